//! The only reader of wall time: timestamps that other processes compare with their own.

use std::time::{SystemTime, UNIX_EPOCH};

/// Microseconds since the Unix epoch.
#[expect(clippy::disallowed_methods, reason = "the engine's counters and the shared file speak wall time")]
pub(crate) fn wall_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros() as u64
}

/// Formats a time for the Date header, in 29 characters. `second` counts from the Unix epoch.
pub(crate) fn http_date(second: u64) -> String {
    const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
    const MONTHS: [&str; 12] =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let (days, rest) = (second / 86_400, second % 86_400);
    // Years begin in March here, so that a leap day ends a year. 146097 days are 400 years.
    let shifted = days + 719_468;
    let (era, day) = (shifted / 146_097, shifted % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let of_month = of_year - (153 * month + 2) / 5 + 1;
    let january = month >= 10;
    let month = if january { month - 10 } else { month + 2 };
    let year = era * 400 + year + u64::from(january);
    let (name, month) = (DAYS[(days % 7) as usize], MONTHS[month as usize]);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{name}, {of_month:02} {month} {year:04} {hour:02}:{minute:02}:{second:02} GMT")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_written_as_http_wants_them() {
        assert_eq!(http_date(784_111_777), "Sun, 06 Nov 1994 08:49:37 GMT");
        assert_eq!(http_date(951_782_400), "Tue, 29 Feb 2000 00:00:00 GMT");
        assert_eq!(http_date(1_735_689_599), "Tue, 31 Dec 2024 23:59:59 GMT");
        assert_eq!(http_date(0), "Thu, 01 Jan 1970 00:00:00 GMT");
    }
}
