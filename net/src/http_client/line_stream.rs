//! Reads a response of unlimited duration line by line.

use std::{net::SocketAddr, time::Duration};

use bytes::{Bytes, BytesMut};
use http::Request;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;

use super::{HttpClientError, exchange::OneShotResponse};

/// TCP keepalive: idle time, interval and retries. A stream may be silent for hours, and a node that lost power stays
/// silent too. The kernel probes the peer and closes the connection when all probes go unanswered.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_RETRIES: u32 = 3;

/// The lines of a response. Dropping the stream closes the connection.
#[derive(Debug)]
pub struct LineStream {
    response: OneShotResponse,
    /// Bytes received and not returned yet.
    buffer: BytesMut,
    /// Length of the front part of `buffer` that is known to have no line end.
    scanned: usize,
    max_line_bytes: usize,
}

impl LineStream {
    pub(super) async fn open(
        address: SocketAddr,
        request: Request<Bytes>,
        longest: usize,
    ) -> Result<Self, HttpClientError> {
        let stream = TcpStream::connect(address).await.map_err(|_| HttpClientError::Unreachable)?;
        let keepalive = TcpKeepalive::new()
            .with_time(KEEPALIVE_IDLE)
            .with_interval(KEEPALIVE_INTERVAL)
            .with_retries(KEEPALIVE_RETRIES);
        SockRef::from(&stream).set_tcp_keepalive(&keepalive).map_err(|_| HttpClientError::Broken)?;
        let response = OneShotResponse::open(Box::new(stream), request).await?;
        Ok(Self { response, buffer: BytesMut::new(), scanned: 0, max_line_bytes: longest })
    }

    /// The response status. With a status other than 200 the lines are those of an error.
    #[must_use]
    pub const fn status(&self) -> u16 {
        self.response.status
    }

    /// Returns the next line without its line end; `None` at the end of the response. Dropping the future before it
    /// completes loses nothing.
    ///
    /// # Errors
    /// The connection broke, or a line is too long.
    pub async fn next(&mut self) -> Result<Option<Bytes>, HttpClientError> {
        loop {
            let line = self.take_line();
            if line.as_ref().map_or(self.buffer.len(), Bytes::len) > self.max_line_bytes {
                return Err(HttpClientError::Broken);
            }
            if line.is_some() {
                return Ok(line);
            }
            match self.response.chunk().await? {
                Some(piece) => self.buffer.extend_from_slice(&piece),
                None => return Ok(None),
            }
        }
    }

    fn take_line(&mut self) -> Option<Bytes> {
        let rest = self.buffer.get(self.scanned..).unwrap_or_default();
        let Some(end) = memchr::memchr(b'\n', rest) else {
            self.scanned = self.buffer.len();
            return None;
        };
        let mut line = self.buffer.split_to(self.scanned + end + 1);
        line.truncate(line.len() - 1);
        self.scanned = 0;
        Some(line.freeze())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use rouse_testing::scripted_engine::scripted;
    use tokio::net::TcpListener;

    use super::super::HttpClient;
    use super::*;

    const LONG: Duration = Duration::from_secs(30);
    const HEAD: &str = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";

    /// Lines of a response whose bytes arrive in these pieces, with a limit of ten bytes per line.
    async fn lines(pieces: &'static [&'static str]) -> LineStream {
        let address = scripted(move |mut stream, _| {
            for piece in pieces {
                stream.write_all(piece.as_bytes()).unwrap();
            }
        });
        HttpClient::new(address, None).stream_lines("/", None, LONG, 10).await.unwrap()
    }

    #[tokio::test]
    async fn lines_come_whole_whatever_pieces_they_were_sent_in_and_one_without_an_end_does_not() {
        let mut lines =
            lines(&[HEAD, "3\r\none\r\n", "7\r\n\ntwo\n\nt\r\n", "6\r\nen int\r\n", "0\r\n\r\n"]).await;
        assert_eq!(lines.status(), 200);
        for expected in ["one", "two", ""] {
            assert_eq!(lines.next().await.unwrap().unwrap(), expected);
        }
        assert_eq!(lines.next().await, Ok(None));
    }

    #[tokio::test]
    async fn a_line_that_is_too_long_is_not_kept() {
        let mut ended = lines(&[HEAD, "b\r\n0123456789\n\r\n", "c\r\n0123456789x\n\r\n"]).await;
        assert_eq!(ended.next().await.unwrap().unwrap(), "0123456789");
        assert_eq!(ended.next().await, Err(HttpClientError::Broken));
        let mut endless = lines(&[HEAD, "b\r\n0123456789x\r\n"]).await;
        assert_eq!(endless.next().await, Err(HttpClientError::Broken));
    }

    #[tokio::test]
    async fn an_answer_that_is_cut_off_is_broken_and_one_that_does_not_begin_is_late() {
        let mut cut = lines(&[HEAD, "4\r\none\n\r\n", "3\r\nt"]).await;
        assert_eq!(cut.next().await.unwrap().unwrap(), "one");
        assert_eq!(cut.next().await, Err(HttpClientError::Broken));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let silent = HttpClient::new(listener.local_addr().unwrap(), None);
        let late = silent.stream_lines("/", None, Duration::from_millis(20), 10).await;
        assert_eq!(late.err(), Some(HttpClientError::Timeout));
    }
}
