//! The engine's own output, in the form of vLLM's. Not `println!`: that panics when whoever read the output is gone, and an
//! engine must outlive its parent.

use std::io::{Write, stderr, stdout};

pub(crate) fn info(line: &str) {
    plain(&format!("INFO:     {line}"));
}

pub(crate) fn plain(line: &str) {
    // Nobody reads it any more: nothing to do about it.
    writeln!(stdout(), "{line}").and_then(|()| stdout().flush()).ok();
}

pub(crate) fn error(line: &str) {
    writeln!(stderr(), "ERROR:    {line}").ok();
}
