//! Triggers of a reload or a shutdown: signals, the configuration file, and the certificates that it names.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use nix::sys::inotify::AddWatchFlags;
use rouse_net::file_watch::{FileWatcher, WRITTEN_FLAGS};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    time::{Instant, Interval, MissedTickBehavior},
};

/// Wait after a change: a certificate and its key are two files, and do not match while only one is replaced.
const CERTIFICATE_DEBOUNCE: Duration = Duration::from_millis(200);
const CERTIFICATE_CHECK_INTERVAL: Duration = Duration::from_secs(3600);

pub(super) struct ControlSignals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
    reopen: Signal,
    file: Option<FileWatcher>,
    certificates: Option<FileWatcher>,
    hourly: Interval,
}

/// An action that signals and file changes request.
pub(super) enum ControlSignal {
    Reload,
    /// Reopens logs after a rotation. The configuration is not read: it may be half written at that moment.
    ReopenLogs,
    /// Checks for changes that no event reports.
    CheckCertificates,
    Terminate,
}

impl ControlSignals {
    pub(super) fn new(file: Option<&Path>) -> io::Result<Self> {
        let mut hourly =
            tokio::time::interval_at(Instant::now() + CERTIFICATE_CHECK_INTERVAL, CERTIFICATE_CHECK_INTERVAL);
        hourly.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
            reopen: signal(SignalKind::user_defined1())?,
            file: file
                .map(|file| FileWatcher::new(vec![file.to_owned()], WRITTEN_FLAGS, Duration::ZERO))
                .transpose()?,
            certificates: None,
            hourly,
        })
    }

    /// Watches exactly these certificate files. Changes before this call go unnoticed.
    pub(super) fn watch(&mut self, files: Vec<PathBuf>) -> io::Result<()> {
        if self.certificates.as_ref().map_or(&[][..], FileWatcher::files) == files {
            return Ok(());
        }
        // Some tools replace a link by a new one, which causes only a create event.
        let flags = WRITTEN_FLAGS | AddWatchFlags::IN_CREATE;
        let watch = (!files.is_empty()).then(|| FileWatcher::new(files, flags, CERTIFICATE_DEBOUNCE));
        self.certificates = watch.transpose()?;
        Ok(())
    }

    pub(super) async fn terminated(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }

    /// Waits for the next action.
    pub(super) async fn next(&mut self) -> ControlSignal {
        tokio::select! {
            _ = self.terminate.recv() => ControlSignal::Terminate,
            _ = self.interrupt.recv() => ControlSignal::Terminate,
            _ = self.hangup.recv() => ControlSignal::Reload,
            _ = self.reopen.recv() => ControlSignal::ReopenLogs,
            () = changed(self.file.as_mut()) => ControlSignal::Reload,
            () = changed(self.certificates.as_mut()) => ControlSignal::Reload,
            _ = self.hourly.tick() => ControlSignal::CheckCertificates,
        }
    }
}

async fn changed(watch: Option<&mut FileWatcher>) {
    match watch {
        Some(watch) => watch.changed().await,
        None => std::future::pending().await,
    }
}
