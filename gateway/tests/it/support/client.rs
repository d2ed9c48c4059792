//! A client over plain sockets: it shows the bytes, and can send what no library would.

use std::{
    collections::BTreeMap,
    io::{ErrorKind, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

#[derive(Clone, Copy)]
pub(crate) struct TestClient {
    address: SocketAddr,
}

/// One complete answer.
#[derive(Debug)]
pub(crate) struct TestResponse {
    pub(crate) status: u16,
    /// Names in lower case.
    pub(crate) headers: BTreeMap<String, String>,
    /// The body with its chunks joined.
    pub(crate) body: Vec<u8>,
    /// Whether the answer ended by its framing and not with the connection.
    pub(crate) complete: bool,
}

impl TestClient {
    pub(crate) const fn new(address: SocketAddr) -> Self {
        Self { address }
    }

    pub(crate) fn try_connect(&self) -> std::io::Result<TcpStream> {
        TcpStream::connect(self.address)
    }

    pub(crate) fn connect(&self) -> TcpStream {
        let stream = self.try_connect().unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        stream
    }

    pub(crate) fn get(&self, path: &str) -> TestResponse {
        self.raw(&format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"))
    }

    pub(crate) fn post(&self, path: &str, body: &str) -> TestResponse {
        self.raw(&request(path, "", body))
    }

    /// Posts with more header lines, each ended by CRLF.
    pub(crate) fn post_with(&self, path: &str, headers: &str, body: &str) -> TestResponse {
        self.raw(&request(path, headers, body))
    }

    pub(crate) fn chat(&self, model: &str, stream: bool, tokens: u32) -> TestResponse {
        self.post("/v1/chat/completions", &chat_body(model, stream, tokens))
    }

    /// Sends these bytes unchanged and reads until the connection ends.
    pub(crate) fn raw(&self, request: &str) -> TestResponse {
        let mut stream = self.connect();
        // A server may refuse and close before the client has written everything.
        let written = stream.write_all(request.as_bytes());
        let mut bytes = Vec::new();
        let mut buffer = [0; 16 << 10];
        loop {
            match stream.read(&mut buffer) {
                Ok(0) => break,
                Ok(n) => bytes.extend_from_slice(buffer.get(..n).unwrap()),
                Err(e) if e.kind() == ErrorKind::ConnectionReset => break,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => panic!("{e} after {:?}", String::from_utf8_lossy(&bytes)),
            }
        }
        TestResponse::parse(&bytes)
            .unwrap_or_else(|| panic!("no answer: {written:?} {:?}", String::from_utf8_lossy(&bytes)))
    }
}

pub(crate) fn chat_body(model: &str, stream: bool, tokens: u32) -> String {
    serde_json::json!({
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": tokens,
        "stream": stream,
        "model": model,
    })
    .to_string()
}

pub(crate) fn request(path: &str, headers: &str, body: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n\
         {headers}Content-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

impl TestResponse {
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let mut space = [httparse::EMPTY_HEADER; 64];
        let mut head = httparse::Response::new(&mut space);
        let httparse::Status::Complete(at) = head.parse(bytes).ok()? else { return None };
        let status = head.code?;
        if status == 100 {
            return Self::parse(bytes.get(at..)?);
        }
        let headers: BTreeMap<String, String> = head
            .headers
            .iter()
            .map(|h| (h.name.to_ascii_lowercase(), String::from_utf8_lossy(h.value).into_owned()))
            .collect();
        let rest = bytes.get(at..)?;
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

    /// The `data:` of every SSE event.
    pub(crate) fn events(&self) -> Vec<String> {
        self.text().lines().filter_map(|l| l.strip_prefix("data: ").map(str::to_owned)).collect()
    }

    /// Whether the stream is complete: `[DONE]` last, no error event, valid framing.
    pub(crate) fn is_whole_stream(&self) -> bool {
        let events = self.events();
        self.status == 200
            && self.complete
            && events.last().is_some_and(|e| e == "[DONE]")
            && !events.iter().any(|e| e.contains("\"error\""))
    }
}

fn unchunk(mut rest: &[u8]) -> (Vec<u8>, bool) {
    let mut body = Vec::new();
    loop {
        let Ok(httparse::Status::Complete((at, size))) = httparse::parse_chunk_size(rest) else {
            return (body, false);
        };
        let size = usize::try_from(size).unwrap();
        let Some(data) = rest.get(at..at + size) else {
            body.extend_from_slice(rest.get(at..).unwrap_or_default());
            return (body, false);
        };
        if size == 0 {
            return (body, true);
        }
        body.extend_from_slice(data);
        rest = rest.get(at + size + 2..).unwrap_or_default();
    }
}
