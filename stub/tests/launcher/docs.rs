//! The page on the launcher: every path and flag stands in it, and its examples do what they are shown for.

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

/// Blocks with the tag `sh launcher`.
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

#[test]
fn every_flag_stands_on_the_page() {
    let help = Command::new(env!("CARGO_BIN_EXE_rouse-stub")).args(["launcher", "--help"]).output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let page = page();
    let flags: Vec<&str> =
        help.split_whitespace().filter(|word| word.starts_with("--") && word.len() > 3).collect();
    assert!(flags.len() > 10, "{help}");
    for flag in flags {
        let flag = flag.trim_end_matches(|c: char| !c.is_ascii_alphanumeric());
        assert!(flag == "--help" || page.contains(&format!("`{flag}")), "{flag} is not on the page");
    }
}
