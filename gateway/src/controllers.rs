//! What Rouse is in a cluster, beside serving: the kinds of objects it is told things by and tells things in.

pub mod crd;
