//! Measures the gateway beside its peers.

mod load;

fn main() {}
