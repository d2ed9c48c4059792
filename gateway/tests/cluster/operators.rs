//! An operator's tools in a cluster: the page of any gateway, and `measure` for an InferenceModel.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use engine_sim::accelerator::AcceleratorFile;
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use rouse::units::Bytes;
use rouse_cluster::wait::WAIT_TIMEOUT;
use rouse_controllers::crd::{InferenceModel, Quantity};
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::{
    client::TestClient,
    installation::{ClusterGateway, Installation, blocking},
    support::{FIELD_MANAGER, cluster},
};

/// What the page reads.
const LIVE: &str = "GET /admin/v1/live HTTP/1.1\r\nHost: localhost\r\n\r\n";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_page_of_any_gateway_shows_the_fleet_as_the_leader_publishes_it() {
    let world = Installation::new("operators-page", 2, "128Gi").await;
    let own = world.name().to_owned();
    let pool = json!({"nodeSelector": {"inference-pool": own}, "memory": "128Gi", "hostSleepMemory": "64Gi"});
    world.pool(&own, pool).await;
    let sleeper = json!({"cooldownPeriod": "10m", "memoryAsleep": "2Gi", "hostMemory": "30Gi",
        "engine": {"sleepMode": "vllm"}});
    world.model("sleeper", "60Gi", "--enable-sleep-mode", sleeper).await;
    world.model("server", "40Gi", "", json!({"cooldownPeriod": "10m"})).await;
    world.model("unused", "40Gi", "", json!({})).await;
    let leader = world.gateway("gateway-0", "");
    for model in ["sleeper", "server"] {
        let client = leader.client();
        assert_eq!(blocking(move || client.chat(model, false, 4)).await.status, 200, "{model}");
    }
    let admin = TestClient::new(leader.admin);
    let order = blocking(move || admin.post("/admin/v1/models/sleeper/sleep?level=1", "")).await;
    assert_eq!(order.status, 202, "{}", order.text());
    let is_asleep = is_drawn(&own, ["asleep", "awake", "cold"], "Asleep(1)", 42);
    let asleep = until_shown(&leader, "its sleeper", is_asleep).await;
    assert_eq!((&asleep["gateway"], &asleep["leads"]), (&json!("gateway-0"), &json!(true)));
    let bars = drawn(&asleep["fleet"], &own);
    assert_eq!(bars["host"], Bytes::gib(30).0, "{bars}");

    let follower = world.gateway("gateway-1", "");
    let pool = own.clone();
    let same = until_shown(&follower, "the leader's fleet", move |fleet| drawn(fleet, &pool) == bars).await;
    assert_eq!((&same["gateway"], &same["leads"]), (&json!("gateway-1"), &json!(false)));

    // The leader wakes the model for the follower's request, and both pages show that.
    let client = follower.client();
    assert_eq!(blocking(move || client.chat("sleeper", false, 4)).await.status, 200);
    let is_awake = is_drawn(&own, ["awake", "awake", "cold"], "Awake", 100);
    let awake = until_shown(&leader, "its engines", is_awake).await;
    let bars = drawn(&awake["fleet"], &own);
    until_shown(&follower, "the leader's change", move |fleet| drawn(fleet, &own) == bars).await;
}

/// Follows what the page of this gateway reads until its fleet fits. Returns that snapshot.
async fn until_shown(
    gateway: &ClusterGateway,
    what: &str,
    fits: impl Fn(&Value) -> bool + Send + 'static,
) -> Value {
    let client = TestClient::new(gateway.admin);
    let shown = blocking(move || {
        let mut live = client.open(LIVE);
        loop {
            if let Some(shown) = newest_snapshot(&live.text()).filter(|shown| fits(&shown["fleet"])) {
                return shown;
            }
            assert!(live.more(), "the stream ended: {}", live.text());
        }
    });
    timeout(WAIT_TIMEOUT, shown)
        .await
        .unwrap_or_else(|_| panic!("the page of {} does not show {what}", gateway.admin))
}

fn newest_snapshot(text: &str) -> Option<Value> {
    // The last event may not be complete.
    let (whole, _) = text.rsplit_once("\n\n")?;
    let (_, newest) = whole.rsplit_once("event: snapshot\ndata: ")?;
    serde_json::from_str(newest.lines().next()?).ok()
}

/// Whether a fleet has these states of the models, this state of the engine that sleeps, and so many GiB reserved.
fn is_drawn(
    pool: &str,
    states: [&'static str; 3],
    engine: &'static str,
    reserved: u64,
) -> impl Fn(&Value) -> bool + Send + use<> {
    let pool = pool.to_owned();
    move |fleet: &Value| {
        let drawn = drawn(fleet, &pool);
        let has_state = |list: &str, key: &str, name: &str, state: &str| {
            let mut entries = drawn[list].as_array().unwrap().iter();
            entries.any(|entry| entry[key] == name && entry["state"] == state)
        };
        let mut models = ["sleeper", "server", "unused"].into_iter().zip(states);
        models.all(|(name, state)| has_state("models", "name", name, state))
            && has_state("engines", "engine", "sleeper#0", engine)
            && drawn["bar"]["reserved"] == Bytes::gib(reserved).0
    }
}

/// What the page draws of a fleet: the states of models and engines, and who holds what of the bars.
///
/// Other tests have pools in the same cluster. Leases are those of the gateway that is asked, and only the leader knows
/// the meters.
fn drawn(fleet: &Value, pool: &str) -> Value {
    let list = |name: &str| fleet[name].as_array().unwrap().iter();
    let of = |entry: &Value, fields: &[&str]| -> Value {
        fields.iter().map(|field| ((*field).to_owned(), entry[*field].clone())).collect()
    };
    let bar = list("accelerators").find(|one| one["id"] == pool).unwrap_or(&Value::Null);
    let running = list("engines").filter(|one| one["state"] != "Cold");
    let fields = ["engine", "generation", "state", "accelerators", "reserved", "host"];
    json!({
        "bar": of(bar, &["capacity", "reserved", "units", "unitsTaken"]),
        "host": fleet["host"]["reserved"],
        "models": list("models").map(|one| of(one, &["name", "state", "pinned", "declared"])).collect::<Vec<_>>(),
        "engines": running.map(|one| of(one, &fields)).collect::<Vec<_>>(),
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn measure_writes_what_it_found_into_the_spec_of_the_inference_model_and_nothing_else() {
    let cluster = cluster().await;
    let namespace = cluster.namespace("operators-measure").await.unwrap();
    let models: Api<InferenceModel> = namespace.api();
    let spec = json!({
        "modelName": "m", "memory": "1Gi", "hostMemory": "1Gi", "containerImage": "rouse/engine", "priority": 7,
        "engine": {"kind": "vllm", "sleepMode": "vllm"},
    });
    let object = json!({"apiVersion": "rouse.dev/v1alpha1", "kind": "InferenceModel",
        "metadata": {"name": "measured"}, "spec": spec});
    let parameters = PatchParams::apply(FIELD_MANAGER);
    let before = models.patch("measured", &parameters, &Patch::Apply(&object)).await.unwrap();

    let dir = tempfile::tempdir().unwrap();
    let file = machine(dir.path());
    let kubeconfig = cluster.kubeconfig(cluster.admin()).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_rouse-gateway"));
    command
        .args([
            "measure",
            "m",
            "--json",
            "--kubernetes",
            &format!("{}/measured", namespace.name()),
            "--config",
        ])
        .arg(file)
        .env("KUBECONFIG", kubeconfig)
        .env_remove("ROUSE_ADMIN");
    let output = blocking(move || command.output().unwrap()).await;
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(said.contains("wrote memory: {awake: 812Mi, asleep: 96Mi, host: 128Mi}"), "{said}");

    let after = models.get("measured").await.unwrap();
    let mut expected = serde_json::to_value(&before.spec).unwrap();
    let measured: Value = serde_json::from_slice(&output.stdout).unwrap();
    for (field, size, size_in_mib) in
        [("memory", "awake", 812), ("memoryAsleep", "asleep", 96), ("hostMemory", "host", 128)]
    {
        let bytes = Bytes(measured["memory"][size].as_u64().unwrap());
        assert_eq!(bytes, Bytes::mib(size_in_mib), "{measured}");
        expected[field] = json!(Quantity::from(bytes));
    }
    assert_eq!(serde_json::to_value(&after.spec).unwrap(), expected);
    assert_eq!(after.metadata.generation, Some(2), "one change of the spec");
}

/// Writes the configuration of a machine with one simulated accelerator, whose engine takes 512Mi of weights and 300Mi
/// of cache. No gateway uses it.
fn machine(dir: &Path) -> PathBuf {
    let (meter, file) = (dir.join("accelerators.json"), dir.join("rouse.yaml"));
    AcceleratorFile::create(&meter, &[("gpu-0", Bytes::gib(4).0)]).unwrap();
    let meter = meter.display().to_string();
    let mut words = vec![env!("CARGO_BIN_EXE_rouse-gateway")];
    words.extend("demo-engine --host ${HOST} --port ${PORT} --model m --enable-sleep-mode".split(' '));
    words.extend(["--gpu-memory-utilization", "${MEMORY_FRACTION}", "--accelerator-file", meter.as_str()]);
    words.extend("--start-time 100ms --profile-time 20ms --wake-time 50ms --sleep-time 50ms".split(' '));
    words.extend(
        "--ttft 5ms --itl 5ms --memory-awake 1Gi --memory-asleep 96Mi --memory-host 128Mi".split(' '),
    );
    words.extend(["--kv-cache-memory-bytes", "300Mi"]);
    // JSON is YAML.
    let config = json!({
        "state": dir.join("state"),
        "headroom": 0,
        "accelerators": [
            {"id": "gpu-0", "memory": "4Gi", "meter": meter, "visible": {"CUDA_VISIBLE_DEVICES": "gpu-0"}},
        ],
        "models": [{
            "name": "m",
            "engine": {"kind": "vllm", "command": words, "env": {"VLLM_SERVER_DEV_MODE": "1"}},
            "memory": {"awake": "1Gi", "asleep": "64Mi", "host": "16Mi"},
        }],
    });
    std::fs::write(&file, config.to_string()).unwrap();
    file
}
