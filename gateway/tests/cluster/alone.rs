//! Tests that need a whole machine: a rate, a time, a cooldown shorter than the pauses of a busy machine. Nothing else
//! runs beside them: `make test-cluster` runs them last, one by one.

mod away;
mod hot;
mod many;
