//! Edge cases, one test for each row of the table in `main.rs`.

mod nodes;
mod pods;
