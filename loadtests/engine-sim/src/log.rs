//! The engine's output in vLLM's form. Not `println!`, which panics when the output's reader is gone: an engine must
//! outlive its parent.

use std::io::{Write, stderr, stdout};

pub(crate) fn info(line: &str) {
    plain(&format!("INFO:     {line}"));
}

pub(crate) fn plain(line: &str) {
    // An error means that the reader is gone.
    writeln!(stdout(), "{line}").and_then(|()| stdout().flush()).ok();
}

pub(crate) fn error(line: &str) {
    writeln!(stderr(), "ERROR:    {line}").ok();
}
