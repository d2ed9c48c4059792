//! The `Date` header of the heads that this crate writes.

use std::{
    cell::Cell,
    io::Write as _,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// Length of a formatted date, in bytes.
const DATE_BYTES: usize = 29;

/// Per-core cache of the formatted date: formats once a second, for any number of heads.
#[derive(Debug, Default)]
pub struct DateCache(Cell<(u64, [u8; DATE_BYTES])>);

impl DateCache {
    /// Returns the current time as a `Date` value.
    #[must_use]
    pub fn now(&self) -> [u8; DATE_BYTES] {
        #[expect(clippy::disallowed_methods, reason = "for the Date header only; no decision depends on it")]
        let now = SystemTime::now();
        self.at(now.duration_since(UNIX_EPOCH).unwrap_or_default())
    }

    fn at(&self, since_epoch: Duration) -> [u8; DATE_BYTES] {
        let second = since_epoch.as_secs();
        let (of, mut text) = self.0.get();
        // Second 0 (1970) marks an empty cache.
        if of != second || second == 0 {
            // The buffer has exactly the length of a date, so the write fits.
            drop(write!(
                &mut text[..],
                "{}",
                httpdate::HttpDate::from(UNIX_EPOCH + Duration::from_secs(second))
            ));
            self.0.set((second, text));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_date_is_that_of_its_second() {
        let dates = DateCache::default();
        for (millis, date) in [
            (0, "Thu, 01 Jan 1970 00:00:00 GMT"),
            (1_800_000_000_000, "Fri, 15 Jan 2027 08:00:00 GMT"),
            (1_800_000_000_999, "Fri, 15 Jan 2027 08:00:00 GMT"),
            (1_800_000_001_000, "Fri, 15 Jan 2027 08:00:01 GMT"),
            (1_799_999_999_000, "Fri, 15 Jan 2027 07:59:59 GMT"),
        ] {
            assert_eq!(dates.at(Duration::from_millis(millis)), *date.as_bytes());
        }
    }
}
