//! A client that writes raw bytes.

use std::{net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
};

use super::MODEL;

/// One response, unparsed.
#[derive(Debug)]
pub(crate) struct RawHttpResponse {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl RawHttpResponse {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (field, value) = line.split_once(": ")?;
            field.eq_ignore_ascii_case(name).then_some(value)
        })
    }

    pub(crate) fn error(&self) -> serde_json::Value {
        serde_json::from_slice::<serde_json::Value>(&self.body).unwrap()["error"].take()
    }
}

pub(crate) struct RawHttpClient {
    pub(crate) stream: TcpStream,
    buffered: Vec<u8>,
}

impl RawHttpClient {
    pub(crate) async fn connect(address: SocketAddr) -> Self {
        Self::from_stream(TcpStream::connect(address).await.unwrap())
    }

    pub(crate) const fn from_stream(stream: TcpStream) -> Self {
        Self { stream, buffered: Vec::new() }
    }

    /// Connects from another address of this machine.
    pub(crate) async fn connect_from(local: &str, address: SocketAddr) -> Self {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(local.parse().unwrap()).unwrap();
        Self { stream: socket.connect(address).await.unwrap(), buffered: Vec::new() }
    }

    pub(crate) async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).await.unwrap();
    }

    /// Reads the next response: its head and, by `Content-Length`, its body.
    pub(crate) async fn read_response(&mut self) -> RawHttpResponse {
        let head = self.read_until(b"\r\n\r\n").await;
        let head = String::from_utf8(head).unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let mut answer = RawHttpResponse { status, head, body: Vec::new() };
        if let Some(length) = answer.header("content-length") {
            let length: usize = length.parse().unwrap();
            while self.buffered.len() < length {
                assert!(self.fill().await, "the body ended early");
            }
            answer.body = self.buffered.drain(..length).collect();
        }
        answer
    }

    /// Reads up to and including `mark`.
    pub(crate) async fn read_until(&mut self, mark: &[u8]) -> Vec<u8> {
        loop {
            if let Some(at) = self.buffered.windows(mark.len()).position(|w| w == mark) {
                return self.buffered.drain(..at + mark.len()).collect();
            }
            assert!(self.fill().await, "ended after {:?}", String::from_utf8_lossy(&self.buffered));
        }
    }

    /// Reads until the connection ends.
    pub(crate) async fn read_to_end(&mut self) -> Vec<u8> {
        while self.fill().await {}
        std::mem::take(&mut self.buffered)
    }

    async fn fill(&mut self) -> bool {
        let read = self.stream.read_buf(&mut self.buffered);
        let read = tokio::time::timeout(Duration::from_secs(20), read).await.expect("nothing came");
        read.is_ok_and(|n| n > 0)
    }
}

/// A request for a completion by [`MODEL`].
pub(crate) fn completion_request(stream: bool) -> String {
    let body = format!("{{\"model\":\"{MODEL}\",\"stream\":{stream}}}");
    raw_request("POST /v1/chat/completions", "", &body)
}

pub(crate) fn raw_request(line: &str, headers: &str, body: &str) -> String {
    let length = body.len();
    format!("{line} HTTP/1.1\r\nhost: x\r\n{headers}content-length: {length}\r\n\r\n{body}")
}
