//! Parses the `Range` header: one range with a first byte.

/// Bytes from `start` to `end`, inclusive. Without `end`, up to the end of the log or the usual limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LogRange {
    pub(crate) start: u64,
    pub(crate) end: Option<u64>,
}

/// Why the header is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Error {
    #[error("Range '{0}' is not supported: send bytes=FIRST-LAST or bytes=FIRST-")]
    Malformed(String),
    #[error("Range ends at {end}, before it starts at {start}")]
    Backwards { start: u64, end: u64 },
}

/// Parses the header's value. Suffixes (`bytes=-500`) and lists of ranges are refused.
pub(crate) fn parse(header: &str) -> Result<LogRange, Error> {
    let malformed = || Error::Malformed(header.to_owned());
    let (start, end) =
        header.strip_prefix("bytes=").and_then(|range| range.split_once('-')).ok_or_else(malformed)?;
    let start = number(start).ok_or_else(malformed)?;
    let end = if end.is_empty() { None } else { Some(number(end).ok_or_else(malformed)?) };
    match end {
        Some(end) if end < start => Err(Error::Backwards { start, end }),
        end => Ok(LogRange { start, end }),
    }
}

/// Parses digits only, because `str::parse` also accepts a sign. A number beyond `u64` becomes `u64::MAX`, past the end
/// of every log.
fn number(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    digits.then(|| text.parse().unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_range() {
        assert_eq!(parse("bytes=0-99"), Ok(LogRange { start: 0, end: Some(99) }));
    }

    #[test]
    fn open_ended_range() {
        assert_eq!(parse("bytes=100-"), Ok(LogRange { start: 100, end: None }));
    }

    #[test]
    fn large_values() {
        assert_eq!(parse("bytes=1048576-2097151"), Ok(LogRange { start: 1 << 20, end: Some((2 << 20) - 1) }));
        let past = parse("bytes=99999999999999999999-").unwrap();
        assert_eq!(past, LogRange { start: u64::MAX, end: None });
    }

    #[test]
    fn suffix_range_rejected() {
        assert!(matches!(parse("bytes=-500"), Err(Error::Malformed(_))));
    }

    #[test]
    fn invalid_unit() {
        assert!(matches!(parse("items=0-99"), Err(Error::Malformed(_))));
    }

    #[test]
    fn garbage_input() {
        for text in ["not-a-range", "", "bytes", "bytes=", "bytes=-", "bytes=a-b", "bytes=+1-2", "bytes= 1-2"]
        {
            assert!(matches!(parse(text), Err(Error::Malformed(_))), "{text}");
        }
    }

    #[test]
    fn several_ranges_are_rejected() {
        assert!(matches!(parse("bytes=0-1,5-6"), Err(Error::Malformed(_))));
    }

    #[test]
    fn end_less_than_start() {
        assert_eq!(parse("bytes=100-50"), Err(Error::Backwards { start: 100, end: 50 }));
    }
}
