//! CORS: what pages of other origins may do with the inference API, enforced by browsers.
//!
//! A browser first sends a preflight without the key, so the gateway answers it before it asks for a key. The browser
//! then shows a page only responses that name the page's origin. Errors must name it too, or the page never learns the
//! reason. Cookies play no part here, and credentials in a header belong to the page itself, so no origin gets more
//! rights than a program that has a key.

use http::{HeaderMap, HeaderName, HeaderValue, Method, header, request};
use rouse_config::Config;

use super::origin;

const ALLOWED_METHODS: HeaderValue = HeaderValue::from_static("GET, HEAD, POST");
/// Two hours in seconds: no browser caches a preflight for longer.
const PREFLIGHT_MAX_AGE: HeaderValue = HeaderValue::from_static("7200");
const ANY_ORIGIN: HeaderValue = HeaderValue::from_static("*");
const VARY_ORIGIN: HeaderValue = HeaderValue::from_static("Origin");
const PREFLIGHT_VARY: HeaderValue =
    HeaderValue::from_static("Origin, Access-Control-Request-Method, Access-Control-Request-Headers");

/// Headers that the stock SDKs send from a browser.
const ALLOWED_HEADERS: [&str; 13] = [
    "accept",
    "authorization",
    "content-type",
    "x-api-key",
    "api-key",
    "x-request-id",
    "x-request-timeout",
    "x-rouse-heartbeat",
    "x-session-id",
    "idempotency-key",
    "traceparent",
    "tracestate",
    "baggage",
];
const ALLOWED_HEADER_PREFIXES: [&str; 3] = ["anthropic-", "openai-", "x-stainless-"];
/// Response headers that a page may read beyond those that every page may read.
const EXPOSED_HEADERS: [&str; 5] =
    ["x-request-id", "request-id", "x-should-retry", "server-timing", "retry-after"];
const EXPOSED_HEADER_PREFIXES: [&str; 4] = ["x-rouse-", "x-ratelimit-", "anthropic-", "openai-"];

/// The CORS headers that the response to one request needs.
pub(super) enum CorsDecision {
    /// No headers: CORS is not configured, or every origin is allowed and the request names no single origin.
    Off,
    /// The origin is missing or not allowed. `Vary` tells caches that the response depends on the origin.
    Foreign,
    Allowed(HeaderValue),
}

impl CorsDecision {
    pub(super) fn for_request(config: &Config, parts: &request::Parts) -> Self {
        let cors = &config.cors;
        let others = if cors.any || cors.origins.is_empty() { Self::Off } else { Self::Foreign };
        if matches!(others, Self::Off) && !cors.any && !origin::is_keyless_loopback(config) {
            return Self::Off;
        }
        let sent = parts.headers.get(header::ORIGIN);
        match sent.filter(|_| parts.headers.get_all(header::ORIGIN).iter().count() == 1) {
            Some(_) if cors.any => Self::Allowed(ANY_ORIGIN),
            Some(origin) if origin::is_allowed(config, origin) => Self::Allowed(origin.clone()),
            _ => others,
        }
    }

    /// The headers of a preflight response. `None`: the request is not a preflight, or its origin is not allowed.
    pub(super) fn preflight(&self, parts: &request::Parts) -> Option<HeaderMap> {
        let Self::Allowed(_) = self else { return None };
        if parts.method != Method::OPTIONS
            || !parts.headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
        {
            return None;
        }
        let mut headers = HeaderMap::new();
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, ALLOWED_METHODS);
        headers.insert(header::ACCESS_CONTROL_MAX_AGE, PREFLIGHT_MAX_AGE);
        headers.insert(header::VARY, PREFLIGHT_VARY);
        let requested = parts.headers.get_all(header::ACCESS_CONTROL_REQUEST_HEADERS).iter();
        let names = requested.filter_map(|value| value.to_str().ok()).flat_map(|list| list.split(','));
        let allowed: Vec<_> = names
            .map(|name| name.trim().to_ascii_lowercase())
            .filter(|name| matches_any(name, &ALLOWED_HEADERS, &ALLOWED_HEADER_PREFIXES))
            .collect();
        if let Ok(list) = HeaderValue::try_from(allowed.join(", "))
            && !list.is_empty()
        {
            headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, list);
        }
        Some(headers)
    }

    /// Adds the CORS headers to any response.
    pub(super) fn apply(self, headers: &mut HeaderMap) {
        let origin = match self {
            Self::Off => return,
            Self::Foreign => None,
            Self::Allowed(origin) => Some(origin),
        };
        if origin != Some(ANY_ORIGIN) && !headers.contains_key(header::ACCESS_CONTROL_MAX_AGE) {
            headers.append(header::VARY, VARY_ORIGIN);
        }
        let Some(origin) = origin else { return };
        let shown: Vec<_> = headers
            .keys()
            .map(HeaderName::as_str)
            .filter(|name| matches_any(name, &EXPOSED_HEADERS, &EXPOSED_HEADER_PREFIXES))
            .collect();
        if let Ok(list) = HeaderValue::try_from(shown.join(", "))
            && !list.is_empty()
        {
            headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, list);
        }
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    }
}

fn matches_any(name: &str, names: &[&str], prefixes: &[&str]) -> bool {
    names.contains(&name) || prefixes.iter().any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests;
