//! A request's body in up to three pieces, what may follow them as it comes, and what of a request is not sent yet.

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

    /// For one write of both, as far as `most` bytes.
    pub(super) fn slices_after<'a>(&'a self, head: &'a [u8], most: usize) -> [IoSlice<'a>; 4] {
        let [a, b, c] = &self.0;
        limit_slices(most, [head, a, b, c])
    }
}

impl Payload {
    /// The same as one chunk; nothing, where there is nothing.
    pub(super) fn as_chunk(&self) -> Self {
        if self.is_empty() {
            return self.clone();
        }
        let [a, b, c] = &self.0;
        let whole = if b.is_empty() && c.is_empty() { a.clone() } else { [&a[..], b, c].concat().into() };
        Self([format!("{:X}\r\n", self.len()).into(), whole, Bytes::from_static(b"\r\n")])
    }
}

/// The first bytes of pieces, `most` of them.
fn limit_slices(most: usize, pieces: [&[u8]; 4]) -> [IoSlice<'_>; 4] {
    let mut room = most;
    pieces.map(|piece| {
        let part = piece.get(..room).unwrap_or(piece);
        room -= part.len();
        IoSlice::new(part)
    })
}

/// The rest of a body that is not all here yet: it is passed on as it comes. A request with one goes out on a connection
/// of its own and is never sent again.
pub struct RequestBodyStream {
    /// In bytes, where the client said how much there is. All of it must come.
    pub remaining: Option<u64>,
    pub body: Pin<Box<dyn Body<Data = Bytes, Error = Fault>>>,
}

impl RequestBodyStream {
    /// The next of it, as it goes out: in chunks, where its length is not known. `None` when that was all.
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<[Bytes; 4], Fault>>> {
        loop {
            let data =
                match ready!(self.body.as_mut().poll_frame(cx)).map(|frame| frame.map(|f| f.into_data())) {
                    Some(Ok(Ok(data))) => data,
                    // Trailers: they are between two hops.
                    Some(Ok(Err(_))) => continue,
                    Some(Err(fault)) => return Poll::Ready(Some(Err(fault))),
                    None => return Poll::Ready(None),
                };
            let none = Bytes::new;
            match &mut self.remaining {
                _ if data.is_empty() => {}
                Some(left) => {
                    // More than was said would be taken for another request.
                    *left = match left.checked_sub(data.len() as u64) {
                        Some(left) => left,
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
        f.debug_struct("Upload").field("left", &self.remaining).finish_non_exhaustive()
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
pub(super) struct UnsentRequest {
    pieces: Option<Box<[Bytes; 4]>>,
    /// The socket took some of it: whoever is at the other end may have read that.
    begun: bool,
    /// What comes behind.
    upload: Option<Box<RequestBodyStream>>,
    /// Why it does not come.
    fault: Option<Box<Fault>>,
}

impl UnsentRequest {
    pub(super) const fn empty() -> Self {
        Self { pieces: None, begun: false, upload: None, fault: None }
    }

    /// What is left when the first `sent` bytes are out.
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

    /// This comes behind it.
    pub(super) fn append(&mut self, upload: RequestBodyStream) {
        self.upload = Some(Box::new(upload));
    }

    /// Why the rest of it does not come, when that is the client's doing.
    pub(super) fn take_fault(&mut self) -> Option<Fault> {
        self.fault.take().map(|fault| *fault)
    }

    /// Ready when there is something to send, or nothing at all is left.
    ///
    /// # Errors
    /// The rest does not come.
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
            None if upload.remaining.is_none_or(|left| left == 0) => {
                if upload.remaining.is_none() {
                    let last = Bytes::from_static(b"0\r\n\r\n");
                    self.pieces = Some(Box::new([last, Bytes::new(), Bytes::new(), Bytes::new()]));
                }
                self.upload = None;
            }
            short => {
                let cut = || Fault::InvalidRequest { message: "the body broke off".into(), param: None };
                self.fault = Some(Box::new(short.and_then(Result::err).unwrap_or_else(cut)));
                return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
            }
        }
        Poll::Ready(Ok(()))
    }

    /// For one write, as far as `most` bytes.
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

    /// The engine reads no more of it.
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
        let mut seen = Vec::new();
        for take in [0, 1, 5, 0, 2, 3] {
            assert_eq!(unsent.is_begun(), !seen.is_empty());
            let all: Vec<u8> = unsent.slices(usize::MAX).iter().flat_map(|slice| slice.to_vec()).collect();
            seen.extend_from_slice(&all[..take]);
            unsent.advance(take);
        }
        assert_eq!(seen, b"HEADabcdefg");
        assert!(unsent.is_empty());
    }
}
