//! An open exchange that a test inspects while it runs.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{Shutdown, TcpStream},
};

use super::{TestClient, TestResponse};

pub(crate) struct OpenExchange {
    stream: TcpStream,
    /// The received bytes that no call has taken yet.
    pub(crate) received: Vec<u8>,
    pub(crate) ended: bool,
}

impl TestClient {
    /// Writes these bytes on a new connection and reads nothing yet.
    pub(crate) fn open(&self, bytes: impl AsRef<[u8]>) -> OpenExchange {
        let mut open = OpenExchange { stream: self.connect(), received: Vec::new(), ended: false };
        open.write(bytes);
        open
    }
}

impl OpenExchange {
    pub(crate) fn write(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).unwrap();
    }

    /// Returns false once the other side accepts no more.
    pub(crate) fn try_write(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        self.stream.write_all(bytes.as_ref()).is_ok()
    }

    /// Closes the write half. The other side may have reset the connection before.
    pub(crate) fn finish(&self) {
        match self.stream.shutdown(Shutdown::Write) {
            Err(error) if error.kind() == ErrorKind::NotConnected => {}
            finished => finished.unwrap(),
        }
    }

    /// Reads until the received bytes contain this text.
    pub(crate) fn until(&mut self, text: &str) {
        while !self.has(text) {
            assert!(self.more(), "ended before {text:?}: {}", self.text());
        }
    }

    /// Reads until more than this many bytes have arrived.
    pub(crate) fn until_more_than(&mut self, bytes: usize) {
        while self.received.len() <= bytes {
            assert!(self.more(), "ended after {bytes} bytes: {}", self.text());
        }
    }

    /// Reads to the end of the connection.
    pub(crate) fn rest(mut self) -> TestResponse {
        while self.more() {}
        TestResponse::parse(&self.received).unwrap_or_else(|| panic!("no answer: {:?}", self.text()))
    }

    /// Takes the first of the successive answers on this connection.
    pub(crate) fn answer(&mut self) -> TestResponse {
        loop {
            if let Some((answer, length)) = self.first() {
                self.received.drain(..length);
                return answer;
            }
            assert!(self.more(), "ended before an answer: {}", self.text());
        }
    }

    /// Whether any byte arrives before the connection ends.
    pub(crate) fn is_answered(&mut self) -> bool {
        !self.received.is_empty() || self.more()
    }

    /// Whether the connection closes without a further byte.
    pub(crate) fn closes(mut self) -> bool {
        !self.more()
    }

    /// Asserts that the connection ends without a 200.
    pub(crate) fn ended_without_200(mut self) {
        while self.more() {}
        assert!(!self.has("HTTP/1.1 200"), "{}", self.text());
    }

    pub(crate) fn has(&self, text: &str) -> bool {
        self.received.windows(text.len()).any(|window| window == text.as_bytes())
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.received).into_owned()
    }

    fn more(&mut self) -> bool {
        let mut buffer = [0; 16 << 10];
        match self.stream.read(&mut buffer) {
            Ok(0) => self.ended = true,
            Ok(n) => self.received.extend_from_slice(buffer.get(..n).unwrap()),
            Err(error) if error.kind() == ErrorKind::ConnectionReset => self.ended = true,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => panic!("{error} after {:?}", self.text()),
        }
        !self.ended
    }

    /// The first complete answer with a length, and its size in bytes.
    fn first(&self) -> Option<(TestResponse, usize)> {
        let head = self.received.windows(4).position(|window| window == b"\r\n\r\n")? + 4;
        let length: usize =
            TestResponse::parse(self.received.get(..head)?)?.header("content-length").parse().ok()?;
        let bytes = self.received.get(..head + length)?;
        Some((TestResponse::parse(bytes)?, bytes.len()))
    }
}
