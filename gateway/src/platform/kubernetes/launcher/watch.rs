//! What happens in a launcher, as it happens.
//!
//! A launcher counts what happens, and whoever was away can go on from the number that was heard last. That is done from a list
//! to the stream that begins with its number, so nothing is missed between the two; and it is done at no other time. One that was
//! started anew counts from nothing, and would take the number of its former life for one that is still to come: so every
//! connection begins with a list, and with the question whether the stream is still that of the same life.

use std::{convert::Infallible, time::Duration};

use rouse_net::http_client::HttpClientError;
use serde::Deserialize;
use tokio::{
    sync::mpsc::{self, error::SendError},
    time::{self, Instant},
};

use super::{CALL_TIMEOUT, Error, INSTANCES, LauncherClient, LauncherInstance, probes::EngineProbes};

/// After a connection that broke; doubled with every one that breaks soon, up to the longest.
const MIN_RECONNECT_DELAY: Duration = Duration::from_millis(50);
const MAX_RECONNECT_DELAY: Duration = Duration::from_secs(2);
/// A line shows one instance, which is as large as whoever made it said.
const MAX_LINE_BYTES: usize = 1 << 20;

/// What is seen of a launcher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LauncherWatchEvent {
    /// These are all that there are. First of each connection; what was heard before is out of date.
    Listed(Vec<LauncherInstance>),
    Created(LauncherInstance),
    /// It answers now, or does so no more. Of a launcher that does not tell only the former is seen.
    Updated(LauncherInstance),
    /// Its process ended by itself; it stays listed until it is deleted. The code is negative for a signal.
    Stopped {
        instance: LauncherInstance,
        exit_code: Option<i32>,
    },
    /// Nothing of it is left.
    Deleted(LauncherInstance),
    /// There is no connection: nothing more is known until the next list. It is told once, however long that takes.
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
    /// None, for what later versions may tell.
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

/// Why a connection is over.
#[derive(Debug, thiserror::Error)]
enum WatchEnd {
    #[error(transparent)]
    Launcher(#[from] Error),
    #[error("nobody listens")]
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
    told: &mpsc::Sender<M>,
    wrap: impl Fn(LauncherWatchEvent) -> M,
) {
    tokio::select! {
        () = told.closed() => {}
        () = reconnect(launcher, told, &wrap) => {}
    }
}

/// Again and again, until nobody listens.
async fn reconnect<M>(
    launcher: &LauncherClient,
    told: &mpsc::Sender<M>,
    wrap: &impl Fn(LauncherWatchEvent) -> M,
) {
    let (mut pause, mut lost) = (MIN_RECONNECT_DELAY, false);
    loop {
        let begun = Instant::now();
        let mut listed = false;
        let Err(end) = stream(launcher, told, wrap, &mut listed).await;
        let WatchEnd::Launcher(error) = end else { return };
        if listed || !lost {
            tracing::info!(%error, address = %launcher.address, "a launcher is lost");
            if told.send(wrap(LauncherWatchEvent::Disconnected)).await.is_err() {
                return;
            }
        }
        lost = true;
        pause = if begun.elapsed() > MAX_RECONNECT_DELAY { MIN_RECONNECT_DELAY } else { pause };
        time::sleep(pause).await;
        pause = (pause * 2).min(MAX_RECONNECT_DELAY);
    }
}

/// One connection, to its end. `listed`: the list was told.
async fn stream<M>(
    launcher: &LauncherClient,
    told: &mpsc::Sender<M>,
    wrap: &impl Fn(LauncherWatchEvent) -> M,
    listed: &mut bool,
) -> Result<Infallible, WatchEnd> {
    let all = launcher.list().await?;
    let path = format!("{INSTANCES}/watch?since={}&ready=true", all.revision);
    let mut lines =
        launcher.client.stream_lines(&path, Some(launcher.epoch), CALL_TIMEOUT, MAX_LINE_BYTES).await?;
    // 410 where more has happened since the list than the launcher keeps: it is listed anew.
    if lines.status() != 200 {
        let text = "it cannot be watched".to_owned();
        return Err(Error::Refused { status: lines.status(), text }.into());
    }
    if launcher.revision().await? < all.revision {
        return Err(HttpClientError::Broken.into());
    }
    let mut probes = EngineProbes::new(launcher.address.ip());
    let mut seen = Some(LauncherWatchEvent::Listed(all.instances));
    loop {
        if let Some(seen) = seen {
            probes.on_event(&seen);
            told.send(wrap(seen)).await?;
            *listed = true;
        }
        seen = tokio::select! {
            // A launcher ends it for those who are too slow, and when it ends itself.
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
