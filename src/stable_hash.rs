//! A hash that is the same in every build and on every machine, unlike the standard library's.
//!
//! Decisions use it where chance would do, so a journal replays, and for names that must not change.

/// FNV-1a of the bytes.
#[must_use]
pub fn fnv1a(bytes: impl IntoIterator<Item = u8>) -> u64 {
    let fold = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, fold)
}
