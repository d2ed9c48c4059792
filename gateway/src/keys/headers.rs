//! What a response's head says about keys.

use http::{HeaderMap, HeaderName, HeaderValue, header};
use rouse::units::Tick;

use super::Key;

/// Under OpenAI's names, which clients read already. For requests, then for tokens: the limit, what is left of it, and
/// when all of it is.
const LIMITS: [[HeaderName; 3]; 2] = [
    [
        HeaderName::from_static("x-ratelimit-limit-requests"),
        HeaderName::from_static("x-ratelimit-remaining-requests"),
        HeaderName::from_static("x-ratelimit-reset-requests"),
    ],
    [
        HeaderName::from_static("x-ratelimit-limit-tokens"),
        HeaderName::from_static("x-ratelimit-remaining-tokens"),
        HeaderName::from_static("x-ratelimit-reset-tokens"),
    ],
];

/// Tells how a 401 would not be one.
pub(crate) fn challenge(headers: &mut HeaderMap) {
    headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
}

/// How much the key has left, where it has limits.
pub(crate) fn note_limits(key: &Key, now: impl FnOnce() -> Tick, headers: &mut HeaderMap) {
    if key.limits.requests.is_none() && key.limits.tokens.is_none() {
        return;
    }
    for (standing, names) in key.account.standing(&key.limits, now()).into_iter().zip(LIMITS) {
        let Some(standing) = standing else { continue };
        let [limit, remaining, reset] = names;
        headers.insert(limit, standing.limit.into());
        headers.insert(remaining, standing.remaining.into());
        if let Ok(value) = HeaderValue::try_from(standing.reset.to_string()) {
            headers.insert(reset, value);
        }
    }
}
