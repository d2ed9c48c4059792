//! The last bytes of a stream of events: enough to write one more behind them, and to see that none is missing.

/// Longer than the last event of any API, as engines write it.
const KEPT: usize = 64;

/// What a stream ends with so far. A frame costs a copy of its last bytes, however long it is.
#[derive(Debug)]
pub(super) struct Tail {
    bytes: [u8; KEPT],
    /// So many of them, at the end.
    length: usize,
}

impl Default for Tail {
    fn default() -> Self {
        Self { bytes: [0; KEPT], length: 0 }
    }
}

impl Tail {
    #[inline]
    pub(super) fn feed(&mut self, frame: &[u8]) {
        if let Some(last) = frame.last_chunk() {
            self.bytes = *last;
        } else {
            self.bytes.copy_within(frame.len().., 0);
            self.bytes[KEPT - frame.len()..].copy_from_slice(frame);
        }
        self.length = (self.length + frame.len()).min(KEPT);
    }

    /// There was something.
    pub(super) const fn began(&self) -> bool {
        self.length > 0
    }

    /// An event may begin here.
    pub(super) fn at_border(&self) -> bool {
        let kept = self.kept();
        kept.is_empty() || [&b"\n\n"[..], b"\r\r", b"\n\r\n"].iter().any(|end| kept.ends_with(end))
    }

    /// The last event is one that ends a stream.
    pub(super) fn is_over(&self) -> bool {
        let kept = self.kept().trim_ascii_end();
        if kept.ends_with(b"data: [DONE]") || kept.ends_with(b"data:[DONE]") {
            return true;
        }
        let inner = kept.strip_suffix(b"}").unwrap_or_default().trim_ascii_end();
        inner.ends_with(b"\"message_stop\"")
    }

    fn kept(&self) -> &[u8] {
        &self.bytes[KEPT - self.length..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(stream: &str, size: usize) -> Tail {
        let mut tail = Tail::default();
        stream.as_bytes().chunks(size).for_each(|frame| tail.feed(frame));
        tail
    }

    #[test]
    fn a_stream_stands_where_it_stands_however_it_was_cut() {
        let long = format!("data: {{\"x\":\"{}\"}}\n\n", "y".repeat(300));
        let stop = "event: message_stop\ndata: {\"type\": \"message_stop\" }\n\n";
        for (stream, border, over) in [
            ("", true, false),
            ("data: {}", false, false),
            ("data: {}\n", false, false),
            ("data: {}\n\n", true, false),
            ("data: {}\r\n\r\n", true, false),
            ("data: {}\r\n", false, false),
            (&long, true, false),
            (&long.replace("yy", "[DONE]"), true, false),
            ("data: {}\n\ndata: [DONE]\n\n", true, true),
            ("data: [DONE]\r\n\r\n", true, true),
            ("data: {\"x\":\"data: [DONE]\"}\n\n", true, false),
            (stop, true, true),
        ] {
            for size in [1, 2, 5, 63, 64, 65, 1000] {
                let tail = after(stream, size);
                let stands = (tail.began(), tail.at_border(), tail.is_over());
                assert_eq!(stands, (!stream.is_empty(), border, over), "{stream:?} by {size}");
            }
        }
    }
}
