//! The cluster side of a gateway: object kinds, controllers, leader election and memory reservations.
//!
//! A controller is a `kit::Component`, which `kit::run` drives. `model_controller` derives a configuration and statuses
//! from objects, and [`dual_pods`] decides and executes. To write a new controller, copy one of the two: "Adding a
//! controller" in `docs/architecture.md` lists everything else to touch.

#![warn(clippy::indexing_slicing)]

mod api_error;
pub mod backend_address;
mod cache;
pub mod compose;
pub mod condition;
pub mod conflicts;
pub mod convert;
pub mod crd;
pub mod dual_pods;
pub mod election;
pub mod engine_pod;
pub mod event_content;
mod failpoint;
mod gateway_replica;
mod generation_floor;
mod image_reference;
pub mod index;
mod kit;
pub mod label;
pub mod ledger;
pub mod measured_memory;
pub mod metrics;
mod model_controller;
pub mod node_agent;
pub mod own_pod;
pub mod platform;
pub mod prometheus_api;
pub mod published;
pub mod recorder;
pub mod rejection;
pub mod runtime;
mod saturation;
mod slot_patch;
mod slots;
pub mod status;
pub mod status_inputs;
mod status_writer;
pub mod strategic_merge;
mod stub_client;
pub mod stub_key;
mod warmup;
pub mod warmup_list;
mod watch;
pub mod workload;
pub mod writer;
