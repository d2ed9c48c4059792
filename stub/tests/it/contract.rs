//! Every SPI path of the proxy itself, with every status that it may return.

use std::{net::TcpListener, process::Command};

use nix::sys::signal::Signal;
use rouse_testing::scripted_engine::scripted;

use crate::support::{ReservedPort, StubBuilder, StubTestClient, stub, until};

const GATE: [&str; 6] = ["cut", "deadline", "epoch", "gated", "generation", "leases"];

fn statuses(client: &StubTestClient, rows: &[(&str, &str, &str, u16)]) {
    for (method, path, body, status) in rows {
        let answer = client.send(method, path, body);
        assert_eq!(answer.status, *status, "{method} {path} {body}: {}", answer.text());
    }
}

#[test]
fn the_gate_is_shown_closed_and_opened_on_both_ports() {
    let stub = stub(&[]);
    for port in ["spi", "admin"] {
        let client = stub.port(port);
        let shown = client.get("/v1/gate");
        assert_eq!((shown.status, shown.header("content-type")), (200, "application/json"));
        assert_eq!(shown.json().as_object().unwrap().keys().collect::<Vec<_>>(), GATE);
        statuses(
            &client,
            &[
                ("POST", "/v1/gate", r#"{"epoch":3,"generation":7}"#, 202),
                ("POST", "/v1/gate", r#"{"epoch":3,"generation":7}"#, 202),
                ("POST", "/v1/gate?wait=true", r#"{"epoch":3,"generation":7,"onDeadline":"cut"}"#, 200),
                ("POST", "/v1/gate", r#"{"epoch":2,"generation":8}"#, 409),
                ("POST", "/v1/gate", r#"{"epoch":3,"generation":6}"#, 409),
                ("POST", "/v1/gate", r#"{"epoch":3}"#, 400),
                ("POST", "/v1/gate", "", 400),
                ("POST", "/v1/gate", r#"{"epoch":3,"generation":7,"unknown":1}"#, 400),
                ("DELETE", "/v1/gate", r#"{"epoch":2,"generation":9}"#, 409),
                ("DELETE", "/v1/gate?epoch=3&generation=6", "", 409),
                ("DELETE", "/v1/gate?epoch=3", "", 400),
                ("DELETE", "/v1/gate?epoch=3&generation=7", "", 200),
                ("DELETE", "/v1/gate", r#"{"epoch":3,"generation":7}"#, 200),
                ("PUT", "/v1/gate", "{}", 405),
                ("GET", "/v1/gates", "", 404),
            ],
        );
        assert!(!stub.gate()["gated"].as_bool().unwrap());
    }
    let older = stub.spi().post("/v1/gate", r#"{"epoch":1,"generation":1}"#).json();
    assert_eq!(
        (&older["epoch"], &older["generation"], &older["gated"]),
        (&3.into(), &7.into(), &false.into())
    );
    assert_eq!(older["reason"], "the order is stale: the stub has already accepted epoch 3 and generation 7");
}

#[test]
fn a_target_is_named_once_and_the_proxy_port_listens_from_then_on() {
    let engine = scripted(|_, _| {});
    let stub = stub(&[]);
    let spi = stub.spi();
    let path = "/v1/proxy/config";
    let named = |address: &str, port: u16| format!(r#"{{"address":"{address}","port":{port}}}"#);
    statuses(
        &spi,
        &[
            ("GET", path, "", 404),
            ("PUT", path, "", 400),
            ("PUT", path, "{", 400),
            ("PUT", path, r#"{"port":8000}"#, 400),
            ("PUT", path, &named("", 8000), 400),
            ("PUT", path, r#"{"address":"10.0.0.1"}"#, 400),
            ("PUT", path, &named("10.0.0.1", 0), 400),
            ("PUT", path, r#"{"address":"10.0.0.1","port":65536}"#, 400),
            ("PUT", path, &named("engine.example", 8000), 400),
            ("PUT", path, &named("0.0.0.0", 8000), 400),
            ("PUT", path, &named("::", 8000), 400),
            ("PUT", path, &named("224.0.0.1", 8000), 400),
            ("PUT", path, &named("255.255.255.255", 8000), 400),
            ("GET", path, "", 404),
        ],
    );
    assert!(!stub.has_logged(&["port=\"proxy\""]));
    let target = named("127.0.0.1", engine.port());
    statuses(
        &spi,
        &[
            ("PUT", path, &target, 200),
            ("PUT", path, &target, 200),
            ("PUT", path, &named("127.0.0.1", 9), 409),
            ("PUT", &format!("{path}?retarget=true"), &named("127.0.0.1", 9), 409),
            ("POST", path, &target, 405),
        ],
    );
    assert_eq!(spi.get(path).text(), target);
    assert_eq!(spi.post(path, "").header("allow"), "GET,HEAD,PUT");
    // The proxy port already listens.
    drop(std::net::TcpStream::connect(stub.port("proxy").address).unwrap());
    let older = spi.clone().with("x-rouse-epoch: 3").send("PUT", path, &target);
    assert_eq!((older.status, stub.gate()["epoch"].as_u64()), (200, Some(3)));
    assert_eq!(spi.clone().with("x-rouse-epoch: 2").send("PUT", path, &target).status, 409);
    assert_eq!(spi.with("x-rouse-epoch: two").send("PUT", path, &target).status, 400);
}

#[test]
fn readiness_is_set_by_nobody_who_was_replaced() {
    let stub = stub(&[]);
    let ready = || stub.port("probes").get("/ready").status;
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!(r#"{{"url":"http://{}/health"}}"#, nobody.local_addr().unwrap());
    let orders = [
        ("POST", "/v1/become-ready", ""),
        ("POST", "/v1/become-unready", ""),
        ("POST", "/v1/readiness-url", &*url),
        ("DELETE", "/v1/readiness-url", ""),
    ];
    let of = |epoch: &str| stub.spi().with(&format!("x-rouse-epoch: {epoch}"));
    assert_eq!((of("5").post("/v1/become-ready", "").status, ready()), (200, 200));
    assert_eq!(stub.gate()["epoch"], 5);
    for (method, path, body) in orders {
        let older = of("4").send(method, path, body);
        assert_eq!((older.status, &older.json()["epoch"]), (409, &5.into()), "{method} {path}");
        assert_eq!(of("five").send(method, path, body).status, 400, "{method} {path}");
        assert_eq!(ready(), 200, "{method} {path} changed nothing");
    }
    // The leader, and a controller without epochs.
    for client in [of("5"), stub.spi(), of("6")] {
        for (method, path, body) in orders {
            assert_eq!(client.send(method, path, body).status, 200, "{method} {path}");
            assert_eq!(ready(), if path.ends_with("become-ready") { 200 } else { 503 });
        }
    }
    // All orders share one fence.
    assert_eq!(stub.spi().post("/v1/gate", r#"{"epoch":5,"generation":1}"#).status, 409);
    assert_eq!(of("5").post("/v1/become-ready", "").status, 409);
}

#[test]
fn a_proxy_port_that_is_taken_is_told_and_tried_again() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let stub = StubBuilder::without_ports(&["proxy"]).flag(format!("--proxy-port={port}")).start();
    let target = "127.0.0.1:9".parse().unwrap();
    assert_eq!(stub.set_target(target), 500);
    assert_eq!(stub.spi().get("/v1/proxy/config").status, 404);
    drop(taken);
    assert_eq!(stub.set_target(target), 200);
}

#[test]
fn orders_to_the_engine_are_refused_with_a_reason() {
    let stub = stub(&[]);
    let spi = stub.spi();
    let order = r#"{"epoch":3,"generation":7}"#;
    statuses(
        &spi,
        &[
            ("POST", "/v1/engine/sleep", order, 409),
            ("POST", "/v1/engine/wake", order, 409),
            ("POST", "/v1/engine/sleep", r#"{"epoch":2,"generation":7}"#, 409),
            ("POST", "/v1/engine/wake", r#"{"epoch":3,"generation":6}"#, 409),
            ("POST", "/v1/engine/sleep", r#"{"epoch":3,"generation":7,"level":3}"#, 400),
            ("POST", "/v1/engine/sleep", "{}", 400),
            ("GET", "/v1/engine/sleep", "", 405),
            ("POST", "/v1/release", r#"{"epoch":2}"#, 409),
            ("POST", "/v1/release", "{}", 400),
            ("GET", "/v1/release", "", 405),
            ("POST", "/v1/release", r#"{"epoch":3}"#, 200),
        ],
    );
    assert!(spi.post("/v1/engine/sleep", order).text().contains("no target"));
    let nobody = ReservedPort::bind();
    assert_eq!(stub.set_target(nobody.address()), 200);
    let refused = spi.post("/v1/engine/sleep", order);
    assert_eq!(refused.json()["reason"], "the gate is open: close it first");
    assert_eq!(spi.post("/v1/gate?wait=true", order).status, 200);
    assert_eq!(spi.post("/v1/engine/sleep", order).status, 502);
    assert_eq!(spi.post("/v1/engine/wake", order).status, 502);
    assert_eq!(spi.send("DELETE", "/v1/gate", order).status, 200, "an order that failed bars nothing");
}

#[test]
fn a_token_is_demanded_where_there_is_one_and_read_again_when_it_changes() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("token");
    std::fs::write(&file, "first\n").unwrap();
    let stub = stub(&["--token-file", file.to_str().unwrap()]);
    let shows = |token: &str| stub.spi().with(&format!("Authorization: {token}")).get("/v1/gate").status;
    let refused = stub.spi().get("/v1/gate");
    assert_eq!((refused.status, refused.header("www-authenticate")), (401, "Bearer"));
    let paths = ["/v1/gate", "/v1/engine/sleep", "/v1/release", "/v1/nothing"];
    for (port, path) in ["spi", "admin"].iter().flat_map(|port| paths.map(|path| (port, path))) {
        assert_eq!(stub.port(port).post(path, "{}").status, 401, "{port} {path}");
    }
    for wrong in
        ["Bearer", "Bearer ", "Bearer firs", "Bearer firstt", "Basic first", "first", "Bearer second"]
    {
        assert_eq!(shows(wrong), 401, "{wrong}");
    }
    assert_eq!((shows("Bearer first"), shows("bearer first")), (200, 200));
    // Like Kubernetes: a new file replaces the old.
    let next = dir.path().join("next");
    std::fs::write(&next, "second").unwrap();
    std::fs::rename(next, &file).unwrap();
    until("the new token holds", || shows("Bearer second") == 200);
    assert_eq!(shows("Bearer first"), 401);
    std::fs::remove_file(&file).unwrap();
    assert_eq!(shows("Bearer second"), 200);
    // With the token, a caller may change the target.
    let spi = stub.spi().with("Authorization: Bearer second");
    let put = |query: &str, port| {
        let body = format!(r#"{{"address":"127.0.0.1","port":{port}}}"#);
        spi.send("PUT", &format!("/v1/proxy/config{query}"), &body).status
    };
    assert_eq!((put("", 9), put("", 10), put("?retarget=true", 10), put("", 10)), (200, 409, 200, 200));
}

#[test]
fn a_token_known_by_its_hash_is_demanded_and_the_hash_opens_nothing() {
    const HASH: &str = "3c469e9d6c5875d37a43f353d4f88e61fcf812c66eee3457465a40b0da4153e0";
    let stub = stub(&["--token-sha256", HASH]);
    let opens = |token: &str| {
        let spi = stub.spi().with(&format!("Authorization: Bearer {token}"));
        spi.send("DELETE", "/v1/gate?epoch=1&generation=1", "").status
    };
    assert_eq!(stub.spi().post("/v1/become-ready", "").status, 401);
    assert_eq!((opens("tokens"), opens(HASH), opens("token")), (401, 401, 200));
}

#[test]
fn a_restarted_stub_with_an_epoch_gate_is_gated_and_without_a_target() {
    for _ in 0..2 {
        let stub = stub(&["--epoch-gate"]);
        assert_eq!(stub.gate()["gated"], true);
        assert_eq!(stub.spi().get("/v1/proxy/config").status, 404);
        let engine = scripted(|_, _| {});
        assert_eq!(stub.set_target(engine), 200);
        let refused = stub.relay().post("/v1/completions", "{}");
        assert_eq!((refused.status, refused.header("x-rouse-gated")), (503, "1"));
        assert_eq!(stub.spi().send("DELETE", "/v1/gate?epoch=1&generation=1", "").status, 200);
        assert_eq!(stub.gate()["gated"], false);
    }
}

#[test]
fn a_port_that_is_taken_a_bad_token_file_and_a_bad_flag_have_exit_codes() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    for (flag, code) in
        [("spi", 10), ("admin", 10), ("probes", 11), ("relay", 12), ("metrics", 12), ("debug", 12)]
    {
        let mut stub = StubBuilder::without_ports(&[flag]).flag(format!("--{flag}-port={port}")).spawn();
        assert_eq!(stub.wait_exit().code(), Some(code), "{flag}");
        stub.until_logged(&[&format!("the {flag} port"), &format!("--{flag}-port")]);
    }
    let mut stub = StubBuilder::new().flag("--token-file=/nowhere").spawn();
    assert_eq!(stub.wait_exit().code(), Some(13));
    for flag in ["--engine-kind=other", "--token-sha256=token"] {
        let mut stub = StubBuilder::new().flag(flag).spawn();
        assert_eq!(stub.wait_exit().code(), Some(2), "{flag}");
    }
}

/// As the downward API writes it: a symlink to a folder is replaced.
#[test]
fn an_address_in_a_file_is_followed() {
    let dir = tempfile::tempdir().unwrap();
    let put = |version: &str, text: &str| {
        let folder = dir.path().join(version);
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("ip"), text).unwrap();
        let link = dir.path().join("..next");
        std::os::unix::fs::symlink(version, &link).unwrap();
        std::fs::rename(link, dir.path().join("..data")).unwrap();
    };
    put("1", "");
    let file = dir.path().join("ip");
    std::os::unix::fs::symlink("..data/ip", &file).unwrap();
    let stub = stub(&["--server-ip-file", file.to_str().unwrap(), "--server-port=7000"]);
    let shown = || stub.spi().get("/v1/proxy/config").text();
    assert_eq!(stub.spi().get("/v1/proxy/config").status, 404);
    for (version, text, address, port) in [
        ("2", "10.1.2.3", "10.1.2.3", 7000),
        ("3", "10.1.2.4:9\n", "10.1.2.4", 9),
        ("4", "fd00::1", "fd00::1", 7000),
    ] {
        put(version, text);
        let wanted = format!(r#"{{"address":"{address}","port":{port}}}"#);
        until("it is followed", || shown() == wanted);
    }
    put("5", "nowhere");
    stub.until_logged(&["no unicast address that a Pod can have"]);
    assert!(shown().contains("fd00::1"));
}

/// Runs the command line of the earlier design's example, plus `--host`. The example's ports are fixed, so the stub
/// gets its own loopback address, on which no other process of this machine holds them.
#[test]
fn the_example_of_the_earlier_design_runs_as_it_is_written() {
    let [.., high, low] = std::process::id().to_be_bytes();
    let client_ip = format!("127.250.{high}.{low}");
    // The stub opens its debug port on 127.0.0.1 whatever `--host` says, so another run of this test may hold it
    // briefly.
    until("port 8003 of 127.0.0.1 is free", || TcpListener::bind(("127.0.0.1", 8003)).is_ok());
    let dir = tempfile::tempdir().unwrap();
    let proxy = dir.path().join("proxy");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_rouse-stub"), &proxy).unwrap();
    let mut command = Command::new(proxy);
    command.args(["--relay-port-1=8000", "--admin-port=8001", "--metrics-port=8002", "--debug-port=8003"]);
    let mut stub = StubBuilder::from_command(command).flag(format!("--host={client_ip}")).spawn();
    stub.until_logged(&["port=\"debug\" address=127.0.0.1:8003"]);
    for (port, number) in
        [("probes", 8080), ("spi", 8081), ("relay", 8000), ("admin", 8001), ("metrics", 8002)]
    {
        assert_eq!(stub.address(port).to_string(), format!("{client_ip}:{number}"));
    }
    let refused = stub.port("relay").post("/v1/completions", "{}");
    assert_eq!((refused.status, refused.header("x-rouse-not-ready")), (503, "1"));
    assert_eq!(stub.port("admin").get("/v1/gate").json()["gated"], false);
    stub.signal(Signal::SIGTERM);
    assert_eq!(stub.wait_exit().code(), Some(0));
}
