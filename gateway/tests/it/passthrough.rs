//! `/engines/{model}/…`: a path that the engine's kind opens passes unchanged, and no spelling of another path reaches
//! the engine.

use rouse_testing::sample::cases;

use crate::{
    refusals::refusal,
    support::{GatewayFixture, GatewayProcess, SimModel, TestClient, client::chat_body},
};

/// No health checks: only the test's client sends requests to the engines.
const UNPROBED: &str = "timeouts: {health: {every: 1h}}";

/// Paths that control an engine of some kind or expose its internals.
const MANAGEMENT: [&str; 44] = [
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/reset_encoder_cache",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/load_lora_adapter",
    "/start_profile",
    "/stop_profile",
    "/server_info",
    "/scale_elastic_ep",
    "/pause",
    "/resume",
    "/init_weight_transfer_engine",
    "/metrics",
    "/load",
    "/docs",
    "/openapi.json",
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
    "/health_generate",
    "/slots",
    "/slots/0",
    "/props",
    "/lora-adapters",
    "/models/unload",
    "/abort",
    "/sim/faults",
];

/// How many of these paths the gate tries in every place and with both methods.
const SAMPLED_PATHS: usize = 15;

/// Spellings of a path that some parser reads as the plain path. `at` is the prefix of the engine's paths.
fn spellings(at: &str, path: &str) -> Vec<String> {
    let bare = path.trim_start_matches('/');
    let escape = |text: &str| text.bytes().map(|byte| format!("%{byte:02x}")).collect::<String>();
    let first = bare.get(..1).unwrap();
    let rest = bare.get(1..).unwrap();
    let mut spelled = vec![
        format!("{at}/{bare}"),
        format!("{at}/{}", bare.to_uppercase()),
        format!("{at}/{}{rest}", first.to_uppercase()),
        format!("{at}//{bare}"),
        format!("{at}///{bare}"),
        format!("{at}/./{bare}"),
        format!("{at}/v1/../{bare}"),
        format!("{at}/v1/models/../../{bare}"),
        format!("{at}/%2e/{bare}"),
        format!("{at}/v1/%2e%2e/{bare}"),
        format!("{at}/v1/.%2e/{bare}"),
        format!("{at}%2f{bare}"),
        format!("{at}%2F{bare}"),
        format!("{at}/%2f{bare}"),
        format!("{at}/{}", escape(bare)),
        format!("{at}/{}{rest}", escape(first)),
        format!("{at}/%25{:02x}{rest}", first.as_bytes().first().unwrap()),
        format!("{at}/{bare}/"),
        format!("{at}/{bare}//"),
        format!("{at}/{bare}/."),
        format!("{at}/{bare}?level=1"),
        format!("{at}/{bare}?"),
        format!("{at}/{bare}#v1/models"),
        format!("{at}/{bare};jsessionid=1"),
        format!("{at}/;x/{bare}"),
        format!("{at}\\{bare}"),
        format!("{at}/v1\\..\\{bare}"),
        format!("{at}/{bare}%00"),
        format!("{at}/{bare}%20"),
        format!("{at}/{bare}%0d%0a"),
        format!("{at}/{bare}\t"),
        format!("{at}/\u{ff53}{rest}"),
        format!("{at}/v1/\u{2024}\u{2024}/{bare}"),
        format!("{at}/%c0%ae%c0%ae/{bare}"),
        format!("{at}/v1/models{path}"),
        format!("{at}/v1/models;{path}"),
        format!("{at}/health{path}"),
        format!("{at}/{bare}.json"),
        format!("http://localhost{at}/{bare}"),
        format!("http://localhost:1@evil{at}/{bare}"),
        format!("{at}/engines/small/{bare}"),
    ];
    spelled.push(format!("{at}{path}/v1/models"));
    spelled
}

fn send(client: &TestClient, method: &str, target: &str, headers: &str) -> u16 {
    let text =
        format!("{method} {target} HTTP/1.1\r\n{headers}Connection: close\r\nContent-Length: 0\r\n\r\n");
    client.raw(&text).status
}

#[test]
fn a_background_is_refused_where_it_means_that_nobody_waits() {
    let gateway = small(UNPROBED);
    let body = r#"{"model":"small","input":"x","prompt":"x","background":"transparent"}"#;
    for at in ["", "/engines/small"] {
        let post = |path: &str| gateway.client().post(&format!("{at}{path}"), body);
        assert_ne!(post("/v1/completions").status, 400, "{at}");
        refusal(&post("/v1/responses"), 400, "invalid_request");
    }
    assert_ne!(gateway.client().post("/v1/images/generations", body).status, 400);
}

fn small(settings: &str) -> GatewayProcess {
    GatewayFixture::new(&["2Gi"])
        .settings(settings)
        .model(&SimModel { keys: "aliases: [org/nick]", ..SimModel::new("small") })
        .start()
}

/// The engine's request counters, without the test's own reads of them.
fn seen(gateway: &GatewayProcess) -> (u64, u64, u64, u64) {
    seen_by(gateway, "small")
}

fn seen_by(gateway: &GatewayProcess, model: &str) -> (u64, u64, u64, u64) {
    let counters = gateway.counters(&format!("{model}#0"));
    let number = |name: &str| counters[name].as_u64().unwrap();
    (number("bytes_in"), number("sleeps"), number("wakes"), number("malformed"))
}

#[test]
fn no_spelling_of_a_management_path_reaches_an_engine() {
    let gateway = small(UNPROBED);
    gateway.wake("small");
    let before = seen(&gateway);
    let client = gateway.client();
    let mut asked = 0;
    let paths = cases(&MANAGEMENT, SAMPLED_PATHS);
    for path in &paths {
        for at in ["/engines/small", "/engines/org%2fnick", ""] {
            for target in spellings(at, path) {
                for method in ["POST", "GET"] {
                    let status = send(&client, method, &target, "Host: localhost\r\n");
                    assert!(matches!(status, 400 | 404 | 405), "{status}: {method} {target:?}");
                    asked += 1;
                }
            }
        }
    }
    assert!(asked > paths.len() * 40 * 3, "{asked}");
    assert_eq!(seen(&gateway), before);
}

/// The other kinds, with paths that each opens and no other kind does. The engine behind them knows none of these paths
/// and answers with its own 404.
const OTHERS: [(&str, [&str; 2]); 3] = [
    ("sglang", ["POST /generate", "GET /model_info"]),
    ("llama-cpp", ["POST /infill", "GET /v1/health"]),
    ("custom", ["POST /own/path", "GET /own/state"]),
];

#[test]
fn each_kind_of_engine_opens_its_own_paths_and_no_spelling_of_a_management_path() {
    let mut fixture = GatewayFixture::new(&["2Gi"]).settings(UNPROBED);
    for (kind, _) in OTHERS {
        let engine = if kind == "custom" { "passthrough: [/own/path, GET /own/state]" } else { "" };
        fixture = fixture.model(&SimModel { kind, awake: "512Mi", engine, ..SimModel::new(kind) });
    }
    let gateway = fixture.start();
    let client = gateway.client();
    for (kind, own) in OTHERS {
        gateway.wake(kind);
        // A POST waits until the gate is open; a GET does not.
        let ready = client.post(&format!("/engines/{kind}{}", own[0].trim_start_matches("POST ")), "{}");
        assert_eq!(ready.json()["detail"], "Not Found", "{kind}: {}", ready.text());
        let before = seen_by(&gateway, kind);
        let targets = MANAGEMENT.iter().flat_map(|path| spellings(&format!("/engines/{kind}"), path));
        for (target, method) in targets.zip(["POST", "GET"].into_iter().cycle()) {
            let status = send(&client, method, &target, "Host: localhost\r\n");
            assert!(matches!(status, 400 | 404 | 405), "{status}: {method} {target:?}");
        }
        assert_eq!(seen_by(&gateway, kind), before, "{kind}");
        for path in OTHERS.iter().flat_map(|(_, paths)| paths).chain(&["POST /pooling", "GET /ping"]) {
            let (method, target) = path.split_once(' ').unwrap();
            let target = format!("/engines/{kind}{target}");
            let answer = if method == "GET" { client.get(&target) } else { client.post(&target, "{}") };
            let arrived = answer.json()["detail"] == "Not Found";
            assert_eq!(
                (answer.status, arrived),
                (404, own.contains(path)),
                "{kind} {path}: {}",
                answer.text()
            );
        }
    }
}

#[test]
fn no_host_method_or_header_makes_another_path_of_an_allowed_one() {
    let gateway = small(UNPROBED);
    gateway.wake("small");
    let before = seen(&gateway);
    let client = gateway.client();
    for headers in [
        "Host: localhost/sleep\r\n",
        "Host: localhost\r\nHost: evil\r\n",
        "Host: localhost\r\nX-Original-URL: /sleep\r\nX-Rewrite-URL: /sleep\r\n",
        "Host: localhost\r\nX-HTTP-Method-Override: DELETE\r\n",
    ] {
        let status = send(&client, "POST", "/engines/small/sleep", headers);
        assert!(matches!(status, 400 | 404), "{status}: {headers:?}");
    }
    for method in ["PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "post", "SLEEP"] {
        let status = send(&client, method, "/engines/small/sleep", "Host: localhost\r\n");
        assert!(matches!(status, 400 | 404 | 405), "{status}: {method}");
        let status = send(&client, method, "/engines/small/v1/models", "Host: localhost\r\n");
        assert_eq!(status, 405, "{method}");
    }
    assert_eq!(seen(&gateway), before);
}

#[test]
fn what_is_open_passes_under_every_name_of_the_model_with_its_query() {
    let gateway = small("");
    gateway.wake("small");
    let client = gateway.client();
    // The gate opens a moment after the gateway reports the model awake, and a GET does not wait for that.
    gateway.until("it is open", std::time::Duration::from_secs(5), || {
        client.get("/engines/small/health").status == 200
    });
    for name in ["small", "org/nick", "org%2Fnick", "org%2fnick", "%73mall"] {
        let version = client.get(&format!("/engines/{name}/version?a=../../sleep;b"));
        assert_eq!((version.status, version.json()["version"].is_string()), (200, true), "{name}");
        let models = client.get(&format!("/engines/{name}/v1/models"));
        // The engine's own list, not the gateway's.
        assert_eq!(models.json()["data"][0]["owned_by"], "vllm");
    }
    for (path, body) in [
        ("/engines/small/v1/chat/completions", chat_body("small", false, 2)),
        ("/engines/small/v1/chat/completions", chat_body("org/nick", false, 2)),
        ("/engines/small/tokenize", r#"{"prompt":"a b"}"#.to_owned()),
        ("/engines/small/tokenize", r#"{"prompt":"a b","model":"small"}"#.to_owned()),
    ] {
        let answer = client.post(path, &body);
        assert_eq!(answer.status, 200, "{path} {body} {}", answer.text());
    }
    let stream = client.post("/engines/small/v1/chat/completions", &chat_body("small", true, 3));
    assert!(stream.is_whole_stream(), "{}", stream.text());
    let missing = client.post("/engines/small/pooling", "{}");
    assert_eq!(
        (missing.status, missing.json()["detail"].as_str()),
        (404, Some("Not Found")),
        "the engine's own"
    );
}

#[test]
fn a_path_and_a_body_that_contradict_each_other_are_refused() {
    let gateway =
        GatewayFixture::new(&["4Gi"]).model(&SimModel::new("small")).model(&SimModel::new("other")).start();
    let client = gateway.client();
    let path = "/engines/small/v1/chat/completions";
    for body in [
        chat_body("other", false, 1),
        chat_body("nobody", false, 1),
        r#"{"model":"small","model":"other"}"#.to_owned(),
        r#"{"model":7}"#.to_owned(),
        "not json".to_owned(),
    ] {
        refusal(&client.post(path, &body), 400, "invalid_request");
    }
    refusal(&client.post("/engines/nobody/v1/chat/completions", "{}"), 404, "model_not_found");
    let near = refusal(&client.post("/engines/Smal%6C-/v1/chat/completions", "{}"), 404, "model_not_found");
    assert_eq!(near["message"], "Model 'Small-' not found: did you mean 'small'?");
    refusal(&client.post("/engines/small/v1/unknown", "{}"), 404, "route_not_found");
    let wrong = client.post("/engines/small/v1/models", "{}");
    refusal(&wrong, 405, "method_not_allowed");
    assert_eq!(wrong.header("allow"), "GET, HEAD");
    // No model woke.
    let models = client.get("/v1/models").json();
    assert!(models["data"].as_array().unwrap().iter().all(|model| model["state"] == "cold"), "{models}");
}

#[test]
fn asking_wakes_a_model_and_looking_does_not() {
    let gateway = small("");
    let client = gateway.client();
    let look = || client.get("/engines/small/v1/models");
    refusal(&look(), 503, "model_not_ready");
    assert_eq!(gateway.client().get("/v1/models/small").json()["state"], "cold");
    let asked = client.post("/engines/small/tokenize", r#"{"prompt":"a"}"#);
    assert_eq!((asked.status, asked.header("x-rouse-cold-start")), (200, "cold"));
    // The gate opens for all requests once the first answer proves the engine.
    gateway.until("it is open", std::time::Duration::from_secs(5), || look().status == 200);
    assert_eq!(gateway.admin().post("/admin/v1/models/small/sleep?level=1", "").status, 202);
    gateway.until_state("small", "asleep");
    let refused = look();
    refusal(&refused, 503, "model_not_ready");
    assert!(refused.text().contains("a GET does not wake a model"), "{}", refused.text());
    assert_eq!(gateway.client().get("/v1/models/small").json()["state"], "asleep");
}

#[test]
fn looking_keeps_no_model_awake() {
    let gateway = GatewayFixture::new(&["2Gi"])
        .model(&SimModel { keys: "idle: {sleepAfter: 600ms, stopAfter: 1h}", ..SimModel::new("small") })
        .start();
    gateway.wake("small");
    let client = gateway.client();
    gateway.until("it sleeps although it is looked at", std::time::Duration::from_secs(20), || {
        client.get("/engines/small/health").status == 503
    });
}
