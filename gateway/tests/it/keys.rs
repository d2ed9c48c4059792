//! Which keys the gateway admits, for which models, and how often; over real engines.

use std::{
    io::Write as _,
    process::{Command, Stdio},
    time::Duration,
};

use http_body_util::{BodyExt as _, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::json;

use crate::{
    refusals::refusal,
    support::{
        GatewayFixture, GatewayProcess, SimModel, TestClient, TestResponse,
        client::{chat_body, request},
    },
};

mod limits;

pub(crate) const CHAT: &str = "/v1/chat/completions";

/// The configuration's line for a key whose secret is its name; `more` has further entries.
pub(crate) fn key(name: &str, more: &str) -> String {
    format!("\n  - {{name: {name}, sha256: \"{}\"{more}}}", hash(name))
}

fn hash(secret: &str) -> String {
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, secret.as_bytes());
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn bearer(secret: &str) -> String {
    format!("Authorization: Bearer {secret}\r\n")
}

pub(crate) fn get(client: TestClient, path: &str, headers: &str) -> TestResponse {
    client.raw(&format!("GET {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n{headers}\r\n"))
}

pub(crate) fn awake(gateway: &GatewayProcess, model: &str) {
    let answer = gateway.admin().post(&format!("/admin/v1/models/{model}/wake"), "");
    assert_eq!(answer.status, 202, "{}", answer.text());
    gateway.until(&format!("{model} is awake"), Duration::from_secs(10), || {
        gateway.engine(&format!("{model}#0"))["state"] == "Awake"
    });
}

/// A gateway with one awake model, `small`, and these keys.
pub(crate) fn small(keys: &str) -> GatewayProcess {
    let gateway = GatewayFixture::new(&["2Gi"])
        .settings(&format!("keys:{keys}"))
        .model(&SimModel::new("small"))
        .start();
    awake(&gateway, "small");
    gateway
}

#[test]
fn a_request_needs_a_key_in_any_of_the_three_headers_and_health_needs_none() {
    let gateway = small(&key("secret-a", ""));
    let client = gateway.client();
    let chat = |headers: &str| client.post_with(CHAT, headers, &chat_body("small", false, 1));
    for headers in ["Authorization: bearer secret-a\r\n", "x-api-key: secret-a\r\n", "api-key: secret-a\r\n"]
    {
        assert_eq!(chat(headers).status, 200, "{headers}");
    }
    let both = format!("{}x-api-key: secret-a\r\n", bearer("secret-a"));
    assert_eq!(chat(&both).status, 200);
    refusal(&chat(&format!("{}x-api-key: other\r\n", bearer("secret-a"))), 400, "invalid_request");
    for (headers, says) in [
        ("", "no API key: send one as 'Authorization: Bearer KEY'"),
        ("x-api-key: \r\n", "invalid API key in the header 'x-api-key': this gateway has no such key"),
        ("Authorization: Basic secret-a\r\n", "in the header 'Authorization': this gateway has no such key"),
        ("api-key: secret-b\r\n", "in the header 'api-key': this gateway has no such key"),
    ] {
        for answer in
            [chat(headers), get(client, "/v1/models", headers), get(client, "/v1/models/small", headers)]
        {
            let error = refusal(&answer, 401, "invalid_api_key");
            assert!(error["message"].as_str().unwrap().contains(says), "{headers}: {error}");
            assert_eq!(answer.header("www-authenticate"), "Bearer", "{headers}");
        }
    }
    assert_eq!(get(client, "/healthz", "").status, 200);
    assert_eq!(get(client, "/readyz", "x-api-key: wrong\r\n").status, 200);
    assert_eq!(get(client, "/v1/models", &bearer("secret-a")).status, 200);
    assert!(!gateway.log().contains("secret-b"), "{}", gateway.log());
    let metrics = gateway.admin().get("/metrics").text();
    assert!(
        metrics.contains("rouse_key_requests_total{key=\"secret-a\",outcome=\"admitted\"} 4"),
        "{metrics}"
    );
}

#[test]
fn a_wrong_key_is_refused_before_the_body_is_asked_for() {
    let gateway = small(&key("secret-a", ""));
    let head = "Expect: 100-continue\r\nContent-Length: 900\r\nx-api-key: wrong\r\n";
    let mut open = gateway.client().open(format!("POST {CHAT} HTTP/1.1\r\nHost: h\r\n{head}\r\n"));
    let answer = open.answer();
    refusal(&answer, 401, "invalid_api_key");
    assert_eq!(answer.header("connection"), "close");
}

#[test]
fn a_key_sees_and_uses_only_its_models() {
    let keys = [key("one", ", models: [nick]"), key("all", "")].concat();
    let gateway = GatewayFixture::new(&["4Gi"])
        .settings(&format!("keys:{keys}"))
        .model(&SimModel { keys: "aliases: [nick]", ..SimModel::new("mine") })
        .model(&SimModel::new("other"))
        .start();
    let client = gateway.client();
    let names = |secret: &str| -> Vec<String> {
        let list = get(client, "/v1/models", &bearer(secret)).json();
        list["data"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names("one"), ["mine", "nick"]);
    assert_eq!(names("all"), ["mine", "nick", "other"]);
    assert_eq!(get(client, "/v1/models/nick", &bearer("one")).status, 200);
    refusal(&get(client, "/v1/models/other", &bearer("one")), 404, "model_not_found");
    let chat =
        |secret: &str, model: &str| client.post_with(CHAT, &bearer(secret), &chat_body(model, false, 1));
    let error = refusal(&chat("one", "other"), 403, "model_forbidden");
    assert_eq!(
        (&error["param"], error["message"].as_str().unwrap().contains("'other'")),
        (&json!("model"), true)
    );
    refusal(&chat("one", "absent"), 404, "model_not_found");
    assert_eq!(chat("one", "mine").status, 200);
    assert_eq!(chat("all", "other").status, 200);
    let metrics = gateway.admin().get("/metrics").text();
    assert!(metrics.contains("rouse_key_requests_total{key=\"one\",outcome=\"forbidden\"} 1"), "{metrics}");
}

#[test]
fn who_may_not_use_a_model_does_not_learn_its_name_from_a_refusal() {
    let keys = [key("one", ", models: [second]"), key("all", "")].concat();
    let gateway = GatewayFixture::new(&["1200Mi"])
        .settings(&format!("keys:{keys}\nstream: {{grace: 100ms}}"))
        .model(&SimModel { keys: "pinned: true", ..SimModel::new("hidden") })
        .model(&SimModel::new("second"))
        .start();
    awake(&gateway, "hidden");
    let asked = |secret: &str, stream| {
        let headers = format!("x-request-timeout: 0.3\r\n{}", bearer(secret));
        gateway.client().post_with(CHAT, &headers, &chat_body("second", stream, 1))
    };
    let error = refusal(&asked("one", false), 429, "insufficient_memory");
    let blocking = &error["details"]["blocking"][0];
    assert_eq!((&blocking["model"], &blocking["memory"]), (&json!("another model"), &json!("1Gi")));
    assert!(!error.to_string().contains("hidden"), "{error}");
    // After the grace the gateway reports the refusal as an event of the stream.
    let late = asked("one", true);
    assert!(late.text().contains("another model") && !late.text().contains("hidden"), "{}", late.text());
    let error = refusal(&asked("all", false), 429, "insufficient_memory");
    assert_eq!(error["details"]["blocking"][0]["model"], "hidden");
}

#[test]
fn a_model_that_left_the_configuration_is_not_named_either() {
    let keys = [key("one", ", models: [second]"), key("all", "")].concat();
    let fixture = GatewayFixture::new(&["1200Mi"])
        .settings(&format!("keys:{keys}"))
        .model(&SimModel::new("second"))
        .model(&SimModel { flags: "--itl 100ms", ..SimModel::new("hidden") });
    let with = fixture.yaml();
    let gateway = fixture.start();
    let body = chat_body("hidden", true, 1000);
    let mut stream = gateway.client().open(request(CHAT, &bearer("all"), &body));
    stream.until("data: ");
    let (without, _) = with.split_once("  - name: hidden").unwrap();
    std::fs::write(gateway.dir.join("rouse.yaml"), without).unwrap();
    gateway.signal(nix::sys::signal::Signal::SIGHUP);
    gateway.until("reloaded", Duration::from_secs(5), || gateway.log().contains("configuration reloaded"));
    let headers = format!("x-request-timeout: 0.3\r\n{}", bearer("one"));
    let answer = gateway.client().post_with(CHAT, &headers, &chat_body("second", false, 1));
    let error = refusal(&answer, 429, "insufficient_memory");
    assert_eq!(error["details"]["holders"][0]["model"], "another model", "{error}");
    assert!(!error.to_string().contains("hidden"), "{error}");
}

#[test]
fn a_path_of_a_model_that_a_key_may_not_use_tells_nothing_of_it() {
    let keys = [key("one", ", models: [mine]"), key("all", "")].concat();
    let gateway = GatewayFixture::new(&["2Gi"])
        .settings(&format!("keys:{keys}"))
        .model(&SimModel::new("mine"))
        .model(&SimModel {
            keys: "aliases: [org/nick]",
            engine: "servedName: inner",
            ..SimModel::new("hidden")
        })
        .start();
    let asked = |path: &str, model: &str| {
        let path = format!("/engines/org%2Fnick{path}");
        let answer = gateway.client().post_with(&path, &bearer("one"), &chat_body(model, false, 1));
        let error = refusal(&answer, 403, "model_forbidden");
        let text = error.to_string();
        assert!(text.contains("'org/nick'") && !text.contains("hidden") && !text.contains("inner"), "{text}");
        text
    };
    // The answer is the same whether or not the engine opens the path, and for any model in the body.
    let told = asked("/v1/chat/completions", "inner");
    for (path, model) in [("/v1/chat/completions", "absent"), ("/sleep", "x"), ("/health", "hidden")] {
        assert_eq!(asked(path, model), told, "{path} {model}");
    }
    let metrics = gateway.admin().get("/metrics").text();
    assert!(metrics.contains("rouse_key_requests_total{key=\"one\",outcome=\"forbidden\"} 4"), "{metrics}");
    let answer = gateway.client().post_with(
        "/engines/org%2Fnick/v1/chat/completions",
        &bearer("all"),
        &chat_body("mine", false, 1),
    );
    let error = refusal(&answer, 400, "invalid_request");
    assert_eq!(error["message"], "the path names the model 'org/nick', but the body names 'mine'");
}

#[test]
fn a_key_that_is_taken_away_fails_at_its_next_request_on_the_same_connection() {
    let fixture = GatewayFixture::new(&["2Gi"])
        .settings(&format!("keys:{}{}", key("stays", ""), key("goes", "")))
        .model(&SimModel::new("small"));
    let with = fixture.yaml();
    let gateway = fixture.start();
    awake(&gateway, "small");
    let ask =
        request(CHAT, &bearer("goes"), &chat_body("small", false, 1)).replace("Connection: close\r\n", "");
    let mut open = gateway.client().open(&ask);
    assert_eq!(open.answer().status, 200);
    open.write(&ask);
    assert_eq!(open.answer().status, 200);
    let file = gateway.dir.join("rouse.yaml");
    std::fs::write(&file, with.replace(&key("goes", ""), "")).unwrap();
    gateway.signal(nix::sys::signal::Signal::SIGHUP);
    gateway.until("reloaded", Duration::from_secs(5), || gateway.log().contains("configuration reloaded"));
    open.write(&ask);
    refusal(&open.answer(), 401, "invalid_api_key");
    let other = gateway.client().post_with(CHAT, &bearer("stays"), &chat_body("small", false, 1));
    assert_eq!(other.status, 200);
}

#[test]
fn a_reload_that_loses_the_keys_is_refused_until_it_says_that_this_is_meant() {
    let keys = key("secret-a", "");
    let gateway = small(&keys);
    let file = gateway.dir.join("rouse.yaml");
    let good = crate::support::read(&file);
    let write = |text: &str| std::fs::write(&file, text).unwrap();
    let chat =
        |headers: &str| gateway.client().post_with(CHAT, headers, &chat_body("small", false, 1)).status;
    let without = good.replace(&format!("keys:{keys}"), "");
    assert_ne!(without, good);
    for (text, said) in
        [(without.as_str(), "the file no longer has keys"), ("# nothing\n", "the file is empty")]
    {
        write(text);
        gateway.until(said, Duration::from_secs(5), || gateway.log().contains(said));
        assert_eq!((chat(""), chat(&bearer("secret-a"))), (401, 200), "{said}");
    }
    write(&format!("keys: none\n{without}"));
    gateway.until("anybody is let in", Duration::from_secs(5), || chat("") == 200);
}

#[test]
fn a_more_urgent_key_overtakes_those_that_wait() {
    let keys = [key("slow", ", priority: -1"), key("fast", ", priority: 5")].concat();
    let gateway = GatewayFixture::new(&["2Gi"])
        .settings(&format!("keys:{keys}"))
        .model(&SimModel { keys: "maxConcurrency: 1", flags: "--itl 20ms", ..SimModel::new("one") })
        .start();
    awake(&gateway, "one");
    let ask = |secret: &str, tokens| {
        gateway.client().open(request(CHAT, &bearer(secret), &chat_body("one", true, tokens)))
    };
    let waiting = |count: u64| {
        gateway.until(&format!("{count} wait"), Duration::from_secs(5), || {
            gateway.fleet()["models"].as_array().unwrap().iter().any(|model| model["waiting"] == count)
        });
    };
    // Longer than any test: each request keeps the only place until its client leaves.
    let long = 100_000;
    let mut first = ask("slow", long);
    first.until("data: ");
    let slow = ask("slow", 60);
    waiting(1);
    let mut fast = ask("fast", long);
    waiting(2);
    drop(first);
    fast.until("data: ");
    // The other request still waits behind this one.
    waiting(1);
    drop(fast);
    assert!(slow.rest().is_whole_stream());
}

#[test]
fn over_http2_every_request_shows_its_key() {
    let gateway = small(&[key("a", ""), key("b", ", models: [absent]")].concat());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let statuses = runtime.block_on(async {
        let stream = tokio::net::TcpStream::connect(gateway.api).await.unwrap();
        let (mut client, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
        let connection = tokio::spawn(connection);
        let mut statuses = Vec::new();
        for secret in ["a", "wrong", "a", "b", "", "a"] {
            let body = Full::new(bytes::Bytes::from(chat_body("small", true, 2)));
            let request = http::Request::post(format!("http://localhost{CHAT}"))
                .header("x-api-key", secret)
                .body(body)
                .unwrap();
            let response = client.send_request(request).await.unwrap();
            statuses.push(response.status().as_u16());
            response.into_body().collect().await.unwrap();
        }
        connection.abort();
        statuses
    });
    assert_eq!(statuses, [200, 401, 200, 403, 401, 200]);
}

#[test]
fn a_key_is_made_with_its_line_and_an_existing_one_gets_the_same_line() {
    let run = |args: &[&str], given: &str| {
        let mut child = Command::new(env!("CARGO_BIN_EXE_rouse-gateway"))
            .arg("key")
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // A command that reads no input may have closed the pipe already.
        drop(child.stdin.take().unwrap().write_all(given.as_bytes()));
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    };
    let made = run(&["team-a"], "");
    let (secret, line) = made.trim().split_once('\n').unwrap();
    let secret = secret.strip_prefix("key").unwrap().trim();
    let gateway = small(&format!("\n  {}", line.strip_prefix("configuration").unwrap().trim()));
    assert_eq!(get(gateway.client(), "/v1/models", &bearer(secret)).status, 200);
    let again = run(&["team-a", "--stdin"], &format!("{secret}\n"));
    assert_eq!(again.trim(), line);
}

#[test]
fn an_engines_own_paths_and_other_apis_are_behind_the_same_keys() {
    let gateway = small(&[key("all", ""), key("none", ", models: [absent]")].concat());
    let client = gateway.client();
    let path = |model: &str| format!("/engines/{model}/v1/chat/completions");
    let body = chat_body("small", false, 1);
    // Without a key a client cannot learn whether a model exists.
    for model in ["small", "absent"] {
        refusal(&client.post(&path(model), &body), 401, "invalid_api_key");
    }
    let post = |path: &str, secret: &str| client.post_with(path, &bearer(secret), &body);
    assert_eq!(post(&path("small"), "all").status, 200);
    refusal(&post(&path("small"), "none"), 403, "model_forbidden");
    let answer = client.post_with("/v1/messages", "x-api-key: wrong\r\n", &body);
    assert_eq!((answer.status, answer.json()["error"]["type"].as_str()), (401, Some("authentication_error")));
    assert_eq!(answer.json()["type"], "error", "in the words of that API");
    let answer = client.post_with("/v1/messages", "x-api-key: all\r\n", &body);
    assert_eq!(answer.status, 200, "{}", answer.text());
}
