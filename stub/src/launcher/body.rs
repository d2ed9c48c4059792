//! Answers that come piece by piece.

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

/// Of a log, at a time.
const LOG_PIECE_BYTES: usize = 256 << 10;

/// What another task sends. That task waits while nobody takes it, and hears when nobody will.
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

/// A part of a log. It ends with an error where it is no longer there: fewer bytes come than were announced, which no
/// client takes for the whole.
pub(crate) fn log_body(part: LogPart) -> ChannelBody {
    // One piece is read while the one before is sent.
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
            tracing::warn!(%error, "the answer with a log ends early");
        }
        if sender.send(piece).await.is_err() || failed {
            return;
        }
    }
}

/// Events after `seen`, as they come, after those that `first` holds. It ends when the watcher is too slow, or the
/// launcher ends.
pub(crate) fn watch_body(
    registry: Arc<InstanceRegistry>,
    first: Bytes,
    (seen, updates): (EventRevision, bool),
    gone: Option<PeerDisconnect>,
) -> ChannelBody {
    let (sender, pieces) = mpsc::channel(1);
    task::spawn(async move {
        if first.is_empty() || sender.send(Ok(first)).await.is_ok() {
            let sending = send_events(&registry, &sender, seen, updates);
            match gone {
                None => sending.await,
                Some(gone) => tokio::select! { () = sending => {}, () = gone.wait() => {} },
            }
        }
    });
    ChannelBody { pieces, length: None }
}

async fn send_events(
    registry: &InstanceRegistry,
    sender: &Sender<io::Result<Bytes>>,
    mut seen: EventRevision,
    updates: bool,
) {
    let mut news = registry.subscribe();
    loop {
        news.mark_unchanged();
        match registry.events_after(seen, updates) {
            WatchStep::End => return,
            WatchStep::Wait => tokio::select! {
                () = sender.closed() => return,
                _ = news.changed() => {}
            },
            WatchStep::Lines(lines, revision) => {
                seen = revision;
                if !lines.is_empty() && sender.send(Ok(lines)).await.is_err() {
                    return;
                }
            }
        }
    }
}
