//! The engines of the demonstration run from the gateway's own binary.

use std::{path::Path, process::Stdio};

use rouse::units::Bytes;
use rouse_gateway::demo;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::Command,
};

use crate::support::TestClient;

#[tokio::test]
async fn an_engine_of_the_demonstration_starts_from_its_command_and_is_accounted() {
    let state = tempfile::tempdir().unwrap();
    let config =
        rouse_gateway::demo::config(state.path(), Path::new(env!("CARGO_BIN_EXE_rouse-gateway"))).unwrap();
    demo::prepare(&config).unwrap();
    let model = &config.engines["tiny-qwen"];
    let command = model.command_line(0, [127, 0, 0, 1].into(), 0.5, Bytes::ZERO);
    let mut engine = Command::new(&command[0])
        .args(&command[1..])
        .env("CUDA_VISIBLE_DEVICES", "sim-1")
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(engine.stdout.take().unwrap()).lines();
    let address = loop {
        let line = lines.next_line().await.unwrap().expect("it starts");
        if let Some((_, address)) = line.split_once("listening on ") {
            break address.trim_start_matches("http://").parse().unwrap();
        }
    };

    let client = TestClient::new(address);
    let models = client.get("/v1/models").text();
    assert!(models.contains("tiny-qwen"), "{models}");
    let asleep = client.get("/is_sleeping").text();
    assert!(asleep.contains("false"), "{asleep}");
    let meter = &config.meters["sim-1"];
    let usage = engine_sim::accelerator::AcceleratorFile::open(meter).unwrap().usage().unwrap();
    let used = usage["sim-1"].used_total;
    assert_eq!(Bytes(used), Bytes::gib(12), "half of what is there");
    engine.kill().await.unwrap();
}

#[tokio::test]
async fn the_demonstration_is_started_by_its_name() {
    let state = tempfile::tempdir().unwrap();
    let mut gateway = Command::new(env!("CARGO_BIN_EXE_rouse-gateway"))
        .args(["demo", "--api", "127.0.0.1:0", "--admin", "127.0.0.1:0"])
        .env("XDG_STATE_HOME", state.path())
        // The demonstration must not use the configuration of a service.
        .env("ROUSE_CONFIG", state.path().join("absent.yaml"))
        .env_remove("STATE_DIRECTORY")
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(gateway.stdout.take().unwrap()).lines();
    let first = lines.next_line().await.unwrap().expect("it says where it listens");
    let address = first.strip_prefix("inference API  http://").unwrap().trim_end_matches("/v1");
    assert!(TestClient::new(address.parse().unwrap()).get("/v1/models").text().contains("tiny-llama"));
    gateway.kill().await.unwrap();
}
