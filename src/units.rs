//! Numbers that must not be mixed up: sizes, moments, spans, generations.
//!
//! They are newtypes because each of them has once been an integer in a bug report somewhere: bytes added to mebibytes,
//! a deadline compared with a duration, an outcome of an earlier engine generation applied to the next.

use std::{
    fmt,
    ops::{Add, AddAssign, Sub},
    str::FromStr,
    time::Duration,
};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A quantity of memory in bytes.
///
/// Parsed with binary or decimal suffixes (`30Gi`, `256MiB`, `1.5G`, `4096`), displayed with binary ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

/// A moment: milliseconds since the Unix epoch, advanced by a monotonic clock.
///
/// The driver anchors it to wall time once at its start. So moments of two runs of a gateway are comparable (idle
/// clocks survive a restart), while steps of the wall clock cannot end a residency early.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Tick(pub u64);

/// A span in milliseconds. Written and parsed as `250ms`, `30s`, `9m`, `1h`, `1m30s`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Millis(pub u64);

/// The generation of an engine that a command or an outcome refers to.
///
/// It grows by at least one with every launch; an outcome of an older generation is ignored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Generation(pub u64);

/// Why a text is not a [`Bytes`] or [`Millis`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("'{0}' is not a size: write a number and a unit, like 30Gi, 256MiB or 4096")]
    Size(String),
    #[error("'{0}' is not a duration: write a number and a unit, like 250ms, 30s, 9m or 1h30m")]
    Duration(String),
}

/// Units from the largest to the smallest.
const BINARY_UNITS: [(&str, u64); 4] = [("Ti", 1 << 40), ("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)];
/// Larger numbers of a unit are less readable than rounded numbers of the next unit.
const MAX_EXACT_NUMBER: u64 = 10_000;

impl Bytes {
    pub const ZERO: Self = Self(0);

    pub const fn gib(n: u64) -> Self {
        Self(n << 30)
    }

    pub const fn mib(n: u64) -> Self {
        Self(n << 20)
    }

    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// Writes the exact size, in the largest binary unit that divides it.
    #[must_use]
    pub fn to_exact_text(self) -> String {
        let Self(bytes) = self;
        let whole = BINARY_UNITS.iter().find(|(_, unit)| bytes != 0 && bytes.is_multiple_of(*unit));
        whole.map_or_else(|| bytes.to_string(), |(suffix, unit)| format!("{}{suffix}", bytes / unit))
    }
}

impl Add for Bytes {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Bytes {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl std::iter::Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self::ZERO, Add::add)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut units = BINARY_UNITS.iter().skip_while(|(_, unit)| self.0 < *unit);
        let Some((suffix, unit)) = units.next() else {
            return write!(f, "{}", self.0);
        };
        let exact = |unit: u64, parts: u128| (u128::from(self.0) * parts).is_multiple_of(u128::from(unit));
        // 1600Mi, as a user wrote it, is no number of Gi with two digits.
        let below = units.next().filter(|(_, below)| exact(*below, 1) && self.0 / below < MAX_EXACT_NUMBER);
        match below.filter(|_| !exact(*unit, 100)) {
            Some((suffix, below)) => write!(f, "{}{suffix}", self.0 / below),
            None if exact(*unit, 1) => write!(f, "{}{suffix}", self.0 / unit),
            None => write!(f, "{:.2}{suffix}", self.0 as f64 / *unit as f64),
        }
    }
}

impl FromStr for Bytes {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let bad = || Error::Size(text.to_owned());
        let trimmed = text.trim();
        let digits = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(digits);
        let factor: u64 = match unit.trim() {
            "" | "B" => 1,
            "k" | "K" | "kB" | "KB" => 1_000,
            "M" | "MB" => 1_000_000,
            "G" | "GB" => 1_000_000_000,
            "T" | "TB" => 1_000_000_000_000,
            "P" | "PB" => 1_000_000_000_000_000,
            "Ki" | "KiB" => 1 << 10,
            "Mi" | "MiB" => 1 << 20,
            "Gi" | "GiB" => 1 << 30,
            "Ti" | "TiB" => 1 << 40,
            "Pi" | "PiB" => 1 << 50,
            _ => return Err(bad()),
        };
        parse_scaled(number, factor).map(Self).ok_or_else(bad)
    }
}

/// Parses digits with at most one decimal point, times the factor.
///
/// Exact, except that a fraction of a byte in the result counts as a whole byte: a need is never understated.
fn parse_scaled(number: &str, factor: u64) -> Option<u64> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() {
        return None;
    }
    let whole: u64 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
    let mut sum = u128::from(whole) * u128::from(factor);
    let fraction = fraction.trim_end_matches('0');
    if !fraction.is_empty() {
        // More than 19 digits do not parse, so neither product overflows.
        let part: u64 = fraction.parse().ok()?;
        let parts = 10_u128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
        sum += (u128::from(part) * u128::from(factor)).div_ceil(parts);
    }
    u64::try_from(sum).ok()
}

impl Millis {
    pub const ZERO: Self = Self(0);
    /// Long enough to mean "no limit" in sums without overflowing them.
    pub const FOREVER: Self = Self(u64::MAX / 4);

    pub const fn secs(n: u64) -> Self {
        Self(n * 1000)
    }

    pub const fn duration(self) -> Duration {
        Duration::from_millis(self.0)
    }

    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl From<Duration> for Millis {
    fn from(d: Duration) -> Self {
        Self(u64::try_from(d.as_millis()).unwrap_or(u64::MAX / 4))
    }
}

impl Add for Millis {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl fmt::Display for Millis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 < 1000 {
            return write!(f, "{}ms", self.0);
        }
        let (h, m, s, ms) = (self.0 / 3_600_000, self.0 / 60_000 % 60, self.0 / 1000 % 60, self.0 % 1000);
        if h > 0 {
            write!(f, "{h}h")?;
        }
        if m > 0 {
            write!(f, "{m}m")?;
        }
        match (s, ms) {
            (0, 0) => Ok(()),
            (s, 0) => write!(f, "{s}s"),
            (s, ms) => write!(f, "{s}.{ms:03}s"),
        }
    }
}

impl FromStr for Millis {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let bad = || Error::Duration(text.to_owned());
        let mut rest = text.trim();
        if rest.is_empty() {
            return Err(bad());
        }
        let mut total = 0.0_f64;
        while !rest.is_empty() {
            let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(bad)?;
            let (number, tail) = rest.split_at(digits);
            let letters = tail.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(tail.len());
            let (unit, next) = tail.split_at(letters);
            let factor = match unit {
                "ms" => 1.0,
                "s" => 1e3,
                "m" => 60e3,
                "h" => 3600e3,
                "d" => 86_400e3,
                _ => return Err(bad()),
            };
            total += number.parse::<f64>().map_err(|_| bad())? * factor;
            rest = next;
        }
        if total.is_finite() && total < Self::FOREVER.0 as f64 {
            Ok(Self(total.round() as u64))
        } else {
            Err(bad())
        }
    }
}

impl Tick {
    /// The span since `earlier`, zero when `earlier` is in fact later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Millis {
        Millis(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Millis> for Tick {
    type Output = Self;
    fn add(self, span: Millis) -> Self {
        Self(self.0.saturating_add(span.0))
    }
}

impl Sub<Millis> for Tick {
    type Output = Self;
    fn sub(self, span: Millis) -> Self {
        Self(self.0.saturating_sub(span.0))
    }
}

/// The time of day in UTC, for a person who reads a report at the console.
impl fmt::Display for Tick {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = self.0 / 1000;
        write!(f, "{:02}:{:02}:{:02}.{:03}", s / 3600 % 24, s / 60 % 60, s % 60, self.0 % 1000)
    }
}

/// Returns the number with its noun: "1 lease", "2 leases".
#[must_use]
pub fn pluralize(number: impl fmt::Display, noun: &str) -> String {
    let number = number.to_string();
    let many = if number == "1" { "" } else { "s" };
    format!("{number} {noun}{many}")
}

impl Generation {
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

macro_rules! impl_serde_as_text {
    ($($name:ident)*) => {$(
        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                s.serialize_u64(self.0)
            }
        }

        /// A number means the base unit; a text is parsed with its unit.
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                struct Visitor;
                impl serde::de::Visitor<'_> for Visitor {
                    type Value = $name;
                    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                        f.write_str("a number with a unit")
                    }
                    fn visit_u64<E: serde::de::Error>(self, v: u64) -> Result<$name, E> {
                        Ok($name(v))
                    }
                    fn visit_i64<E: serde::de::Error>(self, v: i64) -> Result<$name, E> {
                        u64::try_from(v).map($name).map_err(E::custom)
                    }
                    fn visit_str<E: serde::de::Error>(self, v: &str) -> Result<$name, E> {
                        v.parse().map_err(E::custom)
                    }
                }
                d.deserialize_any(Visitor)
            }
        }
    )*};
}

impl_serde_as_text!(Bytes Millis);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_every_usual_suffix_and_junk_is_refused() {
        for (text, bytes) in [
            ("30Gi", 30 << 30),
            ("256MiB", 256 << 20),
            ("1.5Gi", 3 << 29),
            ("4096", 4096),
            ("2G", 2_000_000_000),
            ("2Pi", 1 << 51),
            (".5Ki", 512),
            ("1.", 1),
            // Exact beyond what a floating-point number holds; a part of a byte counts as one.
            ("8191.999999999999999999Pi", 8192 << 50),
            ("9007199254740993.0", 9_007_199_254_740_993),
            ("0.1", 1),
            ("1.1Ki", 1127),
        ] {
            assert_eq!(text.parse::<Bytes>().unwrap().0, bytes, "{text}");
        }
        for text in [
            "",
            ".",
            "Gi",
            ".Gi",
            "-1Gi",
            "+1",
            "1Xi",
            "1e3",
            "1.2.3",
            "1Gi Gi",
            "99999999999Ti",
            "16384Pi",
            "NaN",
        ] {
            assert!(text.parse::<Bytes>().is_err(), "{text}");
        }
    }

    #[test]
    fn spans_are_read_and_written() {
        for (text, ms) in
            [("250ms", 250), ("30s", 30_000), ("9m", 540_000), ("1h30m", 5_400_000), ("1.5s", 1500)]
        {
            let span = text.parse::<Millis>().unwrap();
            assert_eq!(span.0, ms, "{text}");
            assert_eq!(span.to_string().parse::<Millis>().unwrap(), span);
        }
        for text in ["", "5", "s", "5 s x", "-1s", "1y"] {
            assert!(text.parse::<Millis>().is_err(), "{text}");
        }
    }

    #[test]
    fn one_of_a_thing_is_no_plural() {
        let counted = [0, 1, 2, 11].map(|number| pluralize(number, "engine"));
        assert_eq!(counted, ["0 engines", "1 engine", "2 engines", "11 engines"]);
    }

    #[test]
    fn a_size_is_shown_in_the_unit_a_person_would_use() {
        assert_eq!(Bytes::gib(30).to_string(), "30Gi");
        assert_eq!(Bytes(1 << 29).to_string(), "512Mi");
        assert_eq!(Bytes(3 << 29).to_string(), "1.50Gi");
        assert_eq!(Bytes(17).to_string(), "17");
        assert_eq!(Bytes::mib(1600).to_string(), "1600Mi", "as it was written");
        assert_eq!(Bytes::mib(81_559).to_string(), "79.65Gi");
        assert_eq!(Bytes(1_570_000_001).to_string(), "1.46Gi");
        for (bytes, exact) in
            [(0, "0"), (17, "17"), (3 << 29, "1536Mi"), (2 << 40, "2Ti"), (1025 << 10, "1025Ki")]
        {
            assert_eq!(Bytes(bytes).to_exact_text(), exact);
        }
    }
}
