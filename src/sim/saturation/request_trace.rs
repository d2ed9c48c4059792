//! Traces of one model's requests: when each one arrives, and how many tokens it reads and writes.
//!
//! A trace file is CSV or JSON Lines with three values for each request: the time in seconds, the tokens of the prompt
//! and the tokens of the answer. Times may begin anywhere, such as at the Unix epoch: the first request is at zero.

use serde::Deserialize;

use crate::units::Millis;

/// The requests for one model over time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestTrace {
    pub name: String,
    /// Ordered by their time.
    pub requests: Vec<TracedRequest>,
    /// How long the load lasts. Requests that still wait at that time are served after it.
    pub lasts: Millis,
}

/// One request of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TracedRequest {
    /// After the start of the trace.
    pub at: Millis,
    /// Tokens that the engine reads before it answers.
    pub prompt: u32,
    /// Tokens of the answer.
    pub output: u32,
}

/// Why a text is not a trace.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("line {line}: {problem}")]
    Line { line: usize, problem: String },
    #[error("no line has a request")]
    Empty,
}

/// One line of a trace before times are relative.
#[derive(Deserialize)]
struct TraceRow {
    time: f64,
    prompt_tokens: u32,
    output_tokens: u32,
}

/// Positions of the three values in a line of CSV.
struct CsvColumns {
    time: usize,
    prompt_tokens: usize,
    output_tokens: usize,
}

/// Every second of a trace is simulated, so its length is limited. Seconds.
const MAX_LENGTH: f64 = 31.0 * 86_400.0;
/// Longer prompts and answers are mistakes.
const MAX_TOKENS: u32 = 10_000_000;
const TIME: &str = "time";
const PROMPT_TOKENS: &str = "prompt_tokens";
const OUTPUT_TOKENS: &str = "output_tokens";

/// Reads a trace. Files that begin with `{` are JSON Lines, all others are CSV.
///
/// CSV may have a header line, which names the columns `time`, `prompt_tokens` and `output_tokens` in any order, beside
/// others. Without it, the columns are these, in this order.
///
/// # Errors
/// The first line that is not a request, or a text without any.
pub fn read_trace(name: &str, text: &str) -> Result<RequestTrace, Error> {
    let is_json = text.trim_start().starts_with('{');
    let mut columns = CsvColumns { time: 0, prompt_tokens: 1, output_tokens: 2 };
    let mut rows: Vec<(usize, TraceRow)> = Vec::new();
    let mut has_header = false;
    for (index, text) in text.lines().enumerate().filter(|(_, text)| !text.trim().is_empty()) {
        let line = index + 1;
        let problem = |problem| Error::Line { line, problem };
        if !is_json && !has_header && rows.is_empty() && is_header(text) {
            columns = read_header(text).map_err(problem)?;
            has_header = true;
            continue;
        }
        let row = if is_json { parse_json(text) } else { parse_csv(text, &columns) };
        rows.push((line, row.and_then(check).map_err(problem)?));
    }
    let first = rows.iter().map(|(_, row)| row.time).min_by(f64::total_cmp).ok_or(Error::Empty)?;
    if let Some((line, _)) = rows.iter().find(|(_, row)| row.time - first > MAX_LENGTH) {
        let problem = "the request is more than 31 days after the first".to_owned();
        return Err(Error::Line { line: *line, problem });
    }
    let mut requests: Vec<TracedRequest> = rows
        .into_iter()
        .map(|(_, TraceRow { time, prompt_tokens, output_tokens })| TracedRequest {
            at: Millis(((time - first) * 1000.0).round() as u64),
            prompt: prompt_tokens,
            output: output_tokens,
        })
        .collect();
    requests.sort_by_key(|request| request.at);
    let lasts = requests.last().map_or(Millis::ZERO, |last| last.at);
    Ok(RequestTrace { name: name.to_owned(), requests, lasts })
}

fn is_header(text: &str) -> bool {
    text.split(',').next().is_some_and(|first| first.trim().parse::<f64>().is_err())
}

fn read_header(text: &str) -> Result<CsvColumns, String> {
    let position = |wanted: &str| {
        let mut names = text.split(',').map(|name| name.trim().trim_matches('"'));
        names.position(|name| name.eq_ignore_ascii_case(wanted)).ok_or_else(|| {
            format!("the header names no column '{wanted}': name {TIME}, {PROMPT_TOKENS} and {OUTPUT_TOKENS}")
        })
    };
    Ok(CsvColumns {
        time: position(TIME)?,
        prompt_tokens: position(PROMPT_TOKENS)?,
        output_tokens: position(OUTPUT_TOKENS)?,
    })
}

fn parse_csv(text: &str, columns: &CsvColumns) -> Result<TraceRow, String> {
    let fields: Vec<&str> = text.split(',').map(str::trim).collect();
    Ok(TraceRow {
        time: parse_field(&fields, columns.time, TIME)?,
        prompt_tokens: parse_field(&fields, columns.prompt_tokens, PROMPT_TOKENS)?,
        output_tokens: parse_field(&fields, columns.output_tokens, OUTPUT_TOKENS)?,
    })
}

fn parse_field<T: std::str::FromStr>(fields: &[&str], column: usize, name: &str) -> Result<T, String> {
    let field = fields.get(column).ok_or_else(|| format!("the column {name} is missing"))?;
    field.parse().map_err(|_| format!("{name} is '{field}', which is not a number in range"))
}

fn parse_json(text: &str) -> Result<TraceRow, String> {
    serde_json::from_str(text).map_err(|error| format!("not a request: {error}"))
}

fn check(row: TraceRow) -> Result<TraceRow, String> {
    if !(0.0..=f64::from(u32::MAX) * 1000.0).contains(&row.time) {
        return Err(format!("{TIME} is {}: it must be a number of seconds from 0", row.time));
    }
    for (name, tokens) in [(PROMPT_TOKENS, row.prompt_tokens), (OUTPUT_TOKENS, row.output_tokens)] {
        if !(1..=MAX_TOKENS).contains(&tokens) {
            return Err(format!("{name} is {tokens}: it must be from 1 to {MAX_TOKENS}"));
        }
    }
    Ok(row)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(at: u64, prompt: u32, output: u32) -> TracedRequest {
        TracedRequest { at: Millis(at), prompt, output }
    }

    #[test]
    fn csv_and_json_lines_are_read_in_order_of_time_from_the_first_request() {
        let expected = vec![request(0, 800, 20), request(250, 10, 1), request(60_000, 7, 300)];
        for text in [
            "100,800,20\n160,7,300\n100.25,10,1\n",
            "time,prompt_tokens,output_tokens\n100,800,20\n\n100.25,10,1\n160,7,300",
            "model,Output_Tokens,time,prompt_tokens\r\na,20,100,800\r\na,1,100.25,10\r\na,300,160,7\r\n",
            "{\"time\": 100, \"prompt_tokens\": 800, \"output_tokens\": 20}\n\
             {\"time\": 100.25, \"prompt_tokens\": 10, \"output_tokens\": 1, \"user\": \"a\"}\n\
             {\"time\": 160, \"prompt_tokens\": 7, \"output_tokens\": 300}\n",
        ] {
            let trace = read_trace("t", text).unwrap();
            assert_eq!(trace.requests, expected, "{text}");
            assert_eq!(trace.lasts, Millis::secs(60));
        }
    }

    #[test]
    fn a_mistake_is_named_with_its_line() {
        for (text, line, named) in [
            ("1,2,3\n2,3\n", 2, "output_tokens is missing"),
            ("1,2,3\n\n2,3,x\n", 3, "output_tokens is 'x'"),
            ("1,2,3\nnan,3,4\n", 2, "time is NaN"),
            ("1,-2,3\n", 1, "prompt_tokens is '-2'"),
            ("-1,2,3\n", 1, "time is -1"),
            ("1,2,0\n", 1, "output_tokens is 0: it must be from 1"),
            ("at,prompt_tokens,output_tokens\n1,2,3\n", 1, "no column 'time'"),
            ("1,2,3\n99999999,2,3\n", 2, "more than 31 days"),
            ("{\"time\": 1}\n", 1, "prompt_tokens"),
        ] {
            let error = read_trace("t", text).unwrap_err();
            let Error::Line { line: found, problem } = &error else { panic!("{text}: {error}") };
            assert_eq!(*found, line, "{text}: {error}");
            assert!(problem.contains(named), "{text}: {error}");
        }
        assert_eq!(read_trace("t", "time,prompt_tokens,output_tokens\n"), Err(Error::Empty));
        assert_eq!(read_trace("t", ""), Err(Error::Empty));
    }
}
