//! Runs the examples on the launcher's documentation page. `src/docs_check.rs` checks the page's paths and flags.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
};

use crate::support::start;

fn page() -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let text = fs::read_to_string(root.join("docs/stub.md")).unwrap();
    text.split_once("\n## Launcher")
        .expect("a section on the launcher")
        .1
        .split("\n## ")
        .next()
        .unwrap()
        .to_owned()
}

/// Returns the code blocks tagged `sh launcher`.
fn examples(page: &str) -> Vec<&str> {
    page.split("```sh launcher\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect()
}

#[test]
fn examples_do_what_they_are_shown_for() {
    let launcher = start(&["--command", "sh -c \"echo $* ; exec sleep 100\" sh", "--mock-gpus"]);
    let page = page();
    let examples = examples(&page);
    assert!(examples.len() >= 3);
    for example in examples {
        let text = example.replace("localhost:8001", &launcher.address.to_string());
        let script =
            format!("set -euo pipefail\ncurl() {{ command curl --fail-with-body -s \"$@\"; }}\n{text}");
        let output = Command::new("bash").args(["-c", &script]).stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success(), "{example}{}", String::from_utf8_lossy(&output.stdout));
        assert!(!output.stdout.is_empty(), "{example}: it says nothing");
    }
}
