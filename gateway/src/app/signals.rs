//! What tells the gateway to reload or to end: signals, the configuration file itself, and the certificates it names.

use std::{
    ffi::{OsStr, OsString},
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
    path::{Path, PathBuf},
    time::Duration,
};

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use tokio::{
    io::unix::AsyncFd,
    signal::unix::{Signal, SignalKind, signal},
};

use crate::config::Tls;

const WRITTEN: AddWatchFlags = AddWatchFlags::IN_CLOSE_WRITE.union(AddWatchFlags::IN_MOVED_TO);
/// A certificate and its key are two files: with only one of them replaced they do not fit.
const SETTLE: Duration = Duration::from_millis(200);

pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
    file: Option<Watch>,
    certificates: Option<Watch>,
}

/// What is asked of the gateway.
pub(super) enum Asked {
    Reload,
    Terminate,
}

/// Files are watched by their folders: editors and ConfigMaps replace a file instead of writing to it.
struct Watch {
    inotify: AsyncFd<Fd>,
    files: Vec<PathBuf>,
    /// How long to wait for the rest of a change that comes in several files.
    settle: Duration,
}

/// The runtime wants the descriptor both ways; the library gives it one way.
struct Fd(Inotify);

impl AsFd for Fd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Fd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

impl Signals {
    pub(super) fn new(file: Option<&Path>) -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
            file: file.map(|file| Watch::new(vec![file.to_owned()], WRITTEN, Duration::ZERO)).transpose()?,
            certificates: None,
        })
    }

    /// Watches these certificates' files, and no others any more. True when they were not watched before: what changed
    /// until now went unseen.
    pub(super) fn watch(&mut self, tls: Option<&Tls>) -> io::Result<bool> {
        let files: Vec<PathBuf> = tls.map(|tls| tls.files().cloned().collect()).unwrap_or_default();
        if self.certificates.as_ref().map_or(&[][..], |watch| &watch.files) == files {
            return Ok(false);
        }
        // Some tools put a new link in the place of the old one, which only creates it.
        let flags = WRITTEN | AddWatchFlags::IN_CREATE;
        let watch = (!files.is_empty()).then(|| Watch::new(files, flags, SETTLE));
        self.certificates = watch.transpose()?;
        Ok(true)
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
            () = changed(self.file.as_ref()) => Asked::Reload,
            () = changed(self.certificates.as_ref()) => Asked::Reload,
        }
    }
}

async fn changed(watch: Option<&Watch>) {
    match watch {
        Some(watch) => watch.changed().await,
        None => std::future::pending().await,
    }
}

impl Watch {
    #[expect(
        deprecated,
        reason = "the successor is an unsafe function; the descriptor is owned here and outlives its registration"
    )]
    fn new(files: Vec<PathBuf>, flags: AddWatchFlags, settle: Duration) -> io::Result<Self> {
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
        for file in &files {
            let folder = file.parent().filter(|p| !p.as_os_str().is_empty());
            inotify.add_watch(folder.unwrap_or_else(|| Path::new(".")), flags)?;
        }
        Ok(Self { inotify: AsyncFd::new(Fd(inotify))?, files, settle })
    }

    async fn changed(&self) {
        self.touched().await;
        while tokio::time::timeout(self.settle, self.touched()).await.is_ok() {}
    }

    /// Completes when a file was written or replaced. A watch that breaks is never heard of again; SIGHUP still
    /// works.
    async fn touched(&self) {
        loop {
            let Ok(mut ready) = self.inotify.readable().await else { return std::future::pending().await };
            let read = ready.try_io(|fd| fd.get_ref().0.read_events().map_err(io::Error::from));
            match read {
                // `..data` is what Kubernetes swaps under a mounted ConfigMap.
                Ok(Ok(events)) => {
                    let named = |name: &OsString| {
                        self.files.iter().any(|file| file.file_name() == Some(name.as_os_str()))
                            || name.as_os_str() == OsStr::new("..data")
                    };
                    if events.iter().any(|event| event.name.as_ref().is_some_and(named)) {
                        return;
                    }
                }
                Ok(Err(error)) => {
                    tracing::warn!(%error, "files are not watched any more; SIGHUP reloads them");
                    return std::future::pending().await;
                }
                Err(_would_block) => {}
            }
        }
    }
}
