//! `import llama-swap`: the program, from a file to one that `check` accepts.

use std::{fs, process::Command};

use serde_json::Value;

const PROGRAM: &str = env!("CARGO_BIN_EXE_rouse-gateway");

const LLAMA_SWAP: &str = "\
logLevel: debug
models:
  qwen:
    cmd: |
      # ours
      llama-server --port ${PORT} -m /nowhere/qwen.gguf
    ttl: 60
";

#[test]
fn a_configuration_is_converted_and_what_is_left_out_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("config.yaml"), dir.path().join("rouse.yaml"));
    fs::write(&from, LLAMA_SWAP).unwrap();
    let import = |args: &[&str]| {
        let mut command = Command::new(PROGRAM);
        command.args(["import", "llama-swap"]).arg(&from).args(args);
        let output = command.output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    let (code, printed, notes) = import(&[]);
    assert_eq!(code, Some(0), "{notes}");
    assert!(notes.contains(&format!("{}:1:1: logLevel: ", from.display())), "{notes}");
    assert!(printed.contains("#   1: logLevel: ") && printed.contains("  - name: qwen\n"), "{printed}");

    let output = to.to_str().unwrap();
    let (code, told, _) = import(&["--output", output]);
    assert_eq!(code, Some(0));
    assert_eq!(told, format!("{output}: 1 model, 1 note; check it with: rouse-gateway check {output}\n"));
    assert_eq!(fs::read_to_string(&to).unwrap(), printed);
    let (code, _, error) = import(&["--output", output]);
    assert_eq!(code, Some(1));
    assert!(error.contains("exists already"), "{error}");

    let (_, json, notes) = import(&["--json"]);
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!((json["configuration"].as_str(), notes.as_str()), (Some(printed.as_str()), ""));
    assert_eq!((&json["models"], &json["notes"][0]["line"]), (&1.into(), &1.into()));

    let checked = Command::new(PROGRAM).args(["check", "--json", output]).output().unwrap();
    let findings: Value = serde_json::from_slice(&checked.stdout).unwrap();
    assert_eq!(
        (checked.status.code(), &findings["valid"], &findings["models"]),
        (Some(0), &true.into(), &1.into())
    );
    let missing = findings["warnings"].as_array().unwrap();
    assert!(
        missing.iter().any(|one| one["text"].as_str().unwrap().contains("/nowhere/qwen.gguf")),
        "{findings}"
    );
}

#[test]
fn a_file_that_is_none_of_llama_swaps_is_exit_code_64_with_its_line() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config.yaml");
    fs::write(&file, "a: 1\n").unwrap();
    let output = Command::new(PROGRAM).args(["import", "llama-swap"]).arg(&file).output().unwrap();
    assert_eq!(output.status.code(), Some(64));
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(error, format!("{}:1:1: there is no mapping 'models'\n", file.display()));
}
