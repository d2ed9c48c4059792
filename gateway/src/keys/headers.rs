//! Response headers about keys and their limits.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, header};
use rouse::units::{Millis, Tick};
use rouse_net::relay::headers::decimal;

use super::ApiKey;

/// OpenAI's header names, which clients already read. For requests, then for tokens: the limit, the remaining amount,
/// and the time until the whole limit is available.
const LIMIT_HEADERS: [[HeaderName; 3]; 2] = [
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

/// Digits of the largest `u64`.
const MAX_DIGITS: usize = 20;

/// Bytes of all values: two limits, two remaining amounts, and two durations of up to 20 digits of hours and
/// `h59m59.999s`.
const MAX_TEXT_BYTES: usize = 2 * (3 * MAX_DIGITS + 11);

/// The values of all headers, concatenated.
struct LimitHeaderText {
    bytes: [u8; MAX_TEXT_BYTES],
    length: usize,
}

/// Adds the challenge that a 401 needs.
pub(crate) fn add_challenge(headers: &mut HeaderMap) {
    headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
}

/// Adds the key's limits and remaining amounts, if the key has limits.
pub(crate) fn add_limit_headers(key: &ApiKey, now: Tick, headers: &mut HeaderMap) {
    if key.limits.requests.is_none() && key.limits.tokens.is_none() {
        return;
    }
    // One allocation holds all six values and their reference count; six separate values would take two allocations
    // each.
    let mut text = LimitHeaderText { bytes: [0; MAX_TEXT_BYTES], length: 0 };
    let statuses = key.account.status(&key.limits, now);
    let ranges = statuses.map(|status| {
        status.map(|status| {
            let begin = text.length;
            write_number(&mut text, status.limit);
            let limit = text.length;
            write_number(&mut text, status.remaining);
            let remaining = text.length;
            write_duration(&mut text, status.reset);
            [begin..limit, limit..remaining, remaining..text.length]
        })
    });
    let text = Bytes::from_owner(text);
    for (ranges, names) in ranges.into_iter().zip(LIMIT_HEADERS) {
        for (range, name) in ranges.into_iter().flatten().zip(names) {
            if let Ok(value) = HeaderValue::from_maybe_shared(text.slice(range)) {
                headers.insert(name, value);
            }
        }
    }
}

impl LimitHeaderText {
    fn push(&mut self, more: &[u8]) {
        let end = self.length + more.len();
        if let Some(target) = self.bytes.get_mut(self.length..end) {
            target.copy_from_slice(more);
            self.length = end;
        }
    }
}

impl AsRef<[u8]> for LimitHeaderText {
    fn as_ref(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or_default()
    }
}

/// Writes a duration like its `Display`, which takes ten times as long.
fn write_duration(out: &mut LimitHeaderText, span: Millis) {
    let (seconds, millis) = (span.0 / 1000, span.0 % 1000);
    if seconds == 0 {
        write_number(out, millis);
        return out.push(b"ms");
    }
    let units = [(seconds / 3600, b'h'), (seconds / 60 % 60, b'm')];
    for (count, unit) in units.into_iter().filter(|(count, _)| *count > 0) {
        write_number(out, count);
        out.push(&[unit]);
    }
    let seconds = seconds % 60;
    if seconds == 0 && millis == 0 {
        return;
    }
    write_number(out, seconds);
    if millis > 0 {
        out.push(b".");
        out.push(&[millis / 100, millis / 10 % 10, millis % 10].map(|digit| b'0' + digit as u8));
    }
    out.push(b"s");
}

fn write_number(out: &mut LimitHeaderText, number: u64) {
    out.push(decimal(number, &mut [0; MAX_DIGITS]));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_and_a_number_read_as_everywhere_else() {
        for millis in
            [0, 1, 999, 1000, 1001, 1010, 59_999, 60_000, 60_250, 119_750, 3_600_000, 3_660_001, u64::MAX]
        {
            let written = |write: fn(&mut LimitHeaderText, u64)| {
                let mut out = LimitHeaderText { bytes: [0; MAX_TEXT_BYTES], length: 0 };
                write(&mut out, millis);
                String::from_utf8(out.as_ref().to_vec()).unwrap()
            };
            assert_eq!(
                written(|out, millis| write_duration(out, Millis(millis))),
                Millis(millis).to_string()
            );
            assert_eq!(written(write_number), millis.to_string());
        }
    }
}
