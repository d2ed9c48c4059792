//! A client whose requests may carry headers of its own, such as a token, and may be refused before they are written.

use std::{net::SocketAddr, time::Duration};

use rouse_testing::raw_client::{TestClient, TestExchange, TestResponse};

const READ_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Clone)]
pub(crate) struct StubTestClient {
    pub(crate) address: SocketAddr,
    headers: String,
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

    pub(crate) fn get(&self, path: &str) -> TestResponse {
        self.send("GET", path, "")
    }

    pub(crate) fn post(&self, path: &str, body: &str) -> TestResponse {
        self.send("POST", path, body)
    }

    pub(crate) fn send(&self, method: &str, path: &str, body: &str) -> TestResponse {
        self.open(self.request(method, path, "Connection: close\r\n", body)).rest()
    }

    pub(crate) fn request(&self, method: &str, path: &str, headers: &str, body: &str) -> String {
        let (ours, length) = (&self.headers, body.len());
        format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\n{ours}{headers}Content-Length: {length}\r\n\r\n{body}"
        )
    }

    /// Starts a stream of this many tokens, and waits for its head and first event.
    pub(crate) fn stream(&self, tokens: u64) -> TestExchange {
        let asked = self.request("POST", "/v1/chat/completions", "Connection: close\r\n", &chat(tokens));
        let mut open = self.open(asked);
        open.until("data: ");
        open
    }

    /// Writes these bytes on a new connection, as far as the peer accepts them, without reading.
    pub(crate) fn open(&self, bytes: impl AsRef<[u8]>) -> TestExchange {
        let client = TestClient::new(self.address).with_read_timeout(READ_TIMEOUT);
        let mut open = TestExchange::new(client.connect());
        open.try_write(bytes);
        open
    }
}

/// A streaming chat request of this many tokens.
pub(crate) fn chat(tokens: u64) -> String {
    let messages = r#"[{"role":"user","content":"hello"}]"#;
    format!(r#"{{"model":"m","stream":true,"max_tokens":{tokens},"messages":{messages}}}"#)
}
