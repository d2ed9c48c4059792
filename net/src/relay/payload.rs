//! A request's body: its pieces, the rest that is still arriving, and the unsent part.

use std::{
    fmt, io,
    io::IoSlice,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http_body::Body;

use rouse::fault::Fault;

/// A body up to this size, in bytes, is copied behind its head.
pub(super) const MAX_COPIED_BODY_BYTES: usize = 8 << 10;

/// A request's body. It has three pieces because replacing the model name splits it into the bytes before, the name and
/// the bytes after. Joining them would copy a prompt that may be hundreds of mebibytes. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Payload([Bytes; 3]);

impl Payload {
    /// Length in bytes.
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

    /// Slices for one write of head and body, up to `most` bytes.
    pub(super) fn slices_after<'a>(&'a self, head: &'a [u8], most: usize) -> [IoSlice<'a>; 4] {
        let [a, b, c] = &self.0;
        limit_slices(most, [head, a, b, c])
    }
}

impl Payload {
    /// Returns the body framed as one chunk; an empty body stays empty.
    pub(super) fn as_chunk(&self) -> Self {
        if self.is_empty() {
            return self.clone();
        }
        let [a, b, c] = &self.0;
        let whole = if b.is_empty() && c.is_empty() { a.clone() } else { [&a[..], b, c].concat().into() };
        Self([format!("{:X}\r\n", self.len()).into(), whole, Bytes::from_static(b"\r\n")])
    }
}

/// Cuts the pieces to `most` bytes in total.
fn limit_slices(most: usize, pieces: [&[u8]; 4]) -> [IoSlice<'_>; 4] {
    let mut room = most;
    pieces.map(|piece| {
        let part = piece.get(..room).unwrap_or(piece);
        room -= part.len();
        IoSlice::new(part)
    })
}

/// The rest of a body that is still arriving and is forwarded as it arrives. A request with one uses a new connection
/// and is never sent again.
pub struct RequestBodyStream {
    /// Bytes still to come, where the client declared the length. All of them must arrive.
    pub remaining: Option<u64>,
    pub body: Pin<Box<dyn Body<Data = Bytes, Error = Fault>>>,
}

impl RequestBodyStream {
    /// Polls the next piece as it is sent: framed as a chunk when the length is unknown. `None` at the end.
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<[Bytes; 4], Fault>>> {
        loop {
            let data =
                match ready!(self.body.as_mut().poll_frame(cx)).map(|frame| frame.map(|f| f.into_data())) {
                    Some(Ok(Ok(data))) => data,
                    // Trailers concern one hop.
                    Some(Ok(Err(_))) => continue,
                    Some(Err(fault)) => return Poll::Ready(Some(Err(fault))),
                    None => return Poll::Ready(None),
                };
            let none = Bytes::new;
            match &mut self.remaining {
                _ if data.is_empty() => {}
                Some(remaining) => {
                    // The engine would take bytes beyond the declared length for another request.
                    *remaining = match remaining.checked_sub(data.len() as u64) {
                        Some(rest) => rest,
                        None => return Poll::Ready(Some(Err(Fault::Internal))),
                    };
                    return Poll::Ready(Some(Ok([data, none(), none(), none()])));
                }
                None => {
                    let size = format!("{:X}\r\n", data.len()).into();
                    return Poll::Ready(Some(Ok([size, data, Bytes::from_static(b"\r\n"), none()])));
                }
            }
        }
    }
}

impl fmt::Debug for RequestBodyStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestBodyStream").field("left", &self.remaining).finish_non_exhaustive()
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

/// The part of head and body that the socket has not accepted. Usually empty, and then it costs nothing.
#[derive(Debug)]
pub(super) struct UnsentRequest {
    pieces: Option<Box<[Bytes; 4]>>,
    /// The socket accepted some bytes, and the peer may have read them.
    begun: bool,
    /// The rest of the body, which follows `pieces`.
    upload: Option<Box<RequestBodyStream>>,
    /// Why the rest of the body does not arrive.
    fault: Option<Box<Fault>>,
}

impl UnsentRequest {
    /// What remains unsent after the first `sent` bytes.
    pub(super) fn after(sent: usize, head: &[u8], body: &Payload) -> Self {
        let mut unsent = Self { pieces: None, begun: sent > 0, upload: None, fault: None };
        if sent < head.len() + body.len() {
            let [a, b, c] = body.0.clone();
            let of_head = sent.min(head.len());
            let head = Bytes::copy_from_slice(head.get(of_head..).unwrap_or_default());
            unsent.pieces = Some(Box::new([head, a, b, c]));
            unsent.advance(sent - of_head);
        }
        unsent
    }

    pub(super) const fn is_begun(&self) -> bool {
        self.begun
    }

    #[inline]
    pub(super) const fn is_empty(&self) -> bool {
        self.pieces.is_none() && self.upload.is_none()
    }

    /// Appends the rest of the body.
    pub(super) fn append(&mut self, upload: RequestBodyStream) {
        self.upload = Some(Box::new(upload));
    }

    /// Returns why the rest of the body does not arrive, when the client caused that.
    pub(super) fn take_fault(&mut self) -> Option<Fault> {
        self.fault.take().map(|fault| *fault)
    }

    /// Ready when there are bytes to send, or nothing is left.
    ///
    /// # Errors
    /// The rest of the body does not arrive.
    #[inline]
    pub(super) fn poll_more(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.pieces.is_some() { Poll::Ready(Ok(())) } else { self.poll_upload(cx) }
    }

    fn poll_upload(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Some(upload) = &mut self.upload else {
            return Poll::Ready(Ok(()));
        };
        match ready!(upload.poll_next(cx)) {
            Some(Ok(pieces)) => self.pieces = Some(Box::new(pieces)),
            None if upload.remaining.is_none_or(|remaining| remaining == 0) => {
                if upload.remaining.is_none() {
                    let last = Bytes::from_static(b"0\r\n\r\n");
                    self.pieces = Some(Box::new([last, Bytes::new(), Bytes::new(), Bytes::new()]));
                }
                self.upload = None;
            }
            short => {
                let cut =
                    || Fault::InvalidRequest { message: "the request body ended early".into(), param: None };
                self.fault = Some(Box::new(short.and_then(Result::err).unwrap_or_else(cut)));
                return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Slices for one write, up to `most` bytes.
    pub(super) fn slices(&self, most: usize) -> [IoSlice<'_>; 4] {
        let Some(pieces) = &self.pieces else {
            return [IoSlice::new(&[]); 4];
        };
        limit_slices(most, pieces.each_ref().map(|piece| &piece[..]))
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

    /// Drops the unsent rest, because the engine no longer reads it.
    pub(super) fn abandon(&mut self) {
        self.pieces = None;
        self.upload = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_without_a_length_begins_with_a_chunk() {
        let chunk = |pieces: [&'static [u8]; 3]| {
            let chunk = Payload::from(pieces.map(Bytes::from_static)).as_chunk();
            chunk.0.concat()
        };
        assert_eq!(chunk([b"0\r\n\r\nGET /sleep", b"", b""]), b"F\r\n0\r\n\r\nGET /sleep\r\n");
        assert_eq!(chunk([b"abc", b"d", b"ef"]), b"6\r\nabcdef\r\n");
        assert_eq!(chunk([b"", b"", b""]), b"");
    }

    #[test]
    fn pieces_leave_in_order_whatever_the_socket_takes() {
        let body = Payload::from([Bytes::from_static(b"abc"), Bytes::new(), Bytes::from_static(b"defg")]);
        assert_eq!(body.len(), 7);
        let mut head = b"HEAD".to_vec();
        let whole: Vec<u8> = body.slices_after(&head, 11).iter().flat_map(|slice| slice.to_vec()).collect();
        for sent in 0..=whole.len() {
            let unsent = UnsentRequest::after(sent, &head, &body);
            let left: Vec<u8> = unsent.slices(usize::MAX).iter().flat_map(|slice| slice.to_vec()).collect();
            assert_eq!((&left[..], unsent.is_begun()), (&whole[sent..], sent > 0));
            assert_eq!(unsent.is_empty(), left.is_empty());
        }
        for most in 0..=whole.len() {
            let offered =
                |slices: [IoSlice<'_>; 4]| slices.iter().flat_map(|slice| slice.to_vec()).collect::<Vec<_>>();
            assert_eq!(offered(body.slices_after(&head, most)), whole[..most]);
            assert_eq!(offered(UnsentRequest::after(0, &head, &body).slices(most)), whole[..most]);
        }
        let mut unsent = UnsentRequest::after(0, &head, &body);
        body.append_to(&mut head);
        assert_eq!(head, whole);
        let mut received = Vec::new();
        for take in [0, 1, 5, 0, 2, 3] {
            assert_eq!(unsent.is_begun(), !received.is_empty());
            let all: Vec<u8> = unsent.slices(usize::MAX).iter().flat_map(|slice| slice.to_vec()).collect();
            received.extend_from_slice(&all[..take]);
            unsent.advance(take);
        }
        assert_eq!(received, b"HEADabcdefg");
        assert!(unsent.is_empty());
    }
}
