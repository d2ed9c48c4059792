//! Requests and tokens per minute.

use std::time::Duration;

use super::{CHAT, bearer, key, small};
use crate::{
    refusals::refusal,
    support::{GatewayFixture, GatewayProcess, SimModel, TestResponse, client::chat_body},
};

fn chat(gateway: &GatewayProcess, secret: &str, body: &str) -> TestResponse {
    gateway.client().post_with(CHAT, &bearer(secret), body)
}

fn left(answer: &TestResponse, of: &str) -> u64 {
    answer.header(&format!("x-ratelimit-remaining-{of}")).parse().unwrap()
}

#[test]
fn requests_above_the_limit_are_refused_with_the_time_at_which_they_pass() {
    let gateway = small(&[key("two", ", requestsPerMinute: 2"), key("other", "")].concat());
    let body = chat_body("small", false, 1);
    let first = chat(&gateway, "two", &body);
    assert_eq!((first.status, left(&first, "requests")), (200, 1));
    assert_eq!(first.header("x-ratelimit-limit-requests"), "2");
    let reset: rouse::units::Millis = first.header("x-ratelimit-reset-requests").parse().unwrap();
    assert!((50_000..=60_250).contains(&reset.0), "{:?}", first.headers);
    assert_eq!(first.header("x-ratelimit-limit-tokens"), "");
    // A request that is refused for another reason takes nothing from the limits.
    refusal(&chat(&gateway, "two", "{}"), 400, "invalid_request");
    refusal(&chat(&gateway, "two", &chat_body("absent", false, 1)), 404, "model_not_found");
    let second = chat(&gateway, "two", &chat_body("small", true, 2));
    assert_eq!((second.is_whole_stream(), left(&second, "requests")), (true, 0));
    let third = chat(&gateway, "two", &body);
    let error = refusal(&third, 429, "rate_limited");
    let details = &error["details"];
    assert_eq!((&details["unit"], &details["limit"]), (&"requests".into(), &2.into()), "{error}");
    assert_eq!((&details["used"], &details["window"]), (&2.into(), &"1m0s".into()), "{error}");
    assert_eq!((left(&third, "requests"), third.header("x-ratelimit-limit-requests")), (0, "2"));
    let after: u64 = third.header("retry-after").parse().unwrap();
    assert!((50..=61).contains(&after), "{after}");
    let other = chat(&gateway, "other", &body);
    assert_eq!((other.status, other.header("x-ratelimit-limit-requests")), (200, ""));
    let metrics = gateway.admin().get("/metrics").text();
    for line in [
        "rouse_key_requests_total{key=\"two\",outcome=\"admitted\"} 2",
        "rouse_key_requests_total{key=\"two\",outcome=\"over_requests\"} 1",
        "rouse_admission_refusals_total{reason=\"rate_limited\"} 1",
    ] {
        assert!(metrics.contains(line), "{line} in {metrics}");
    }
}

#[test]
fn tokens_are_settled_with_what_the_engine_counted_whatever_was_reserved() {
    let gateway = small(&key("k", ", tokensPerMinute: 3000"));
    let usage = |answer: &serde_json::Value| {
        answer["prompt_tokens"].as_u64().unwrap() + answer["completion_tokens"].as_u64().unwrap()
    };
    let answer = chat(&gateway, "k", &chat_body("small", false, 40));
    let mut used = usage(&answer.json()["usage"]);
    let counted = || -> u64 {
        let metrics = gateway.admin().get("/metrics").text();
        let of = |kind: &str| -> u64 {
            let start = format!("rouse_key_tokens_total{{counted=\"engine\",key=\"k\",kind=\"{kind}\"}} ");
            metrics.lines().find_map(|line| line.strip_prefix(&start)?.parse().ok()).unwrap_or_default()
        };
        of("prompt") + of("completion")
    };
    let stream = r#"{"model":"small","stream":true,"max_tokens":30,"stream_options":{"include_usage":true},"messages":[{"role":"user","content":"hello"}]}"#;
    let answer = chat(&gateway, "k", stream);
    let last = answer.events().into_iter().rev().nth(1).unwrap();
    used += usage(&serde_json::from_str::<serde_json::Value>(&last).unwrap()["usage"]);
    gateway.until("both are settled", Duration::from_secs(5), || counted() == used);
    let large = chat_body("small", false, 1).replace("hello", &"word ".repeat(4000));
    let error = refusal(&chat(&gateway, "k", &large), 429, "rate_limited");
    assert_eq!(
        (&error["details"]["unit"], &error["details"]["used"]),
        (&"tokens".into(), &used.into()),
        "{error}"
    );
}

#[test]
fn to_count_tokens_takes_a_request_and_no_tokens() {
    let gateway = small(&key("k", ", requestsPerMinute: 9, tokensPerMinute: 3000"));
    let body = chat_body("small", false, 1).replace("hello", &"word ".repeat(400));
    for (path, requests) in
        [("/tokenize", 8), ("/engines/small/tokenize", 7), ("/v1/messages/count_tokens", 6)]
    {
        let answer = gateway.client().post_with(path, &bearer("k"), &body);
        assert_eq!((left(&answer, "requests"), left(&answer, "tokens")), (requests, 3000), "{path}");
    }
}

#[test]
fn a_stream_without_usage_counts_its_events_and_one_that_never_began_nothing() {
    let keys = key("k", ", requestsPerMinute: 9, tokensPerMinute: 100000");
    let gateway = GatewayFixture::new(&["1200Mi"])
        .settings(&format!(
            "keys:{keys}\nqueue: {{policy: reject}}\nturns: {{protect: always, residency: 1h, maxTurn: 2h}}"
        ))
        .model(&SimModel::new("small"))
        .model(&SimModel::new("second"))
        .start();
    super::awake(&gateway, "small");
    refusal(&chat(&gateway, "k", &chat_body("second", false, 1)), 429, "insufficient_memory");
    assert!(chat(&gateway, "k", &chat_body("small", true, 50)).is_whole_stream());
    let start = "rouse_key_tokens_total{counted=\"estimated\",key=\"k\",kind=\"completion\"} ";
    gateway.until("its events are counted", Duration::from_secs(5), || {
        let metrics = gateway.admin().get("/metrics").text();
        let counted = metrics.lines().find_map(|line| line.strip_prefix(start)?.parse::<u64>().ok());
        counted.is_some_and(|counted| (49..=52).contains(&counted))
    });
    let next = chat(&gateway, "k", &chat_body("small", false, 1));
    assert_eq!(left(&next, "requests"), 7, "the refused one was given back");
}
