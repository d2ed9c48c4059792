//! Durations and sizes in flags and fault values: `50ms`, `1.5s`, `2m`; `1Gi`, `64MiB`, `4096`.

use std::time::Duration;

use thiserror::Error;

#[derive(Debug, Error, PartialEq, Eq)]
pub enum Error {
    #[error("`{0}` is not a duration; write 50ms, 1.5s, 2m or 1h")]
    Duration(String),
    #[error("`{0}` is not a size; write 1Gi, 64MiB or plain bytes")]
    Size(String),
}

/// Parses a duration; a bare `0` needs no unit.
pub fn duration(text: &str) -> Result<Duration, Error> {
    let fail = || Error::Duration(text.to_owned());
    let (number, unit) = split(text);
    let seconds = match unit {
        "us" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        "" if number == "0" => 0.0,
        _ => return Err(fail()),
    };
    let number: f64 = number.parse().map_err(|_| fail())?;
    Duration::try_from_secs_f64(number * seconds).map_err(|_| fail())
}

/// Parses a size to bytes. `Ki`, `Mi`, `Gi`, `Ti` (with or without `B`) are powers of 1024, `KB` to `TB` of 1000.
pub fn bytes(text: &str) -> Result<u64, Error> {
    let fail = || Error::Size(text.to_owned());
    let (number, unit) = split(text);
    let scale: u64 = match unit {
        "" | "B" => 1,
        "Ki" | "KiB" => 1 << 10,
        "Mi" | "MiB" => 1 << 20,
        "Gi" | "GiB" => 1 << 30,
        "Ti" | "TiB" => 1 << 40,
        "KB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "TB" => 1_000_000_000_000,
        _ => return Err(fail()),
    };
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(scale).ok_or_else(fail);
    }
    let number: f64 = number.parse().map_err(|_| fail())?;
    let size = number * scale as f64;
    if size.is_finite() && (0.0..=u64::MAX as f64).contains(&size) { Ok(size as u64) } else { Err(fail()) }
}

fn split(text: &str) -> (&str, &str) {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    (number, unit.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_read_as_written() {
        assert_eq!(duration("50ms"), Ok(Duration::from_millis(50)));
        assert_eq!(duration("1.5s"), Ok(Duration::from_millis(1500)));
        assert_eq!(duration("2m"), Ok(Duration::from_secs(120)));
        assert_eq!(duration("0"), Ok(Duration::ZERO));
        assert!(duration("5").is_err());
        assert!(duration("-5s").is_err());
    }

    #[test]
    fn sizes_read_as_written() {
        assert_eq!(bytes("1Gi"), Ok(1 << 30));
        assert_eq!(bytes("256MiB"), Ok(256 << 20));
        assert_eq!(bytes("0.5Gi"), Ok(1 << 29));
        assert_eq!(bytes("4096"), Ok(4096));
        assert!(bytes("1Zi").is_err());
        assert!(bytes("99999999999Ti").is_err());
    }
}
