//! What the gateway reports about single requests, to a trace collector and in the access log.

use std::time::Duration;

use nix::sys::signal::Signal;
use opentelemetry_proto::tonic::trace::v1::{Span, span::SpanKind, status::StatusCode};
use serde_json::Value;

use crate::support::{
    GatewayFixture, GatewayProcess, SimModel,
    client::{chat_body, request},
    read,
};

mod collector;
mod trouble;

use collector::{Collector, hex, names, text};

const CHAT: &str = "/v1/chat/completions";
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";

/// A gateway with one model that sleeps and one that takes minutes to start.
fn traced(collector: &Collector, more: &str) -> GatewayProcess {
    GatewayFixture::new(&["4Gi"])
        .settings(&format!("telemetry: {{otlp: \"{}\"{more}}}", collector.url()))
        .model(&SimModel { flags: "--itl 20ms", ..SimModel::new("m") })
        .model(&SimModel { flags: "--start-time 5m", ..SimModel::new("parks") })
        .start()
}

fn ask(gateway: &GatewayProcess, id: &str, headers: &str, model: &str, stream: bool) -> u16 {
    let headers = format!("x-request-id: {id}\r\n{headers}");
    gateway.client().post_with(CHAT, &headers, &chat_body(model, stream, 3)).status
}

/// Asserts that the spans follow one another within their parent.
fn is_in_order(own: &Span, below: &[Span]) {
    let mut at = own.start_time_unix_nano;
    for span in below {
        assert!(at <= span.start_time_unix_nano, "{own:?} {below:?}");
        assert!(span.start_time_unix_nano <= span.end_time_unix_nano, "{below:?}");
        assert_eq!(span.trace_id, own.trace_id);
        at = span.end_time_unix_nano;
    }
    assert!(at <= own.end_time_unix_nano, "{own:?} {below:?}");
}

#[test]
fn a_request_is_a_span_with_one_below_it_for_each_thing_it_waited_for() {
    let collector = Collector::start();
    let gateway = traced(&collector, ", headers: {x-tenant: blue}");
    assert_eq!(ask(&gateway, "cold", "user-agent: test/1\r\n", "m", true), 200);
    assert_eq!(ask(&gateway, "hot", "", "m", false), 200);

    let (own, below) = collector.tree(&gateway, "cold");
    assert_eq!(own.name, "POST /v1/chat/completions");
    assert_eq!(own.kind, SpanKind::Server as i32);
    assert_eq!((own.trace_id.len(), own.parent_span_id.len()), (16, 0));
    assert_eq!(names(&below), ["parked", "connect", "wait for first byte", "stream"]);
    is_in_order(&own, &below);
    // The engine takes 100 ms to start.
    let parked = below.first().unwrap();
    assert!(parked.end_time_unix_nano - parked.start_time_unix_nano >= 100_000_000);
    for (name, value) in [
        ("http.request.method", "POST"),
        ("url.path", CHAT),
        ("http.route", CHAT),
        ("http.response.status_code", "200"),
        ("gen_ai.request.model", "m"),
        ("gen_ai.operation.name", "chat"),
        ("rouse.cold_start", "cold"),
        ("rouse.engine", "m#0"),
        ("client.address", "127.0.0.1"),
        ("user_agent.original", "test/1"),
        ("error.type", ""),
    ] {
        assert_eq!(text(&own, name), value, "{name}");
    }

    let (own, below) = collector.tree(&gateway, "hot");
    assert_eq!(names(&below), ["connect", "wait for first byte", "stream"]);
    is_in_order(&own, &below);
    assert_eq!(text(&own, "rouse.cold_start"), "");
    assert_eq!(text(&own, "gen_ai.usage.output_tokens"), "3");
    assert_eq!(text(below.first().unwrap(), "rouse.engine"), "m#0");

    let resource = collector.resource();
    assert_eq!(resource.get("service.name").map(String::as_str), Some("rouse-gateway"));
    let head = collector.head();
    assert!(
        head.starts_with("post /v1/traces http/1.1\r\n") && head.contains("x-tenant: blue\r\n"),
        "{head}"
    );
    assert!(!collector.asked("/readyz"), "probes are not traced");
}

#[test]
fn a_refusal_and_a_client_that_left_say_so_in_their_spans() {
    let collector = Collector::start();
    let gateway = traced(&collector, "");
    assert_eq!(ask(&gateway, "nobody", "", "nobody", false), 404);
    let (own, below) = collector.tree(&gateway, "nobody");
    assert_eq!((text(&own, "error.type").as_str(), below.len()), ("model_not_found", 0));
    // A 404 is not a server error.
    assert_eq!(own.status.unwrap_or_default().code, StatusCode::Unset as i32);

    assert_eq!(ask(&gateway, "impatient", "x-request-timeout: 0.2\r\n", "parks", false), 503);
    let (own, below) = collector.tree(&gateway, "impatient");
    assert_eq!((names(&below), text(&own, "error.type").as_str()), (vec!["parked"], "model_not_ready"));
    assert_eq!(own.status.unwrap().code, StatusCode::Error as i32);

    let text_of = request(CHAT, "x-request-id: left\r\n", &chat_body("parks", false, 1));
    let open = gateway.client().open(text_of);
    parked(&gateway, "parks");
    drop(open);
    let (own, below) = collector.tree(&gateway, "left");
    assert_eq!((names(&below), text(&own, "error.type").as_str()), (vec!["parked"], "client_left"));
    assert_eq!(text(&own, "http.response.status_code"), "499");
    let event = own.events.iter().find(|event| event.name == "client left").unwrap();
    assert_eq!(format!("{:?}", event.attributes).matches("parked").count(), 1);
}

fn parked(gateway: &GatewayProcess, model: &str) {
    gateway.until("parked", Duration::from_secs(5), || {
        let fleet = gateway.fleet();
        fleet["models"].as_array().unwrap().iter().any(|m| m["name"] == model && m["waiting"] == 1)
    });
}

/// Returns the header of this name that the engine got.
fn passed(gateway: &GatewayProcess, headers: &str, name: &str) -> Option<String> {
    let answer = gateway.client().post_with(CHAT, headers, &chat_body("echo", false, 1));
    assert_eq!(answer.status, 200, "{}", answer.text());
    let prefix = format!("{name}: ");
    answer.text().lines().find_map(|line| line.strip_prefix(&prefix).map(str::to_owned))
}

#[test]
fn the_engine_is_told_of_the_gateways_span_and_the_clients_is_its_parent() {
    let collector = Collector::start();
    let settings = format!("telemetry: {{otlp: \"{}/custom/path\", sample: 0}}", collector.url());
    let gateway = GatewayFixture::new(&["1Gi"]).settings(&settings).echo_model("echo", "").start();
    gateway.wake("echo");

    let client = format!("traceparent: 00-{TRACE}-{PARENT}-01\r\ntracestate: a=1\r\nx-request-id: child\r\n");
    let told = passed(&gateway, &client, "traceparent").unwrap();
    let (own, _) = collector.tree(&gateway, "child");
    assert_eq!((hex(&own.trace_id).as_str(), hex(&own.parent_span_id).as_str()), (TRACE, PARENT));
    assert_eq!(told, format!("00-{TRACE}-{}-01", hex(&own.span_id)));
    assert!(collector.head().starts_with("post /custom/path "));
    assert_eq!(passed(&gateway, &client, "tracestate").as_deref(), Some("a=1"));

    // A request that its caller did not sample, or without a sampling decision, is not recorded, and the gateway passes
    // that decision on.
    let unsampled = client.replace("-01\r\n", "-00\r\n").replace("child", "unsampled");
    let told = passed(&gateway, &unsampled, "traceparent").unwrap();
    assert!(told.starts_with(&format!("00-{TRACE}-")) && told.ends_with("-00"), "{told}");
    let broken = "traceparent: 00-xyz\r\ntracestate: a=1\r\nx-request-id: broken\r\n";
    let told = passed(&gateway, broken, "traceparent").unwrap();
    assert!(told.len() == 55 && told.ends_with("-00") && !told.contains(TRACE), "{told}");
    assert_eq!(passed(&gateway, broken, "tracestate"), None);
    assert_eq!(passed(&gateway, "", "traceparent").map(|told| told.len()), Some(55));
    // A later span has arrived, so the earlier ones would have, too.
    passed(&gateway, &client.replace("child", "later"), "traceparent");
    collector.tree(&gateway, "later");
    assert!(!collector.has("unsampled") && !collector.has("broken"));
}

#[test]
fn without_traces_the_clients_own_headers_pass_as_they_are() {
    let gateway = GatewayFixture::new(&["1Gi"]).echo_model("echo", "").start();
    gateway.wake("echo");
    for sent in [format!("00-{TRACE}-{PARENT}-01"), "malformed".to_owned()] {
        let headers = format!("traceparent: {sent}\r\ntracestate: a=1\r\n");
        assert_eq!(passed(&gateway, &headers, "traceparent"), Some(sent));
        assert_eq!(passed(&gateway, &headers, "tracestate").as_deref(), Some("a=1"));
    }
    assert_eq!(passed(&gateway, "", "traceparent"), None);
}

/// How many records of this signal were dropped so far for this reason.
fn dropped(gateway: &GatewayProcess, signal: &str, reason: &str) -> u64 {
    let text = gateway.admin().get("/metrics").text();
    let name = format!("rouse_telemetry_dropped_total{{reason=\"{reason}\",signal=\"{signal}\"}} ");
    text.lines().find_map(|line| line.strip_prefix(&name)?.parse().ok()).unwrap()
}

#[test]
fn a_collector_that_takes_nothing_costs_only_its_own_spans_which_are_counted() {
    let collector = Collector::start();
    collector.refuse(true);
    let gateway = traced(&collector, "");
    // Without requests to the inference API, which have spans that would be dropped before those of the one below.
    gateway.wake_by_admin("m");
    assert_eq!(ask(&gateway, "lost", "", "m", false), 200);
    gateway.until("dropped", Duration::from_secs(15), || dropped(&gateway, "traces", "export_failed") > 0);
    gateway.until_logged("cannot export traces");
    let log = gateway.log();
    assert_eq!(log.matches("cannot export traces").count(), 1, "{log}");
    assert!(log.contains("the collector returned status 503"), "{log}");
    collector.refuse(false);
    assert_eq!(ask(&gateway, "kept", "", "m", false), 200);
    collector.tree(&gateway, "kept");
    assert!(!collector.has("lost"));
    gateway.until("said", Duration::from_secs(5), || gateway.log().contains("trace export recovered"));
    assert_eq!(dropped(&gateway, "traces", "queue_full"), 0);
}

#[test]
fn what_is_queued_goes_out_before_the_gateway_ends() {
    let collector = Collector::start();
    let gateway = traced(&collector, "");
    gateway.wake("m");
    assert_eq!(ask(&gateway, "last", "", "m", false), 200);
    assert_eq!(gateway.terminate(), Some(0));
    assert!(collector.has("last"));
}

/// Waits for the log line of the request with this id.
fn line(gateway: &GatewayProcess, id: &str) -> Value {
    let find = || {
        let log = read(&gateway.dir.join("access.log"));
        let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines.into_iter().find(|line| line["id"] == id)
    };
    gateway.until(&format!("a line of {id}"), Duration::from_secs(5), || find().is_some());
    find().unwrap()
}

fn logging(more: &str) -> GatewayProcess {
    let fixture = GatewayFixture::new(&["4Gi"]);
    let log = fixture.dir().join("access.log").display().to_string();
    fixture
        .settings(&format!("logs: {{access: {log:?}}}\n{more}"))
        // Three tokens take ten times as long as the smallest bound of a test: the gateway may read the first token
        // late, and the engine makes up for its own delays.
        .model(&SimModel { flags: "--itl 200ms", ..SimModel::new("m") })
        .model(&SimModel { flags: "--start-time 5m", ..SimModel::new("parks") })
        .start()
}

#[test]
fn every_request_has_its_line_in_the_access_log() {
    let gateway = logging("");
    let headers = format!(
        "x-request-id: cold\r\ntraceparent: 00-{TRACE}-{PARENT}-01\r\nuser-agent: a\"b\\c\x7f{}\r\n",
        "x".repeat(400)
    );
    let path = format!("{CHAT}?api-version=1&api-key=s3cret");
    let body = chat_body("m", true, 3)
        .replace("\"stream\":true", "\"stream\":true,\"stream_options\":{\"include_usage\":true}");
    let answer = gateway.client().post_with(&path, &headers.replace('\x7f', ""), &body);
    assert_eq!(answer.status, 200);
    let cold = line(&gateway, "cold");
    for (name, value) in [
        ("trace", TRACE),
        ("client", "127.0.0.1"),
        ("method", "POST"),
        ("path", "/v1/chat/completions?api-version=1&api-key=***"),
        ("route", "chat"),
        ("model", "m"),
        ("engine", "m#0"),
        ("cold_start", "cold"),
    ] {
        assert_eq!(cold[name], value, "{name}");
    }
    assert!(cold["ts"].as_str().unwrap().ends_with('Z'));
    assert_eq!(
        (&cold["status"], &cold["code"], &cold["disconnect_phase"]),
        (&200.into(), &Value::Null, &Value::Null)
    );
    assert_eq!((cold["tokens_out"].as_u64(), cold["retries"].as_u64()), (Some(3), Some(0)));
    assert_eq!(cold["bytes_in"].as_u64(), Some(body.len() as u64));
    assert_eq!(cold["bytes_out"].as_u64(), Some(answer.body.len() as u64));
    let at = |name: &str| cold[name].as_f64().unwrap();
    // The wait is a difference of two whole milliseconds, so it may be up to one millisecond too long.
    assert!(at("waited_ms") >= 100.0 && at("first_byte_ms") > at("waited_ms") - 1.0, "{cold}");
    assert!(at("duration_ms") >= at("first_byte_ms") + 40.0, "{cold}");
    let agent = cold["user_agent"].as_str().unwrap();
    assert!(agent.starts_with("a\"b\\cxxx") && agent.len() <= 260 && agent.ends_with('…'), "{agent}");

    ask(&gateway, "nobody", "", "nobody", false);
    let refused = line(&gateway, "nobody");
    assert_eq!((&refused["status"], &refused["code"]), (&404.into(), &"model_not_found".into()));
    assert_eq!((&refused["model"], &refused["engine"]), (&Value::Null, &Value::Null));
}

#[test]
fn a_line_names_the_key_and_never_shows_it() {
    // The hash of `sk-a`.
    let gateway = logging(
        "keys: [{name: team-a, sha256: a4a6d307ad00fa67176e1099fdbc4f4a09bb527a7f24718a5030f2f173d11f7f}]",
    );
    assert_eq!(ask(&gateway, "known", "Authorization: Bearer sk-a\r\n", "m", false), 200);
    let known = line(&gateway, "known");
    assert_eq!((&known["key"], known["tokens_out"].as_u64()), (&"team-a".into(), Some(3)));
    assert_eq!(ask(&gateway, "unknown", "Authorization: Bearer sk-b\r\n", "m", false), 401);
    let unknown = line(&gateway, "unknown");
    assert_eq!((&unknown["key"], &unknown["code"]), (&Value::Null, &"invalid_api_key".into()));
    assert!(!read(&gateway.dir.join("access.log")).contains("sk-"));
}

#[test]
fn a_client_that_left_is_499_with_the_phase_it_left_in() {
    let gateway = logging("");
    gateway.wake("m");
    let client = gateway.client();
    let ask = |id: &str, model: &str, stream: bool, tokens: u32| {
        let headers = format!("x-request-id: {id}\r\n");
        request(CHAT, &headers, &chat_body(model, stream, tokens))
    };
    let whole = ask("sending", "m", true, 1);
    drop(client.open(whole.get(..whole.len() - 2).unwrap()));

    let open = client.open(ask("parked", "parks", false, 1));
    parked(&gateway, "parks");
    drop(open);

    // Not a stream: its head comes with the last token.
    let open = client.open(ask("headers", "m", false, 10_000));
    gateway.until("it runs", Duration::from_secs(5), || gateway.counters("m#0")["running"] == 1);
    drop(open);

    let mut open = client.open(ask("streaming", "m", true, 10_000));
    open.until("data: ");
    drop(open);

    for (id, phase) in
        [("sending", "connecting"), ("parked", "parked"), ("headers", "headers"), ("streaming", "streaming")]
    {
        let line = line(&gateway, id);
        assert_eq!((&line["status"], &line["disconnect_phase"]), (&499.into(), &phase.into()), "{line}");
        let metric = format!("rouse_client_disconnects_total{{phase=\"{phase}\"}} 1");
        assert!(gateway.admin().get("/metrics").text().contains(&metric), "{metric}");
    }
}

#[test]
fn a_log_that_was_moved_away_is_opened_anew_on_a_signal_that_reads_no_configuration() {
    let gateway = logging("");
    let (log, old) = (gateway.dir.join("access.log"), gateway.dir.join("access.log.1"));
    ask(&gateway, "before", "", "nobody", false);
    line(&gateway, "before");
    // A change behind a link is not an event, so only a gateway that reloads its configuration finds the mistake.
    let (file, target) = (gateway.dir.join("rouse.yaml"), gateway.dir.join("linked.yaml"));
    std::fs::rename(&file, &target).unwrap();
    std::os::unix::fs::symlink(&target, &file).unwrap();
    std::fs::write(&target, "unknown: 1\n").unwrap();
    std::fs::rename(&log, &old).unwrap();
    gateway.signal(Signal::SIGUSR1);
    gateway.until("opened anew", Duration::from_secs(5), || log.exists());
    ask(&gateway, "after", "", "nobody", false);
    line(&gateway, "after");
    assert!(!read(&log).contains("before") && !read(&old).contains("after"));
    assert!(!gateway.log().contains("configuration reload failed"), "{}", gateway.log());
}
