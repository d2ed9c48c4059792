//! A request's body in up to three pieces, and what of a request is not sent yet.

use std::io::IoSlice;

use bytes::Bytes;

/// A body up to this size, in bytes, is copied behind its head.
pub(super) const SMALL: usize = 8 << 10;

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

    pub(super) fn append_to(&self, head: &mut Vec<u8>) {
        self.0.iter().for_each(|piece| head.extend_from_slice(piece));
    }

    /// For one write of both.
    pub(super) fn behind<'a>(&'a self, head: &'a [u8]) -> [IoSlice<'a>; 4] {
        let [a, b, c] = self.0.each_ref().map(|piece| IoSlice::new(piece));
        [IoSlice::new(head), a, b, c]
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

/// What of head and body the socket has not taken. Usually nothing, and then it costs nothing.
#[derive(Debug)]
pub(super) struct Unsent {
    pieces: Option<Box<[Bytes; 4]>>,
    /// The socket took some of it: whoever is at the other end may have read that.
    begun: bool,
}

impl Unsent {
    /// What is left when the first `sent` bytes are out.
    pub(super) fn after(sent: usize, head: &[u8], body: &Payload) -> Self {
        let mut unsent = Self { pieces: None, begun: sent > 0 };
        if sent < head.len() + body.len() {
            let [a, b, c] = body.0.clone();
            let of_head = sent.min(head.len());
            unsent.pieces = Some(Box::new([Bytes::copy_from_slice(&head[of_head..]), a, b, c]));
            unsent.advance(sent - of_head);
        }
        unsent
    }

    pub(super) const fn is_begun(&self) -> bool {
        self.begun
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.pieces.is_none()
    }

    pub(super) fn slices(&self) -> [IoSlice<'_>; 4] {
        let Some(pieces) = &self.pieces else {
            return [IoSlice::new(&[]); 4];
        };
        pieces.each_ref().map(|piece| IoSlice::new(piece))
    }

    pub(super) fn advance(&mut self, mut sent: usize) {
        self.begun |= sent > 0;
        let Some(pieces) = &mut self.pieces else { return };
        for piece in pieces.iter_mut() {
            let of_this = sent.min(piece.len());
            drop(piece.split_to(of_this));
            sent -= of_this;
        }
        if pieces.iter().all(Bytes::is_empty) {
            self.pieces = None;
        }
    }

    /// The engine reads no more of it.
    pub(super) fn abandon(&mut self) {
        self.pieces = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_leave_in_order_whatever_the_socket_takes() {
        let body = Payload::from([Bytes::from_static(b"abc"), Bytes::new(), Bytes::from_static(b"defg")]);
        assert_eq!(body.len(), 7);
        let mut head = b"HEAD".to_vec();
        let whole: Vec<u8> = body.behind(&head).iter().flat_map(|slice| slice.to_vec()).collect();
        for sent in 0..=whole.len() {
            let unsent = Unsent::after(sent, &head, &body);
            let left: Vec<u8> = unsent.slices().iter().flat_map(|slice| slice.to_vec()).collect();
            assert_eq!((&left[..], unsent.is_begun()), (&whole[sent..], sent > 0));
            assert_eq!(unsent.is_empty(), left.is_empty());
        }
        let mut unsent = Unsent::after(0, &head, &body);
        body.append_to(&mut head);
        assert_eq!(head, whole);
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
