//! A piece of an answer on its way out.
//!
//! HTTP/2 asks for the next piece when its client has room for all of the last one. A client that reads slowly and without pause may
//! take longer for that than one may stall. So what counts is every part that goes out: h2 cuts a piece into frames as the stream's
//! window and the socket have room, and advances as it writes them.

use std::rc::{Rc, Weak};

use bytes::{Buf, Bytes};

use super::StreamingBody;

/// Bytes that tell the body which they are of when its client takes some of them.
pub(crate) struct TrackedBytes {
    bytes: Bytes,
    /// Not kept by what waits to be written: with it would be the engine.
    streaming_body: Weak<StreamingBody>,
}

impl TrackedBytes {
    pub(super) fn tracked(live: &Rc<StreamingBody>, bytes: Bytes) -> Self {
        Self { bytes, streaming_body: Rc::downgrade(live) }
    }

    /// Nobody is told.
    pub(super) const fn untracked(bytes: Bytes) -> Self {
        Self { bytes, streaming_body: Weak::new() }
    }
}

impl Buf for TrackedBytes {
    fn remaining(&self) -> usize {
        self.bytes.len()
    }

    fn chunk(&self) -> &[u8] {
        &self.bytes
    }

    fn advance(&mut self, count: usize) {
        self.bytes.advance(count);
        if let Some(live) = self.streaming_body.upgrade().filter(|_| count > 0) {
            live.note_written();
        }
    }
}
