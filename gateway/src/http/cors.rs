//! What pages of other origins may do with the inference API, for browsers to enforce.
//!
//! A browser asks first (a preflight, without the key: so it is answered before anybody is asked for one), and then shows
//! a page only answers that name the page's origin; so errors must name it, too, or a page never learns why. Cookies
//! play no part here, and credentials in a header are the page's own, so no origin is ever trusted with more than a
//! program that has a key.

use http::{HeaderMap, HeaderName, HeaderValue, Method, header, request};

use crate::config::Cors;

const METHODS: HeaderValue = HeaderValue::from_static("GET, HEAD, POST");
/// Two hours, in seconds: no browser keeps it for longer.
const MAX_AGE: HeaderValue = HeaderValue::from_static("7200");
const ANY: HeaderValue = HeaderValue::from_static("*");
const ORIGIN: HeaderValue = HeaderValue::from_static("Origin");
const PREFLIGHT_VARIES: HeaderValue =
    HeaderValue::from_static("Origin, Access-Control-Request-Method, Access-Control-Request-Headers");

/// What the stock SDKs send from a browser.
const SENT: [&str; 11] = [
    "accept",
    "authorization",
    "content-type",
    "x-api-key",
    "api-key",
    "x-request-id",
    "x-request-timeout",
    "idempotency-key",
    "traceparent",
    "tracestate",
    "baggage",
];
const SENT_PREFIXES: [&str; 3] = ["anthropic-", "openai-", "x-stainless-"];
/// Of an answer, what a page may read beyond what every page may.
const SHOWN: [&str; 4] = ["x-request-id", "x-should-retry", "server-timing", "retry-after"];
const SHOWN_PREFIXES: [&str; 4] = ["x-rouse-", "x-ratelimit-", "anthropic-", "openai-"];

/// What is to be said of one request's origin.
pub(super) enum Origin {
    /// Nothing is configured, and nothing said.
    Off,
    /// The origin is none of ours, or there is none. Caches must know that another one would be told otherwise.
    Foreign,
    Allowed(HeaderValue),
}

impl Origin {
    pub(super) fn of(cors: &Cors, parts: &request::Parts) -> Self {
        if !cors.any && cors.origins.is_empty() {
            return Self::Off;
        }
        let sent = parts.headers.get(header::ORIGIN);
        let Some(origin) = sent.filter(|_| parts.headers.get_all(header::ORIGIN).iter().count() == 1) else {
            return if cors.any { Self::Off } else { Self::Foreign };
        };
        if cors.any {
            return Self::Allowed(ANY);
        }
        let is = |allowed: &String| origin.as_bytes().eq_ignore_ascii_case(allowed.as_bytes());
        if cors.origins.iter().any(is) { Self::Allowed(origin.clone()) } else { Self::Foreign }
    }

    /// The head of a preflight's answer; `None` when this is none, or of a foreign origin.
    pub(super) fn preflight(&self, parts: &request::Parts) -> Option<HeaderMap> {
        let Self::Allowed(_) = self else { return None };
        if parts.method != Method::OPTIONS
            || !parts.headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
        {
            return None;
        }
        let mut headers = HeaderMap::new();
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, METHODS);
        headers.insert(header::ACCESS_CONTROL_MAX_AGE, MAX_AGE);
        headers.insert(header::VARY, PREFLIGHT_VARIES);
        let asked = parts.headers.get_all(header::ACCESS_CONTROL_REQUEST_HEADERS).iter();
        let names = asked.filter_map(|value| value.to_str().ok()).flat_map(|list| list.split(','));
        let allowed: Vec<_> = names
            .map(|name| name.trim().to_ascii_lowercase())
            .filter(|name| is_one(name, &SENT, &SENT_PREFIXES))
            .collect();
        if let Ok(list) = HeaderValue::try_from(allowed.join(", "))
            && !list.is_empty()
        {
            headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, list);
        }
        Some(headers)
    }

    /// Says it on an answer, whatever it is.
    pub(super) fn note(self, headers: &mut HeaderMap) {
        let origin = match self {
            Self::Off => return,
            Self::Foreign => None,
            Self::Allowed(origin) => Some(origin),
        };
        if origin != Some(ANY) && !headers.contains_key(header::ACCESS_CONTROL_MAX_AGE) {
            headers.append(header::VARY, ORIGIN);
        }
        let Some(origin) = origin else { return };
        let shown: Vec<_> = headers
            .keys()
            .map(HeaderName::as_str)
            .filter(|name| is_one(name, &SHOWN, &SHOWN_PREFIXES))
            .collect();
        if let Ok(list) = HeaderValue::try_from(shown.join(", "))
            && !list.is_empty()
        {
            headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, list);
        }
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    }
}

fn is_one(name: &str, names: &[&str], prefixes: &[&str]) -> bool {
    names.contains(&name) || prefixes.iter().any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::testing::{Engine, Gateway, events, json, post, raw};

    fn allow(origins: &[&str]) -> impl FnOnce(&mut crate::config::Config) {
        let any = origins.contains(&"*");
        let origins = origins.iter().filter(|o| **o != "*").map(ToString::to_string).collect();
        move |config| config.cors = Cors { origins, any }
    }

    fn preflight(origin: &str) -> String {
        raw(
            "OPTIONS /v1/chat/completions",
            &format!(
                "origin: {origin}\r\naccess-control-request-method: POST\r\naccess-control-request-headers: \
                 Authorization,content-type, x-stainless-os,anthropic-version,x-evil\r\n"
            ),
            "",
        )
    }

    #[tokio::test]
    async fn a_preflight_is_answered_without_a_key_and_names_what_may_be_sent() {
        let gateway = Gateway::start(allow(&["https://app.example"]));
        let mut client = gateway.connect().await;
        client.send(preflight("https://app.example")).await;
        let answer = client.answer().await;
        assert_eq!(answer.status, 204, "{}", answer.head);
        for (name, value) in [
            ("access-control-allow-origin", "https://app.example"),
            ("access-control-allow-methods", "GET, HEAD, POST"),
            (
                "access-control-allow-headers",
                "authorization, content-type, x-stainless-os, anthropic-version",
            ),
            ("access-control-max-age", "7200"),
            ("vary", "Origin, Access-Control-Request-Method, Access-Control-Request-Headers"),
        ] {
            assert_eq!(answer.header(name), Some(value), "{}", answer.head);
        }
        assert_eq!(answer.header("access-control-allow-credentials"), None);
        // And the connection serves on.
        client.send(raw("GET /healthz", "", "")).await;
        assert_eq!(client.answer().await.status, 200);
    }

    #[tokio::test]
    async fn errors_and_streams_name_the_origin_and_what_may_be_read() {
        let gateway = Gateway::start(allow(&["https://app.example"]));
        let engine = Engine::start(events("{}")).await;
        let gate = gateway.open_gate();
        gateway.route(&[(engine.address, &gate)]);
        let mut client = gateway.connect().await;
        let origin = "origin: https://app.example\r\n";
        client.send(raw("POST /v1/nothing", origin, "")).await;
        let refused = client.answer().await;
        assert_eq!(refused.status, 404);
        assert_eq!(refused.header("access-control-allow-origin"), Some("https://app.example"));
        let shown = refused.header("access-control-expose-headers").unwrap();
        assert!(shown.contains("x-request-id") && shown.contains("x-should-retry"), "{shown}");
        let mut client = gateway.connect().await;
        client.send(post(true).replacen("\r\n", &format!("\r\n{origin}"), 1)).await;
        let stream = client.answer().await;
        assert_eq!((stream.status, stream.header("vary")), (200, Some("Origin")), "{}", stream.head);
        assert_eq!(stream.header("access-control-allow-origin"), Some("https://app.example"));
    }

    #[tokio::test]
    async fn other_origins_are_told_nothing_and_caches_that_it_depends() {
        let gateway = Gateway::start(allow(&["https://app.example"]));
        let foreign = [
            "https://app.example.evil",
            "http://app.example",
            "https://app.example:8443",
            "null",
            "https://app.example\r\norigin: https://evil.example",
        ];
        for origin in foreign {
            let mut client = gateway.connect().await;
            client.send(preflight(origin)).await;
            let answer = client.answer().await;
            assert_eq!((answer.status, answer.header("vary")), (405, Some("Origin")), "{origin}");
            assert_eq!(answer.header("access-control-allow-origin"), None, "{origin}");
        }
    }

    #[tokio::test]
    async fn every_origin_is_allowed_by_a_star_and_none_without_configuration() {
        let gateway = Gateway::start(allow(&["*"]));
        let mut client = gateway.connect().await;
        client.send(preflight("https://whoever.example")).await;
        let answer = client.answer().await;
        assert_eq!((answer.status, answer.header("access-control-allow-origin")), (204, Some("*")));
        let gateway = Gateway::start(|_| {});
        let engine = Engine::start(json("{}")).await;
        let gate = gateway.open_gate();
        gateway.route(&[(engine.address, &gate)]);
        let mut client = gateway.connect().await;
        client.send(post(false).replacen("\r\n", "\r\norigin: https://app.example\r\n", 1)).await;
        let answer = client.answer().await;
        assert_eq!((answer.status, answer.header("vary")), (200, None));
        assert!(!answer.head.contains("access-control"), "{}", answer.head);
        client.send(preflight("https://app.example")).await;
        assert_eq!(client.answer().await.status, 405);
    }
}
