//! Decides which requests pass. An engine serves inference and management on one port, and clients of a relay must not
//! reach the management.
//!
//! For a known engine kind, exactly the paths of that kind pass, in exact spelling. For a custom engine only the
//! management words are known: a path passes if it contains none of them and if no two routers can parse it
//! differently. `GET /metrics` also passes for every kind: the Pod network is not public, and scrapers find an engine's
//! metrics at its requester.

use http::{Method, Uri};
use rouse::fault::Fault;
use rouse_net::adapter::{
    EngineKind,
    paths::{self, MANAGEMENT_SEGMENTS, READ_METHODS},
};

/// Longest path echoed in a response, in characters.
const MAX_ECHOED_CHARS: usize = 256;

/// Checks whether a request may pass.
///
/// # Errors
/// It does not pass; the fault comes with the allowed methods, if there are any.
pub(super) fn check(
    kind: EngineKind,
    method: &Method,
    uri: &Uri,
) -> Result<(), (Fault, Option<&'static str>)> {
    let path = uri.path();
    // These methods address the connection, not the engine. Some servers ignore a method's case.
    if [Method::CONNECT, Method::TRACE].iter().any(|it| method.as_str().eq_ignore_ascii_case(it.as_str())) {
        return Err((route_not_found(method, path), None));
    }
    let methods = match (path, kind) {
        ("/metrics", _) => Some(READ_METHODS),
        (_, EngineKind::Custom) => {
            return if is_safe_path(path) { Ok(()) } else { Err((route_not_found(method, path), None)) };
        }
        _ => paths::allowed_methods(kind, path),
    };
    match methods {
        None => Err((route_not_found(method, path), None)),
        Some(methods) if methods.contains(method) => Ok(()),
        Some(methods) => {
            let allow = if methods == READ_METHODS { "GET, HEAD" } else { "POST" };
            Err((Fault::MethodNotAllowed { method: method.to_string(), path: echoed(path) }, Some(allow)))
        }
    }
}

/// Whether no router can parse this path as a management path.
fn is_safe_path(path: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/-_.~:@".contains(&byte);
    let Some(rest) = path.strip_prefix('/') else { return false };
    path.bytes().all(plain) && (rest.is_empty() || rest.split('/').all(is_safe_segment))
}

fn is_safe_segment(segment: &str) -> bool {
    // Some routers treat `sleep.json` and `sleep:now` like `sleep`.
    let words = segment.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '-'));
    let steers = |word: &str| MANAGEMENT_SEGMENTS.iter().any(|name| name.eq_ignore_ascii_case(word));
    !matches!(segment, "" | "." | "..") && !words.into_iter().any(steers)
}

fn route_not_found(method: &Method, path: &str) -> Fault {
    Fault::RouteNotFound { method: echoed(method.as_str()), path: echoed(path), suggested_path: None }
}

fn echoed(text: &str) -> String {
    text.chars().take(MAX_ECHOED_CHARS).flat_map(char::escape_default).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passes(kind: EngineKind, method: &Method, path: &str) -> bool {
        path.parse().is_ok_and(|uri| check(kind, method, &uri).is_ok())
    }

    #[test]
    fn what_a_kind_opens_passes_with_its_methods() {
        for kind in [EngineKind::Vllm, EngineKind::Sglang, EngineKind::LlamaCpp, EngineKind::Custom] {
            assert!(passes(kind, &Method::POST, "/v1/chat/completions?x=/sleep"), "{kind:?}");
            assert!(passes(kind, &Method::GET, "/v1/models"));
            assert!(passes(kind, &Method::GET, "/metrics") && passes(kind, &Method::HEAD, "/metrics"));
            assert!(!passes(kind, &Method::POST, "/metrics"));
        }
        assert!(!passes(EngineKind::Vllm, &Method::GET, "/v1/chat/completions"));
        assert!(!passes(EngineKind::Vllm, &Method::POST, "/v2/models/x/infer"));
        assert!(passes(EngineKind::Custom, &Method::POST, "/v2/models/x/infer"));
        assert!(passes(EngineKind::Custom, &Method::GET, "/"));
    }

    #[test]
    fn what_is_for_the_connection_or_for_a_server_as_a_whole_does_not_pass() {
        for kind in [EngineKind::Vllm, EngineKind::Sglang, EngineKind::LlamaCpp, EngineKind::Custom] {
            for name in ["CONNECT", "TRACE", "connect", "Trace"] {
                let method = Method::from_bytes(name.as_bytes()).unwrap();
                for path in ["/", "/v1/models", "/v1/chat/completions", "/metrics", "*", "localhost:443"] {
                    assert!(!passes(kind, &method, path), "{kind:?} {name} {path}");
                }
            }
            for method in [Method::OPTIONS, Method::GET] {
                assert!(!passes(kind, &method, "*"), "{kind:?} {method} *");
            }
        }
        // A custom engine decides itself which of its paths a browser may preflight.
        assert!(passes(EngineKind::Custom, &Method::OPTIONS, "/v1/models"));
    }

    #[test]
    fn what_steers_an_engine_passes_in_no_spelling() {
        let escape = |name: &str| name.bytes().map(|byte| format!("%{byte:02x}")).collect::<String>();
        for name in MANAGEMENT_SEGMENTS.iter().filter(|name| **name != "metrics") {
            let upper = name.to_uppercase();
            let (initial, rest) = name.split_at(1);
            let first = escape(initial) + rest;
            let mut paths = [
                "/",
                "//",
                "/./",
                "/../",
                "/v1/",
                "/v1/../",
                "/%2e/",
                "/v1/%2e%2e/",
                "/%2f",
                "/;x/",
                "/v1/models/",
                "/v1/models/../../",
                "/x/y/",
                "/health/",
            ]
            .map(|before| format!("{before}{name}"))
            .to_vec();
            paths.extend(
                ["/", "//", "/.", "/0", ";a=b", "%00", "%20", ".json", "?", "?level=1", ":x"]
                    .map(|after| format!("/{name}{after}")),
            );
            paths.extend([
                format!("/{upper}"),
                format!("/v1/{upper}"),
                format!("/{first}"),
                format!("/{}", escape(name)),
            ]);
            paths.push(format!("http://localhost/{name}"));
            for kind in [EngineKind::Vllm, EngineKind::Sglang, EngineKind::LlamaCpp, EngineKind::Custom] {
                for method in [Method::GET, Method::POST] {
                    for path in &paths {
                        assert!(!passes(kind, &method, path), "{kind:?} {method} {path}");
                    }
                }
            }
        }
    }
}
