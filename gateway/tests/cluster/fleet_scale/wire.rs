//! Just enough of HTTP/1.1 to serve thousands of stubs in one process: a call costs little beside what is measured.

use std::time::Duration;

use rouse_net::stub_api::GATED_HEADER;
use rouse_testing::scripted_engine::{head_length, request_length};
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::sleep,
};

/// Time for each token of an answer.
pub(super) const TOKEN_TIME: Duration = Duration::from_millis(100);

/// One accepted connection.
pub(super) struct StubConnection {
    stream: TcpStream,
    received: Vec<u8>,
}

/// One request with its body.
pub(super) struct StubRequest {
    pub(super) method: String,
    pub(super) path: String,
    pub(super) query: String,
    pub(super) body: Vec<u8>,
    /// The client closes the connection after the response.
    pub(super) closes: bool,
}

impl StubRequest {
    fn parse(whole: &[u8]) -> Option<Self> {
        let (head, body) = whole.split_at(head_length(whole)?);
        let head = String::from_utf8_lossy(head);
        let mut words = head.lines().next()?.split(' ');
        let (method, target) = (words.next()?.to_owned(), words.next()?);
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let closes = head.lines().any(|line| line.eq_ignore_ascii_case("connection: close"));
        Some(Self { method, path: path.to_owned(), query: query.to_owned(), body: body.to_vec(), closes })
    }
}

impl StubConnection {
    pub(super) fn new(stream: TcpStream) -> Self {
        Self { stream, received: Vec::with_capacity(1024) }
    }

    /// Reads the next request. `None` when the client has closed the connection.
    pub(super) async fn next(&mut self) -> Option<StubRequest> {
        let length = loop {
            if let Some(length) = request_length(&self.received) {
                break length;
            }
            if self.stream.read_buf(&mut self.received).await.ok()? == 0 {
                return None;
            }
        };
        let whole: Vec<u8> = self.received.drain(..length).collect();
        StubRequest::parse(&whole)
    }

    /// Sends a JSON response. `None`: the client is gone.
    pub(super) async fn reply(&mut self, status: u16, body: &Value) -> Option<()> {
        self.reply_marked(status, "", body).await
    }

    /// Sends a text. `None`: the client is gone.
    pub(super) async fn reply_text(&mut self, body: &str) -> Option<()> {
        let head = "HTTP/1.1 200 OK\r\nContent-Type: text/plain";
        self.send(&format!("{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len())).await
    }

    /// Sends the 503 of a closed gate.
    pub(super) async fn reply_gated(&mut self) -> Option<()> {
        let mark = format!("{GATED_HEADER}: 1\r\n");
        self.reply_marked(503, &mark, &serde_json::json!({"error": "the engine's gate is closed"})).await
    }

    async fn reply_marked(&mut self, status: u16, mark: &str, body: &Value) -> Option<()> {
        let body = body.to_string();
        let text = format!(
            "HTTP/1.1 {status} Status\r\n{mark}Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        self.send(&text).await
    }

    /// Sends a stream of this many tokens, one every [`TOKEN_TIME`].
    pub(super) async fn stream_tokens(&mut self, tokens: u64) -> Option<()> {
        self.send("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            .await?;
        for token in 1..=tokens {
            sleep(TOKEN_TIME).await;
            let finish = if token == tokens { "\"stop\"" } else { "null" };
            self.send_event(&format!(
                "{{\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"choices\":[{{\"index\":0,\
                 \"delta\":{{\"content\":\"x\"}},\"finish_reason\":{finish}}}]}}"
            ))
            .await?;
        }
        self.send_event("[DONE]").await?;
        self.send("0\r\n\r\n").await
    }

    async fn send_event(&mut self, data: &str) -> Option<()> {
        // The chunk holds "data: " before the text and an empty line behind it.
        self.send(&format!("{:x}\r\ndata: {data}\n\n\r\n", data.len() + 8)).await
    }

    async fn send(&mut self, text: &str) -> Option<()> {
        self.stream.write_all(text.as_bytes()).await.ok()
    }
}
