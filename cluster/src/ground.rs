//! What a cluster stands on: a folder, a range of loopback addresses, a mark, and a watchdog.
//!
//! Each cluster has the addresses `127.N.*.*` to itself: `127.N.0.1` for its servers, the others for Pods. The first socket
//! bound there is the claim, so two clusters at once cannot have the same, and ports need not be searched for.
//!
//! Whatever a cluster starts carries `TEST_CLUSTER=N:folder` in its environment, and so does what that starts in turn. The
//! watchdog is a shell outside our process group that waits for the end of its stdin, which comes with the end of this
//! process, however that ends. Then it kills all that is marked, until nothing is left, and removes the folder and the cgroups
//! that have its name. It also holds the claim: the addresses are free when nobody is left on them.
//!
//! A node (`node`) has a network of its own, and `198.18.N.*` and `198.19.N.*` in it: what RFC 2544 sets aside for tests is
//! routed nowhere, and so in nobody's way.

use std::{
    fs,
    net::{Ipv4Addr, TcpListener},
    os::{fd::OwnedFd, unix::process::CommandExt as _},
    panic,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU16, Ordering},
    },
};

use anyhow::{Context as _, Result};

use crate::control_plane::PORTS;

/// Marks every process of a cluster. Its name begins as none of Rouse's own settings does: whoever starts engines takes those
/// out of their environment.
pub(crate) const MARK: &str = "TEST_CLUSTER";
/// Marks the processes of one server or container.
pub(crate) const PART: &str = "TEST_CLUSTER_PART";

/// Nobody listens there; it is only bound.
const CLAIM: u16 = 16440;
/// Second bytes of addresses that others hardly use: Debian's resolver and local tools sit on 127.0 and 127.1.
const RANGE: std::ops::Range<u32> = 32..250;

const WATCHDOG: &str = r#"
read -r _
while pids=$(grep -lszxF -- "$1" /proc/[0-9]*/environ | cut -d / -f 3); [ -n "$pids" ]; do
    kill -KILL $pids
done
# Processes in Pods of a node have no mark, but end with its first one, which has. Nothing tells when the last has ended.
for group in /sys/fs/cgroup/"${2##*/}" /sys/fs/cgroup/*/"${2##*/}"; do
    while [ -d "$group" ] && ! find "$group" -depth -type d -exec rmdir {} + 2> /dev/null; do
        sleep 0.02
    done
done
if [ -e "$2/keep" ]; then rm -rf -- "$2/state"; else rm -rf -- "$2"; fi
"#;

pub(crate) struct Ground {
    net: u8,
    folder: PathBuf,
    /// The number of the next Pod's or node's address.
    free: AtomicU16,
    watchdog: Mutex<Option<(Child, ChildStdin)>>,
}

/// `127.N.1.0`: the servers have those before.
const FIRST: u16 = 256;
/// The last that is no broadcast address.
const LAST: u16 = 65_534;

impl Ground {
    /// Takes a free range of addresses, makes the folder and starts the watchdog.
    pub(crate) fn claim() -> Result<Self> {
        let first = std::process::id();
        let (net, claim) = RANGE
            .map(|n| RANGE.start + (n + first) % (RANGE.end - RANGE.start))
            .filter_map(|net| u8::try_from(net).ok())
            .find_map(|net| Some((net, claim(Ipv4Addr::new(127, net, 0, 1))?)))
            .context("no addresses: others hold all of 127.32 to 127.249, or one of the servers' ports on all of them")?;
        let folder = tempfile::Builder::new().prefix("rouse-cluster-").tempdir()?.keep();
        fs::create_dir(folder.join("state"))?;
        fs::create_dir(folder.join("logs"))?;
        let mut watchdog = Command::new("sh")
            .args(["-c", WATCHDOG, "watchdog"])
            .arg(format!("{MARK}={}", mark(net, &folder)))
            .arg(&folder)
            .stdin(Stdio::piped())
            .stdout(OwnedFd::from(claim))
            .stderr(Stdio::null())
            .env_remove(MARK)
            .current_dir("/")
            .process_group(0)
            .spawn()
            .context("sh")?;
        let stdin = watchdog.stdin.take().context("the watchdog has no stdin")?;
        keep_on_panic(&folder);
        Ok(Self { net, folder, free: AtomicU16::new(FIRST), watchdog: Mutex::new(Some((watchdog, stdin))) })
    }

    /// The servers' address.
    pub(crate) fn address(&self) -> Ipv4Addr {
        self.nth(1)
    }

    /// The address that was handed out longest ago, or never.
    pub(crate) fn next(&self) -> Ipv4Addr {
        let after = |n: u16| Some(if n >= LAST { FIRST } else { n + 1 });
        let (Ok(n) | Err(n)) = self.free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, after);
        self.nth(n)
    }

    fn nth(&self, n: u16) -> Ipv4Addr {
        let [high, low] = n.to_be_bytes();
        Ipv4Addr::new(127, self.net, high, low)
    }

    /// This machine's end of the wire to the cluster's node.
    pub(crate) fn uplink(&self) -> Ipv4Addr {
        Ipv4Addr::new(198, 18, self.net, 1)
    }

    /// The node's end, and so its address.
    pub(crate) fn node(&self) -> Ipv4Addr {
        Ipv4Addr::new(198, 18, self.net, 2)
    }

    /// Addresses for the node's Pods: 24 bits of this are theirs.
    pub(crate) fn pods(&self) -> Ipv4Addr {
        Ipv4Addr::new(198, 19, self.net, 0)
    }

    /// What the wire is called on this machine.
    pub(crate) fn wire(&self) -> String {
        format!("rouse{}", self.net)
    }

    /// A name that no other cluster has, on this machine and as long as it lives.
    pub(crate) fn name(&self) -> String {
        self.folder.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// What goes with the cluster.
    pub(crate) fn state(&self) -> PathBuf {
        self.folder.join("state")
    }

    /// What stays when a test fails.
    pub(crate) fn logs(&self) -> PathBuf {
        self.folder.join("logs")
    }

    /// The value of [`MARK`].
    pub(crate) fn mark(&self) -> String {
        mark(self.net, &self.folder)
    }

    /// The value of [`PART`] for this server or container.
    pub(crate) fn part(&self, name: &str) -> String {
        format!("{}:{name}", self.mark())
    }

    /// The logs stay when the cluster ends.
    pub(crate) fn keep(&self) {
        keep(&self.folder);
    }

    /// Lets the watchdog do its work, and waits for it.
    pub(crate) fn end(&self) {
        let watchdog = self.watchdog.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((mut watchdog, stdin)) = watchdog {
            drop(stdin);
            // It is our child and has not been waited for, so there is nothing that could fail.
            drop(watchdog.wait());
        }
    }
}

impl Drop for Ground {
    fn drop(&mut self) {
        self.end();
    }
}

/// The socket that claims this address, where nobody has it or one of the servers' ports there.
fn claim(address: Ipv4Addr) -> Option<TcpListener> {
    let claim = TcpListener::bind((address, CLAIM)).ok()?;
    PORTS.iter().all(|port| TcpListener::bind((address, *port)).is_ok()).then_some(claim)
}

fn mark(net: u8, folder: &Path) -> String {
    format!("{net}:{}", folder.display())
}

fn keep(folder: &Path) {
    if let Err(error) = fs::write(folder.join("keep"), "") {
        eprintln!("the cluster's logs in {} cannot be kept: {error}", folder.display());
    }
}

/// A test that fails says where the logs are, and they stay.
fn keep_on_panic(folder: &Path) {
    let folder = folder.to_owned();
    let before = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        before(info);
        if folder.exists() {
            keep(&folder);
            eprintln!("the cluster's logs stay in {}", folder.join("logs").display());
        }
    }));
}
