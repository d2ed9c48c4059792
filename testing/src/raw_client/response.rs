//! One complete answer, parsed strictly enough to show how it ended.

use std::collections::BTreeMap;

use serde_json::Value;

/// One answer, after its interim answers.
#[derive(Debug, PartialEq, Eq)]
pub struct TestResponse {
    pub status: u16,
    /// The statuses of the interim answers before it.
    pub interim: Vec<u16>,
    /// Names in lower case.
    pub headers: BTreeMap<String, String>,
    /// The body with its chunks joined.
    pub body: Vec<u8>,
    /// Whether the answer ended by its framing. A body that only the end of the connection can end counts as complete.
    pub complete: bool,
    /// Everything behind the last chunk: the trailer lines and the final CRLF. Empty without chunks.
    pub trailers: String,
}

impl TestResponse {
    /// Parses an answer and everything behind it. `None` without a complete and valid head.
    pub fn parse(mut bytes: &[u8]) -> Option<Self> {
        let mut interim = Vec::new();
        loop {
            let mut space = [httparse::EMPTY_HEADER; 64];
            let mut head = httparse::Response::new(&mut space);
            let httparse::Status::Complete(at) = head.parse(bytes).ok()? else { return None };
            let status = head.code?;
            bytes = bytes.get(at..)?;
            if (100..200).contains(&status) {
                interim.push(status);
                continue;
            }
            let headers: BTreeMap<String, String> = head
                .headers
                .iter()
                .map(|h| (h.name.to_ascii_lowercase(), String::from_utf8_lossy(h.value).into_owned()))
                .collect();
            let (body, complete, trailers) =
                if headers.get("transfer-encoding").is_some_and(|value| value == "chunked") {
                    unchunk(bytes)
                } else {
                    let length = headers.get("content-length").map(|value| value.parse::<usize>().unwrap());
                    (bytes.to_vec(), length.is_none_or(|length| bytes.len() == length), String::new())
                };
            return Some(Self { status, interim, headers, body, complete, trailers });
        }
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// The header with this name in lower case; empty without one.
    pub fn header(&self, name: &str) -> &str {
        self.find_header(name).unwrap_or_default()
    }

    /// The header with this name in lower case.
    pub fn find_header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    /// Returns the `data:` of every SSE event. A blank line separates two events; the last one may lack it, since a
    /// stream may have broken off. Only such a stream may end within a character.
    pub fn events(&self) -> Vec<String> {
        let text = if self.complete { String::from_utf8(self.body.clone()).unwrap() } else { self.text() };
        let text = text.replace("\r\n", "\n");
        let blocks = text.split("\n\n").map(|block| {
            let lines = block.lines().filter_map(|line| line.strip_prefix("data: "));
            lines.collect::<Vec<_>>().join("\n")
        });
        blocks.filter(|data| !data.is_empty()).collect()
    }

    /// Whether the stream is complete: `[DONE]` last, no error event, valid framing.
    pub fn is_whole_stream(&self) -> bool {
        let events = self.events();
        self.status == 200
            && self.complete
            && events.last().is_some_and(|event| event == "[DONE]")
            && !events.iter().any(|event| event.contains("\"error\""))
    }

    /// Whether the engine or the gateway gave the stream up: an error event last, no `[DONE]`, an unclean end.
    pub fn broke_off_with(&self, code: &str) -> bool {
        let events = self.events();
        let last = events.last().and_then(|event| serde_json::from_str::<Value>(event).ok());
        self.status == 200
            && !self.complete
            && last.is_some_and(|event| event["error"]["code"] == code)
            && !events.iter().any(|event| event == "[DONE]")
    }
}

/// Returns the joined chunks, whether the last one and its end are there, and everything behind it.
fn unchunk(mut rest: &[u8]) -> (Vec<u8>, bool, String) {
    let mut body = Vec::new();
    loop {
        let Ok(httparse::Status::Complete((at, size))) = httparse::parse_chunk_size(rest) else {
            return (body, false, String::new());
        };
        let size = usize::try_from(size).unwrap();
        let behind = rest.get(at..).unwrap_or_default();
        if size == 0 {
            // Either nothing but the end, or trailers, which end with the first blank line.
            let trailers_end = behind.windows(4).position(|window| window == b"\r\n\r\n");
            let complete = behind == b"\r\n"
                || !behind.starts_with(b"\r\n") && trailers_end.is_some_and(|at| at + 4 == behind.len());
            return (body, complete, String::from_utf8_lossy(behind).into_owned());
        }
        let Some(data) = behind.get(..size) else {
            body.extend_from_slice(behind);
            return (body, false, String::new());
        };
        body.extend_from_slice(data);
        rest = behind.get(size + 2..).unwrap_or_default();
    }
}
