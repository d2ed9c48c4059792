//! The gateway as its clients and operators meet it.

mod cli;
mod demo;
