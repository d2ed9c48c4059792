//! A chunk of a response that reports each part the connection writes.
//!
//! HTTP/2 polls for the next chunk only when its client has room for all of the last one. A client that reads slowly
//! but steadily may need longer than the stall limit for that. So every written part counts as progress: h2 cuts a
//! chunk into frames as the stream's window and the socket have room, and advances the chunk as it writes them.

use std::rc::{Rc, Weak};

use bytes::{Buf, Bytes};

use super::StreamingBody;

/// Bytes that notify their body when the connection writes some of them.
pub(crate) struct TrackedBytes {
    bytes: Bytes,
    /// Weak, because a chunk that waits to be written must not keep the body, and with it the engine.
    streaming_body: Weak<StreamingBody>,
}

impl TrackedBytes {
    pub(super) fn tracked(streaming_body: &Rc<StreamingBody>, bytes: Bytes) -> Self {
        Self { bytes, streaming_body: Rc::downgrade(streaming_body) }
    }

    /// Bytes that notify no body.
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
        if let Some(streaming_body) = self.streaming_body.upgrade().filter(|_| count > 0) {
            streaming_body.note_written();
        }
    }
}
