//! What a response's head says about keys.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, header};
use rouse::units::{Millis, Tick};

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

/// Of the largest number.
const DIGITS: usize = 20;

/// Tells how a 401 would not be one.
pub(crate) fn challenge(headers: &mut HeaderMap) {
    headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
}

/// How much the key has left, where it has limits.
pub(crate) fn note_limits(key: &Key, now: Tick, headers: &mut HeaderMap) {
    if key.limits.requests.is_none() && key.limits.tokens.is_none() {
        return;
    }
    // One piece of memory for all six, where each would take two of its own.
    let mut text = Vec::with_capacity(6 * DIGITS);
    let standings = key.account.standing(&key.limits, now);
    let ranges = standings.map(|standing| {
        standing.map(|standing| {
            let begin = text.len();
            number(&mut text, standing.limit);
            let limit = text.len();
            number(&mut text, standing.remaining);
            let remaining = text.len();
            span(&mut text, standing.reset);
            [begin..limit, limit..remaining, remaining..text.len()]
        })
    });
    let text = Bytes::from(text);
    for (ranges, names) in ranges.into_iter().zip(LIMITS) {
        for (range, name) in ranges.into_iter().flatten().zip(names) {
            if let Ok(value) = HeaderValue::from_maybe_shared(text.slice(range)) {
                headers.insert(name, value);
            }
        }
    }
}

/// As its `Display`, which takes ten times as long.
fn span(out: &mut Vec<u8>, span: Millis) {
    let (seconds, millis) = (span.0 / 1000, span.0 % 1000);
    if seconds == 0 {
        number(out, millis);
        return out.extend_from_slice(b"ms");
    }
    let units = [(seconds / 3600, b'h'), (seconds / 60 % 60, b'm')];
    for (count, unit) in units.into_iter().filter(|(count, _)| *count > 0) {
        number(out, count);
        out.push(unit);
    }
    let seconds = seconds % 60;
    if seconds == 0 && millis == 0 {
        return;
    }
    number(out, seconds);
    if millis > 0 {
        out.push(b'.');
        out.extend([millis / 100, millis / 10 % 10, millis % 10].map(digit));
    }
    out.push(b's');
}

fn number(out: &mut Vec<u8>, mut number: u64) {
    let (mut digits, mut at) = ([0; DIGITS], DIGITS);
    loop {
        at -= 1;
        digits[at] = digit(number % 10);
        number /= 10;
        if number == 0 {
            return out.extend_from_slice(&digits[at..]);
        }
    }
}

fn digit(of: u64) -> u8 {
    b"0123456789"[of as usize]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_and_a_number_read_as_everywhere_else() {
        for millis in
            [0, 1, 999, 1000, 1001, 1010, 59_999, 60_000, 60_250, 119_750, 3_600_000, 3_660_001, u64::MAX]
        {
            let mut out = Vec::new();
            span(&mut out, Millis(millis));
            assert_eq!(String::from_utf8(out).unwrap(), Millis(millis).to_string());
            let mut out = Vec::new();
            number(&mut out, millis);
            assert_eq!(String::from_utf8(out).unwrap(), millis.to_string());
        }
    }
}
