//! Prebuilt responses. Only their Date changes, once a second.

use crate::clock;

/// Builds a complete response with a placeholder for the date.
pub(super) fn ok(kind: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let mut bytes = format!(
        "HTTP/1.1 200 OK\r\ndate: -----------------------------\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n"
    )
    .into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

/// A response with a current date.
pub(super) struct DatedResponse {
    bytes: Vec<u8>,
    second: u64,
}

impl DatedResponse {
    pub(super) fn new(bytes: &[u8]) -> Self {
        Self { bytes: bytes.to_vec(), second: 0 }
    }

    pub(super) fn with_date(&mut self) -> &[u8] {
        /// Offset of the date after the status line of a 200 or a 404 and `date: `.
        const OK: usize = b"HTTP/1.1 200 OK\r\ndate: ".len();
        const NOT_FOUND: usize = b"HTTP/1.1 404 Not Found\r\ndate: ".len();
        let second = clock::wall_us() / 1_000_000;
        if second != self.second {
            self.second = second;
            let at = if self.bytes.get(9) == Some(&b'2') { OK } else { NOT_FOUND };
            let date = clock::http_date(second);
            if let Some(slot) = self.bytes.get_mut(at..at + date.len()) {
                slot.copy_from_slice(date.as_bytes());
            }
        }
        &self.bytes
    }
}
