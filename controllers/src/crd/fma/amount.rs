//! Kubernetes' quantities, of any resource: `8`, `500m`, `128Gi`, `1e3`.

use rouse::units::Bytes;

const NANOS_PER_UNIT: i128 = 1_000_000_000;

/// Parses a quantity of memory, rounded down to whole bytes. `None`: it is negative, too large, or no quantity.
pub(crate) fn bytes(text: &str) -> Option<Bytes> {
    u64::try_from(amount(text)? / NANOS_PER_UNIT).ok().map(Bytes)
}

/// In thousand-millionths, which is as fine as they get. None: it is no quantity, or one beyond all resources.
pub(super) fn amount(text: &str) -> Option<i128> {
    let end = text.find(|c: char| !c.is_ascii_digit() && !matches!(c, '.' | '+' | '-')).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let (whole, part) = number.split_once('.').unwrap_or((number, ""));
    let digits: i128 = format!("{whole}{part}").parse().ok()?;
    // What is finer counts as nothing.
    let scale = 10_i128.checked_pow(u32::try_from(part.len()).ok()?)?;
    Some(digits.checked_mul(of_unit(unit)?)? / scale)
}

fn of_unit(unit: &str) -> Option<i128> {
    let decimal = |power: i32| u32::try_from(9 + power).ok().and_then(|power| 10_i128.checked_pow(power));
    let binary = |power: u32| Some(NANOS_PER_UNIT << (10 * power));
    match unit {
        "n" => decimal(-9),
        "u" => decimal(-6),
        "m" => decimal(-3),
        "" => decimal(0),
        "k" => decimal(3),
        "M" => decimal(6),
        "G" => decimal(9),
        "T" => decimal(12),
        "P" => decimal(15),
        "E" => decimal(18),
        "Ki" => binary(1),
        "Mi" => binary(2),
        "Gi" => binary(3),
        "Ti" => binary(4),
        "Pi" => binary(5),
        "Ei" => binary(6),
        other => {
            decimal(other.strip_prefix(['e', 'E'])?.parse().ok().filter(|power: &i32| power.abs() < 20)?)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_compared_whatever_their_units() {
        for (one, other) in [
            ("8", "8000m"),
            ("1Ki", "1024"),
            ("1.5Gi", "1536Mi"),
            ("1e3", "1k"),
            ("2E3", "2000"),
            ("5e-1", "500m"),
            ("1E", "1000P"),
            ("0.000000001", "1n"),
            (".5", "0.5"),
            ("3.", "3"),
            ("+1", "1"),
            ("-1", "-1000m"),
        ] {
            assert_eq!(amount(one).unwrap(), amount(other).unwrap(), "{one} {other}");
        }
        assert!(amount("64Gi") < amount("128Gi") && amount("128G") < amount("128Gi"));
    }

    #[test]
    fn memory_is_counted_in_whole_bytes() {
        assert_eq!(bytes("1.5Gi"), Some(Bytes::mib(1536)));
        assert_eq!(bytes("2e3"), Some(Bytes(2000)));
        assert_eq!(bytes("1900m"), Some(Bytes(1)));
        assert_eq!(["-2", "lots", "64Ei"].map(bytes), [None; 3]);
    }

    #[test]
    fn what_is_none_has_no_value() {
        for text in ["", "Gi", "lots", "1GiB", "1 Gi", "1-2", "1..2", "1e", "1e99", "1e-20", "1_000", "."] {
            assert_eq!(amount(text), None, "{text:?}");
        }
        assert_eq!(amount("999999999999999999999999999999Ei"), None);
    }
}
