//! A client over plain sockets. It exposes the bytes, and can do what no library would.

use std::{
    collections::BTreeMap,
    io::{ErrorKind, Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpStream},
    time::Duration,
};

#[derive(Clone)]
pub(crate) struct StubTestClient {
    pub(crate) address: SocketAddr,
    headers: String,
}

/// One complete response.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct StubTestResponse {
    pub(crate) status: u16,
    /// Names are in lower case.
    pub(crate) headers: BTreeMap<String, String>,
    /// The body without chunked framing.
    pub(crate) body: Vec<u8>,
    /// Whether its framing marked the end, not the end of the connection.
    pub(crate) complete: bool,
}

/// A running exchange.
pub(crate) struct StubTestExchange {
    stream: TcpStream,
    pub(crate) seen: Vec<u8>,
}

impl StubTestClient {
    pub(crate) const fn new(address: SocketAddr) -> Self {
        Self { address, headers: String::new() }
    }

    /// Adds a header line, without its line end, to every request.
    pub(crate) fn with(mut self, header: &str) -> Self {
        self.headers.push_str(header);
        self.headers.push_str("\r\n");
        self
    }

    pub(crate) fn get(&self, path: &str) -> StubTestResponse {
        self.send("GET", path, "")
    }

    pub(crate) fn post(&self, path: &str, body: &str) -> StubTestResponse {
        self.send("POST", path, body)
    }

    pub(crate) fn send(&self, method: &str, path: &str, body: &str) -> StubTestResponse {
        self.open(self.request(method, path, "Connection: close\r\n", body)).rest()
    }

    pub(crate) fn request(&self, method: &str, path: &str, headers: &str, body: &str) -> String {
        let (ours, length) = (&self.headers, body.len());
        format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\n{ours}{headers}Content-Length: {length}\r\n\r\n{body}"
        )
    }

    /// Starts a stream of this many tokens, and waits for its head and first event.
    pub(crate) fn stream(&self, tokens: u64) -> StubTestExchange {
        let asked = self.request("POST", "/v1/chat/completions", "Connection: close\r\n", &chat(tokens));
        let mut open = self.open(asked);
        open.until("data: ");
        open
    }

    /// Writes these bytes on a new connection, without reading.
    pub(crate) fn open(&self, bytes: impl AsRef<[u8]>) -> StubTestExchange {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut open = StubTestExchange { stream, seen: Vec::new() };
        open.try_write(bytes);
        open
    }
}

/// A streaming chat request of this many tokens.
pub(crate) fn chat(tokens: u64) -> String {
    let messages = r#"[{"role":"user","content":"hello"}]"#;
    format!(r#"{{"model":"m","stream":true,"max_tokens":{tokens},"messages":{messages}}}"#)
}

impl StubTestExchange {
    /// Writes bytes; false once the peer accepts no more.
    pub(crate) fn try_write(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        self.stream.write_all(bytes.as_ref()).is_ok()
    }

    /// Closes the client's sending half. The peer may have reset the connection already.
    pub(crate) fn finish(&self) {
        match self.stream.shutdown(Shutdown::Write) {
            Err(error) if error.kind() == ErrorKind::NotConnected => {}
            finished => finished.unwrap(),
        }
    }

    pub(crate) fn until(&mut self, text: &str) {
        while !self.has(text) {
            assert!(self.more(), "ended before {text:?}: {}", self.text());
        }
    }

    /// Reads to the end of the connection and parses the response.
    pub(crate) fn rest(mut self) -> StubTestResponse {
        while self.more() {}
        StubTestResponse::parse(&self.seen).unwrap_or_else(|| panic!("no answer: {:?}", self.text()))
    }

    /// Reads to the end of the connection and returns the text.
    pub(crate) fn all(mut self) -> String {
        while self.more() {}
        self.text()
    }

    pub(crate) fn has(&self, text: &str) -> bool {
        self.seen.windows(text.len()).any(|window| window == text.as_bytes())
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.seen).into_owned()
    }

    /// Reads more bytes; false at the end or a reset.
    pub(crate) fn more(&mut self) -> bool {
        match self.try_more() {
            Ok(more) => more,
            Err(error) if error.kind() == ErrorKind::ConnectionReset => false,
            Err(error) => panic!("{error} after {:?}", self.text()),
        }
    }

    /// Reads more bytes; false at the end. A reset is an error.
    pub(crate) fn try_more(&mut self) -> std::io::Result<bool> {
        let mut buffer = [0; 16 << 10];
        loop {
            match self.stream.read(&mut buffer) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                read => {
                    let read = read?;
                    self.seen.extend_from_slice(buffer.get(..read).unwrap());
                    return Ok(read > 0);
                }
            }
        }
    }
}

impl StubTestResponse {
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let mut space = [httparse::EMPTY_HEADER; 64];
        let mut head = httparse::Response::new(&mut space);
        let httparse::Status::Complete(at) = head.parse(bytes).ok()? else { return None };
        let status = head.code?;
        let rest = bytes.get(at..)?;
        if (100..200).contains(&status) {
            return Self::parse(rest);
        }
        let headers: BTreeMap<String, String> = head
            .headers
            .iter()
            .map(|h| (h.name.to_ascii_lowercase(), String::from_utf8_lossy(h.value).into_owned()))
            .collect();
        let (body, complete) = if headers.get("transfer-encoding").is_some_and(|v| v == "chunked") {
            unchunk(rest)
        } else {
            let length = headers.get("content-length").map(|v| v.parse::<usize>().unwrap());
            (rest.to_vec(), length.is_none_or(|n| rest.len() == n))
        };
        Some(Self { status, headers, body, complete })
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.text()))
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", String::as_str)
    }
}

fn unchunk(mut rest: &[u8]) -> (Vec<u8>, bool) {
    let mut body = Vec::new();
    loop {
        let Ok(httparse::Status::Complete((at, size))) = httparse::parse_chunk_size(rest) else {
            return (body, false);
        };
        let size = usize::try_from(size).unwrap();
        if size == 0 {
            return (body, rest.get(at..) == Some(b"\r\n"));
        }
        let Some(data) = rest.get(at..at + size) else {
            body.extend_from_slice(rest.get(at..).unwrap_or_default());
            return (body, false);
        };
        body.extend_from_slice(data);
        rest = rest.get(at + size + 2..).unwrap_or_default();
    }
}
