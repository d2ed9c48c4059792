//! What a gateway is in a cluster beside serving: the kinds of objects it is told things by and tells things in, what
//! they mean, who of several decides, and how that one books memory.

mod api_error;
pub mod backend_address;
pub mod compose;
pub mod condition;
pub mod conflicts;
pub mod convert;
pub mod crd;
pub mod dual_pods;
pub mod election;
pub mod engine_pod;
pub mod event_content;
pub(crate) mod failpoint;
pub mod gateway_replica;
pub mod index;
pub mod label;
pub mod ledger;
pub mod model_controller;
pub mod own_pod;
pub mod published;
pub mod recorder;
pub mod rejection;
pub mod status;
pub mod status_inputs;
pub mod status_writer;
pub mod strategic_merge;
pub mod stub_key;
pub mod watch;
pub mod workload;
pub mod writer;
