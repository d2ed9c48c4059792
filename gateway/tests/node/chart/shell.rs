//! The shell of a reader who follows the pages: a clone of the repository as working folder, helm, kubectl, and the
//! gateway's program.

use std::{
    fs,
    io::{BufRead as _, BufReader, Lines},
    net::SocketAddr,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::PathBuf,
    process::{Child, ChildStdout, Command, Stdio},
};

use rouse_testing::port::ReservedPort;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::earlier;
use crate::{installation::merge, support::repo_path};

/// `helm` as its users have it, with a file of values for this machine after their own.
const HELM: &str = r#"#!/bin/bash
set -euo pipefail
values=()
case $1 in install | upgrade) values=(--values "$VALUES") ;; esac
exec "${ROUSE_HELM:?it must be the path of helm: make test-node builds it and sets the variable}" "$@" "${values[@]}"
"#;

/// A reader sees a refusal in the answer; a script sees it only in curl's exit code.
const CURL: &str = r#"curl() { command curl --fail-with-body "$@"; }"#;

pub(super) struct PageShell {
    kubeconfig: PathBuf,
    /// The port of this machine in place of the pages' 8080.
    port: ReservedPort,
    /// The clone, the programs, the values, and what the programs keep.
    scratch: TempDir,
}

/// A command that runs until it is dropped.
pub(super) struct RunningForward {
    child: Child,
    /// kubectl reports each connection, and would end if that could not be written.
    output: Lines<BufReader<ChildStdout>>,
}

impl PageShell {
    /// A shell whose clone has an earlier version of the chart.
    pub(super) fn new(kubeconfig: PathBuf) -> Self {
        let shell = Self { kubeconfig, port: ReservedPort::bind(), scratch: tempfile::tempdir().unwrap() };
        earlier::write_chart(&shell.clone_folder());
        let programs = shell.programs();
        fs::create_dir(&programs).unwrap();
        fs::write(programs.join("helm"), HELM).unwrap();
        fs::set_permissions(programs.join("helm"), fs::Permissions::from_mode(0o755)).unwrap();
        symlink(rouse_cluster::kubectl().unwrap(), programs.join("kubectl")).unwrap();
        symlink(env!("CARGO_BIN_EXE_rouse-gateway"), programs.join("rouse-gateway")).unwrap();
        shell
    }

    fn clone_folder(&self) -> PathBuf {
        self.scratch.path().join("clone")
    }

    fn programs(&self) -> PathBuf {
        self.scratch.path().join("bin")
    }

    fn values(&self) -> PathBuf {
        self.scratch.path().join("machine.yaml")
    }

    /// What the pages have, what it is here, and why. Every command and every saved file has it replaced.
    pub(super) fn replacements(&self) -> [(&'static str, String, &'static str); 6] {
        let engine = rouse_cluster::node::image("engine-sim");
        [
            ("8080", self.port.number().to_string(), "tests and other programs share this machine's ports"),
            ("docker.io/vllm/vllm-openai:v0.11.0", engine, "this machine has no GPU, and pulls nothing"),
            (
                "args: [--model, ",
                "args: [--host=0.0.0.0, --itl=20ms, --model, ".to_owned(),
                "vLLM listens on all addresses, and a stream must outlast an upgrade",
            ),
            (
                "[vllm, serve, ",
                "[/engine-sim, --host=0.0.0.0, --model, ".to_owned(),
                "the program of that image",
            ),
            (", --max-model-len, \"8192\"", String::new(), "the simulated engine has no longest context"),
            (" --max-model-len=8192,", String::new(), "the same, as one word"),
        ]
    }

    fn here(&self, text: &str) -> String {
        let replaced = self.replacements();
        replaced.iter().fold(text.to_owned(), |text, (on_page, here, _)| text.replace(on_page, here))
    }

    /// Writes the values that this machine needs, over these. `api_server`: where Pods reach the API server.
    pub(super) fn set_values(&self, mut values: Value, api_server: SocketAddr) {
        // Nothing on this node routes Services, and so not the API server's either.
        let env = json!([
            {"name": "KUBERNETES_SERVICE_HOST", "value": api_server.ip().to_string()},
            {"name": "KUBERNETES_SERVICE_PORT", "value": api_server.port().to_string()},
        ]);
        merge(&mut values, json!({"gateway": {"replicas": 1, "preStopSeconds": 1, "extraEnv": env}}));
        fs::write(self.values(), values.to_string()).unwrap();
    }

    /// Brings the clone up to date.
    pub(super) fn pull(&self) {
        let charts = self.clone_folder().join("charts");
        fs::remove_dir_all(&charts).unwrap();
        symlink(repo_path("charts"), charts).unwrap();
    }

    /// Saves a file in the clone.
    pub(super) fn save(&self, file: &str, text: &str) {
        fs::write(self.clone_folder().join(file), self.here(text)).unwrap();
    }

    /// Runs these commands in the clone, and returns what they print.
    pub(super) fn run(&self, commands: &str) -> String {
        let output = self.bash(&format!("{CURL}\n{commands}")).output().unwrap();
        let printed = String::from_utf8(output.stdout).unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{commands}: {printed}{errors}");
        printed
    }

    /// Starts this command of kubectl, as in a second terminal, and returns once it forwards a port.
    pub(super) fn forward(&self, command: &str) -> RunningForward {
        assert!(command.contains(" port-forward "), "{command}");
        let mut child = self.bash(&format!("exec {command}")).stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut running = RunningForward { child, output };
        let first = running.output.next().map(Result::unwrap).unwrap_or_default();
        assert!(first.starts_with("Forwarding from "), "{command}: {first}");
        running
    }

    fn bash(&self, commands: &str) -> Command {
        let mut bash = Command::new("bash");
        bash.args(["-c", &format!("set -euo pipefail\n{}\n", self.here(commands))]);
        bash.current_dir(self.clone_folder()).stdin(Stdio::null());
        bash.env("PATH", format!("{}:{}", self.programs().display(), std::env::var("PATH").unwrap()));
        bash.env("KUBECONFIG", &self.kubeconfig).env("VALUES", self.values());
        // Neither program reads or writes what belongs to this machine's user.
        let home = self.scratch.path();
        for variable in ["HOME", "HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
            bash.env(variable, home.join(variable));
        }
        bash
    }
}

impl Drop for RunningForward {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}
