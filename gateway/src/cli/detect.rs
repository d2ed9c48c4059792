//! Finds what this machine has: accelerators, programs of engines, and files of models.
//!
//! `init` proposes a configuration from it, and `doctor` compares a configuration with it. Nothing here changes
//! anything, no query takes longer than its limit, and no file's content is trusted: sizes and names that a file claims
//! are bounded before they are used.

use serde::Serialize;

pub(super) mod accelerators;
pub(super) mod gguf;
pub(super) mod model_files;
pub(super) mod probe;
pub(super) mod programs;
pub(super) mod python_packages;
pub(super) mod snapshots;

/// Something that was found and is not used, with the reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct LeftOut {
    pub(super) what: String,
    pub(super) why: String,
}

impl LeftOut {
    pub(super) fn new(what: impl std::fmt::Display, why: impl Into<String>) -> Self {
        Self { what: what.to_string(), why: why.into() }
    }
}
