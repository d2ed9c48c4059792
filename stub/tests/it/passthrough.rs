//! Management requests do not reach an engine in any spelling.

use std::sync::{Arc, Mutex};

use rouse_testing::scripted_engine::scripted;

use crate::support::{engine::sim, stub_before};

const MANAGEMENT: [&str; 40] = [
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/reset_encoder_cache",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/start_profile",
    "/stop_profile",
    "/server_info",
    "/scale_elastic_ep",
    "/pause",
    "/resume",
    "/init_weight_transfer_engine",
    "/load",
    "/shutdown",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/flush_cache",
    "/update_weights_from_disk",
    "/update_weights_from_tensor",
    "/update_weights_from_distributed",
    "/init_weights_update_group",
    "/get_weights_by_name",
    "/get_server_info",
    "/get_internal_state",
    "/set_internal_state",
    "/abort_request",
    "/pause_generation",
    "/configure_logging",
    "/slots",
    "/slots/0",
    "/props",
    "/lora-adapters",
    "/abort",
    "/tools",
    "/close_session",
    "/v1/sleep",
];

/// Spellings of a path that some parser reads as the plain path.
fn spellings(path: &str) -> Vec<String> {
    let bare = path.trim_start_matches('/');
    let escape = |text: &str| text.bytes().map(|byte| format!("%{byte:02x}")).collect::<String>();
    let (first, rest) = (bare.get(..1).unwrap(), bare.get(1..).unwrap());
    let number = first.as_bytes().first().unwrap();
    vec![
        format!("/{bare}"),
        format!("/{}", bare.to_uppercase()),
        format!("/{}{rest}", first.to_uppercase()),
        format!("//{bare}"),
        format!("///{bare}"),
        format!("/./{bare}"),
        format!("/v1/../{bare}"),
        format!("/v1/models/../../{bare}"),
        format!("/%2e/{bare}"),
        format!("/v1/%2e%2e/{bare}"),
        format!("/v1/.%2e/{bare}"),
        format!("%2f{bare}"),
        format!("/%2f{bare}"),
        format!("/{}", escape(bare)),
        format!("/{}{rest}", escape(first)),
        format!("/%25{number:02x}{rest}"),
        format!("/{bare}/"),
        format!("/{bare}//"),
        format!("/{bare}/."),
        format!("/{bare}?level=1"),
        format!("/{bare}?"),
        format!("/{bare}#v1/models"),
        format!("/{bare};jsessionid=1"),
        format!("/;x/{bare}"),
        format!("\\{bare}"),
        format!("/v1\\..\\{bare}"),
        format!("/{bare}%00"),
        format!("/{bare}%20"),
        format!("/{bare}%0d%0a"),
        format!("/{bare}\t"),
        format!("/\u{ff53}{rest}"),
        format!("/%c0%ae%c0%ae/{bare}"),
        format!("/v1/models{path}"),
        format!("/v1/models;{path}"),
        format!("/health{path}"),
        format!("/{bare}.json"),
        format!("http://localhost/{bare}"),
        format!("http://localhost:1@evil/{bare}"),
        format!("{path}/v1/models"),
    ]
}

#[test]
fn no_spelling_of_a_management_path_reaches_an_engine_of_any_kind() {
    for kind in ["vllm", "custom"] {
        let engine = sim("");
        let stub = stub_before(engine.address, &["--engine-kind", kind]);
        let relay = stub.relay();
        let counts = || ["bytes_in", "sleeps", "wakes", "malformed"].map(|name| engine.counter(name));
        let before = counts();
        for path in MANAGEMENT {
            for target in spellings(path) {
                for method in ["POST", "GET"] {
                    let text = format!(
                        "{method} {target} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
                    );
                    let answer = relay.open(text).rest();
                    assert!(
                        matches!(answer.status, 400 | 404 | 405),
                        "{kind} {method} {target:?} {}",
                        answer.status
                    );
                }
            }
        }
        assert_eq!(counts(), before, "{kind}");
        for headers in [
            "X-Original-URL: /sleep\r\n",
            "X-Rewrite-URL: /sleep\r\n",
            "Connection: upgrade\r\nUpgrade: h2c\r\n",
        ] {
            let asked = relay.request("GET", "/v1/models", headers, "");
            let mut open = relay.open(asked);
            open.until("HTTP/1.1 200");
        }
        assert_eq!(engine.counter("sleeps"), 0);
    }
}

#[test]
fn a_path_of_the_kind_passes_with_its_method_alone_and_refusals_are_in_openais_words() {
    let engine = sim("");
    let stub = stub_before(engine.address, &[]);
    let relay = stub.relay();
    assert_eq!(relay.get("/v1/models").status, 200);
    let wrong = relay.post("/v1/models", "{}");
    assert_eq!((wrong.status, wrong.header("allow")), (405, "GET, HEAD"));
    assert_eq!(relay.get("/v1/chat/completions").header("allow"), "POST");
    let unknown = relay.post("/v1/unknown", "{}");
    assert_eq!((unknown.status, &unknown.json()["error"]["type"]), (404, &"invalid_request_error".into()));
    assert_eq!((relay.get("/metrics").status, relay.post("/metrics", "").status), (200, 405));
}

#[test]
fn a_head_with_as_many_fields_as_the_gateway_takes_and_adds_passes() {
    let engine = sim("");
    let stub = stub_before(engine.address, &[]);
    let relay = stub.relay();
    let mut open = relay.open(relay.request("GET", "/v1/models", &"x: y\r\n".repeat(120), ""));
    open.until("HTTP/1.1 200");
}

/// These target the connection or the server as a whole, not a path or method of an engine.
#[test]
fn what_is_for_the_connection_or_for_the_server_reaches_no_engine() {
    let came = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&came);
    let engine = scripted(move |_, head| noted.lock().unwrap().push(String::from_utf8(head).unwrap()));
    for kind in ["vllm", "sglang", "llamacpp", "custom"] {
        let stub = stub_before(engine, &["--engine-kind", kind]);
        for line in [
            "OPTIONS *",
            "OPTIONS **",
            "OPTIONS */sleep",
            "GET *",
            "POST *",
            "CONNECT *",
            "CONNECT localhost:8000",
            "CONNECT 127.0.0.1:8000",
            "CONNECT /v1/models",
            "CONNECT http://localhost/v1/models",
            "connect localhost:8000",
            "connect /v1/models",
            "TRACE *",
            "TRACE /",
            "TRACE /v1/models",
            "TRACE /sleep",
            "TRACE http://localhost/v1/models",
            "trace /v1/models",
        ] {
            for port in ["relay", "proxy"] {
                let head =
                    format!("{line} HTTP/1.1\r\nHost: a\r\nMax-Forwards: 0\r\nConnection: close\r\n\r\n");
                let answer = stub.port(port).open(head).rest();
                assert!(matches!(answer.status, 400 | 404 | 405), "{kind} {port} {line}: {}", answer.status);
                assert!(!answer.text().contains("Max-Forwards"), "{kind} {port} {line}: it is sent back");
            }
        }
    }
    assert_eq!(*came.lock().unwrap(), Vec::<String>::new());
}

/// After a refused tunnel the following bytes are the next request, which is checked like any other.
#[test]
fn nothing_passes_behind_a_connect_or_an_upgrade_that_was_refused() {
    let engine = sim("");
    let stub = stub_before(engine.address, &["--engine-kind=custom"]);
    let relay = stub.relay();
    for first in [
        "CONNECT localhost:8000 HTTP/1.1\r\nHost: a\r\n\r\n",
        "OPTIONS * HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
    ] {
        let sleep = "POST /sleep HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";
        let text = relay.open(format!("{first}{sleep}")).all();
        assert!(text.starts_with("HTTP/1.1 404 ") && !text.contains("HTTP/1.1 2"), "{text}");
    }
    assert_eq!(engine.counter("sleeps"), 0);
}
