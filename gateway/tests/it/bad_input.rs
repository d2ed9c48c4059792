//! Operators and clients get a clear message for each mistake, and a mistake leaves nothing behind.

use std::{
    path::Path,
    process::{Command, Output},
    time::Duration,
};

use crate::{
    refusals::refusal,
    support::{GatewayFixture, GatewayProcess, SimModel, client::request},
};

const CHAT: &str = "/v1/chat/completions";
const MIB: usize = 1 << 20;

/// Runs `rouse-gateway` with these arguments to its end.
fn run(args: &[&str], dir: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rouse-gateway"));
    command.args(args).current_dir(dir).env_remove("ROUSE_CONFIG").output().unwrap()
}

/// Both `check` and a start refuse the file with code 64. Returns the start's message.
fn refused(yaml: &str) -> String {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("rouse.yaml"), yaml).unwrap();
    let check = run(&["check", "rouse.yaml"], dir.path());
    let start =
        run(&["--config", "rouse.yaml", "--api", "127.0.0.1:0", "--admin", "127.0.0.1:0"], dir.path());
    for output in [&check, &start] {
        assert_eq!(output.status.code(), Some(64), "{output:?}");
        assert!(output.stdout.is_empty(), "{output:?}");
    }
    assert_eq!(check.stderr, start.stderr);
    String::from_utf8(start.stderr).unwrap()
}

const MODEL: &str = "
  - name: small
    engine: {kind: vllm, command: [serve, \"${PORT}\"]}
    memory: {awake: 1Gi}";

#[test]
fn a_file_that_is_no_yaml_is_refused_with_its_place() {
    let said = refused("models: [\n  {name: a\n");
    assert!(said.starts_with("rouse.yaml:"), "{said}");
    assert!(!said.contains("panicked"), "{said}");
    assert!(refused("models:\n\t- name: a\n").starts_with("rouse.yaml:2:"));
    assert!(refused("- a\n- b\n").starts_with("rouse.yaml:1:1: "));
    assert!(refused("state: a\nstate: b\n").contains("rouse.yaml:2:1: the key 'state' is given twice"));
}

#[test]
fn every_mistake_of_a_file_is_reported_at_once() {
    let said = refused(&format!(
        "quue: {{}}\nqueue: {{maxWait: soon, polcy: wait}}\nmodels:{MODEL}{MODEL}\n    colour: red\n"
    ));
    let lines: Vec<&str> = said.lines().collect();
    for (place, says) in [
        ("rouse.yaml:1:1: ", "quue"),
        ("rouse.yaml:2:18: ", "soon"),
        ("rouse.yaml:2:24: ", "polcy"),
        ("rouse.yaml:7:11: ", "the name 'small' is already taken"),
        ("rouse.yaml:10:5: ", "colour"),
    ] {
        assert!(
            lines.iter().any(|line| line.starts_with(place) && line.contains(says)),
            "{place}{says}\n{said}"
        );
    }
    assert_eq!(lines.len(), 5, "{said}");
}

#[test]
fn a_file_that_is_not_there_and_a_flag_that_does_not_exist_say_so() {
    let dir = tempfile::tempdir().unwrap();
    let absent = run(&["--config", "absent.yaml"], dir.path());
    let said = String::from_utf8_lossy(&absent.stderr).into_owned();
    assert_eq!(absent.status.code(), Some(64), "{said}");
    assert!(said.contains("absent.yaml") && said.contains("No such file"), "{said}");
    let flag = run(&["--confg", "x"], dir.path());
    assert_eq!(flag.status.code(), Some(64));
}

#[test]
fn a_model_that_fits_nowhere_fails_the_check_and_not_the_start() {
    let fixture = GatewayFixture::new(&["1Gi"]).model(&SimModel { awake: "2Gi", ..SimModel::new("large") });
    std::fs::write(fixture.dir().join("rouse.yaml"), fixture.yaml()).unwrap();
    let check = run(&["check", "rouse.yaml"], fixture.dir());
    let said = String::from_utf8_lossy(&check.stderr).into_owned();
    assert_eq!(check.status.code(), Some(64), "{said}");
    assert!(said.contains("model 'large': needs 2Gi on one accelerator, but at most "), "{said}");
    let gateway = fixture.start();
    gateway.until_logged("needs 2Gi on one accelerator, but at most ");
}

#[test]
fn a_port_that_is_taken_ends_the_start_before_any_engine() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let fixture =
        GatewayFixture::new(&["2Gi"]).model(&SimModel { keys: "pinned: true", ..SimModel::new("small") });
    std::fs::write(fixture.dir().join("rouse.yaml"), fixture.yaml()).unwrap();
    for (api, admin) in [(address.as_str(), "127.0.0.1:0"), ("127.0.0.1:0", address.as_str())] {
        let output = run(&["--config", "rouse.yaml", "--api", api, "--admin", admin], fixture.dir());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(&format!("cannot listen on {address}: address in use")), "{said}");
        assert!(output.stdout.is_empty(), "{output:?}");
        let engines = crate::support::read(&fixture.dir().join("state/engines.json"));
        assert!(!engines.contains("small#0"), "{engines}");
    }
}

#[test]
fn a_second_gateway_over_the_same_state_is_refused() {
    let gateway = GatewayFixture::new(&["2Gi"]).model(&SimModel::new("small")).start();
    let output =
        run(&["--config", "rouse.yaml", "--api", "127.0.0.1:0", "--admin", "127.0.0.1:0"], &gateway.dir);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("another gateway") || said.contains("in use"), "{said}");
}

#[test]
fn a_changed_file_that_is_invalid_is_refused_whole_and_the_old_one_stays() {
    let fixture = GatewayFixture::new(&["2Gi"]).model(&SimModel::new("small"));
    let good = fixture.yaml();
    let gateway = fixture.start();
    assert_eq!(gateway.client().chat("small", true, 1).status, 200);
    let write = |yaml: &str| {
        // The test replaces the file instead of rewriting it, so the gateway never reads half a file.
        let next = gateway.dir.join("next.yaml");
        std::fs::write(&next, yaml).unwrap();
        std::fs::rename(next, gateway.dir.join("rouse.yaml")).unwrap();
        gateway.signal(nix::sys::signal::Signal::SIGHUP);
    };
    let more = |name: &str| good.clone() + &good.split_once("models:\n").unwrap().1.replace("small", name);
    write(&(more("other") + "    colour: red\n"));
    gateway.until("it is refused", Duration::from_secs(10), || gateway.log().contains("colour"));
    assert_eq!(gateway.client().get("/v1/models/other").status, 404);
    assert_eq!(gateway.engine("small#0")["generation"], 1);
    assert_eq!(gateway.client().chat("small", true, 1).header("x-rouse-cold-start"), "");
    write(&more("other"));
    gateway.until("it is taken", Duration::from_secs(10), || {
        gateway.client().get("/v1/models/other").status == 200
    });
    assert_eq!(gateway.engine("small#0")["generation"], 1);
}

#[test]
fn a_command_that_does_not_exist_harms_no_other_model() {
    let gateway = GatewayFixture::new(&["2Gi"])
        .model(&SimModel::new("small"))
        .model_yaml("  - name: absent\n    engine: {kind: custom, command: [no-such-program, \"${PORT}\"]}\n    memory: {awake: 64Mi}\n")
        .start();
    let level = IdleFootprint::of(&gateway);
    let error = refusal(&gateway.client().chat("absent", true, 1), 503, "model_not_ready");
    assert_eq!(error["details"]["cause"], "command_not_found");
    level.is_back(&gateway);
    assert!(gateway.client().chat("small", true, 1).is_whole_stream());
}

#[test]
fn bad_bodies_leave_nothing_behind() {
    let gateway = GatewayFixture::new(&["2Gi"])
        .settings("limits: {body: 1Mi, bodyRate: 1Mi}")
        .model(&SimModel::new("small"))
        .start();
    gateway.wake("small");
    let level = IdleFootprint::of(&gateway);
    let client = gateway.client();
    let two = r#"{"model":"small","model":"small"}"#;
    for body in ["not json", "{}", two, "\u{0}", "[[[[", r#"{"model":"small""#] {
        refusal(&client.post(CHAT, body), 400, "invalid_request");
    }
    // Nested deeper than any stack allows.
    let deep = format!("{{\"a\":{}", "[".repeat(400_000));
    refusal(&client.post(CHAT, &deep), 400, "invalid_request");
    let deep = format!("{{\"model\":\"small\",\"a\":{}{}}}", "[".repeat(200_000), "]".repeat(200_000));
    assert!(client.post(CHAT, &deep).status < 500);
    // A body with fewer bytes than its `Content-Length`, and malformed chunks.
    let short = client.open(format!("POST {CHAT} HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n{{\"mod"));
    short.finish();
    short.ended_without_200();
    let chunks = format!(
        "POST {CHAT} HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{{}}\r\n0\r\n\r\n"
    );
    refusal(&client.raw(&chunks), 400, "invalid_request");
    let mut slow = client.open(format!("POST {CHAT} HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n"));
    for byte in "{\"model\"".chars() {
        slow.write(byte.to_string());
        crate::support::pause(Duration::from_millis(20));
    }
    slow.until("408 Request Timeout");
    refusal(&slow.rest(), 408, "request_timeout");
    level.is_back(&gateway);
    assert_eq!(gateway.counters("small#0")["malformed"], 0);
    assert!(client.chat("small", true, 1).is_whole_stream());
}

#[test]
fn bodies_of_300_mib_cost_bounded_memory_and_only_for_as_long_as_they_come() {
    let gateway = GatewayFixture::new(&["2Gi"])
        .settings("limits: {bodyTotal: 256Mi}")
        .model(&SimModel::new("small"))
        .start();
    let level = IdleFootprint::of(&gateway);
    // With a declared length: the gateway refuses the body before it reads a byte of it.
    let head = format!("POST {CHAT} HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n", 300 * MIB);
    let mut declared = gateway.client().open(head);
    declared.until("limits.body");
    declared.finish();
    refusal(&declared.rest(), 413, "body_too_large");
    assert!(memory(&gateway, "VmHWM") < level.memory + 16 * MIB);
    // Without a declared length: the gateway reads up to the limit, then refuses, and the client can still send the
    // rest.
    let mut chunked = gateway
        .client()
        .open(format!("POST {CHAT} HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"));
    let piece = format!("{:x}\r\n{}\r\n", MIB, "x".repeat(MIB));
    for _ in 0..300 {
        if !chunked.try_write(&piece) {
            break;
        }
    }
    chunked.until("limits.body");
    chunked.finish();
    let error = refusal(&chunked.rest(), 413, "body_too_large");
    assert_eq!(error["message"], "the body is larger than limits.body (256Mi)");
    // The gateway holds the body up to the limit, and no copy of it.
    let peak = memory(&gateway, "VmHWM");
    assert!(peak < level.memory + (256 + 40) * MIB, "{} MiB", peak / MIB);
    level.is_back(&gateway);
    // Memory is freed away from the core that served the request, and so a moment later.
    gateway.until("memory is back", Duration::from_secs(10), || {
        memory(&gateway, "VmRSS") < level.memory + 32 * MIB
    });
}

#[test]
fn many_large_bodies_at_once_are_bounded_by_their_sum() {
    let gateway = GatewayFixture::new(&["2Gi"])
        // One client may hold as much as the largest body, which here is also the limit for all clients.
        .settings("limits: {body: 32Mi, bodyTotal: 32Mi}")
        .model(&SimModel { flags: "--start-time 1h", ..SimModel::new("small") })
        .start();
    // The launch that the first request causes holds descriptors of its own.
    assert_eq!(gateway.admin().post("/admin/v1/models/small/wake", "").status, 202);
    gateway.until("its process runs", Duration::from_secs(10), || {
        gateway.engine("small#0")["state"] == "Loading"
    });
    let level = IdleFootprint::of(&gateway);
    let body = format!("{{\"model\":\"small\",\"x\":\"{}\"}}", "x".repeat(10 * MIB));
    let parked: Vec<_> = (0..3).map(|_| gateway.client().open(request(CHAT, "", &body))).collect();
    gateway.until("parked", Duration::from_secs(10), || {
        gateway.fleet()["models"].as_array().unwrap().iter().any(|model| model["waiting"] == 3)
    });
    refusal(&gateway.client().post(CHAT, &body), 429, "busy");
    let peak = memory(&gateway, "VmHWM");
    assert!(peak < level.memory + (32 + 40) * MIB, "{} MiB", peak / MIB);
    drop(parked);
    level.is_back(&gateway);
}

/// The descriptors and memory of an idle gateway.
struct IdleFootprint {
    descriptors: usize,
    memory: usize,
}

impl IdleFootprint {
    fn of(gateway: &GatewayProcess) -> Self {
        Self { descriptors: descriptors(gateway), memory: memory(gateway, "VmRSS") }
    }

    /// Waits until no request waits, no lease is held, nothing runs, and every descriptor is closed again.
    fn is_back(&self, gateway: &GatewayProcess) {
        gateway.until("nothing is left", Duration::from_secs(10), || {
            let fleet = gateway.fleet();
            let sum = |list: &str, key: &str| -> u64 {
                fleet[list].as_array().unwrap().iter().filter_map(|entry| entry[key].as_u64()).sum()
            };
            let left = sum("engines", "leases") + sum("models", "waiting") + sum("models", "leases");
            let serving = |e: &&serde_json::Value| e["state"] == "Awake";
            let running: u64 = fleet["engines"]
                .as_array()
                .unwrap()
                .iter()
                .filter(serving)
                .filter_map(|e| gateway.counters(e["engine"].as_str().unwrap())["running"].as_u64())
                .sum();
            left + running == 0 && descriptors(gateway) <= self.descriptors
        });
    }
}

fn descriptors(gateway: &GatewayProcess) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", gateway.pid())).unwrap().count()
}

/// Bytes of physical memory: now (`VmRSS`), or the peak so far (`VmHWM`).
fn memory(gateway: &GatewayProcess, which: &str) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{}/status", gateway.pid())).unwrap();
    let line = status.lines().find(|line| line.starts_with(which)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
}
