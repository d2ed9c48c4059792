//! A piece of an answer on its way out.
//!
//! HTTP/2 asks for the next piece when its client has room for all of the last one. A client that reads slowly and without pause may
//! take longer for that than one may stall. So what counts is every part that goes out: h2 cuts a piece into frames as the stream's
//! window and the socket have room, and advances as it writes them.

use std::rc::{Rc, Weak};

use bytes::{Buf, Bytes};

use super::Live;

/// Bytes that tell the body which they are of when its client takes some of them.
pub(crate) struct Outgoing {
    bytes: Bytes,
    /// Not kept by what waits to be written: with it would be the engine.
    live: Weak<Live>,
}

impl Outgoing {
    pub(super) fn of(live: &Rc<Live>, bytes: Bytes) -> Self {
        Self { bytes, live: Rc::downgrade(live) }
    }

    /// Nobody is told.
    pub(super) const fn alone(bytes: Bytes) -> Self {
        Self { bytes, live: Weak::new() }
    }
}

impl Buf for Outgoing {
    fn remaining(&self) -> usize {
        self.bytes.len()
    }

    fn chunk(&self) -> &[u8] {
        &self.bytes
    }

    fn advance(&mut self, count: usize) {
        self.bytes.advance(count);
        if let Some(live) = self.live.upgrade().filter(|_| count > 0) {
            live.taken();
        }
    }
}
