//! Watches for the kubelet's socket, which a restarted kubelet creates anew.

use std::{io, path::Path, time::Duration};

use nix::sys::inotify::AddWatchFlags;
use rouse_net::file_watch::{FileWatcher, WRITTEN_FLAGS};

/// The file name of the kubelet's socket.
pub(crate) const KUBELET_SOCKET: &str = "kubelet.sock";

/// Notifies when the kubelet's socket is created in this folder, without polling.
#[derive(Debug)]
pub(crate) struct KubeletSocketWatch(FileWatcher);

impl KubeletSocketWatch {
    /// Watches a folder, which may be missing yet.
    pub(crate) fn new(folder: &Path) -> io::Result<Self> {
        let flags = WRITTEN_FLAGS | AddWatchFlags::IN_CREATE;
        FileWatcher::new(vec![folder.join(KUBELET_SOCKET)], flags, Duration::ZERO).map(Self)
    }

    /// Completes when the socket was created, or may have been. No event is lost if the caller drops the future.
    pub(crate) async fn created(&mut self) {
        self.0.changed_once().await;
    }
}
