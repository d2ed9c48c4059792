//! One connection, which a test writes and reads step by step.

use std::{
    io::{self, ErrorKind, Read as _, Write as _},
    net::{Shutdown, TcpStream},
};

use super::TestResponse;

/// A connection whose answer the test reads step by step.
#[derive(Debug)]
pub struct TestExchange {
    socket: TcpStream,
    /// The received bytes that no call has taken yet.
    pub received: Vec<u8>,
}

impl TestExchange {
    /// An exchange over a connection on which nothing was read yet.
    pub const fn new(socket: TcpStream) -> Self {
        Self { socket, received: Vec::new() }
    }

    pub const fn socket(&self) -> &TcpStream {
        &self.socket
    }

    pub fn write(&mut self, bytes: impl AsRef<[u8]>) {
        self.socket.write_all(bytes.as_ref()).unwrap();
    }

    /// Returns false once the peer accepts no more.
    pub fn try_write(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        self.socket.write_all(bytes.as_ref()).is_ok()
    }

    /// Closes the sending half. The peer may have reset the connection before.
    pub fn finish(&self) {
        match self.socket.shutdown(Shutdown::Write) {
            Err(error) if error.kind() == ErrorKind::NotConnected => {}
            finished => finished.unwrap(),
        }
    }

    /// Reads until the received bytes contain this text.
    pub fn until(&mut self, text: &str) {
        while !self.has(text) {
            assert!(self.more(), "ended before {text:?}: {}", self.text());
        }
    }

    /// Reads until more than this many bytes have arrived.
    pub fn until_more_than(&mut self, bytes: usize) {
        while self.received.len() <= bytes {
            assert!(self.more(), "ended after {bytes} bytes: {}", self.text());
        }
    }

    /// Reads to the end of the connection and parses the answer.
    pub fn rest(mut self) -> TestResponse {
        while self.more() {}
        TestResponse::parse(&self.received).unwrap_or_else(|| panic!("no answer: {:?}", self.text()))
    }

    /// Reads to the end of the connection and returns the text.
    pub fn all(mut self) -> String {
        while self.more() {}
        self.text()
    }

    /// Takes the first of the successive answers on this connection. Each must have a Content-Length.
    pub fn answer(&mut self) -> TestResponse {
        loop {
            if let Some((answer, length)) = self.first() {
                self.received.drain(..length);
                return answer;
            }
            assert!(self.more(), "ended before an answer: {}", self.text());
        }
    }

    /// Whether any byte arrives before the connection ends.
    pub fn is_answered(&mut self) -> bool {
        !self.received.is_empty() || self.more()
    }

    /// Whether the connection closes without a further byte.
    pub fn closes(mut self) -> bool {
        !self.more()
    }

    /// Asserts that the connection ends without a 200.
    pub fn ended_without_200(mut self) {
        while self.more() {}
        assert!(!self.has("HTTP/1.1 200"), "{}", self.text());
    }

    pub fn has(&self, text: &str) -> bool {
        self.received.windows(text.len()).any(|window| window == text.as_bytes())
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.received).into_owned()
    }

    /// Reads more bytes. Returns false at the end of the connection, which may be a reset.
    pub fn more(&mut self) -> bool {
        match self.try_more() {
            Ok(more) => more,
            Err(error) if error.kind() == ErrorKind::ConnectionReset => false,
            Err(error) => panic!("{error} after {:?}", self.text()),
        }
    }

    /// Reads more bytes. Returns false at the end of the connection; a reset is an error.
    pub fn try_more(&mut self) -> io::Result<bool> {
        let mut buffer = [0; 16 << 10];
        loop {
            match self.socket.read(&mut buffer) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                read => {
                    let read = read?;
                    self.received.extend_from_slice(&buffer[..read]);
                    return Ok(read > 0);
                }
            }
        }
    }

    /// The first complete answer with a Content-Length, and its size in bytes. No interim answer may be before it.
    fn first(&self) -> Option<(TestResponse, usize)> {
        let head = self.received.windows(4).position(|window| window == b"\r\n\r\n")? + 4;
        let length: usize =
            TestResponse::parse(self.received.get(..head)?)?.header("content-length").parse().ok()?;
        let bytes = self.received.get(..head + length)?;
        Some((TestResponse::parse(bytes)?, bytes.len()))
    }
}
