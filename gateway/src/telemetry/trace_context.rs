//! Parses `traceparent`: the caller's span, its trace, and whether it is recorded (W3C Trace Context).
//!
//! This is written by hand: it must pass through a gateway without traces, and costs a request less than a propagator
//! that knows every format.

use std::{cell::Cell, collections::hash_map::RandomState, hash::BuildHasher};

use http::{HeaderMap, HeaderName, HeaderValue};

pub(crate) const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
pub(crate) const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

const SAMPLED: u8 = 1;
/// The flags that are passed on, as the standard requires: "sampled" and "the trace id is random".
const KNOWN_FLAGS: u8 = 3;

/// One span's position in a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TraceContext {
    pub(crate) trace_id: u128,
    pub(crate) span_id: u64,
    flags: u8,
}

/// Generates ids, one generator per core: no two share a seed, and none repeats an id.
#[derive(Debug, Default)]
pub(crate) struct TraceIdGenerator {
    // Seeded by the standard library: ids must be unique and evenly distributed, not secret.
    seed: RandomState,
    made: Cell<u64>,
}

impl TraceContext {
    /// Returns the client's context, if it sent exactly one valid header.
    pub(crate) fn from_headers(headers: &HeaderMap) -> Option<Self> {
        let mut all = headers.get_all(TRACEPARENT).iter();
        let (first, None) = (all.next()?, all.next()) else { return None };
        Self::parse(first.as_bytes())
    }

    fn parse(text: &[u8]) -> Option<Self> {
        let (known, rest) = text.split_at_checked(55)?;
        let [version @ 0..=0xfe] = hex::<1>(known.get(..2)?)? else { return None };
        let dashes = [2, 35, 52].iter().all(|at| known.get(*at) == Some(&b'-'));
        // Later versions may only append.
        let ends = if version == 0 { rest.is_empty() } else { rest.first().is_none_or(|byte| *byte == b'-') };
        if !dashes || !ends {
            return None;
        }
        let trace = u128::from_be_bytes(hex(known.get(3..35)?)?);
        let span = u64::from_be_bytes(hex(known.get(36..52)?)?);
        let [flags] = hex(known.get(53..)?)?;
        (trace != 0 && span != 0).then_some(Self {
            trace_id: trace,
            span_id: span,
            flags: flags & KNOWN_FLAGS,
        })
    }

    pub(crate) const fn is_sampled(self) -> bool {
        self.flags & SAMPLED != 0
    }

    /// Returns the context of a span of ours below this one, with the same sampling decision.
    pub(crate) fn child(self, ids: &TraceIdGenerator) -> Self {
        Self { span_id: ids.next_span_id(), ..self }
    }

    /// Returns the first span of a new trace.
    ///
    /// `share` of these are sampled. The trace id decides, so that every observer would decide alike.
    pub(crate) fn root(ids: &TraceIdGenerator, share: f64) -> Self {
        let trace = ids.next_trace_id();
        let low = (trace as u64) >> 1;
        let sampled = (low as f64) < share * (1_u64 << 63) as f64;
        Self { trace_id: trace, span_id: ids.next_span_id(), flags: u8::from(sampled) }
    }

    /// Returns the same context, marked as not recorded.
    pub(crate) const fn unsampled(self) -> Self {
        Self { flags: self.flags & !SAMPLED, ..self }
    }

    pub(crate) fn to_header(self) -> Option<HeaderValue> {
        let Self { trace_id: trace, span_id: span, flags } = self;
        HeaderValue::try_from(format!("00-{trace:032x}-{span:016x}-{flags:02x}")).ok()
    }
}

impl TraceIdGenerator {
    fn next(&self) -> u64 {
        let number = self.made.get();
        self.made.set(number.wrapping_add(1));
        // Zero is not a valid id.
        self.seed.hash_one(number).max(1)
    }

    fn next_span_id(&self) -> u64 {
        self.next()
    }

    fn next_trace_id(&self) -> u128 {
        u128::from(self.next()) << 64 | u128::from(self.next())
    }
}

/// Parses lower-case hexadecimal digits, two per byte.
fn hex<const N: usize>(digits: &[u8]) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    let (pairs, []) = digits.as_chunks::<2>() else { return None };
    if pairs.len() != N {
        return None;
    }
    for (byte, [high, low]) in bytes.iter_mut().zip(pairs) {
        *byte = digit(*high)? << 4 | digit(*low)?;
    }
    Some(bytes)
}

const fn digit(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALID: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_valid_header_is_read_and_written_back_as_it_was() {
        let context = TraceContext::parse(VALID.as_bytes()).unwrap();
        assert_eq!(context.to_header().unwrap(), VALID);
        assert!(context.is_sampled());
        let child = context.child(&TraceIdGenerator::default());
        assert_eq!((child.trace_id, child.is_sampled()), (context.trace_id, true));
        assert_ne!(child.span_id, context.span_id);
        let later =
            TraceContext::parse(b"cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-08-what-comes");
        assert_eq!(later.map(TraceContext::is_sampled), Some(false));
    }

    #[test]
    fn a_malformed_header_counts_as_none() {
        for bad in [
            "",
            "00",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
            "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01more",
            "00_4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0",
        ] {
            assert_eq!(TraceContext::parse(bad.as_bytes()), None, "{bad}");
        }
        let mut two = HeaderMap::new();
        two.append(TRACEPARENT, HeaderValue::from_static(VALID));
        assert!(TraceContext::from_headers(&two).is_some());
        two.append(TRACEPARENT, HeaderValue::from_static(VALID));
        assert_eq!(TraceContext::from_headers(&two), None);
    }

    #[test]
    fn roots_are_sampled_by_their_share() {
        let ids = TraceIdGenerator::default();
        let sampled = |share| (0..10_000).filter(|_| TraceContext::root(&ids, share).is_sampled()).count();
        assert_eq!((sampled(0.0), sampled(1.0)), (0, 10_000));
        assert!((2_000..3_000).contains(&sampled(0.25)));
    }
}
