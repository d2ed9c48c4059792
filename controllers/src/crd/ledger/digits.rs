//! Numbers as few visible characters: base 64, five bits and a mark of more in each.

use super::Error;

const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
const MORE: u64 = 32;
/// Of 128 bits.
pub(super) const UUID_DIGITS: usize = 22;

/// Appends the number, its lowest five bits first.
pub(super) fn put(text: &mut String, mut number: u64) {
    loop {
        let low = number % MORE;
        number /= MORE;
        text.push(digit(if number == 0 { low } else { low + MORE }));
        if number == 0 {
            return;
        }
    }
}

/// Appends a number that may be negative: small ones of either sign are short.
pub(super) fn put_signed(text: &mut String, number: i64) {
    put(text, ((number << 1) ^ (number >> 63)).cast_unsigned());
}

/// Reads what [`put`] wrote, one number after the other.
pub(super) struct DigitReader<'a>(std::str::Bytes<'a>);

impl<'a> DigitReader<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        Self(text.bytes())
    }

    pub(super) fn is_done(&self) -> bool {
        self.0.len() == 0
    }

    pub(super) fn take(&mut self) -> Result<u64, Error> {
        let mut number = 0_u64;
        for shift in (0..).step_by(5) {
            let digit = self.0.next().and_then(value).ok_or(Error::Digits)?;
            let low = digit % MORE;
            let shifted = low.checked_shl(shift).filter(|shifted| shifted >> shift == low);
            number |= shifted.ok_or(Error::Digits)?;
            if digit < MORE {
                break;
            }
        }
        Ok(number)
    }

    pub(super) fn take_signed(&mut self) -> Result<i64, Error> {
        let number = self.take()?;
        Ok((number >> 1).cast_signed() ^ -(number & 1).cast_signed())
    }
}

/// A UUID without its dashes, in 22 characters; `None` for a text that is not exactly one in lower case.
pub(super) fn uuid(text: &str) -> Option<String> {
    let mut bits = 0_u128;
    let mut dashes = Vec::new();
    for (at, c) in text.char_indices() {
        if c == '-' {
            dashes.push(at);
        } else {
            let nibble = c.to_digit(16).filter(|_| !c.is_ascii_uppercase())?;
            bits = bits << 4 | u128::from(nibble);
        }
    }
    if text.len() != 36 || dashes != [8, 13, 18, 23] {
        return None;
    }
    let digits = (0..UUID_DIGITS).rev().map(|place| (bits >> (6 * place)) as u64 % 64);
    Some(digits.map(digit).collect())
}

/// Back from [`uuid`].
pub(super) fn from_uuid(text: &[u8]) -> Result<String, Error> {
    let mut bits = 0_u128;
    for byte in text {
        let low = value(*byte).ok_or(Error::Digits)?;
        let fits = bits.leading_zeros() >= 6;
        bits = if fits { bits << 6 | u128::from(low) } else { return Err(Error::Digits) };
    }
    if text.len() != UUID_DIGITS {
        return Err(Error::Digits);
    }
    let part = |from: u32, nibbles: u32| bits >> (128 - 4 * (from + nibbles)) & ((1 << (4 * nibbles)) - 1);
    Ok(format!(
        "{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
        part(0, 8),
        part(8, 4),
        part(12, 4),
        part(16, 4),
        part(20, 12)
    ))
}

#[expect(clippy::indexing_slicing, reason = "there are 64 digits")]
fn digit(value: u64) -> char {
    char::from(DIGITS[(value % 64) as usize])
}

fn value(byte: u8) -> Option<u64> {
    DIGITS.iter().position(|digit| *digit == byte).and_then(|place| u64::try_from(place).ok())
}
