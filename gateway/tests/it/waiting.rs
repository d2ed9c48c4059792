//! What a client sees while its request waits and when its turn comes, and what the gateway forwards to the engine and
//! back.

use std::time::Duration;

use crate::{
    refusals::refusal,
    support::{
        GatewayFixture, GatewayProcess, SimModel, TestResponse,
        client::{chat_body, request},
    },
};

mod passing;

const CHAT: &str = "/v1/chat/completions";
const QUICK: &str = "stream: {grace: 50ms, heartbeat: 50ms}";

fn one(settings: &str, sim: &SimModel<'_>) -> GatewayProcess {
    GatewayFixture::new(&["2Gi"]).settings(settings).model(sim).start()
}

/// Counts the heartbeats of the stream. Each is a line of one space without an id, so no SDK makes an event of it.
fn beats(answer: &TestResponse) -> usize {
    let text = answer.text();
    assert!(!text.contains(" \n\n") && !text.lines().any(|line| line.starts_with("id:")), "{text}");
    text.lines().filter(|line| *line == " ").count()
}

#[test]
fn a_parked_stream_gets_its_head_and_heartbeats_and_then_its_tokens() {
    // The start lasts until the test has seen the heartbeats.
    let gateway = one(QUICK, &SimModel { flags: "--fault hang", ..SimModel::new("slow") });
    let mut open =
        gateway.client().open(request(CHAT, "x-request-id: mine\r\n", &chat_body("slow", true, 3)));
    open.until("\r\n\r\n");
    assert!(!open.has("data: "));
    gateway.until_state("slow", "launching");
    while open.text().lines().filter(|line| *line == " ").count() < 3 {
        let seen = open.received.len();
        open.until_more_than(seen);
    }
    gateway.fault("slow#0", r#"{"hang": null}"#);
    let answer = open.rest();
    assert!(answer.is_whole_stream(), "{}", answer.text());
    assert!(answer.header("content-type").starts_with("text/event-stream"));
    assert_eq!((answer.header("x-accel-buffering"), answer.header("x-request-id")), ("no", "mine"));
    assert!(answer.header("cache-control").contains("no-transform"));
    assert!(beats(&answer) >= 3, "{}", answer.text());
    // The rest equals the answer of an awake engine, byte for byte.
    let awake = gateway.client().chat("slow", true, 3);
    let texts = |answer: &TestResponse| -> Vec<_> {
        let events = answer.events();
        let parsed = events.iter().filter_map(|e| serde_json::from_str::<serde_json::Value>(e).ok());
        parsed.map(|event| event["choices"].clone()).collect()
    };
    assert_eq!(texts(&answer), texts(&awake));
    assert_eq!(beats(&awake), 0);
}

#[test]
fn a_failure_after_the_grace_is_one_event_without_done_and_an_unclean_end() {
    let flags = "--fault slow-start=400ms --fault exit-at-start=3";
    let gateway = one(QUICK, &SimModel { flags, ..SimModel::new("dies") });
    for path in [CHAT, "/v1/completions"] {
        let answer =
            gateway.client().post(path, r#"{"model":"dies","stream":true,"prompt":"x","messages":[]}"#);
        // The second request arrives during the backoff after the failures, and the gateway refuses it before any
        // grace.
        if answer.status != 200 {
            refusal(&answer, 503, "model_not_ready");
            continue;
        }
        let events = answer.events();
        assert_eq!(events.len(), 1, "{events:?}");
        let event: serde_json::Value = serde_json::from_str(events.first().unwrap()).unwrap();
        assert_eq!(event["error"]["code"], "model_not_ready");
        assert_eq!(event["error"]["details"]["cause"], "exited:3", "{event}");
        assert!(beats(&answer) >= 1 && !answer.complete && !answer.text().contains("[DONE]"));
    }
    assert_eq!(gateway.leases(), 0);
}

#[test]
fn an_engines_own_refusal_after_the_grace_is_an_event_and_before_it_an_answer() {
    let gateway =
        one(QUICK, &SimModel { flags: "--start-time 500ms --fault status=418", ..SimModel::new("teapot") });
    let late = gateway.client().chat("teapot", true, 1);
    assert_eq!(late.status, 200);
    let last = late.events().pop().unwrap();
    assert!(last.contains("\"error\"") && !late.complete, "{}", late.text());
    let early = gateway.client().chat("teapot", true, 1);
    assert_eq!((early.status, early.complete), (418, true), "{}", early.text());
}

#[test]
fn a_clients_own_deadline_ends_its_wait_before_the_gateways_and_never_lengthens_it() {
    // First the gateway's own bound is so far away that a busy machine cannot hide the client's bound. Then the
    // gateway's bound is near.
    let own = {
        let gateway =
            one("queue: {maxWait: 1m}", &SimModel { flags: "--start-time 1h", ..SimModel::new("never") });
        waited(&gateway, "x-request-timeout: 0.1\r\n")
    };
    assert!((100..60_000).contains(&own), "{own}");
    let gateway =
        one("queue: {maxWait: 400ms}", &SimModel { flags: "--start-time 1h", ..SimModel::new("never") });
    assert!((400..3_600_000).contains(&waited(&gateway, "x-request-timeout: 3600\r\n")));
    assert!(waited(&gateway, "") >= 400);
}

/// Milliseconds that a request for the model that never starts has waited at its refusal.
fn waited(gateway: &GatewayProcess, headers: &str) -> u64 {
    let answer = gateway.client().post_with(CHAT, headers, &chat_body("never", false, 1));
    let error = refusal(&answer, 503, "model_not_ready");
    let text = error["details"]["waited"].as_str().unwrap().to_owned();
    text.parse::<rouse::units::Millis>().unwrap().0
}

#[test]
fn responses_say_what_a_request_waited_for_if_it_waited() {
    let gateway = GatewayFixture::new(&["1200Mi"])
        .settings("turns: {residency: 50ms, maxTurn: 1s}")
        .model(&SimModel::new("first"))
        .model(&SimModel::new("second"))
        .start();
    let start = |model, stream| {
        let answer = gateway.client().chat(model, stream, 1);
        assert_eq!(answer.status, 200, "{}", answer.text());
        (answer.header("x-rouse-cold-start").to_owned(), answer.header("server-timing").to_owned())
    };
    let (kind, timing) = start("first", false);
    assert_eq!(kind, "cold");
    let part = |name: &str| -> u64 {
        let part = timing.split(", ").find_map(|part| part.strip_prefix(&format!("{name};dur="))).unwrap();
        part.parse().unwrap()
    };
    assert!(part("queue") >= part("wake") && part("wake") >= 100 && part("first-byte") < 60_000, "{timing}");
    // The gate opens for all requests once the first answer proves the engine, and a GET does not wait for that.
    gateway.until("it is open", Duration::from_secs(5), || {
        gateway.client().get("/engines/first/health").status == 200
    });
    assert_eq!(start("first", false), (String::new(), String::new()));
    assert_eq!(start("first", true), (String::new(), String::new()));
    assert_eq!(start("second", true).0, "cold");
    assert_eq!(start("first", true).0, "hot");
}

#[test]
fn models_are_listed_with_their_states_under_every_name() {
    let gateway = GatewayFixture::new(&["4Gi", "4Gi"])
        .model(&SimModel { keys: "aliases: [default, org/nick]", ..SimModel::new("org/awake") })
        .model(&SimModel::new("asleep"))
        .model(&SimModel::new("cold"))
        .model(&SimModel { flags: "--start-time 1h", ..SimModel::new("launching") })
        .model(&SimModel { flags: "--fault exit-at-start=1", ..SimModel::new("failed") })
        .start();
    gateway.wake("org/awake");
    gateway.wake("asleep");
    assert_eq!(gateway.admin().post("/admin/v1/models/asleep/sleep?level=1", "").status, 202);
    assert_eq!(gateway.admin().post("/admin/v1/models/launching/wake", "").status, 202);
    gateway.until_state("asleep", "asleep");
    gateway.until_state("launching", "launching");
    // This request comes last, because the list shows the model as failed only until its next attempt is due.
    refusal(&gateway.client().chat("failed", false, 1), 503, "model_not_ready");
    let list = gateway.client().get("/v1/models").json();
    assert_eq!(list["object"], "list");
    let states: Vec<_> = list["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|model| {
            assert_eq!((&model["object"], &model["owned_by"]), (&"model".into(), &"rouse".into()));
            assert!(model["created"].as_u64().unwrap() > 1_600_000_000);
            (model["id"].as_str().unwrap(), model["state"].as_str().unwrap())
        })
        .collect();
    for wanted in [
        ("org/awake", "awake"),
        ("default", "awake"),
        ("org/nick", "awake"),
        ("asleep", "asleep"),
        ("cold", "cold"),
        ("launching", "launching"),
        ("failed", "failed"),
    ] {
        assert!(states.contains(&wanted), "{wanted:?} {states:?}");
    }
    assert_eq!(states.len(), 7);
    for path in ["org/awake", "org%2Fawake", "org%2fnick", "default"] {
        let model = gateway.client().get(&format!("/v1/models/{path}")).json();
        assert_eq!(
            (&model["id"], &model["state"]),
            (&path.replace("%2F", "/").replace("%2f", "/").into(), &"awake".into())
        );
    }
    for path in ["org", "org%2", "awake", "org//awake"] {
        assert_eq!(gateway.client().get(&format!("/v1/models/{path}")).status, 404, "{path}");
    }
    let chat = gateway.client().chat("org/nick", false, 1);
    assert_eq!(chat.status, 200, "{}", chat.text());
}

#[test]
fn a_client_that_leaves_while_it_waits_is_forgotten() {
    let gateway = one("", &SimModel { flags: "--start-time 1h", ..SimModel::new("never") });
    let waiting = |n: u64| {
        gateway.until("the queue has its length", Duration::from_secs(5), || {
            gateway.fleet()["models"].as_array().unwrap().iter().any(|model| model["waiting"] == n)
        });
    };
    let open =
        [true, false].map(|stream| gateway.client().open(request(CHAT, "", &chat_body("never", stream, 1))));
    waiting(2);
    drop(open);
    waiting(0);
}

#[test]
fn a_client_that_takes_nothing_is_cut_and_pins_no_engine() {
    let flags = "--itl 0 --ttft 0";
    let gateway = one("limits: {clientStall: 400ms}", &SimModel { flags, ..SimModel::new("fast") });
    gateway.wake("fast");
    let asked = || gateway.counters("fast#0")["total"].as_u64().unwrap();
    // The count includes the gateway's own request that proved the engine.
    let before = asked();
    // More than all buffers between the engine and this client hold together.
    let open = gateway.client().open(request(CHAT, "", &chat_body("fast", true, 10_000_000)));
    gateway.until("it streams", Duration::from_secs(5), || asked() > before);
    gateway.until("it is cut", Duration::from_secs(10), || gateway.leases() == 0);
    gateway.until("the engine has noticed", Duration::from_secs(5), || {
        gateway.counters("fast#0")["running"] == 0
    });
    drop(open);
}

#[test]
fn a_connection_that_says_nothing_is_closed() {
    let gateway = one("limits: {connectionIdle: 300ms}", &SimModel::new("small"));
    let mut open = gateway.client().open("GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!(open.answer().status, 200);
    assert!(open.closes());
}

#[test]
fn one_address_may_hold_only_so_many_connections() {
    let gateway = one("limits: {connectionsPerAddress: 3}", &SimModel::new("small"));
    let served = || {
        let mut open = gateway.client().open("GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n");
        (open.is_answered() && !open.has("HTTP/1.1 429 ")).then_some(open)
    };
    let mut open = Vec::new();
    // The connections of the readiness checks may not all have closed yet.
    gateway.until("three are served", Duration::from_secs(5), || {
        open.extend(served());
        open.len() == 3
    });
    assert!(served().is_none());
    let refused = gateway.client().get("/healthz");
    assert_eq!((refused.status, refused.header("retry-after")), (429, "1"));
    open.pop();
    gateway.until("a place is free again", Duration::from_secs(5), || served().is_some());
}
