//! What a gateway does in a cluster beside serving: who decides, and what is written for whom.

pub mod election;
