//! The exact bytes of the fast engine's responses, shared with a client that checks them.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// Bytes of one event, including `data: ` and the blank line, unless the model's name is too long.
pub const EVENT_BYTES: usize = 226;
/// Bytes of a non-streaming response's body, unless the model's name is too long.
pub const ANSWER_BYTES: usize = 600;
/// The end of each stream.
pub const DONE: &[u8] = b"data: [DONE]\n\n";

const SEQUENCE_DIGITS: usize = 8;
const TIME_DIGITS: usize = 16;

/// Nanoseconds of the monotonic clock that all processes of a machine share.
#[must_use]
pub fn monotonic_ns() -> u64 {
    // Only an unknown clock is an error.
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(0, |now| Duration::from(now).as_nanos() as u64)
}

/// An event with a stamp: its position in the stream (8 decimal digits) and its send time (16 hexadecimal digits,
/// `monotonic_ns`).
#[derive(Clone, Debug)]
pub struct StampedEvent {
    bytes: Vec<u8>,
    /// Offset of the position; the time follows after a space.
    stamp_offset: usize,
}

/// The stamp in an event's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventStamp {
    pub sequence: u32,
    pub sent_ns: u64,
}

impl StampedEvent {
    #[must_use]
    pub fn new(model: &str) -> Self {
        let before = format!(
            r#"data: {{"id":"chatcmpl-fast","object":"chat.completion.chunk","created":1763640000,"model":{},"choices":[{{"index":0,"delta":{{"content":""#,
            serde_json::Value::from(model),
        );
        let after = "\"},\"finish_reason\":null}]}\n\n";
        let used = before.len() + after.len() + SEQUENCE_DIGITS + 1 + TIME_DIGITS;
        let padding = ".".repeat(EVENT_BYTES.saturating_sub(used));
        let blank = " ".repeat(SEQUENCE_DIGITS + 1 + TIME_DIGITS);
        Self { stamp_offset: before.len(), bytes: format!("{before}{blank}{padding}{after}").into_bytes() }
    }

    /// The event as a chunk of a body, which [`Self::read`] cannot parse.
    pub(super) fn as_chunk(&self) -> Self {
        let size = format!("{:x}\r\n", self.bytes.len());
        Self {
            stamp_offset: size.len() + self.stamp_offset,
            bytes: [size.as_bytes(), &self.bytes, b"\r\n"].concat(),
        }
    }

    #[expect(clippy::len_without_is_empty, reason = "an event is never empty")]
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// The event as sent.
    pub fn stamped(&mut self, stamp: EventStamp) -> &[u8] {
        write(&mut self.bytes, self.stamp_offset, stamp);
        &self.bytes
    }

    /// Parses an event. `None` if any byte differs from the sent event.
    #[must_use]
    pub fn read(&self, event: &[u8]) -> Option<EventStamp> {
        let end = self.stamp_offset + SEQUENCE_DIGITS + 1 + TIME_DIGITS;
        let stamp = EventStamp::read(event.get(self.stamp_offset..end)?)?;
        (event.get(..self.stamp_offset) == self.bytes.get(..self.stamp_offset)
            && event.get(end..) == self.bytes.get(end..))
        .then_some(stamp)
    }
}

impl EventStamp {
    /// Parses the stamp at the beginning of a content.
    #[must_use]
    pub fn read(content: &[u8]) -> Option<Self> {
        let (sequence, rest) = content.split_at_checked(SEQUENCE_DIGITS)?;
        let (b' ', time) = rest.split_first()? else { return None };
        let sequence = sequence.iter().try_fold(0_u32, |sum, digit| {
            digit.is_ascii_digit().then(|| sum * 10 + u32::from(digit - b'0'))
        })?;
        let sent_ns = time.get(..TIME_DIGITS)?.iter().try_fold(0_u64, |sum, digit| {
            let value = match digit {
                b'0'..=b'9' => digit - b'0',
                b'a'..=b'f' => digit - b'a' + 10,
                _ => return None,
            };
            Some(sum << 4 | u64::from(value))
        })?;
        Some(Self { sequence, sent_ns })
    }
}

fn write(bytes: &mut [u8], at: usize, stamp: EventStamp) {
    let Some(slot) = bytes.get_mut(at..at + SEQUENCE_DIGITS + 1 + TIME_DIGITS) else { return };
    let (sequence, time) = slot.split_at_mut(SEQUENCE_DIGITS);
    let mut rest = stamp.sequence;
    for digit in sequence.iter_mut().rev() {
        *digit = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    for (nth, digit) in time.iter_mut().skip(1).enumerate() {
        *digit = b"0123456789abcdef"[(stamp.sent_ns >> (60 - 4 * nth) & 15) as usize];
    }
}

/// All responses of an engine with one model.
#[derive(Clone, Debug)]
pub struct FastResponses {
    /// Body of a non-streaming response.
    pub answer: Vec<u8>,
    /// Body of the model list.
    pub models: Vec<u8>,
    /// Body of SGLang's model info.
    pub(super) model_info: Vec<u8>,
    pub event: StampedEvent,
}

impl FastResponses {
    #[must_use]
    pub fn new(model: &str) -> Self {
        let name = serde_json::Value::from(model);
        let before = format!(
            r#"{{"id":"chatcmpl-fast","object":"chat.completion","created":1763640000,"model":{name},"choices":[{{"index":0,"message":{{"role":"assistant","content":""#
        );
        let after = r#""},"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":200,"completion_tokens":64,"total_tokens":264}}"#;
        let content = "The same words for all. ".chars().cycle();
        let content: String = content.take(ANSWER_BYTES.saturating_sub(before.len() + after.len())).collect();
        Self {
            answer: format!("{before}{content}{after}").into_bytes(),
            models: format!(
                r#"{{"object":"list","data":[{{"id":{name},"object":"model","created":1763640000,"owned_by":"fast"}}]}}"#
            )
            .into_bytes(),
            model_info: format!(
                r#"{{"model_path":{name},"tokenizer_path":{name},"served_model_name":{name},"is_generation":true}}"#
            )
            .into_bytes(),
            event: StampedEvent::new(model),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_valid_json_of_the_promised_size_and_read_back() {
        let mut event = StampedEvent::new("m");
        let stamp = EventStamp { sequence: 12_345_678, sent_ns: 0x0123_4567_89ab_cdef };
        let bytes = event.stamped(stamp).to_vec();
        assert_eq!(bytes.len(), EVENT_BYTES);
        let text = std::str::from_utf8(&bytes).unwrap();
        let json = text.strip_prefix("data: ").unwrap().strip_suffix("\n\n").unwrap();
        let json: serde_json::Value = serde_json::from_str(json).unwrap();
        let content = json["choices"][0]["delta"]["content"].as_str().unwrap();
        assert!(content.starts_with("12345678 0123456789abcdef."));
        assert_eq!(StampedEvent::new("m").read(&bytes), Some(stamp));
    }

    #[test]
    fn any_changed_byte_of_an_event_is_noticed() {
        let mut event = StampedEvent::new("m");
        let stamp = EventStamp { sequence: 7, sent_ns: 9 };
        let bytes = event.stamped(stamp).to_vec();
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            assert_ne!(event.read(&changed), Some(stamp), "byte {at}");
        }
        assert_eq!(event.read(&bytes[..EVENT_BYTES - 1]), None);
    }

    #[test]
    fn an_answer_is_valid_json_of_the_promised_size() {
        let wire = FastResponses::new("a \"quoted\" name");
        let json: serde_json::Value = serde_json::from_slice(&wire.answer).unwrap();
        assert_eq!((wire.answer.len(), json["usage"]["total_tokens"].as_u64()), (ANSWER_BYTES, Some(264)));
        assert!(serde_json::from_slice::<serde_json::Value>(&wire.models).is_ok());
    }
}
