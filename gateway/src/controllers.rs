//! What a gateway is in a cluster beside serving: the kinds of objects it is told things by and tells things in, what
//! they mean, who of several decides, and how that one books memory.

pub mod address;
pub mod booking;
pub mod compose;
pub mod condition;
pub mod convert;
pub mod crd;
pub mod dual;
pub mod election;
pub(crate) mod fault;
pub mod index;
pub mod label;
pub mod news;
pub mod objects;
pub mod own_pod;
pub mod pods;
pub mod published;
pub mod recorder;
pub mod refusal;
pub mod registry;
pub mod replica;
mod said;
pub mod settle;
pub mod status;
pub mod strategic;
pub mod stub_key;
pub mod told;
pub mod watch;
pub mod workload;
pub mod writer;
