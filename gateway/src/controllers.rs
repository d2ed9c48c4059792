//! What a gateway is in a cluster beside serving: the kinds of objects it is told things by and tells things in, and who
//! of several decides.

pub mod crd;
pub mod election;
