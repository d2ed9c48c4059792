//! The probes port, and the two orders by which a controller sets its readiness.

use crate::support::StubBuilder;

#[test]
fn a_thousand_flips_are_all_seen_in_order() {
    let stub = StubBuilder::new().start();
    assert!(!stub.ready());
    for flip in 1..=1000 {
        let ready = flip % 2 == 1;
        let path = if ready { "/v1/become-ready" } else { "/v1/become-unready" };
        let answer = stub.post(path, "");
        assert_eq!((answer.status, &*answer.text()), (200, "OK\n"));
        assert_eq!(stub.ready(), ready, "flip {flip}");
    }
    // Repeated orders change nothing.
    assert_eq!(stub.port("admin").post("/v1/become-ready", "").status, 200);
    assert_eq!(stub.port("admin").post("/v1/become-ready", "").status, 200);
    assert!(stub.ready());
    let metrics = stub.get("metrics", "/metrics").text();
    assert!(metrics.contains("\nrouse_stub_readiness_changes_total 1001\n"), "{metrics}");
}

#[test]
fn a_closed_gate_is_unready_whatever_the_engine_is() {
    let stub = StubBuilder::new().flag("--epoch-gate").start();
    assert_eq!(stub.post("/v1/become-ready", "").status, 200);
    assert!(!stub.ready(), "it starts gated");
    let open = stub.spi().send("DELETE", "/v1/gate", r#"{"epoch": 3, "generation": 1}"#);
    assert_eq!(open.status, 200, "{open:?}");
    assert!(stub.ready());
    let closed = stub.post("/v1/gate", r#"{"epoch": 3, "generation": 1}"#);
    assert_eq!(closed.status, 202, "{closed:?}");
    assert!(!stub.ready());
}

#[test]
fn without_epochs_the_word_acts_at_once() {
    let stub = StubBuilder::with_ports(&[("spi", 0), ("probes", 0)]).start();
    assert_eq!(stub.post("/v1/become-ready", "").status, 200);
    assert!(stub.ready());
}

#[test]
fn the_stub_itself_is_healthy_and_says_nothing_else() {
    let stub = StubBuilder::new().start();
    let health = stub.get("probes", "/health");
    assert_eq!((health.status, &*health.text()), (200, "OK\n"));
    assert_eq!(stub.get("probes", "/v1/become-ready").status, 404);
    for path in ["/ready", "/health"] {
        let answer = stub.port("probes").post(path, "");
        assert_eq!((answer.status, answer.header("allow")), (405, "GET,HEAD"));
    }
    for path in ["/v1/become-ready", "/v1/become-unready"] {
        let answer = stub.get("spi", path);
        assert_eq!((answer.status, answer.header("allow")), (405, "POST"));
    }
}

#[test]
fn the_words_want_the_token_and_the_probes_do_not() {
    let setting = StubBuilder::new();
    let file = setting.dir().join("token");
    std::fs::write(&file, "secret\n").unwrap();
    let stub = setting.flag(format!("--token-file={}", file.display())).start();
    for path in ["/v1/become-ready", "/v1/become-unready", "/v1/readiness-url", "/v1/set-log?startPos=0"] {
        assert_eq!(stub.post(path, "").status, 401, "{path}");
    }
    for path in ["/v1/dual-pods/accelerators", "/v1/dual-pods/accelerator-memory-usage"] {
        assert_eq!(stub.get("spi", path).status, 401, "{path}");
    }
    assert!(!stub.ready());
    let told = stub.spi().with("Authorization: Bearer secret").post("/v1/become-ready", "");
    assert_eq!(told.status, 200);
    assert!(stub.ready());
}
