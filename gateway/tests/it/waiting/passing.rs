//! What passes between a client and an engine, and what the gateway keeps back.

use http_body_util::{BodyExt as _, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};

use crate::support::{
    GatewayFixture, GatewayProcess, SimModel, TestResponse,
    client::{chat_body, request},
};

const CHAT: &str = "/v1/chat/completions";

fn echoing(keys: &str) -> GatewayProcess {
    let gateway = GatewayFixture::new(&["1Gi"]).echo_model("echo", keys).start();
    gateway.wake("echo");
    gateway
}

fn awake(sim: &SimModel<'_>) -> GatewayProcess {
    let gateway = GatewayFixture::new(&["2Gi"]).model(sim).start();
    gateway.wake(sim.name);
    gateway
}

/// The request as the engine got it: its lines and its body.
fn sent(answer: &TestResponse) -> (Vec<String>, String) {
    assert_eq!(answer.status, 200, "{}", answer.text());
    let text = answer.text();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    (head.lines().map(str::to_owned).collect(), body.to_owned())
}

#[test]
fn what_belongs_to_one_connection_or_is_ours_passes_in_neither_direction() {
    let gateway = echoing("");
    let headers = "x-behave: forge\r\nAuthorization: Bearer secret\r\nx-api-key: secret\r\nCookie: a=b\r\n\
                   Proxy-Authorization: Basic x\r\nConnection: x-mine\r\nx-mine: 1\r\nKeep-Alive: timeout=5\r\n\
                   TE: trailers\r\nx-rouse-gate: closed\r\nX-Forwarded-For: 1.2.3.4\r\nForwarded: for=1.2.3.4\r\n\
                   traceparent: 00-1\r\nx-custom: kept\r\nUser-Agent: sdk\r\n";
    let answer =
        gateway.client().post_with(&format!("{CHAT}?a=b%20c"), headers, &chat_body("echo", false, 1));
    let (lines, body) = sent(&answer);
    assert_eq!(lines.first().unwrap(), "POST /v1/chat/completions?a=b%20c HTTP/1.1");
    assert_eq!(body, chat_body("echo", false, 1));
    let names: Vec<&str> = lines.iter().skip(1).filter_map(|line| line.split(':').next()).collect();
    for gone in [
        "authorization",
        "x-api-key",
        "cookie",
        "proxy-authorization",
        "connection",
        "x-mine",
        "keep-alive",
        "te",
        "x-rouse-gate",
        "x-forwarded-for",
        "forwarded",
    ] {
        assert!(!names.contains(&gone), "{gone}: {lines:?}");
    }
    for kept in ["traceparent: 00-1", "x-custom: kept", "user-agent: sdk", "content-type: application/json"] {
        assert!(lines.iter().any(|line| line == kept), "{kept}: {lines:?}");
    }
    assert!(names.contains(&"host") && names.contains(&"x-request-id"));
    for gone in ["x-rouse-cold-start", "x-private", "keep-alive", "proxy-authenticate"] {
        assert_eq!(answer.header(gone), "", "{gone}");
    }
    assert_eq!(answer.header("x-passes"), "yes");
}

#[test]
fn a_target_in_absolute_form_reaches_the_engine_as_a_path() {
    let gateway = echoing("");
    let answer =
        gateway.client().post(&format!("http://example.org{CHAT}?a=b"), &chat_body("echo", false, 1));
    let (lines, _) = sent(&answer);
    assert_eq!(lines.first().unwrap(), "POST /v1/chat/completions?a=b HTTP/1.1");
    assert!(!answer.text().contains("example.org"), "{}", answer.text());
}

#[test]
fn a_client_of_http_1_0_gets_no_chunks_and_a_head_request_no_body() {
    let gateway = awake(&SimModel::new("small"));
    let body = chat_body("small", true, 2);
    for connection in ["", "Connection: keep-alive\r\n"] {
        let old = format!("POST {CHAT} HTTP/1.0\r\n{connection}Content-Length: {}\r\n\r\n{body}", body.len());
        let answer = gateway.client().raw(&old);
        assert_eq!((answer.header("transfer-encoding"), answer.header("connection")), ("", "close"));
        assert!(answer.is_whole_stream(), "{}", answer.text());
    }
    let head = "HEAD /v1/models HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n";
    let mut open = gateway.client().open(head);
    open.until("\r\n\r\n");
    assert!(open.has("HTTP/1.1 200") && open.has("content-length: ") && open.closes());
}

#[test]
fn an_engines_own_key_takes_the_place_of_the_clients() {
    let gateway = echoing("apiKey: engine-key");
    let answer = gateway.client().post_with(CHAT, "api-key: mine\r\n", &chat_body("echo", false, 1));
    let (lines, _) = sent(&answer);
    assert!(lines.iter().any(|line| line == "authorization: Bearer engine-key"), "{lines:?}");
    assert!(!answer.text().contains("mine"), "{}", answer.text());
}

#[test]
fn only_the_name_is_replaced_in_the_body_and_every_other_byte_stays() {
    let gateway = echoing("servedName: Org/\"Model\"");
    let spaced = "{ \"x\" : 1.0e0 ,\"model\"  :\t\"ec\\u0068o\",\"é\":[null, 1e400] }";
    let (lines, body) = sent(&gateway.client().post(CHAT, spaced));
    let wanted = spaced.replace("\"ec\\u0068o\"", r#""Org/\"Model\"""#);
    assert_eq!(body, wanted);
    assert!(lines.iter().any(|line| *line == format!("content-length: {}", wanted.len())), "{lines:?}");
    // Clients cannot use the engine's own name of the model.
    let served = gateway.client().post(CHAT, r#"{"model":"Org/\"Model\""}"#);
    assert_eq!(served.status, 404);
}

#[test]
fn the_model_in_the_answer_is_the_engines_own() {
    let sim = SimModel {
        flags: "--model Org/Real",
        engine: "servedName: Org/Real",
        keys: "aliases: [nick]",
        ..SimModel::new("small")
    };
    let yaml = GatewayFixture::new(&["2Gi"]).model(&sim).yaml();
    assert!(yaml.contains("servedName"), "{yaml}");
    let gateway = awake(&sim);
    for name in ["small", "nick"] {
        let answer = gateway.client().chat(name, false, 1);
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    assert_eq!(gateway.counters("small#0")["malformed"], 0);
}

#[test]
fn a_fit_request_id_is_kept_and_any_other_is_made_anew() {
    let gateway = echoing("");
    let id = |header: &str| {
        let answer = gateway.client().post_with(CHAT, header, &chat_body("echo", false, 1));
        let (lines, _) = sent(&answer);
        let got = answer.header("x-request-id").to_owned();
        assert!(lines.iter().any(|line| *line == format!("x-request-id: {got}")), "{lines:?}");
        got
    };
    // A generated id has the form of a UUID, because some engines accept no other form.
    let is_made = |id: &str| id.split('-').map(str::len).eq([8, 4, 4, 4, 12]);
    assert_eq!(id("x-request-id: a.B_c-9\r\n"), "a.B_c-9");
    for unfit in ["", "x-request-id: a b\r\n", "x-request-id: é\r\n", "x-request-id: \r\n"] {
        assert!(is_made(&id(unfit)), "{unfit:?}");
    }
    assert!(is_made(&id(&format!("x-request-id: {}\r\n", "a".repeat(129)))));
    assert_ne!(id(""), id(""));
}

#[test]
fn early_answers_of_an_engine_are_dropped_and_so_are_trailers() {
    let gateway = awake(&SimModel::new("small"));
    for fault in ["early-hints", "100s", "trailers", "close-delimited"] {
        gateway.fault("small#0", &format!("{{\"{fault}\": true}}"));
        for stream in [true, false] {
            let open = gateway.client().open(request(CHAT, "", &chat_body("small", stream, 3)));
            let answer = open.rest();
            assert_eq!((answer.status, answer.complete), (200, true), "{fault} {stream}: {}", answer.text());
            assert!(!stream || answer.is_whole_stream(), "{fault}: {}", answer.text());
            assert!(stream || answer.json()["choices"].is_array(), "{fault}: {}", answer.text());
            assert_eq!(answer.header("trailer"), "", "{fault}");
            assert_eq!(answer.interim, [0; 0], "{fault}");
            assert!(matches!(&*answer.trailers, "" | "\r\n"), "{fault}: {:?}", answer.trailers);
        }
        gateway.fault("small#0", &format!("{{\"{fault}\": null}}"));
    }
}

#[test]
fn streams_are_asked_for_unencoded_and_whole_answers_as_the_client_likes() {
    let gateway = awake(&SimModel { flags: "--fault gzip", ..SimModel::new("small") });
    let ask = |stream| {
        gateway.client().post_with(CHAT, "Accept-Encoding: gzip\r\n", &chat_body("small", stream, 3))
    };
    let stream = ask(true);
    assert!(stream.is_whole_stream() && stream.header("content-encoding").is_empty(), "{}", stream.text());
    let whole = ask(false);
    assert_eq!(whole.header("content-encoding"), "gzip");
    assert!(whole.complete && whole.body.starts_with(&[0x1f, 0x8b]));
}

#[test]
fn an_engine_that_answers_before_it_has_read_is_heard() {
    let gateway = awake(&SimModel { flags: "", ..SimModel::new("small") });
    gateway.fault("small#0", r#"{"early-response": true}"#);
    let body = format!("{{\"model\":\"small\",\"messages\":[],\"x\":\"{}\"}}", "x".repeat(8 << 20));
    for _ in 0..3 {
        let answer = gateway.client().post(CHAT, &body);
        assert_eq!((answer.status, answer.complete), (400, true), "{}", answer.text());
    }
    gateway.fault("small#0", r#"{"early-response": null}"#);
    assert!(gateway.client().chat("small", true, 1).is_whole_stream());
}

#[test]
fn requests_that_follow_each_other_on_one_connection_are_answered_in_order() {
    let gateway = awake(&SimModel::new("small"));
    let kept = |id: &str, tokens| {
        request(CHAT, &format!("x-request-id: {id}\r\n"), &chat_body("small", false, tokens))
            .replace("Connection: close\r\n", "")
    };
    let all = [
        kept("one", 30),
        kept("two", 1),
        "GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n".to_owned(),
        kept("four", 2),
    ];
    let mut open = gateway.client().open(all.concat());
    let answers: Vec<TestResponse> = all.iter().map(|_| open.answer()).collect();
    let ids: Vec<&str> = answers.iter().map(|answer| answer.header("x-request-id")).collect();
    assert_eq!((ids.first(), ids.get(1), ids.get(3)), (Some(&"one"), Some(&"two"), Some(&"four")));
    assert!(answers.iter().all(|answer| answer.status == 200));
    // A refusal after the gateway has read the body leaves the connection usable.
    open.write(kept("five", 1).replace("\"small\"", "\"smell\""));
    assert_eq!(open.answer().status, 404);
    open.write(kept("six", 1));
    assert_eq!(open.answer().status, 200);
}

#[test]
fn http2_without_an_upgrade_carries_streams_side_by_side() {
    let gateway =
        GatewayFixture::new(&["2Gi"]).settings("limits: {body: 1Mi}").model(&SimModel::new("small")).start();
    gateway.wake("small");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let stream = tokio::net::TcpStream::connect(gateway.api).await.unwrap();
        let (client, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
        let connection = tokio::spawn(connection);
        let ask = |model: &'static str, stream| {
            let mut client = client.clone();
            let body = Full::new(bytes::Bytes::from(chat_body(model, stream, 20)));
            let request = http::Request::post(format!("http://localhost{CHAT}"))
                .header("content-type", "application/json")
                .body(body)
                .unwrap();
            async move {
                let response = client.send_request(request).await.unwrap();
                let status = response.status();
                assert!(response.headers().contains_key("x-request-id"));
                let body = response.into_body().collect().await.unwrap().to_bytes();
                (status.as_u16(), String::from_utf8_lossy(&body).into_owned())
            }
        };
        let (first, second, absent) =
            tokio::join!(ask("small", true), ask("small", false), ask("absent", true));
        assert!(first.0 == 200 && first.1.ends_with("data: [DONE]\n\n"), "{first:?}");
        assert!(second.0 == 200 && second.1.contains("\"choices\""), "{second:?}");
        assert!(absent.0 == 404 && absent.1.contains("model_not_found"), "{absent:?}");
        // A request that is refused for its size ends alone: the connection stays open.
        let large = http::Request::post(format!("http://localhost{CHAT}"))
            .body(Full::new(bytes::Bytes::from(vec![b'x'; 2 << 20])))
            .unwrap();
        let response = client.clone().send_request(large).await.unwrap();
        assert_eq!(response.status(), 413);
        assert_eq!(ask("small", true).await.0, 200);
        connection.abort();
    });
    assert_eq!(gateway.leases(), 0);
}
