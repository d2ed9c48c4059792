//! `init` and `doctor` as a person runs them, on a machine that the test makes up.

use std::{
    fs,
    net::TcpListener,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::{Command, Output},
};

use serde_json::Value;

use crate::support::{GatewayFixture, SimModel};

/// Answers what `init` asks of a llama-server.
const LLAMA_SERVER: &str = r#"#!/bin/sh
case "$1" in
--version) echo "version: 4589 (eb7cf15a)" >&2 ;;
--help) printf '%s\n' "-m,    --model FNAME" "-c,    --ctx-size N" "-ngl, --n-gpu-layers N" "-a,    --alias STRING" \
  "--host HOST" "--port PORT" ;;
esac
"#;

/// A home directory, with a folder of programs that is all of the path.
struct MachineFixture(tempfile::TempDir);

impl MachineFixture {
    fn new() -> Self {
        let fixture = Self(tempfile::tempdir().unwrap());
        fs::create_dir(fixture.0.path().join("bin")).unwrap();
        fixture
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    fn with_llama_server(self) -> Self {
        let server = self.path("bin/llama-server");
        fs::write(&server, LLAMA_SERVER).unwrap();
        fs::set_permissions(&server, fs::Permissions::from_mode(0o755)).unwrap();
        self
    }

    fn with_model(self, name: &str) -> Self {
        let file = Path::new(&self.path("models")).join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, gguf()).unwrap();
        self
    }

    fn rouse(&self, arguments: &[&str]) -> Output {
        let path = format!("{}:{}", self.path("bin"), "/bin:/usr/bin");
        Command::new(env!("CARGO_BIN_EXE_rouse-gateway"))
            .args(arguments)
            .env_clear()
            .env("HOME", self.0.path())
            .env("PATH", path)
            .current_dir(self.0.path())
            .output()
            .unwrap()
    }
}

/// The metadata of a model with 2 layers and a context of 2048 tokens.
fn gguf() -> Vec<u8> {
    let text = |bytes: &mut Vec<u8>, text: &str| {
        bytes.extend((text.len() as u64).to_le_bytes());
        bytes.extend(text.as_bytes());
    };
    let numbers = [
        ("llama.context_length", 2048_u32),
        ("llama.block_count", 2),
        ("llama.embedding_length", 64),
        ("llama.attention.head_count", 4),
    ];
    let mut file = b"GGUF".to_vec();
    file.extend(3_u32.to_le_bytes());
    file.extend(0_u64.to_le_bytes());
    file.extend((numbers.len() as u64 + 1).to_le_bytes());
    text(&mut file, "general.architecture");
    file.extend(8_u32.to_le_bytes());
    text(&mut file, "llama");
    for (key, number) in numbers {
        text(&mut file, key);
        file.extend(4_u32.to_le_bytes());
        file.extend(number.to_le_bytes());
    }
    file
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[output.stdout.as_slice(), &output.stderr].concat()).into_owned()
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", said(output)))
}

/// Returns the findings of this area with this level.
fn findings<'v>(report: &'v Value, area: &str, level: &str) -> Vec<&'v str> {
    let all = report["findings"].as_array().unwrap().iter();
    let wanted = all.filter(|finding| finding["area"] == area && finding["level"] == level);
    wanted.map(|finding| finding["what"].as_str().unwrap()).collect()
}

#[test]
fn init_writes_a_file_that_check_accepts_and_never_replaces_one_unasked() {
    let machine = MachineFixture::new().with_llama_server().with_model("sub/Tiny Llama.gguf");
    let written = machine.rouse(&["init"]);
    assert_eq!(written.status.code(), Some(0), "{}", said(&written));
    for part in ["Wrote rouse.yaml with ", "tiny-llama", "rouse-gateway doctor --config rouse.yaml"] {
        assert!(said(&written).contains(part), "{part}: {}", said(&written));
    }
    let file = fs::read_to_string(machine.path("rouse.yaml")).unwrap();
    assert!(file.contains("# ") && file.contains("until it is measured"), "{file}");
    let checked = machine.rouse(&["check", "rouse.yaml"]);
    assert_eq!(checked.status.code(), Some(0), "{}\n{file}", said(&checked));
    assert!(!said(&checked).contains("model 'tiny-llama'"), "{}\n{file}", said(&checked));

    fs::write(machine.path("rouse.yaml"), "models: []\n").unwrap();
    let refused = machine.rouse(&["init"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(said(&refused).contains("rouse.yaml exists: pass --force"), "{}", said(&refused));
    assert_eq!(fs::read_to_string(machine.path("rouse.yaml")).unwrap(), "models: []\n");
    let report = json(&machine.rouse(&["init", "--force", "--json"]));
    assert!(
        report["models"].as_array().unwrap().iter().any(|model| model["name"] == "tiny-llama"),
        "{report}"
    );
    assert_eq!(fs::read_to_string(machine.path("rouse.yaml")).unwrap(), file);

    // The package's file has this, and the page on installing has `init` replace it.
    fs::write(machine.path("rouse.yaml"), "shutdown: {engines: leave}\nmodels: []\n").unwrap();
    json(&machine.rouse(&["init", "--force", "--json"]));
    let kept = fs::read_to_string(machine.path("rouse.yaml")).unwrap();
    assert_eq!(kept.lines().filter(|line| *line == "shutdown: {engines: leave}").count(), 1, "{kept}");
    assert_eq!(machine.rouse(&["check", "rouse.yaml"]).status.code(), Some(0), "{kept}");
}

#[test]
fn init_looks_where_it_is_told_and_says_where_it_has_looked() {
    let machine = MachineFixture::new().with_llama_server();
    let elsewhere = tempfile::tempdir().unwrap();
    fs::write(elsewhere.path().join("found.gguf"), gguf()).unwrap();
    let place = elsewhere.path().display().to_string();
    let report = json(&machine.rouse(&["init", "--json", "--output", "a.yaml", "--models", &place]));
    assert!(report["models"].as_array().unwrap().iter().any(|model| model["name"] == "found"), "{report}");
    let searched = report["searched"].as_array().unwrap();
    assert!(searched.iter().any(|line| line.as_str().unwrap().contains(&place)), "{report}");
    let absent = machine.rouse(&["init", "--output", "b.yaml", "--models", "/no/such/folder"]);
    assert!(absent.status.code() == Some(1) && said(&absent).contains("no such folder"), "{}", said(&absent));
    assert!(!Path::new(&machine.path("b.yaml")).exists());
}

#[test]
fn doctor_says_what_will_make_trouble_and_fails_for_errors() {
    let machine = MachineFixture::new().with_llama_server();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let yaml = format!(
        "listen: {{api: '{address}', admin: '127.0.0.1:0'}}\nstate: {:?}\nheadroom: 64Mi\n\
         accelerators: [{{id: cpu, memory: 512Mi}}]\nmodels:\n  - {{name: m, engine: {{kind: llama-cpp, command: \
         [llama-server, -m, /no/such.gguf, --host, '${{HOST}}', --port, '${{PORT}}', --no-such-flag]}}, memory: \
         {{awake: 64Mi}}}}\n",
        machine.path("state")
    );
    fs::write(machine.path("rouse.yaml"), yaml).unwrap();
    let output = machine.rouse(&["doctor", "--config", "rouse.yaml", "--json"]);
    let report = json(&output);
    assert_eq!(output.status.code(), Some(1), "{report}");
    assert!(findings(&report, "ports", "error")[0].contains("address in use"), "{report}");
    let engines = findings(&report, "engines", "error");
    assert!(engines.iter().any(|what| what.contains("there is no model at /no/such.gguf")), "{report}");
    assert!(engines.iter().any(|what| what.contains("does not know --no-such-flag")), "{report}");
    assert_eq!(findings(&report, "engines", "ok"), ["llama-server 4589 (eb7cf15a)"]);
    // People get the same, with reason and advice.
    let shown = said(&machine.rouse(&["doctor", "--config", "rouse.yaml"]));
    for part in ["error    ports ", "why: the gateway does not start", "do: find it with `ss -ltnp"] {
        assert!(shown.contains(part), "{part}: {shown}");
    }

    fs::write(machine.path("rouse.yaml"), "unknown: 1\n").unwrap();
    let report = json(&machine.rouse(&["doctor", "--config", "rouse.yaml", "--json"]));
    assert!(findings(&report, "configuration", "error")[0].contains("unknown key 'unknown'"), "{report}");
    assert_eq!(report["errors"].as_u64().unwrap() as usize, count(&report, "error"));
}

fn count(report: &Value, level: &str) -> usize {
    report["findings"].as_array().unwrap().iter().filter(|finding| finding["level"] == level).count()
}

#[test]
fn doctor_does_not_blame_a_running_gateway_for_its_own_ports() {
    let gateway = GatewayFixture::new(&["2Gi"])
        .settings("listen: {api: \"127.0.0.1:0\", admin: \"127.0.0.1:0\"}")
        .model(&SimModel::new("m"))
        .start();
    let file = gateway.dir.join("rouse.yaml").display().to_string();
    let machine = MachineFixture::new();
    let report = json(&machine.rouse(&["doctor", "--config", &file, "--json"]));
    assert_eq!(findings(&report, "ports", "error"), [""; 0], "{report}");
    assert!(findings(&report, "ports", "ok").iter().any(|what| what.contains("gateway runs")), "{report}");
    assert_eq!(findings(&report, "configuration", "error"), [""; 0], "{report}");
}
