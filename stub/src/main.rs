//! `rouse-stub`: see the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    rouse_stub::cli::run()
}
