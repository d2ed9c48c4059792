//! Watches files through their folders. Editors and ConfigMaps replace files instead of writing to them.
//!
//! A folder can be replaced too, or be missing at first, and the kernel reports that at most once. So a lost watch is
//! set up again, and retried for as long as it takes. It also counts as a change, since events in between are lost.

use std::{
    ffi::OsStr,
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
    path::{Path, PathBuf},
    time::Duration,
};

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent};
use tokio::{io::unix::AsyncFd, time::Instant};

/// A file was written, or another one moved into its place.
pub const WRITTEN_FLAGS: AddWatchFlags =
    AddWatchFlags::IN_CLOSE_WRITE.union(AddWatchFlags::IN_MOVED_TO).union(FOLDER_GONE_FLAGS);
/// The folder itself was deleted or moved.
const FOLDER_GONE_FLAGS: AddWatchFlags = AddWatchFlags::IN_DELETE_SELF.union(AddWatchFlags::IN_MOVE_SELF);
/// The watch has ended, or events were lost.
const WATCH_LOST_FLAGS: AddWatchFlags = FOLDER_GONE_FLAGS
    .union(AddWatchFlags::IN_IGNORED)
    .union(AddWatchFlags::IN_UNMOUNT)
    .union(AddWatchFlags::IN_Q_OVERFLOW);
/// How often a missing folder is retried.
const RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// Notifies when one of its files changes.
#[derive(Debug)]
pub struct FileWatcher {
    inotify: AsyncFd<InotifyFd>,
    files: Vec<PathBuf>,
    flags: AddWatchFlags,
    /// How long to wait for the rest of a change that spans several files.
    debounce: Duration,
    /// Folders that are not watched yet. They are retried at `retry_at`.
    missing: Vec<PathBuf>,
    retry_at: Instant,
}

/// Provides both descriptor traits: the runtime requires `AsRawFd` as well, and the library implements only `AsFd`.
#[derive(Debug)]
struct InotifyFd(Inotify);

impl AsFd for InotifyFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for InotifyFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

impl FileWatcher {
    /// `debounce`: how long to wait for the rest of a change that spans several files.
    ///
    /// # Errors
    /// No inotify descriptor is available.
    pub fn new(files: Vec<PathBuf>, flags: AddWatchFlags, debounce: Duration) -> io::Result<Self> {
        let (inotify, missing) = (descriptor()?, folders(&files));
        let mut watch = Self { inotify, files, flags, debounce, missing, retry_at: Instant::now() };
        watch.add();
        for folder in &watch.missing {
            tracing::warn!(folder = %folder.display(), "cannot watch the folder yet, retrying");
        }
        Ok(watch)
    }

    #[must_use]
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// Completes after a file was written or replaced, or may have been. Waits for further changes until none comes
    /// within the debounce time.
    pub async fn changed(&mut self) {
        self.changed_once().await;
        let debounce = self.debounce;
        while tokio::time::timeout(debounce, self.changed_once()).await.is_ok() {}
    }

    /// Completes at the first event of a change: a file was written or replaced, or may have been. No event is lost if
    /// the caller drops the future.
    pub async fn changed_once(&mut self) {
        loop {
            let read = tokio::select! {
                read = events(&self.inotify) => read,
                () = tokio::time::sleep_until(self.retry_at), if !self.missing.is_empty() => {
                    if self.add() { return }
                    continue;
                }
            };
            match read {
                Ok(events) if events.iter().any(|event| event.mask.intersects(WATCH_LOST_FLAGS)) => {
                    self.rebuild();
                    return;
                }
                Ok(events) if events.iter().any(|event| self.is_relevant(event)) => return,
                Ok(_) => {}
                Err(error) => {
                    tracing::warn!(%error, "watching files failed, retrying");
                    self.missing = folders(&self.files);
                    self.retry_at = Instant::now() + RETRY_INTERVAL;
                }
            }
        }
    }

    /// Reports whether the event concerns a watched file. Kubernetes swaps `..data` in a mounted ConfigMap.
    fn is_relevant(&self, event: &InotifyEvent) -> bool {
        event.name.as_ref().is_some_and(|name| {
            self.files.iter().any(|file| file.file_name() == Some(name.as_os_str()))
                || name.as_os_str() == OsStr::new("..data")
        })
    }

    /// Watches all folders anew, since the old watches may follow a folder that was moved.
    fn rebuild(&mut self) {
        self.missing = folders(&self.files);
        self.retry_at = Instant::now() + RETRY_INTERVAL;
        match descriptor() {
            Ok(inotify) => {
                self.inotify = inotify;
                self.add();
            }
            Err(error) => tracing::warn!(%error, "watching files failed, retrying"),
        }
    }

    /// Watches those missing folders that exist now; true when there was at least one.
    fn add(&mut self) -> bool {
        let (inotify, flags) = (&self.inotify.get_ref().0, self.flags);
        let before = self.missing.len();
        self.missing.retain(|folder| inotify.add_watch(folder, flags).is_err());
        self.retry_at = Instant::now() + RETRY_INTERVAL;
        self.missing.len() < before
    }
}

#[expect(
    deprecated,
    reason = "the successor is an unsafe function; the descriptor is owned here and outlives its registration"
)]
fn descriptor() -> io::Result<AsyncFd<InotifyFd>> {
    AsyncFd::new(InotifyFd(Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?))
}

fn folders(files: &[PathBuf]) -> Vec<PathBuf> {
    let folder = |file: &PathBuf| match file.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
        _ => Path::new(".").to_owned(),
    };
    let mut folders: Vec<_> = files.iter().map(folder).collect();
    folders.sort_unstable();
    folders.dedup();
    folders
}

async fn events(inotify: &AsyncFd<InotifyFd>) -> io::Result<Vec<InotifyEvent>> {
    loop {
        let mut ready = inotify.readable().await?;
        if let Ok(read) = ready.try_io(|fd| fd.get_ref().0.read_events().map_err(io::Error::from)) {
            return read;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Longer than [`RETRY_INTERVAL`].
    const SOON: Duration = Duration::from_secs(15);

    async fn seen(watch: &mut FileWatcher) -> bool {
        tokio::time::timeout(SOON, watch.changed()).await.is_ok()
    }

    #[tokio::test]
    async fn a_folder_that_is_replaced_is_watched_again() {
        let dir = tempfile::tempdir().unwrap();
        let (certs, next) = (dir.path().join("certs"), dir.path().join("next"));
        let file = certs.join("a.pem");
        for folder in [&certs, &next] {
            fs::create_dir(folder).unwrap();
        }
        let mut watch = FileWatcher::new(vec![file.clone()], WRITTEN_FLAGS, Duration::ZERO).unwrap();
        fs::rename(&certs, dir.path().join("old")).unwrap();
        fs::rename(&next, &certs).unwrap();
        assert!(seen(&mut watch).await);
        fs::write(&file, "1").unwrap();
        assert!(seen(&mut watch).await);
        fs::remove_dir_all(&certs).unwrap();
        assert!(seen(&mut watch).await);
        fs::create_dir(&certs).unwrap();
        assert!(seen(&mut watch).await, "that it is back");
        fs::write(&file, "2").unwrap();
        assert!(seen(&mut watch).await);
    }

    #[tokio::test]
    async fn a_folder_that_comes_later_is_watched_then() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("later");
        let mut watch = FileWatcher::new(vec![folder.join("a.pem")], WRITTEN_FLAGS, Duration::ZERO).unwrap();
        fs::create_dir(&folder).unwrap();
        assert!(seen(&mut watch).await);
        fs::write(folder.join("other"), "").unwrap();
        fs::write(folder.join("a.pem"), "").unwrap();
        assert!(seen(&mut watch).await);
    }
}
