//! What can fail at these sockets.

use std::{io, path::PathBuf, time::Duration};

/// A socket cannot be served, or a call on one failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "the path of {} leaves no room for the name of a socket, whose path has at most 107 bytes: mount the folder \
         at a shorter path",
        .0.display()
    )]
    LongFolder(PathBuf),
    #[error(
        "cannot watch {}: {source}; if there are no watches left, raise fs.inotify.max_user_instances",
        .folder.display()
    )]
    Watch { folder: PathBuf, source: io::Error },
    #[error("cannot listen on {}: {source}", .socket.display())]
    Listen { socket: PathBuf, source: io::Error },
    #[error("the path {} is not UTF-8, so no socket can have it", .0.display())]
    NotUtf8(PathBuf),
    #[error("{} does not exist: check that its folder is mounted and that its server runs", .0.display())]
    NoSocket(PathBuf),
    #[error("cannot connect to {}", .socket.display())]
    Connect { socket: PathBuf, source: tonic::transport::Error },
    #[error("{method} on {} failed: {}", .socket.display(), .status.message())]
    Call { method: &'static str, socket: PathBuf, status: Box<tonic::Status> },
    #[error("{method} on {} was not answered within {} ms", .socket.display(), .limit.as_millis())]
    Deadline { method: &'static str, socket: PathBuf, limit: Duration },
    #[error("neither the kubelet nor the container runtime lists what containers use: {kubelet}; {runtime}")]
    NoUsage { kubelet: Box<Self>, runtime: Box<Self> },
}
