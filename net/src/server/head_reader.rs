//! Reads the head of the next request from the connection.

use std::{
    io,
    task::{Context, Poll, ready},
};

use super::{
    Http1Limits, ServerIo,
    head::{self, HeadRefusal, RequestHead},
    wire::Wire,
};

/// Bytes per read. Most requests arrive whole, and a long body is read by larger reads of its own.
const READ_BYTES: usize = 16 << 10;

/// The next head, or why it was refused; `None` at the end of the client's side.
type HeadPoll = Poll<io::Result<Option<Result<RequestHead, HeadRefusal>>>>;

/// The progress within a head that arrives in pieces.
#[derive(Debug, Default)]
pub(super) struct HeadReader {
    /// The buffered bytes that were parsed and end within the head.
    searched: usize,
    /// The bytes of empty lines before the head. They count as part of it.
    skipped: usize,
}

impl HeadReader {
    /// Reads until a head is complete. A head that arrives whole is parsed where it was read.
    pub(super) fn poll<P: ServerIo>(
        &mut self,
        wire: &Wire<P>,
        limits: &Http1Limits,
        cx: &mut Context<'_>,
    ) -> HeadPoll {
        loop {
            if wire.buffered_bytes() > self.searched {
                let scanned = wire.scan_buffered(|bytes| match self.scan(bytes, limits) {
                    Ok((used, head)) => (used, head.map(Ok)),
                    Err(refusal) => (0, Some(Err(refusal))),
                });
                if let Some(found) = scanned {
                    return Poll::Ready(Ok(Some(found)));
                }
            }
            let read = wire.poll_read(cx, READ_BYTES, |bytes| {
                if bytes.is_empty() {
                    return Some(None);
                }
                if wire.buffered_bytes() > 0 {
                    wire.push(bytes);
                    return None;
                }
                match self.scan(bytes, limits) {
                    Ok((used, head)) => {
                        wire.push(bytes.get(used..).unwrap_or_default());
                        head.map(|head| Some(Ok(head)))
                    }
                    Err(refusal) => Some(Some(Err(refusal))),
                }
            });
            if let Some(found) = ready!(read)? {
                return Poll::Ready(Ok(found));
            }
        }
    }

    /// Parses the bytes that have arrived; returns how many of them are used up, and the head once it is complete.
    fn scan(
        &mut self,
        bytes: &[u8],
        limits: &Http1Limits,
    ) -> Result<(usize, Option<RequestHead>), HeadRefusal> {
        let empty = head::leading_empty_lines(bytes);
        let is_first = self.searched == 0 && self.skipped == 0;
        self.skipped += empty;
        let rest = bytes.get(empty..).unwrap_or_default();
        let searched = self.searched.saturating_sub(empty);
        let max_bytes = limits.max_head_bytes.saturating_sub(self.skipped);
        // Parsing anew after every byte would take quadratic time.
        if !rest.is_empty()
            && (is_first || head::has_blank_line(rest, searched))
            && let Some((length, head)) = head::parse(rest, limits, max_bytes)?
        {
            *self = Self::default();
            return Ok((empty + length, Some(head)));
        }
        self.searched = rest.len();
        if rest.len() >= max_bytes {
            return Err(HeadRefusal::TooLarge);
        }
        Ok((empty, None))
    }
}
