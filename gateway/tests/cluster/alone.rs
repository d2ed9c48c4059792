//! Tests that need a whole machine: a rate, a time. Nothing else runs beside them: `make test-cluster` runs them last,
//! one by one.

mod hot;
mod many;
