//! Reads a response of unlimited duration line by line.

use bytes::{Bytes, BytesMut};

use super::{HttpClientError, ResponseStream};

/// The lines of a response. Dropping the stream closes the connection.
#[derive(Debug)]
pub struct LineStream {
    response: ResponseStream,
    /// Bytes received and not returned yet.
    buffer: BytesMut,
    /// Length of the front part of `buffer` that is known to have no line end.
    scanned: usize,
    max_line_bytes: usize,
}

impl LineStream {
    pub(super) fn new(response: ResponseStream, max_line_bytes: usize) -> Self {
        Self { response, buffer: BytesMut::new(), scanned: 0, max_line_bytes }
    }

    /// The response status. With a status other than 200 the lines are those of an error.
    #[must_use]
    pub const fn status(&self) -> u16 {
        self.response.status().as_u16()
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
                return Err(HttpClientError::LineTooLong(self.max_line_bytes));
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
