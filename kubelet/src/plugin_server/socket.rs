//! The socket of a plugin, with a name that no other process or start has.

use std::{
    fs,
    hash::{BuildHasher as _, RandomState},
    io,
    path::{Path, PathBuf},
};

use rouse::stable_hash::fnv1a;
use tokio::net::{UnixListener, UnixStream};

use crate::Error;

/// The kernel's limit on the path of a socket, in bytes, without the final zero.
const LONGEST_PATH: usize = 107;
/// How much of the resource's name is in the file name, for people.
const LONGEST_LABEL: usize = 40;
const PREFIX: &str = "rouse-";
const SUFFIX: &str = ".sock";
/// Two hashes, each of 8 digits with a dash before it.
const HASHES: usize = 18;
/// A hash of 8 digits.
const SHORT: u64 = 0xffff_ffff;

/// A plugin's socket in the kubelet's folder. Its file is removed on drop.
#[derive(Debug)]
pub(super) struct PluginSocket {
    path: PathBuf,
    endpoint: String,
}

impl PluginSocket {
    /// Listens on a new socket, and removes those that earlier processes left behind for this resource.
    pub(super) async fn bind(folder: &Path, resource: &str) -> Result<(Self, UnixListener), Error> {
        let prefix = prefix(folder, resource)?;
        remove_stale(folder, &prefix).await;
        // Not the pid: that of a container is 1 after every restart, and in the container that replaces it as well. The
        // standard library seeds each `RandomState` differently.
        let start = RandomState::new().hash_one(0_u8) & SHORT;
        let endpoint = format!("{prefix}{start:08x}{SUFFIX}");
        let path = folder.join(&endpoint);
        match UnixListener::bind(&path) {
            Ok(listener) => Ok((Self { path, endpoint }, listener)),
            Err(source) => Err(Error::Listen { socket: path, source }),
        }
    }

    /// The file name, by which the plugin registers.
    pub(super) fn endpoint(&self) -> &str {
        &self.endpoint
    }
}

impl Drop for PluginSocket {
    fn drop(&mut self) {
        match fs::remove_file(&self.path) {
            Ok(()) => {}
            // A kubelet that started has removed it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                tracing::warn!(socket = %self.path.display(), %error, "cannot remove the plugin's socket");
            }
        }
    }
}

/// The part of the file name that all sockets of a resource share.
fn prefix(folder: &Path, resource: &str) -> Result<String, Error> {
    let taken = folder.as_os_str().len() + "/".len() + PREFIX.len() + HASHES + SUFFIX.len();
    let space = LONGEST_PATH.checked_sub(taken).ok_or_else(|| Error::LongFolder(folder.to_owned()))?;
    let name = resource.rsplit('/').next().unwrap_or_default();
    let plain = |letter: &char| letter.is_ascii_alphanumeric() || matches!(letter, '-' | '_' | '.');
    let label: String = name.chars().filter(plain).take(space.min(LONGEST_LABEL)).collect();
    let hash = fnv1a(resource.bytes()) & SHORT;
    Ok(format!("{PREFIX}{label}-{hash:08x}-"))
}

/// Removes the sockets with this prefix on which no process listens. A killed agent leaves its own, and a kubelet
/// removes them only when it starts.
async fn remove_stale(folder: &Path, prefix: &str) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        if !entry.file_name().to_str().is_some_and(|name| name.starts_with(prefix) && name.ends_with(SUFFIX))
        {
            continue;
        }
        let socket = entry.path();
        let connected = UnixStream::connect(&socket).await;
        if connected.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
            && let Err(error) = fs::remove_file(&socket)
        {
            tracing::warn!(socket = %socket.display(), %error, "cannot remove a socket without a listener");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
        names.map(|name| name.to_str().unwrap().to_owned()).collect()
    }

    #[tokio::test]
    async fn each_socket_has_its_own_name_and_goes_with_its_plugin() {
        let folder = tempfile::tempdir().unwrap();
        let (first, _first) = PluginSocket::bind(folder.path(), "rouse.dev/gpu").await.unwrap();
        let (second, _second) = PluginSocket::bind(folder.path(), "rouse.dev/gpu").await.unwrap();
        assert_ne!(first.endpoint(), second.endpoint());
        drop(first);
        assert_eq!(names(folder.path()), [second.endpoint()]);
        fs::remove_file(&second.path).unwrap();
        drop(second);
        assert!(names(folder.path()).is_empty());
    }

    #[tokio::test]
    async fn sockets_of_dead_processes_are_removed_and_no_others() {
        let folder = tempfile::tempdir().unwrap();
        let (_living, _listener) = PluginSocket::bind(folder.path(), "rouse.dev/gpu").await.unwrap();
        let dead = |resource: &str| {
            let path =
                folder.path().join(format!("{}dead{SUFFIX}", prefix(folder.path(), resource).unwrap()));
            drop(UnixListener::bind(path).unwrap());
        };
        dead("rouse.dev/gpu");
        dead("rouse.dev/gpu-b");
        fs::write(folder.path().join("kubelet_internal_checkpoint"), "").unwrap();
        assert_eq!(names(folder.path()).len(), 4);
        let (_next, _next_listener) = PluginSocket::bind(folder.path(), "rouse.dev/gpu").await.unwrap();
        let names = names(folder.path());
        let left: Vec<_> = names.iter().filter(|name| name.ends_with("dead.sock")).collect();
        assert_eq!(names.len(), 4, "the dead one is gone, the new one is there: {names:?}");
        assert!(left.len() == 1 && left.iter().all(|name| name.starts_with("rouse-gpu-b-")), "{left:?}");
    }

    #[test]
    fn the_path_stays_within_the_kernels_limit() {
        let resource = format!("rouse.dev/{}", "r".repeat(63));
        for length in 1..120 {
            let folder = PathBuf::from("/".repeat(length));
            match prefix(&folder, &resource) {
                Ok(prefix) => assert!(length + 1 + prefix.len() + 8 + SUFFIX.len() <= LONGEST_PATH),
                Err(error) => {
                    assert!(matches!(error, Error::LongFolder(_)) && length > 70, "{length}: {error}");
                }
            }
        }
    }
}
