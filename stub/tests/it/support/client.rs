//! A client over plain sockets: it shows the bytes, and can do what no library would.

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

/// One answer, whole.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct StubTestResponse {
    pub(crate) status: u16,
    /// Names in lower case.
    pub(crate) headers: BTreeMap<String, String>,
    /// Chunks joined.
    pub(crate) body: Vec<u8>,
    /// It ended as its framing says, and not by the connection's end.
    pub(crate) complete: bool,
}

/// An exchange that is looked at while it runs.
pub(crate) struct StubTestExchange {
    stream: TcpStream,
    pub(crate) seen: Vec<u8>,
}

impl StubTestClient {
    pub(crate) const fn new(address: SocketAddr) -> Self {
        Self { address, headers: String::new() }
    }

    /// With another header line on every request, without its end.
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

    /// A stream of so many tokens, of which the head and the first event are there.
    pub(crate) fn stream(&self, tokens: u64) -> StubTestExchange {
        let asked = self.request("POST", "/v1/chat/completions", "Connection: close\r\n", &chat(tokens));
        let mut open = self.open(asked);
        open.until("data: ");
        open
    }

    /// Writes these bytes on a connection of their own and reads nothing yet.
    pub(crate) fn open(&self, bytes: impl AsRef<[u8]>) -> StubTestExchange {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut open = StubTestExchange { stream, seen: Vec::new() };
        open.try_write(bytes);
        open
    }
}

/// A chat request of so many tokens, to be streamed.
pub(crate) fn chat(tokens: u64) -> String {
    let messages = r#"[{"role":"user","content":"hello"}]"#;
    format!(r#"{{"model":"m","stream":true,"max_tokens":{tokens},"messages":{messages}}}"#)
}

impl StubTestExchange {
    /// False once the other side takes no more.
    pub(crate) fn try_write(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        self.stream.write_all(bytes.as_ref()).is_ok()
    }

    /// The client has sent all it will. The other side may have had enough of it before, and reset the connection.
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

    /// Reads to the connection's end.
    pub(crate) fn rest(mut self) -> StubTestResponse {
        while self.more() {}
        StubTestResponse::parse(&self.seen).unwrap_or_else(|| panic!("no answer: {:?}", self.text()))
    }

    /// Reads to the connection's end; what came.
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

    /// Something came, and not the end.
    pub(crate) fn more(&mut self) -> bool {
        match self.try_more() {
            Ok(more) => more,
            Err(error) if error.kind() == ErrorKind::ConnectionReset => false,
            Err(error) => panic!("{error} after {:?}", self.text()),
        }
    }

    /// The same, where a reset is not the same as an end.
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
