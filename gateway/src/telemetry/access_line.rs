//! Formats one line of the access log.
//!
//! Every line has every field, with `null` for missing values, so that a table can be built from the lines without a
//! schema. Values from a client are escaped and cut; of the query, only names and harmless values are kept.

use std::time::Duration;

use serde::Serialize;
use tokio::time::Instant;

use super::RequestRecord;
use crate::{
    driver::ColdStart,
    http::client_text::{MAX_CLIENT_TEXT_BYTES, sanitize},
    metrics::{cold_start_label, phase_label},
};

/// Names whose values are written. A secret may have any other name, or none.
const SAFE_QUERY_PARAMS: [&str; 10] =
    ["after", "api-version", "before", "follow", "include", "level", "limit", "model", "order", "purpose"];

#[derive(Serialize)]
struct AccessLogLine<'a> {
    ts: String,
    id: Option<&'a str>,
    trace: Option<String>,
    client: Option<String>,
    method: &'a str,
    path: &'a str,
    route: &'a str,
    model: Option<&'a str>,
    key: Option<&'a str>,
    engine: Option<String>,
    status: u16,
    code: Option<&'a str>,
    disconnect_phase: Option<&'static str>,
    cold_start: Option<&'static str>,
    waited_ms: Option<u64>,
    first_byte_ms: Option<f64>,
    duration_ms: f64,
    bytes_in: u64,
    bytes_out: u64,
    tokens_in: Option<u64>,
    tokens_out: Option<u64>,
    retries: u32,
    user_agent: Option<&'a str>,
}

/// Appends the record's line with its line end.
pub(super) fn write(record: &RequestRecord, out: &mut Vec<u8>) {
    let ended = &record.outcome;
    let line = AccessLogLine {
        ts: timestamp(record.wall_clock.since_epoch(record.began_at)),
        id: ended.id.as_ref().and_then(|id| id.to_str().ok()),
        trace: record.trace_id().map(|trace| format!("{trace:032x}")),
        client: record.client.map(|client| client.to_canonical().to_string()),
        method: &record.method,
        path: &record.path,
        route: ended.route,
        model: ended.model.as_ref().map(|model| model.as_str()),
        key: ended.key.as_deref(),
        engine: record.engine.as_ref().map(ToString::to_string),
        status: ended.status,
        code: ended.code,
        disconnect_phase: ended.left_in_phase.map(phase_label),
        cold_start: ended.cold_start.map(|kind: ColdStart| cold_start_label(Some(kind)).1),
        waited_ms: ended.wait.map(|waited| waited.0),
        first_byte_ms: record.head_sent_at.map(|at| millis(record.began_at, at)),
        duration_ms: millis(record.began_at, record.ended_at),
        bytes_in: ended.bytes_in,
        bytes_out: ended.bytes_out,
        tokens_in: record.usage.map(|usage| usage.prompt),
        tokens_out: record.usage.map(|usage| usage.completion),
        retries: ended.retries,
        user_agent: record.user_agent.as_deref(),
    };
    let before = out.len();
    if serde_json::to_writer(&mut *out, &line).is_err() {
        out.truncate(before);
        return;
    }
    out.push(b'\n');
}

/// Returns the path, with the parts of the query that cannot be secret.
pub(super) fn redacted_path(uri: &http::Uri) -> String {
    let Some(query) = uri.query() else { return sanitize(uri.path()) };
    let mut shown = uri.path().to_owned();
    for (number, part) in query.split('&').enumerate() {
        // Anything beyond this length is cut off anyway.
        if shown.len() > MAX_CLIENT_TEXT_BYTES {
            break;
        }
        shown.push(if number == 0 { '?' } else { '&' });
        match part.split_once('=') {
            Some((name, _)) if SAFE_QUERY_PARAMS.contains(&name) => shown.push_str(part),
            Some((name, _)) => shown.extend([name, "=***"]),
            None => shown.push_str("***"),
        }
    }
    sanitize(&shown)
}

fn millis(from: Instant, to: Instant) -> f64 {
    let micros = to.saturating_duration_since(from).as_micros();
    micros as f64 / 1e3
}

/// Formats a time since the Unix epoch as `2026-11-20T16:05:50.123Z`.
fn timestamp(since_epoch: Duration) -> String {
    let millis = u64::try_from(since_epoch.as_millis()).unwrap_or(u64::MAX);
    let (days, rest) = (millis / 86_400_000, millis % 86_400_000);
    let (year, month, day) = date(days);
    let (hours, minutes, seconds) = (rest / 3_600_000, rest / 60_000 % 60, rest / 1000 % 60);
    format!("{year:04}-{month:02}-{day:02}T{hours:02}:{minutes:02}:{seconds:02}.{:03}Z", rest % 1000)
}

/// Returns the Gregorian date of a number of days since 1970.
///
/// Years start in March here: then the leap day is the last day of its year, and a linear formula gives the months'
/// lengths.
const fn date(days: u64) -> (u64, u64, u64) {
    let since = days + 719_468;
    let (era, day_of_era) = (since / 146_097, since % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = year_of_era + era * 400 + (month <= 2) as u64;
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_written_as_dates() {
        for (millis, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_400_123, "2000-02-29T00:00:00.123Z"),
            (1_795_190_399_999, "2026-11-20T15:59:59.999Z"),
            (4_107_542_400_000, "2100-03-01T00:00:00.000Z"),
        ] {
            assert_eq!(timestamp(Duration::from_millis(millis)), text);
        }
    }

    #[test]
    fn secrets_in_a_query_are_not_written() {
        for (uri, shown) in [
            ("/v1/models", "/v1/models"),
            ("/v1/models?limit=3&after=m", "/v1/models?limit=3&after=m"),
            ("/a?api_key=abc&Token=x&n=1&order=asc", "/a?api_key=***&Token=***&n=***&order=asc"),
            ("/a?%6bey=abc", "/a?%6bey=***"),
            ("/a?code=abc&jwt=x&access=y", "/a?code=***&jwt=***&access=***"),
            ("/a?s3cret", "/a?***"),
            ("/a?s3cret&limit=1&", "/a?***&limit=1&***"),
        ] {
            assert_eq!(redacted_path(&uri.parse().unwrap()), shown);
        }
    }

    #[test]
    fn a_long_query_is_cut_and_nothing_of_a_secret_is_left() {
        let long = redacted_path(&format!("/a?key=s3cret&{}", "x&".repeat(20_000)).parse().unwrap());
        assert!(long.starts_with("/a?key=***&***&") && long.len() <= MAX_CLIENT_TEXT_BYTES + 3, "{long}");
    }
}
