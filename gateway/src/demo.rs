//! The embedded demonstration, which `rouse-gateway demo` runs.
//!
//! Three small simulated models share two simulated accelerators that cannot hold all of them, so that the first try
//! shows what Rouse is for. Their engines run from this same binary (`demo-engine`), so one file is enough.

use std::{net::SocketAddr, path::Path};

use rouse::model::AcceleratorId;

use rouse_config::{Config, ConfigErrors, yaml_quoted};

/// The simulated accelerators and their memory in bytes.
pub const ACCELERATORS: [(&str, u64); 2] = [("sim-0", 24 << 30), ("sim-1", 24 << 30)];

/// Name of the file in the state directory that simulates the accelerators.
const METER_FILE: &str = "accelerators.json";

/// The simulated models.
///
/// `tiny-llama` fills one accelerator, `tiny-qwen` half of one, and `tiny-mistral` both, so it can only be awake alone.
const MODELS: [DemoModel; 3] = [
    DemoModel {
        name: "tiny-llama",
        accelerators: 1,
        awake: "20Gi",
        asleep: "1Gi",
        start: "3s",
        wake: "400ms",
    },
    DemoModel {
        name: "tiny-qwen",
        accelerators: 1,
        awake: "12Gi",
        asleep: "1Gi",
        start: "2s",
        wake: "250ms",
    },
    DemoModel {
        name: "tiny-mistral",
        accelerators: 2,
        awake: "16Gi",
        asleep: "1Gi",
        start: "4s",
        wake: "600ms",
    },
];

struct DemoModel {
    name: &'static str,
    accelerators: u32,
    awake: &'static str,
    asleep: &'static str,
    start: &'static str,
    wake: &'static str,
}

/// Returns the demonstration's configuration.
///
/// State is kept under `state_dir`; engines are `own_exe demo-engine …`. The configuration names the file of the
/// simulated accelerators, which [`prepare`] must create.
pub fn config(state_dir: &Path, own_exe: &Path) -> Result<Config, ConfigErrors> {
    rouse_config::parse(&yaml(state_dir, own_exe), "the demonstration")
}

/// Creates the file of the simulated accelerators unless it exists.
///
/// An existing file accounts for engines that live on from the previous gateway.
pub fn prepare(config: &Config) -> Result<(), engine_sim::accelerator::Error> {
    let Some(path) = config.meters.get(&AcceleratorId::from(ACCELERATORS[0].0)) else {
        return Ok(());
    };
    if engine_sim::accelerator::AcceleratorFile::open(path).is_err() {
        engine_sim::accelerator::AcceleratorFile::create(path, &ACCELERATORS)?;
    }
    Ok(())
}

/// Returns the same configuration as a file that a person could write; it also serves as an example.
#[must_use]
pub fn yaml(state_dir: &Path, own_exe: &Path) -> String {
    let meter = quoted(&state_dir.join(METER_FILE).display().to_string());
    let mut text = format!(
        "headroom: 1Gi\nhost: {{sleepMemory: 64Gi}}\nstate: {}\naccelerators:\n",
        quoted(&state_dir.display().to_string())
    );
    for (id, bytes) in ACCELERATORS {
        text.push_str(&format!(
            "  - {{id: {id}, memory: {bytes}, meter: {meter}, visible: {{CUDA_VISIBLE_DEVICES: {id}}}}}\n"
        ));
    }
    text.push_str("models:\n");
    let exe = quoted(&own_exe.display().to_string());
    for model in &MODELS {
        text.push_str(&model.yaml(&exe, &meter));
    }
    text
}

/// Returns the console text with commands to try.
///
/// `program` is the path by which this binary was called, since it may not be in the `PATH`.
#[must_use]
pub fn welcome(api: SocketAddr, admin: SocketAddr, program: &str) -> String {
    let names = MODELS.map(|model| model.name).join(", ");
    let [first, _, last] = MODELS.map(|model| model.name);
    let curl = |model: &str| {
        format!(
            "  curl -N http://{api}/v1/chat/completions -H 'content-type: application/json' \\\n    -d \
             '{{\"model\":\"{model}\",\"stream\":true,\"messages\":[{{\"role\":\"user\",\"content\":\"Hello\"}}]}}'\n"
        )
    };
    format!(
        "This demo serves {names} (simulated models) on two simulated accelerators,\nwhich cannot hold all of them \
         at once. The inference API is at http://{api}, the admin API at\nhttp://{admin}. Send a request to a cold \
         model:\n\n{}\nThen to one that does not fit beside it, and ask why each model is in its state:\n\n{}  \
         {program} ps --admin {admin}\n  {program} explain {first} --admin {admin}\n",
        curl(first),
        curl(last),
    )
}

impl DemoModel {
    fn yaml(&self, exe: &str, meter: &str) -> String {
        let Self { name, accelerators, awake, asleep, start, wake } = self;
        format!(
            r#"  - name: {name}
    engine:
      kind: vllm
      command: [{exe}, demo-engine, --host, "${{HOST}}", --port, "${{PORT}}", --model, {name},
        --enable-sleep-mode, --gpu-memory-utilization, "${{MEMORY_FRACTION}}", --accelerator-file, {meter},
        --memory-awake, {awake}, --memory-asleep, {asleep}, --memory-host, 4Gi,
        --start-time, {start}, --wake-time, {wake}, --sleep-time, 200ms, --ttft, 80ms, --itl, 25ms, --tokens, "48"]
      env: {{VLLM_SERVER_DEV_MODE: "1"}}
      startTimeout: 1m
    accelerators: {accelerators}
    memory: {{awake: {awake}, asleep: {asleep}, host: 4Gi}}
    idle: {{sleepAfter: 1m, stopAfter: 10m}}
"#
        )
    }
}

/// Quotes a path. Escapes `${`, which in a path is not a substitution.
fn quoted(path: &str) -> String {
    yaml_quoted(&path.replace("${", "$${"))
}

#[cfg(test)]
mod tests {
    use rouse::{model::AcceleratorRequirement, units::Bytes};

    use super::*;

    #[test]
    fn each_demonstration_model_fits_and_all_of_them_do_not() {
        let config =
            config(Path::new("/tmp/a \"quoted\" ${PORT} place"), Path::new("/bin/rouse-gateway")).unwrap();
        assert_eq!(rouse_config::unplaceable_models(&config), []);
        assert_eq!(rouse_config::check(&config), rouse_config::CheckFindings::default());
        let total: Bytes = config.core.accelerators.iter().map(|device| device.capacity).sum();
        let wanted: Bytes = config
            .core
            .models
            .iter()
            .map(|spec| match &spec.accelerators {
                AcceleratorRequirement::Count(count) => Bytes(spec.memory.awake.0 * u64::from(*count)),
                other => unreachable!("{other:?}"),
            })
            .sum();
        assert!(wanted > total, "{wanted} must not fit into {total}");
        assert!(config.core.models.iter().all(|spec| spec.can_sleep));
        assert_eq!(config.state, Path::new("/tmp/a \"quoted\" ${PORT} place"));
    }

    #[test]
    fn the_welcome_has_a_line_to_copy() {
        let (api, admin) = (([127, 0, 0, 1], 8080).into(), ([127, 0, 0, 1], 8180).into());
        let welcome = welcome(api, admin, "target/quick/rouse-gateway");
        insta::assert_snapshot!(welcome, @r###"
        This demo serves tiny-llama, tiny-qwen, tiny-mistral (simulated models) on two simulated accelerators,
        which cannot hold all of them at once. The inference API is at http://127.0.0.1:8080, the admin API at
        http://127.0.0.1:8180. Send a request to a cold model:

          curl -N http://127.0.0.1:8080/v1/chat/completions -H 'content-type: application/json' \
            -d '{"model":"tiny-llama","stream":true,"messages":[{"role":"user","content":"Hello"}]}'

        Then to one that does not fit beside it, and ask why each model is in its state:

          curl -N http://127.0.0.1:8080/v1/chat/completions -H 'content-type: application/json' \
            -d '{"model":"tiny-mistral","stream":true,"messages":[{"role":"user","content":"Hello"}]}'
          target/quick/rouse-gateway ps --admin 127.0.0.1:8180
          target/quick/rouse-gateway explain tiny-llama --admin 127.0.0.1:8180
        "###);
    }

    #[test]
    fn the_demonstration_keeps_the_accelerators_of_engines_that_live_on() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path(), Path::new("/bin/rouse-gateway")).unwrap();
        prepare(&config).unwrap();
        let file = dir.path().join(METER_FILE);
        let before = std::fs::metadata(&file).unwrap().modified().unwrap();
        prepare(&config).unwrap();
        assert_eq!(std::fs::metadata(&file).unwrap().modified().unwrap(), before);
    }
}
