//! What is asked of a whole machine: a rate, a time, a cooldown that is shorter than a busy machine may be deaf. Nothing else runs
//! beside these: `make test-cluster` does them last, one by one.

mod away;
mod hot;
mod many;
