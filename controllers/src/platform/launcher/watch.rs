//! Streams the events of a launcher.
//!
//! A launcher numbers its events, and a client can resume after the last number that it has seen. The watch resumes
//! only from a list to the stream that begins with the list's number, so it misses nothing between the two. A restarted
//! launcher counts from zero and would take an old number for a future one. So every connection begins with a list, and
//! with a check that the stream belongs to the same launcher process.

use std::{convert::Infallible, time::Duration};

use rouse_net::http_client::HttpClientError;
use serde::Deserialize;
use tokio::{
    sync::mpsc::{self, error::SendError},
    time::{self, Instant},
};

use super::{CALL_TIMEOUT, Error, INSTANCES, LauncherClient, LauncherInstance, probes::EngineProbes};

/// Delay after a broken connection; doubles, up to the maximum, while connections break soon.
const MIN_RECONNECT_DELAY: Duration = Duration::from_millis(50);
const MAX_RECONNECT_DELAY: Duration = Duration::from_secs(2);
/// Maximum length of a line, which shows one instance; its size depends on the client that created it.
const MAX_LINE_BYTES: usize = 1 << 20;

/// An event of a launcher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LauncherWatchEvent {
    /// All current instances. The first event of each connection; it invalidates everything earlier.
    Listed(Vec<LauncherInstance>),
    Created(LauncherInstance),
    /// The instance began or stopped answering. Launchers without readiness reports only show the former.
    Updated(LauncherInstance),
    /// The instance's process ended by itself; it stays listed until it is deleted. The code is negative for a signal.
    Stopped {
        instance: LauncherInstance,
        exit_code: Option<i32>,
    },
    /// Nothing of the instance is left.
    Deleted(LauncherInstance),
    /// The connection is lost: nothing is known until the next list. Sent once per outage.
    Disconnected,
}

/// A line of the stream.
#[derive(Deserialize)]
struct WatchLine {
    #[serde(rename = "type")]
    kind: String,
    object: WatchLineObject,
}

#[derive(Deserialize)]
struct WatchLineObject {
    #[serde(flatten)]
    instance: LauncherInstance,
    #[serde(default)]
    exit_code: Option<i32>,
}

impl WatchLine {
    /// Returns `None` for event types of later versions.
    fn into_event(self) -> Option<LauncherWatchEvent> {
        let WatchLineObject { instance, exit_code } = self.object;
        match self.kind.as_str() {
            "CREATED" => Some(LauncherWatchEvent::Created(instance)),
            "UPDATED" => Some(LauncherWatchEvent::Updated(instance)),
            "STOPPED" => Some(LauncherWatchEvent::Stopped { instance, exit_code }),
            "DELETED" => Some(LauncherWatchEvent::Deleted(instance)),
            _ => None,
        }
    }
}

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
enum WatchEnd {
    #[error(transparent)]
    Launcher(#[from] Error),
    #[error("the receiver is closed")]
    ReceiverClosed,
}

impl From<HttpClientError> for WatchEnd {
    fn from(failure: HttpClientError) -> Self {
        Self::Launcher(failure.into())
    }
}

impl<M> From<SendError<M>> for WatchEnd {
    fn from(_: SendError<M>) -> Self {
        Self::ReceiverClosed
    }
}

pub(super) async fn run<M>(
    launcher: &LauncherClient,
    tx: &mpsc::Sender<M>,
    wrap: impl Fn(LauncherWatchEvent) -> M,
) {
    tokio::select! {
        () = tx.closed() => {}
        () = reconnect(launcher, tx, &wrap) => {}
    }
}

/// Reconnects until the receiver closes.
async fn reconnect<M>(
    launcher: &LauncherClient,
    tx: &mpsc::Sender<M>,
    wrap: &impl Fn(LauncherWatchEvent) -> M,
) {
    let (mut pause, mut lost) = (MIN_RECONNECT_DELAY, false);
    loop {
        let started = Instant::now();
        let mut listed = false;
        let Err(end) = stream(launcher, tx, wrap, &mut listed).await;
        let WatchEnd::Launcher(error) = end else { return };
        if listed || !lost {
            tracing::info!(%error, address = %launcher.address, "connection to the launcher lost, reconnecting");
            if tx.send(wrap(LauncherWatchEvent::Disconnected)).await.is_err() {
                return;
            }
        }
        lost = true;
        pause = if started.elapsed() > MAX_RECONNECT_DELAY { MIN_RECONNECT_DELAY } else { pause };
        time::sleep(pause).await;
        pause = (pause * 2).min(MAX_RECONNECT_DELAY);
    }
}

/// Runs one connection to its end. Sets `listed` once the list was sent.
async fn stream<M>(
    launcher: &LauncherClient,
    tx: &mpsc::Sender<M>,
    wrap: &impl Fn(LauncherWatchEvent) -> M,
    listed: &mut bool,
) -> Result<Infallible, WatchEnd> {
    let all = launcher.list().await?;
    let path = format!("{INSTANCES}/watch?since={}&ready=true", all.revision);
    let mut lines =
        launcher.client.stream_lines(&path, Some(launcher.epoch), CALL_TIMEOUT, MAX_LINE_BYTES).await?;
    // 410 if more events have happened since the list than the launcher keeps: list again.
    if lines.status() != 200 {
        let text = "cannot watch the instances".to_owned();
        return Err(Error::Refused { status: lines.status(), text }.into());
    }
    if launcher.revision().await? < all.revision {
        return Err(HttpClientError::Broken.into());
    }
    let mut probes = EngineProbes::new(launcher.address.ip());
    let mut event = Some(LauncherWatchEvent::Listed(all.instances));
    loop {
        if let Some(event) = event {
            probes.on_event(&event);
            tx.send(wrap(event)).await?;
            *listed = true;
        }
        event = tokio::select! {
            // A launcher ends the stream of a slow client, and when it shuts down.
            line = lines.next() => {
                let line = line?.ok_or(HttpClientError::Broken)?;
                serde_json::from_slice::<WatchLine>(&line).map_err(|_| HttpClientError::Broken)?.into_event()
            }
            answers = probes.next() => Some(answers),
        };
    }
}

#[cfg(test)]
mod tests;
