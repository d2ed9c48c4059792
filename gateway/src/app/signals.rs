//! What tells the gateway to reload or to end: signals, and the configuration file itself.

use std::{
    ffi::{OsStr, OsString},
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
    path::Path,
};

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use tokio::{
    io::unix::AsyncFd,
    signal::unix::{Signal, SignalKind, signal},
};

pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
    file: Option<Watch>,
}

/// What is asked of the gateway.
pub(super) enum Asked {
    Reload,
    Terminate,
}

/// The file's folder is watched, not the file: editors and ConfigMaps replace a file instead of writing to it.
struct Watch {
    inotify: AsyncFd<Fd>,
    name: OsString,
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
            file: file.map(Watch::new).transpose()?,
        })
    }

    pub(super) async fn terminate(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }

    /// The next thing that asks for something.
    pub(super) async fn next(&mut self) -> Asked {
        let changed = async {
            match &self.file {
                Some(watch) => watch.changed().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = self.terminate.recv() => Asked::Terminate,
            _ = self.interrupt.recv() => Asked::Terminate,
            _ = self.hangup.recv() => Asked::Reload,
            () = changed => Asked::Reload,
        }
    }
}

impl Watch {
    #[expect(
        deprecated,
        reason = "the successor is an unsafe function; the descriptor is owned here and outlives its registration"
    )]
    fn new(file: &Path) -> io::Result<Self> {
        let folder = file.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
        inotify.add_watch(folder, AddWatchFlags::IN_CLOSE_WRITE | AddWatchFlags::IN_MOVED_TO)?;
        Ok(Self {
            inotify: AsyncFd::new(Fd(inotify))?,
            name: file.file_name().unwrap_or_default().to_owned(),
        })
    }

    /// Completes when the file was written or replaced. A watch that breaks is never heard of again; SIGHUP still
    /// works.
    async fn changed(&self) {
        loop {
            let Ok(mut ready) = self.inotify.readable().await else { return std::future::pending().await };
            let read = ready.try_io(|fd| fd.get_ref().0.read_events().map_err(io::Error::from));
            match read {
                // `..data` is what Kubernetes swaps under a mounted ConfigMap.
                Ok(Ok(events)) => {
                    let named =
                        |name: &OsString| *name == self.name || name.as_os_str() == OsStr::new("..data");
                    if events.iter().any(|event| event.name.as_ref().is_some_and(named)) {
                        return;
                    }
                }
                Ok(Err(error)) => {
                    tracing::warn!(%error, "the configuration file is not watched any more");
                    return std::future::pending().await;
                }
                Err(_would_block) => {}
            }
        }
    }
}
