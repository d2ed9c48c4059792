//! Response bodies that stream piece by piece.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::{
    sync::mpsc::{self, Receiver, Sender},
    task,
};

use crate::serve::PeerDisconnect;

use super::{
    events::EventRevision,
    log::LogPart,
    registry::{InstanceRegistry, WatchStep},
};

/// Bytes of a log that are read at a time.
const LOG_PIECE_BYTES: usize = 256 << 10;

/// A body fed by another task. That task waits while the client is slow, and its send fails after the client
/// disconnects.
#[derive(Debug)]
pub(crate) struct ChannelBody {
    pieces: Receiver<io::Result<Bytes>>,
    length: Option<u64>,
}

impl Body for ChannelBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        self.pieces.poll_recv(context).map(|piece| piece.map(|piece| piece.map(Frame::data)))
    }

    fn size_hint(&self) -> SizeHint {
        self.length.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

/// Streams a part of a log. The body ends with an error if the part is trimmed meanwhile: it is then shorter than its
/// announced length, which no client takes for the whole.
pub(crate) fn log_body(part: LogPart) -> ChannelBody {
    // One piece is read while the previous piece is sent.
    let (sender, pieces) = mpsc::channel(1);
    let length = Some(part.len());
    task::spawn(send_log(part, sender));
    ChannelBody { pieces, length }
}

async fn send_log(part: LogPart, sender: Sender<io::Result<Bytes>>) {
    let part = Arc::new(part);
    let mut at = part.start;
    while at <= part.end {
        let part = Arc::clone(&part);
        let read = task::spawn_blocking(move || {
            let mut piece = vec![0; LOG_PIECE_BYTES];
            let length = part.read(at, &mut piece)?;
            piece.truncate(length);
            if length == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(Bytes::from(piece)) }
        });
        let piece = read.await.unwrap_or_else(|error| Err(io::Error::other(error)));
        at += piece.as_ref().map_or(0, |piece| piece.len() as u64);
        let failed = piece.is_err();
        if let Err(error) = &piece {
            tracing::warn!(%error, "log response ended early");
        }
        if sender.send(piece).await.is_err() || failed {
            return;
        }
    }
}

/// Streams `first`, then the events after `last_seen` as they happen. The stream ends when the watcher falls too far behind
/// or the launcher ends.
pub(crate) fn watch_body(
    registry: Arc<InstanceRegistry>,
    first: Bytes,
    (last_seen, updates): (EventRevision, bool),
    disconnect: Option<PeerDisconnect>,
) -> ChannelBody {
    let (sender, pieces) = mpsc::channel(1);
    task::spawn(async move {
        if first.is_empty() || sender.send(Ok(first)).await.is_ok() {
            let sending = send_events(&registry, &sender, last_seen, updates);
            match disconnect {
                None => sending.await,
                Some(disconnect) => tokio::select! { () = sending => {}, () = disconnect.wait() => {} },
            }
        }
    });
    ChannelBody { pieces, length: None }
}

async fn send_events(
    registry: &InstanceRegistry,
    sender: &Sender<io::Result<Bytes>>,
    mut last_seen: EventRevision,
    updates: bool,
) {
    let mut revisions = registry.subscribe();
    loop {
        revisions.mark_unchanged();
        match registry.events_after(last_seen, updates) {
            WatchStep::End => return,
            WatchStep::Wait => tokio::select! {
                () = sender.closed() => return,
                _ = revisions.changed() => {}
            },
            WatchStep::Lines(lines, revision) => {
                last_seen = revision;
                if !lines.is_empty() && sender.send(Ok(lines)).await.is_err() {
                    return;
                }
            }
        }
    }
}
