//! What tells the gateway to reload or to end: signals, the configuration file itself, and the certificates it names.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use nix::sys::inotify::AddWatchFlags;
use rouse::files::{WRITTEN, Watch};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    time::{Instant, Interval, MissedTickBehavior},
};

/// A certificate and its key are two files: with only one of them replaced they do not fit.
const SETTLE: Duration = Duration::from_millis(200);
const HOUR: Duration = Duration::from_secs(3600);

pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
    rotated: Signal,
    file: Option<Watch>,
    certificates: Option<Watch>,
    hourly: Interval,
}

/// What is asked of the gateway.
pub(super) enum Asked {
    Reload,
    /// To open logs anew after a rotation. The configuration is not read: it may be half written at that moment.
    Reopen,
    /// To look at what no event tells of.
    Look,
    Terminate,
}

impl Signals {
    pub(super) fn new(file: Option<&Path>) -> io::Result<Self> {
        let mut hourly = tokio::time::interval_at(Instant::now() + HOUR, HOUR);
        hourly.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
            rotated: signal(SignalKind::user_defined1())?,
            file: file.map(|file| Watch::new(vec![file.to_owned()], WRITTEN, Duration::ZERO)).transpose()?,
            certificates: None,
            hourly,
        })
    }

    /// Watches these certificates' files, and no others any more. What changed until now went unseen.
    pub(super) fn watch(&mut self, files: Vec<PathBuf>) -> io::Result<()> {
        if self.certificates.as_ref().map_or(&[][..], Watch::files) == files {
            return Ok(());
        }
        // Some tools put a new link in the place of the old one, which only creates it.
        let flags = WRITTEN | AddWatchFlags::IN_CREATE;
        let watch = (!files.is_empty()).then(|| Watch::new(files, flags, SETTLE));
        self.certificates = watch.transpose()?;
        Ok(())
    }

    pub(super) async fn terminate(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }

    /// The next thing that asks for something.
    pub(super) async fn next(&mut self) -> Asked {
        tokio::select! {
            _ = self.terminate.recv() => Asked::Terminate,
            _ = self.interrupt.recv() => Asked::Terminate,
            _ = self.hangup.recv() => Asked::Reload,
            _ = self.rotated.recv() => Asked::Reopen,
            () = changed(self.file.as_mut()) => Asked::Reload,
            () = changed(self.certificates.as_mut()) => Asked::Reload,
            _ = self.hourly.tick() => Asked::Look,
        }
    }
}

async fn changed(watch: Option<&mut Watch>) {
    match watch {
        Some(watch) => watch.changed().await,
        None => std::future::pending().await,
    }
}
