//! The hash that matches requests: of sessions, prefixes, and ids of responses.
//!
//! It must be the same in every gateway and after every restart, which the standard library guarantees for none of its
//! hashers. It must also follow an id byte by byte through a stream. It is not a security measure: a client that makes
//! two ids collide only routes two of its own conversations to one engine.

const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;

/// The hash of `bytes`: stable across processes, machines and versions.
#[must_use]
pub fn stable_hash(bytes: &[u8]) -> u64 {
    let mut hasher = StableHasher::default();
    hasher.write(bytes);
    hasher.finish()
}

/// Computes [`stable_hash`] of bytes that arrive in pieces.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StableHasher {
    state: u64,
    /// Up to seven bytes that do not fill a word yet.
    word: u64,
    length: u64,
}

impl StableHasher {
    pub(crate) fn write(&mut self, bytes: &[u8]) {
        let missing = self.length.wrapping_neg() % 8;
        let (first, rest) = bytes.split_at(bytes.len().min(missing as usize));
        self.write_bytes(first);
        // Once the input is aligned, the loop reads whole words, which covers nearly all of a long text.
        let (words, last) = rest.as_chunks::<8>();
        for word in words {
            self.fold(u64::from_le_bytes(*word));
        }
        self.length += 8 * words.len() as u64;
        self.write_bytes(last);
    }

    /// Writes single bytes. Together with the pending ones they fill at most one word.
    fn write_bytes(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            let pending = self.length % 8;
            self.word |= u64::from(byte) << (8 * pending);
            self.length += 1;
            if pending == 7 {
                let word = std::mem::take(&mut self.word);
                self.fold(word);
            }
        }
    }

    pub(crate) const fn finish(mut self) -> u64 {
        self.fold(self.word);
        self.fold(self.length);
        // Mix the bits: rings and tables use only the first or the last few.
        let mut out = self.state;
        out = (out ^ out >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
        out = (out ^ out >> 33).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
        out ^ out >> 33
    }

    const fn fold(&mut self, word: u64) {
        self.state = (self.state.rotate_left(23) ^ word).wrapping_mul(MULTIPLIER);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_hash_of_a_text_never_changes() {
        // Gateways of two versions serve side by side: a new value here moves every session to another engine.
        assert_eq!(stable_hash(b""), 0x0000_0000_0000_0000);
        assert_eq!(stable_hash(b"resp_1"), 0x388f_b52c_ed1f_7d97);
        assert_eq!(stable_hash(b"chatcmpl-0123456789"), 0x6a03_33c7_4b64_0a22);
    }

    proptest! {
        #[test]
        fn pieces_hash_as_the_whole(bytes in prop::collection::vec(any::<u8>(), 0..64), cut in any::<prop::sample::Index>()) {
            let (front, back) = bytes.split_at(cut.index(bytes.len() + 1));
            let mut hasher = StableHasher::default();
            hasher.write(front);
            hasher.write(back);
            prop_assert_eq!(hasher.finish(), stable_hash(&bytes));
        }

        #[test]
        fn short_texts_differ(one in "[a-z]{0,9}", other in "[a-z]{0,9}") {
            prop_assert_eq!(one == other, stable_hash(one.as_bytes()) == stable_hash(other.as_bytes()));
        }
    }
}
