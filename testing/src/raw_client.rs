//! A raw HTTP/1.1 client over blocking sockets. It shows the bytes, and can send what no library would.

use std::{
    io,
    net::{SocketAddr, TcpStream},
    time::Duration,
};

mod exchange;
mod response;

pub use exchange::TestExchange;
pub use response::TestResponse;

/// Longer than any answer takes.
const READ_TIMEOUT: Duration = Duration::from_secs(120);

const CHAT_PATH: &str = "/v1/chat/completions";

/// Opens a connection for each request.
#[derive(Clone, Copy, Debug)]
pub struct TestClient {
    pub address: SocketAddr,
    read_timeout: Duration,
}

impl TestClient {
    pub const fn new(address: SocketAddr) -> Self {
        Self { address, read_timeout: READ_TIMEOUT }
    }

    /// Sets how long each read may wait for bytes.
    pub const fn with_read_timeout(self, read_timeout: Duration) -> Self {
        Self { read_timeout, ..self }
    }

    pub fn try_connect(&self) -> io::Result<TcpStream> {
        TcpStream::connect(self.address)
    }

    pub fn connect(&self) -> TcpStream {
        let socket = self.try_connect().unwrap();
        socket.set_nodelay(true).unwrap();
        socket.set_read_timeout(Some(self.read_timeout)).unwrap();
        socket
    }

    pub fn get(&self, path: &str) -> TestResponse {
        self.raw(&format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"))
    }

    pub fn post(&self, path: &str, body: &str) -> TestResponse {
        self.raw(&request(path, "", body))
    }

    /// Posts with more header lines, each ended by CRLF.
    pub fn post_with(&self, path: &str, headers: &str, body: &str) -> TestResponse {
        self.raw(&request(path, headers, body))
    }

    pub fn chat(&self, model: &str, stream: bool, tokens: u32) -> TestResponse {
        self.post(CHAT_PATH, &chat_body(model, stream, tokens))
    }

    /// Sends these bytes unchanged and reads until the connection ends.
    pub fn raw(&self, request: &str) -> TestResponse {
        let mut exchange = TestExchange::new(self.connect());
        // A server may refuse and close before the client has written everything.
        exchange.try_write(request);
        exchange.rest()
    }

    /// Writes these bytes on a new connection and reads nothing yet.
    pub fn open(&self, bytes: impl AsRef<[u8]>) -> TestExchange {
        let mut exchange = TestExchange::new(self.connect());
        exchange.write(bytes);
        exchange
    }

    /// Sends a chat request and reads nothing yet.
    pub fn open_chat(&self, model: &str, stream: bool, tokens: u32) -> TestExchange {
        self.open(request(CHAT_PATH, "", &chat_body(model, stream, tokens)))
    }

    /// Opens a chat stream and reads up to its first event.
    pub fn open_stream(&self, model: &str, tokens: u32) -> TestExchange {
        let mut exchange = self.open_chat(model, true, tokens);
        exchange.until("data: ");
        exchange
    }
}

/// The body of a chat request.
pub fn chat_body(model: &str, stream: bool, tokens: u32) -> String {
    serde_json::json!({
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": tokens,
        "stream": stream,
        "model": model,
    })
    .to_string()
}

/// A POST of JSON after which the server closes the connection.
pub fn request(path: &str, headers: &str, body: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n\
         {headers}Content-Length: {}\r\n\r\n{body}",
        body.len()
    )
}
