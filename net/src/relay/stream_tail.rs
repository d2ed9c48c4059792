//! Keeps the end of an event stream: its last bytes, and the first bytes of its last event. That is enough to append an
//! event, and to detect that the stream is complete.

use memchr::memrchr2;

use crate::openai::sse::ResponseScanner;

/// Longer than any API's final event as engines write it. Also longer than the prefix that identifies an error event.
const TAIL_BYTES: usize = 64;

/// The tail of a stream so far. A frame of any length costs a search for its last line ends, and a copy of a few bytes.
#[derive(Debug)]
pub(super) struct StreamTail {
    bytes: [u8; TAIL_BYTES],
    /// The number of valid bytes, at the end of `bytes`.
    length: usize,
    /// The beginning of the last event: of the event in progress, or of the previous one between two events.
    start: [u8; TAIL_BYTES],
    started: usize,
}

impl Default for StreamTail {
    fn default() -> Self {
        Self { bytes: [0; TAIL_BYTES], length: 0, start: [0; TAIL_BYTES], started: 0 }
    }
}

impl StreamTail {
    #[inline]
    pub(super) fn feed(&mut self, frame: &[u8]) {
        let begins = self.last_start(frame);
        if begins.is_some() {
            self.started = 0;
        }
        self.keep_start(frame.get(begins.unwrap_or(0)..).unwrap_or_default());
        if let Some(last) = frame.last_chunk() {
            self.bytes = *last;
        } else {
            self.bytes.copy_within(frame.len().., 0);
            let (_, end) = self.bytes.split_at_mut(TAIL_BYTES - frame.len());
            end.copy_from_slice(frame);
        }
        self.length = (self.length + frame.len()).min(TAIL_BYTES);
    }

    /// Returns where in `frame` the last non-empty event begins; `None` when it began in an earlier frame.
    #[inline]
    fn last_start(&self, frame: &[u8]) -> Option<usize> {
        let mut end = 1 + frame.iter().rposition(|byte| !is_line_end(*byte))?;
        while let Some(at) = memrchr2(b'\n', b'\r', frame.get(..end)?) {
            if ends_event(self.last_bytes(), frame.get(..=at)?) {
                return Some(at + 1);
            }
            end = at;
        }
        self.at_event_boundary().then_some(0)
    }

    #[inline]
    fn keep_start(&mut self, bytes: &[u8]) {
        let (_, room) = self.start.split_at_mut(self.started);
        let length = bytes.len().min(room.len());
        let ((room, _), (bytes, _)) = (room.split_at_mut(length), bytes.split_at(length));
        room.copy_from_slice(bytes);
        self.started += length;
    }

    /// Reports whether an event may begin here.
    pub(super) fn at_event_boundary(&self) -> bool {
        let tail = self.last_bytes();
        tail.is_empty() || ends_event(tail, &[])
    }

    /// Reports whether the last event ends the stream, or is an error of the engine's own.
    pub(super) fn is_over(&self) -> bool {
        let tail = self.last_bytes().trim_ascii_end();
        if tail.ends_with(b"data: [DONE]") || tail.ends_with(b"data:[DONE]") {
            return true;
        }
        if !self.at_event_boundary() {
            return false;
        }
        // The scanner alone defines these events. The beginning of an event is enough to recognize one.
        let mut scanner = ResponseScanner::new();
        scanner.feed(self.start.get(..self.started).unwrap_or_default());
        scanner.feed(b"\n\n");
        scanner.facts().done || scanner.facts().error
    }

    fn last_bytes(&self) -> &[u8] {
        self.bytes.get(TAIL_BYTES - self.length..).unwrap_or_default()
    }
}

const fn is_line_end(byte: u8) -> bool {
    matches!(byte, b'\n' | b'\r')
}

/// Reports whether an event ends after `before` followed by `bytes`.
#[inline]
fn ends_event(before: &[u8], bytes: &[u8]) -> bool {
    let mut last = before.iter().chain(bytes).rev();
    match (last.next(), last.next()) {
        (Some(b'\n'), Some(b'\n')) | (Some(b'\r'), Some(b'\r')) => true,
        (Some(b'\n'), Some(b'\r')) => last.next() == Some(&b'\n'),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(stream: &str, size: usize) -> StreamTail {
        let mut tail = StreamTail::default();
        stream.as_bytes().chunks(size).for_each(|frame| tail.feed(frame));
        tail
    }

    const SIZES: [usize; 8] = [1, 2, 3, 5, 63, 64, 65, 1000];

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
            for size in SIZES {
                let tail = after(stream, size);
                let stands = (tail.at_event_boundary(), tail.is_over());
                assert_eq!(stands, (border, over), "{stream:?} by {size}");
            }
        }
    }

    /// The scanner, which follows the whole stream, and the tail agree on the last event.
    #[test]
    fn a_last_event_is_known_as_such_by_its_beginning() {
        let (delta, text) = ("data: {\"id\":\"c\",\"choices\":[]}", "z".repeat(300));
        for (last, over) in [
            (format!("data: {{\"error\":{{\"message\":\"{text}\"}}}}"), true),
            (format!("data:{{ \"error\" : \"{text}\"}}"), true),
            (format!("data: {{\"type\":\"error\",\"error\":{{\"message\":\"{text}\"}}}}"), true),
            (format!("event: error\ndata: {{\"type\":\"error\",\"message\":\"{text}\"}}"), true),
            (format!("event: error\ndata: {text}"), true),
            (format!("event: transcript.text.done\ndata: {{\"text\":\"{text}\"}}"), true),
            (format!("data: {{\"type\":\"speech.audio.done\",\"x\":\"{text}\"}}"), true),
            (format!("event: errors\ndata: {{\"x\":\"{text}\"}}"), false),
            (format!("data: {{\"error\":null,\"x\":\"{text}\"}}"), false),
            (format!("data: {{\"choices\":[{{\"error\":\"{text}\"}}]}}"), false),
            (format!("data: {{\"x\":\"{text}\\\"error\\\":1\"}}"), false),
        ] {
            for end in ["\n", "\r", "\r\n"] {
                let whole = format!("{delta}\n\n{last}\n\n").replace('\n', end);
                let mut scanner = ResponseScanner::new();
                scanner.feed(whole.as_bytes());
                assert_eq!(scanner.facts().done || scanner.facts().error, over, "{whole:?}");
                // Half an event is not recognized, and an event after the final one means that the stream is not over.
                let (half, more) = (whole.trim_end(), format!("{whole}{delta}{end}{end}"));
                for size in SIZES {
                    assert_eq!(after(&whole, size).is_over(), over, "{whole:?} by {size}");
                    assert!(!after(half, size).is_over(), "{half:?} by {size}");
                    assert!(!after(&more, size).is_over(), "{more:?} by {size}");
                }
            }
        }
    }
}
