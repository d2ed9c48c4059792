//! The quickstarts of one machine, followed as written: their configuration, and the commands that they show against a
//! running gateway. Engines that need a GPU or a download are stand-ins: engine-sim behind the engine's own command
//! line.

use std::{fs, os::unix::fs::PermissionsExt as _, path::Path, process::Command};

use engine_sim::accelerator::AcceleratorFile;
use rouse_testing::page;

use crate::support::{GatewayProcess, read};

/// The program in place of an engine's. `packaging/newcomer` uses it as well.
const STAND_IN: &str = include_str!("quickstarts/stand-in");

/// A machine with a GPU of 24 GB, on which a reader follows a page.
struct QuickstartReader {
    /// Ends before its folder is removed.
    gateway: GatewayProcess,
    blocks: Vec<String>,
    dir: tempfile::TempDir,
}

impl QuickstartReader {
    /// Saves the page's configuration and starts the gateway with it.
    fn start(name: &str) -> Self {
        let text = read(&Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("docs").join(name));
        let configurations = page::tagged(&text, "yaml");
        let [yaml] = &configurations[..] else { panic!("{name} has not one configuration") };
        let dir = tempfile::tempdir().unwrap();
        let programs = dir.path().join("bin");
        fs::create_dir(&programs).unwrap();
        for engine in ["vllm", "python3", "llama-server"] {
            let file = programs.join(engine);
            fs::write(&file, STAND_IN).unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
        }
        let mut config = format!("state: {:?}\n", dir.path().join("state"));
        let meter = dir.path().join("accelerators.json");
        let declares = yaml.starts_with("accelerators:");
        if !declares {
            AcceleratorFile::create(&meter, &[("gpu-0", 24 << 30)]).unwrap();
            config += &format!(
                "accelerators:\n  - {{id: gpu-0, memory: 24Gi, meter: {meter:?}, visible: {{CUDA_VISIBLE_DEVICES: gpu-0}}}}\n"
            );
        }
        fs::write(dir.path().join("rouse.yaml"), config + yaml).unwrap();
        let gateway = GatewayProcess::spawn_as(dir.path(), &[], |command| {
            let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap());
            command.env("PATH", path).env("ROUSE", env!("CARGO_BIN_EXE_rouse-gateway"));
            command.env("METER", if declares { Path::new("") } else { meter.as_path() });
        });
        Self { gateway, blocks: page::tagged(&text, "sh quickstart"), dir }
    }

    /// Types every command of the page that a running gateway answers. Returns what they print, block by block.
    fn types_all(&self) -> Vec<String> {
        self.blocks.iter().map(|block| self.types(block)).collect()
    }

    fn types(&self, block: &str) -> String {
        let block = block.replace("localhost:8080", &self.gateway.api.to_string());
        let own = Path::new(env!("CARGO_BIN_EXE_rouse-gateway")).parent().unwrap();
        let output = Command::new("bash")
            .arg("-c")
            .arg(format!("set -euo pipefail\ncurl() {{ command curl --fail-with-body \"$@\"; }}\n{block}"))
            .current_dir(self.dir.path())
            .env("PATH", format!("{}:{}", own.display(), std::env::var("PATH").unwrap()))
            .env("ROUSE_ADMIN", self.gateway.admin.to_string())
            .env_remove("ROUSE_ADMIN_TOKEN")
            .env_remove("ROUSE_CONFIG")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{block}\n{said}{errors}");
        said
    }
}

/// Follows a page whose models are these two. Returns the reader, for what the page says about the second model.
fn follow(page: &str, first: &str, second: &str) -> QuickstartReader {
    let reader = QuickstartReader::start(page);
    let said = reader.types_all().concat();
    assert!(said.contains("rouse.yaml: valid; 2 models; 1 accelerator"), "{page}: {said}");
    assert_eq!(said.matches("\"choices\":").count(), 3, "{page}: {said}");
    assert!(said.contains(&format!("{first}#0")) && said.contains(second), "{page}: {said}");
    assert_eq!(reader.gateway.engine(&format!("{first}#0"))["state"], "Awake", "{page}: they take turns");
    assert_ne!(reader.gateway.engine(&format!("{second}#0"))["state"], "Awake", "{page}: they take turns");
    reader
}

#[test]
fn the_quickstart_with_vllm_leads_to_two_models_that_sleep_and_wake_by_turns() {
    let reader = follow("quickstart-vllm.md", "qwen3-8b", "granite-8b");
    let state = reader.gateway.engine("granite-8b#0")["state"].clone();
    assert!(state.as_str().is_some_and(|state| state.starts_with("Asleep")), "{state}");
}

/// The simulated engine has no calls by which SGLang sleeps, so its engines are stopped and started instead.
#[test]
fn the_quickstart_with_sglang_leads_to_two_models_that_take_turns() {
    drop(follow("quickstart-sglang.md", "qwen3-8b", "granite-8b"));
}

#[test]
fn the_quickstart_with_llama_cpp_leads_to_two_models_that_are_started_by_turns() {
    let reader = follow("quickstart-llama-cpp.md", "qwen3-1.7b", "qwen3-0.6b");
    let explained = reader.types("rouse-gateway explain qwen3-0.6b");
    assert!(explained.contains("evicted at") && explained.contains("for qwen3-1.7b"), "{explained}");
}
