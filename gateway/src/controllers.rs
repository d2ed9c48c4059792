//! What a gateway is in a cluster beside serving: the kinds of objects it is told things by and tells things in, who of
//! several decides, and how that one books memory.

pub mod booking;
pub mod crd;
pub mod election;
