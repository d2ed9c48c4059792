//! A cluster's resources on this machine: a folder, a range of loopback addresses, a mark, and a watchdog.
//!
//! Each cluster owns the addresses `127.N.*.*`: `127.N.0.1` for its servers, the others for Pods. Binding the first
//! socket there claims the range, so two concurrent clusters never share one, and ports are fixed.
//!
//! Every process of a cluster carries `TEST_CLUSTER=N:folder` in its environment, and so do its descendants. The
//! watchdog is a shell outside our process group that waits for the end of its stdin, which comes with the end of this
//! process, however it ends. Then it kills all marked processes until none is left, and removes the folder and the
//! cgroups of that name. It also holds the claim, so the addresses become free only when no process uses them.
//!
//! A process that joins another process's cluster (`ClusterResources::join`) has its own folder, mark and watchdog, so
//! that its Pods end with it and the servers do not. Numbers that must be unique across all processes of a cluster,
//! such as the Pods' addresses, come from files in the cluster's folder ([`SharedCounter`]).
//!
//! A node (`node_address`) has its own network with `198.18.N.*` and `198.19.N.*`. RFC 2544 reserves these for tests;
//! they are routed nowhere, so they conflict with nothing.

use std::{
    fs,
    net::{Ipv4Addr, TcpListener},
    os::{fd::OwnedFd, unix::process::CommandExt as _},
    panic,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{Mutex, PoisonError},
};

use anyhow::{Context as _, Result};

use crate::{control_plane::PORTS, counter::SharedCounter};

/// Marks every process of a cluster. The name must not begin like one of Rouse's settings, which launchers remove from
/// the environment of engines.
pub(crate) const CLUSTER_MARK_ENV: &str = "TEST_CLUSTER";
/// Marks the processes of one server or container.
pub(crate) const PART_MARK_ENV: &str = "TEST_CLUSTER_PART";

/// Bound for the claim only; nothing listens there.
const CLAIM_PORT: u16 = 16440;
/// Second bytes of rarely used addresses: Debian's resolver and local tools use 127.0 and 127.1.
const NET_RANGE: std::ops::Range<u32> = 32..250;

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

pub(crate) struct ClusterResources {
    net_octet: u8,
    folder: PathBuf,
    /// The cluster's folder. Differs from `folder` if another process owns the cluster.
    base_folder: PathBuf,
    /// How many addresses Pods and nodes have received.
    addresses: SharedCounter,
    watchdog: Mutex<Option<(Child, ChildStdin)>>,
}

/// `127.N.1.0`; the servers have the addresses before it.
const FIRST_POD_ADDRESS: u32 = 256;
/// Excludes the broadcast address.
const MAX_POD_ADDRESSES: u32 = 65_535 - FIRST_POD_ADDRESS;

impl ClusterResources {
    /// Claims a free range of addresses, creates the folder and starts the watchdog.
    pub(crate) fn claim() -> Result<Self> {
        let first = std::process::id();
        let (net, claim) = NET_RANGE
            .map(|n| NET_RANGE.start + (n + first) % (NET_RANGE.end - NET_RANGE.start))
            .filter_map(|net| u8::try_from(net).ok())
            .find_map(|net| Some((net, claim_address(Ipv4Addr::new(127, net, 0, 1))?)))
            .context("no addresses are free: other processes hold all of 127.32 to 127.249, or one of the servers' ports on each of them")?;
        let folder = create_folder()?;
        let watchdog = spawn_watchdog(net, &folder, OwnedFd::from(claim).into())?;
        Self::new(net, folder.clone(), folder, watchdog)
    }

    /// Joins the cluster of another process, which [`ClusterResources::key`] names.
    pub(crate) fn join(key: &str) -> Result<Self> {
        let (net, base) = key.split_once(':').context("the cluster's key is not NUMBER:FOLDER")?;
        let net = net.parse().context("the number in the cluster's key is invalid")?;
        let folder = create_folder()?;
        let watchdog = spawn_watchdog(net, &folder, Stdio::null())?;
        Self::new(net, folder, base.into(), watchdog)
    }

    fn new(net: u8, folder: PathBuf, base: PathBuf, watchdog: (Child, ChildStdin)) -> Result<Self> {
        keep_on_panic(&folder, &base);
        let addresses = SharedCounter::open(&base.join("state/addresses"))?;
        Ok(Self {
            net_octet: net,
            folder,
            base_folder: base,
            addresses,
            watchdog: Mutex::new(Some(watchdog)),
        })
    }

    /// The key with which another process joins this cluster.
    pub(crate) fn key(&self) -> String {
        mark(self.net_octet, &self.base_folder)
    }

    /// The servers' address.
    pub(crate) fn server_address(&self) -> Ipv4Addr {
        self.nth_address(1)
    }

    /// Returns the address that was handed out longest ago, or never.
    ///
    /// # Errors
    /// The counter's file cannot be written.
    pub(crate) fn next_address(&self) -> Result<Ipv4Addr> {
        Ok(self.nth_address(FIRST_POD_ADDRESS + self.addresses.next()? % MAX_POD_ADDRESSES))
    }

    fn nth_address(&self, n: u32) -> Ipv4Addr {
        let [_, _, high, low] = n.to_be_bytes();
        Ipv4Addr::new(127, self.net_octet, high, low)
    }

    /// This machine's end of the wire to the cluster's node.
    pub(crate) fn uplink_address(&self) -> Ipv4Addr {
        Ipv4Addr::new(198, 18, self.net_octet, 1)
    }

    /// The node's end of the wire, which is its address.
    pub(crate) fn node_address(&self) -> Ipv4Addr {
        Ipv4Addr::new(198, 18, self.net_octet, 2)
    }

    /// The /24 subnet of the node's Pods.
    pub(crate) fn pod_subnet(&self) -> Ipv4Addr {
        Ipv4Addr::new(198, 19, self.net_octet, 0)
    }

    /// The wire's name on this machine.
    pub(crate) fn veth_name(&self) -> String {
        format!("rouse{}", self.net_octet)
    }

    /// A name unique to this cluster on this machine while it lives.
    pub(crate) fn name(&self) -> String {
        self.folder.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Files deleted with this process's part of the cluster.
    pub(crate) fn state(&self) -> PathBuf {
        self.folder.join("state")
    }

    /// Files deleted with the cluster and shared by all its processes.
    pub(crate) fn base_state(&self) -> PathBuf {
        self.base_folder.join("state")
    }

    /// Files kept when a test fails.
    pub(crate) fn logs(&self) -> PathBuf {
        self.folder.join("logs")
    }

    /// Logs of the cluster's servers, kept when a test fails.
    pub(crate) fn base_logs(&self) -> PathBuf {
        self.base_folder.join("logs")
    }

    /// The value of [`CLUSTER_MARK_ENV`].
    pub(crate) fn mark(&self) -> String {
        mark(self.net_octet, &self.folder)
    }

    /// The value of [`PART_MARK_ENV`] for this server or container.
    pub(crate) fn part_mark(&self, name: &str) -> String {
        format!("{}:{name}", self.mark())
    }

    /// Keeps the logs when the cluster ends.
    pub(crate) fn keep_logs(&self) {
        mark_kept(&self.folder);
        mark_kept(&self.base_folder);
    }

    /// Triggers the watchdog and waits for its end.
    pub(crate) fn end(&self) {
        let watchdog = self.watchdog.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((mut watchdog, stdin)) = watchdog {
            drop(stdin);
            // The watchdog is our child and not reaped yet, so this cannot fail.
            drop(watchdog.wait());
        }
    }
}

impl Drop for ClusterResources {
    fn drop(&mut self) {
        self.end();
    }
}

/// Claims this address. Returns its socket, unless the address or one of the servers' ports is taken.
fn claim_address(address: Ipv4Addr) -> Option<TcpListener> {
    let claim = TcpListener::bind((address, CLAIM_PORT)).ok()?;
    PORTS.iter().all(|port| TcpListener::bind((address, *port)).is_ok()).then_some(claim)
}

fn create_folder() -> Result<PathBuf> {
    let folder = tempfile::Builder::new().prefix("rouse-cluster-").tempdir()?.keep();
    fs::create_dir(folder.join("state"))?;
    fs::create_dir(folder.join("logs"))?;
    Ok(folder)
}

/// Starts the watchdog for this folder's mark. It holds `claim` as its stdout.
fn spawn_watchdog(net: u8, folder: &Path, claim: Stdio) -> Result<(Child, ChildStdin)> {
    let mut watchdog = Command::new("sh")
        .args(["-c", WATCHDOG, "watchdog"])
        .arg(format!("{CLUSTER_MARK_ENV}={}", mark(net, folder)))
        .arg(folder)
        .stdin(Stdio::piped())
        .stdout(claim)
        .stderr(Stdio::null())
        .env_remove(CLUSTER_MARK_ENV)
        .current_dir("/")
        .process_group(0)
        .spawn()
        .context("sh")?;
    let stdin = watchdog.stdin.take().context("the watchdog has no stdin")?;
    Ok((watchdog, stdin))
}

fn mark(net: u8, folder: &Path) -> String {
    format!("{net}:{}", folder.display())
}

fn mark_kept(folder: &Path) {
    if let Err(error) = fs::write(folder.join("keep"), "") {
        eprintln!("cannot keep the cluster's logs in {}: {error}", folder.display());
    }
}

/// Makes a failing test keep its logs and print where they are.
fn keep_on_panic(folder: &Path, base: &Path) {
    let (folder, base) = (folder.to_owned(), base.to_owned());
    let before = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        before(info);
        for of in [&folder, &base].into_iter().take(if folder == base { 1 } else { 2 }) {
            if of.exists() {
                mark_kept(of);
                eprintln!("the cluster's logs are kept in {}", of.join("logs").display());
            }
        }
    }));
}
