//! A client that writes raw bytes.

use std::{net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
};

use super::MODEL;

/// One response as it came.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Answer {
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

pub(crate) struct Client {
    pub(crate) stream: TcpStream,
    rest: Vec<u8>,
}

impl Client {
    pub(crate) async fn connect(address: SocketAddr) -> Self {
        Self::of(TcpStream::connect(address).await.unwrap())
    }

    pub(crate) const fn of(stream: TcpStream) -> Self {
        Self { stream, rest: Vec::new() }
    }

    /// As one of another address of this machine.
    pub(crate) async fn connect_from(local: &str, address: SocketAddr) -> Self {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(local.parse().unwrap()).unwrap();
        Self { stream: socket.connect(address).await.unwrap(), rest: Vec::new() }
    }

    pub(crate) async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).await.unwrap();
    }

    /// The next response, its head and, by `Content-Length`, its body.
    pub(crate) async fn answer(&mut self) -> Answer {
        let head = self.until(b"\r\n\r\n").await;
        let head = String::from_utf8(head).unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let mut answer = Answer { status, head, body: Vec::new() };
        if let Some(length) = answer.header("content-length") {
            let length: usize = length.parse().unwrap();
            while self.rest.len() < length {
                assert!(self.fill().await, "the body ended early");
            }
            answer.body = self.rest.drain(..length).collect();
        }
        answer
    }

    /// What comes until `mark`, mark included.
    pub(crate) async fn until(&mut self, mark: &[u8]) -> Vec<u8> {
        loop {
            if let Some(at) = self.rest.windows(mark.len()).position(|w| w == mark) {
                return self.rest.drain(..at + mark.len()).collect();
            }
            assert!(self.fill().await, "ended after {:?}", String::from_utf8_lossy(&self.rest));
        }
    }

    /// Everything until the connection ends.
    pub(crate) async fn rest(&mut self) -> Vec<u8> {
        while self.fill().await {}
        std::mem::take(&mut self.rest)
    }

    async fn fill(&mut self) -> bool {
        let read = self.stream.read_buf(&mut self.rest);
        let read = tokio::time::timeout(Duration::from_secs(20), read).await.expect("nothing came");
        read.is_ok_and(|n| n > 0)
    }
}

/// Asks for a completion of [`MODEL`].
pub(crate) fn post(stream: bool) -> String {
    let body = format!("{{\"model\":\"{MODEL}\",\"stream\":{stream}}}");
    raw("POST /v1/chat/completions", "", &body)
}

pub(crate) fn raw(line: &str, headers: &str, body: &str) -> String {
    let length = body.len();
    format!("{line} HTTP/1.1\r\nhost: x\r\n{headers}content-length: {length}\r\n\r\n{body}")
}
