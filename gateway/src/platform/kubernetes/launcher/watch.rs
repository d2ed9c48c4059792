//! What happens in a launcher, as it happens.
//!
//! A launcher counts what happens, and whoever was away can go on from the number that was heard last. That is done from a list
//! to the stream that begins with its number, so nothing is missed between the two; and it is done at no other time. One that was
//! started anew counts from nothing, and would take the number of its former life for one that is still to come: so every
//! connection begins with a list, and with the question whether the stream is still that of the same life.

use std::{convert::Infallible, time::Duration};

use rouse::caller::Failure;
use serde::Deserialize;
use tokio::{
    sync::mpsc::{self, error::SendError},
    time::{self, Instant},
};

use super::{CALL, Error, INSTANCES, Instance, Launcher, probes::Probes};

/// After a connection that broke; doubled with every one that breaks soon, up to the longest.
const FIRST: Duration = Duration::from_millis(50);
const LONGEST: Duration = Duration::from_secs(2);
/// A line shows one instance, which is as large as whoever made it said.
const LINE: usize = 1 << 20;

/// What is seen of a launcher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen {
    /// These are all that there are. First of each connection; what was heard before is out of date.
    Listed(Vec<Instance>),
    Created(Instance),
    /// It answers now, or does so no more. Of a launcher that does not tell only the former is seen.
    Updated(Instance),
    /// Its process ended by itself; it stays listed until it is deleted. The code is negative for a signal.
    Stopped {
        instance: Instance,
        exit_code: Option<i32>,
    },
    /// Nothing of it is left.
    Deleted(Instance),
    /// There is no connection: nothing more is known until the next list. It is told once, however long that takes.
    Lost,
}

/// A line of the stream.
#[derive(Deserialize)]
struct Event {
    #[serde(rename = "type")]
    kind: String,
    object: Object,
}

#[derive(Deserialize)]
struct Object {
    #[serde(flatten)]
    instance: Instance,
    #[serde(default)]
    exit_code: Option<i32>,
}

impl Event {
    /// None, for what later versions may tell.
    fn seen(self) -> Option<Seen> {
        let Object { instance, exit_code } = self.object;
        match self.kind.as_str() {
            "CREATED" => Some(Seen::Created(instance)),
            "UPDATED" => Some(Seen::Updated(instance)),
            "STOPPED" => Some(Seen::Stopped { instance, exit_code }),
            "DELETED" => Some(Seen::Deleted(instance)),
            _ => None,
        }
    }
}

/// Why a connection is over.
#[derive(Debug, thiserror::Error)]
enum End {
    #[error(transparent)]
    Launcher(#[from] Error),
    #[error("nobody listens")]
    Unheard,
}

impl From<Failure> for End {
    fn from(failure: Failure) -> Self {
        Self::Launcher(failure.into())
    }
}

impl<M> From<SendError<M>> for End {
    fn from(_: SendError<M>) -> Self {
        Self::Unheard
    }
}

pub(super) async fn follow<M>(launcher: &Launcher, told: &mpsc::Sender<M>, wrap: impl Fn(Seen) -> M) {
    tokio::select! {
        () = told.closed() => {}
        () = connect(launcher, told, &wrap) => {}
    }
}

/// Again and again, until nobody listens.
async fn connect<M>(launcher: &Launcher, told: &mpsc::Sender<M>, wrap: &impl Fn(Seen) -> M) {
    let (mut pause, mut lost) = (FIRST, false);
    loop {
        let begun = Instant::now();
        let mut listed = false;
        let Err(end) = stream(launcher, told, wrap, &mut listed).await;
        let End::Launcher(error) = end else { return };
        if listed || !lost {
            tracing::info!(%error, address = %launcher.address, "a launcher is lost");
            if told.send(wrap(Seen::Lost)).await.is_err() {
                return;
            }
        }
        lost = true;
        pause = if begun.elapsed() > LONGEST { FIRST } else { pause };
        time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST);
    }
}

/// One connection, to its end. `listed`: the list was told.
async fn stream<M>(
    launcher: &Launcher,
    told: &mpsc::Sender<M>,
    wrap: &impl Fn(Seen) -> M,
    listed: &mut bool,
) -> Result<Infallible, End> {
    let all = launcher.list().await?;
    let path = format!("{INSTANCES}/watch?since={}&ready=true", all.revision);
    let mut lines = launcher.caller.lines(&path, Some(launcher.epoch), CALL, LINE).await?;
    // 410 where more has happened since the list than the launcher keeps: it is listed anew.
    if lines.status() != 200 {
        let text = "it cannot be watched".to_owned();
        return Err(Error::Refused { status: lines.status(), text }.into());
    }
    if launcher.revision().await? < all.revision {
        return Err(Failure::Broken.into());
    }
    let mut probes = Probes::new(launcher.address.ip());
    let mut seen = Some(Seen::Listed(all.instances));
    loop {
        if let Some(seen) = seen {
            probes.saw(&seen);
            told.send(wrap(seen)).await?;
            *listed = true;
        }
        seen = tokio::select! {
            // A launcher ends it for those who are too slow, and when it ends itself.
            line = lines.next() => {
                let line = line?.ok_or(Failure::Broken)?;
                serde_json::from_slice::<Event>(&line).map_err(|_| Failure::Broken)?.seen()
            }
            answers = probes.next() => Some(answers),
        };
    }
}

#[cfg(test)]
mod tests;
