//! Reads the requests of access logs.
//!
//! A log has a line for every request. Those without a model asked for no engine. Those with neither a wait nor an
//! engine were refused before they could wait, such as for a limit of their key.

use std::collections::BTreeMap;

use rouse::{
    sim::what_if::{RecordedEnd, RecordedRequest},
    units::{Millis, Tick},
};
use serde::Deserialize;

/// Requests of all logs that were read.
#[derive(Default)]
pub(super) struct AccessLogRequests {
    pub(super) requests: Vec<RecordedRequest>,
    /// Lines of requests that no engine would have got.
    pub(super) without_demand: usize,
    /// Numbers that stand for the clients: their keys, else their addresses.
    clients: BTreeMap<String, u64>,
}

/// The fields of a line that matter to a simulation.
#[derive(Deserialize)]
struct AccessLogRow {
    ts: String,
    client: Option<String>,
    model: Option<String>,
    key: Option<String>,
    engine: Option<String>,
    status: u16,
    waited_ms: Option<u64>,
    duration_ms: f64,
    tokens_in: Option<u64>,
    tokens_out: Option<u64>,
}

/// Status of a request whose client disconnected.
const CLIENT_LEFT: u16 = 499;
/// No request lasts longer. Milliseconds.
const MAX_DURATION: f64 = 31.0 * 86_400_000.0;

impl AccessLogRequests {
    /// Reads a log. Its last line may be cut off.
    ///
    /// # Errors
    /// The first line that is not one of an access log.
    pub(super) fn read(&mut self, text: &str) -> Result<(), String> {
        let is_complete = text.ends_with('\n');
        let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        let last = lines.clone().last().map(|(index, _)| index);
        for (index, line) in lines {
            match parse(line) {
                Ok(row) => self.add(row),
                Err(_) if !is_complete && Some(index) == last => {}
                Err(problem) => return Err(format!("line {}: {problem}", index + 1)),
            }
        }
        Ok(())
    }

    fn add(&mut self, (at, row): (Tick, AccessLogRow)) {
        let wait = Millis(row.waited_ms.unwrap_or_default());
        let end = if row.engine.is_some() {
            Some(RecordedEnd::Served(Millis((row.duration_ms.round() as u64).saturating_sub(wait.0))))
        } else if row.waited_ms.is_none() {
            None
        } else if row.status == CLIENT_LEFT {
            Some(RecordedEnd::Left)
        } else {
            Some(RecordedEnd::Refused)
        };
        let (Some(model), Some(end)) = (row.model, end) else {
            self.without_demand += 1;
            return;
        };
        let (tokens_in, tokens_out) = (row.tokens_in.unwrap_or_default(), row.tokens_out.unwrap_or_default());
        let client = row.key.clone().or(row.client).map_or(0, |name| self.client_number(name));
        self.requests.push(RecordedRequest {
            at,
            model: model.into(),
            key: row.key.unwrap_or_default(),
            key_priority: 0,
            client,
            // As the gateway weighs them for the fairness between keys.
            tokens: tokens_in.saturating_add(tokens_out.saturating_mul(2)),
            wait,
            end,
        });
    }

    fn client_number(&mut self, name: String) -> u64 {
        let next = self.clients.len() as u64 + 1;
        *self.clients.entry(name).or_insert(next)
    }
}

fn parse(line: &str) -> Result<(Tick, AccessLogRow), String> {
    let row: AccessLogRow =
        serde_json::from_str(line).map_err(|error| format!("not a line of the access log: {error}"))?;
    let at = parse_timestamp(&row.ts).ok_or_else(|| {
        format!("ts is '{}', which is not a time of the form 2026-11-20T16:05:50.123Z", row.ts)
    })?;
    if !(0.0..=MAX_DURATION).contains(&row.duration_ms) {
        return Err(format!("duration_ms is {}: it must be from 0 to 31 days", row.duration_ms));
    }
    Ok((at, row))
}

/// Parses `2026-11-20T16:05:50.123Z`.
fn parse_timestamp(text: &str) -> Option<Tick> {
    let (date, time) = text.strip_suffix('Z')?.split_once('T')?;
    let [year, month, day] = numbers(date, '-')?;
    let (time, millis) = time.split_once('.')?;
    let [hour, minute, second] = numbers(time, ':')?;
    let millis = millis.parse::<u64>().ok().filter(|_| millis.len() == 3)?;
    let in_range = (1970..=9999).contains(&year)
        && (1..=12).contains(&month)
        && (1..=31).contains(&day)
        && hour < 24
        && minute < 60
        && second < 60;
    in_range.then(|| {
        let seconds = ((days_since_1970(year, month, day) * 24 + hour) * 60 + minute) * 60 + second;
        Tick(seconds * 1000 + millis)
    })
}

fn numbers(text: &str, separator: char) -> Option<[u64; 3]> {
    let numbers: Option<Vec<u64>> = text.split(separator).map(|number| number.parse().ok()).collect();
    numbers?.try_into().ok()
}

/// Days from 1970 to a Gregorian date.
///
/// Years start in March here: then the leap day is the last day of its year, and a linear formula gives the days before
/// a month.
const fn days_since_1970(year: u64, month: u64, day: u64) -> u64 {
    let from_march = (month + 9) % 12;
    let year = year - (month <= 2) as u64;
    let leap_days = year / 4 - year / 100 + year / 400;
    year * 365 + leap_days + (153 * from_march + 2) / 5 + day - 719_469
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_read_as_the_access_log_writes_them() {
        for (millis, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_400_123, "2000-02-29T00:00:00.123Z"),
            (1_795_190_399_999, "2026-11-20T15:59:59.999Z"),
            (4_107_542_400_000, "2100-03-01T00:00:00.000Z"),
        ] {
            assert_eq!(parse_timestamp(text), Some(Tick(millis)), "{text}");
        }
        for text in ["", "2026-11-20", "2026-13-20T15:59:59.999Z", "2026-11-20T15:59:59Z", "1-1-1T1:1:1.0Z"] {
            assert_eq!(parse_timestamp(text), None, "{text}");
        }
    }

    const TIMES: &str = r#""ts": "1970-01-01T00:00:01.000Z", "duration_ms": 1500.4"#;

    fn line(fields: &str) -> String {
        format!("{{{TIMES}, {fields}}}\n")
    }

    #[test]
    fn a_line_tells_how_long_an_engine_had_the_request_or_how_its_wait_ended() {
        let mut log = AccessLogRequests::default();
        let text = [
            line(r#""status": 200, "model": "m", "engine": "m#0", "waited_ms": 500, "client": "::1""#),
            line(r#""status": 200, "model": "m", "engine": "m#0", "key": "k", "tokens_out": 4"#),
            line(r#""status": 499, "model": "m", "engine": null, "waited_ms": 1500"#),
            line(r#""status": 503, "model": "m", "engine": null, "waited_ms": 1500"#),
            line(r#""status": 429, "model": "m", "engine": null, "waited_ms": null"#),
            line(r#""status": 200, "model": null"#),
        ];
        log.read(&text.concat()).unwrap();
        let ends: Vec<_> = log.requests.iter().map(|request| (request.end, request.client)).collect();
        assert_eq!(
            ends,
            [
                (RecordedEnd::Served(Millis(1000)), 1),
                (RecordedEnd::Served(Millis(1500)), 2),
                (RecordedEnd::Left, 0),
                (RecordedEnd::Refused, 0),
            ]
        );
        assert_eq!((log.without_demand, log.requests[1].tokens), (2, 8));
        assert_eq!((log.requests[0].at, log.requests[0].wait), (Tick(1000), Millis(500)));
    }

    #[test]
    fn a_mistake_is_named_with_its_line_but_a_cut_last_line_is_none() {
        let good = line(r#""status": 200"#);
        for (bad, named) in [
            ("{}", "line 2: not a line of the access log: missing field `ts`"),
            ("2026 GET /", "line 2: not a line of the access log: "),
            (r#"{"ts": "noon", "duration_ms": 1, "status": 200}"#, "line 2: ts is 'noon'"),
            (
                r#"{"ts": "1970-01-01T00:00:01.000Z", "duration_ms": -1, "status": 200}"#,
                "line 2: duration_ms is -1",
            ),
        ] {
            let error = AccessLogRequests::default().read(&format!("{good}{bad}\n")).unwrap_err();
            assert!(error.contains(named), "{error}");
        }
        AccessLogRequests::default().read(&format!("{good}{{\"ts\": \"19")).unwrap();
    }
}
