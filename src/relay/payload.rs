//! A request's body in up to three pieces, and what of a request is not sent yet.

use std::io::IoSlice;

use bytes::Bytes;

/// A request's body. Three pieces, because a body whose model name was replaced is the bytes before, the name and the
/// bytes after, and joining them would copy a prompt that may be hundreds of mebibytes. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Payload([Bytes; 3]);

impl Payload {
    /// In bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.iter().map(Bytes::len).sum()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl From<Bytes> for Payload {
    fn from(body: Bytes) -> Self {
        Self([body, Bytes::new(), Bytes::new()])
    }
}

impl From<[Bytes; 3]> for Payload {
    fn from(pieces: [Bytes; 3]) -> Self {
        Self(pieces)
    }
}

/// Head and body on their way out. Head and body leave in one write where the socket takes them.
#[derive(Debug)]
pub(super) struct Unsent {
    pieces: [Bytes; 4],
    /// The socket took some of it: whoever is at the other end may have read that.
    begun: bool,
}

impl Unsent {
    pub(super) fn new(head: &Bytes, body: &Payload) -> Self {
        let [a, b, c] = body.0.clone();
        Self { pieces: [head.clone(), a, b, c], begun: false }
    }

    pub(super) const fn is_begun(&self) -> bool {
        self.begun
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pieces.iter().all(Bytes::is_empty)
    }

    pub(super) fn slices(&self) -> [IoSlice<'_>; 4] {
        self.pieces.each_ref().map(|piece| IoSlice::new(piece))
    }

    pub(super) fn advance(&mut self, mut sent: usize) {
        self.begun |= sent > 0;
        for piece in &mut self.pieces {
            let of_this = sent.min(piece.len());
            drop(piece.split_to(of_this));
            sent -= of_this;
        }
    }

    /// The engine reads no more of it.
    pub(super) fn abandon(&mut self) {
        self.pieces = Default::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_leave_in_order_whatever_the_socket_takes() {
        let body = Payload::from([Bytes::from_static(b"abc"), Bytes::new(), Bytes::from_static(b"defg")]);
        assert_eq!(body.len(), 7);
        let mut unsent = Unsent::new(&Bytes::from_static(b"HEAD"), &body);
        let mut seen = Vec::new();
        for take in [0, 1, 5, 0, 2, 3] {
            assert_eq!(unsent.is_begun(), !seen.is_empty());
            let all: Vec<u8> = unsent.slices().iter().flat_map(|slice| slice.to_vec()).collect();
            seen.extend_from_slice(&all[..take]);
            unsent.advance(take);
        }
        assert_eq!(seen, b"HEADabcdefg");
        assert!(unsent.is_empty());
    }
}
