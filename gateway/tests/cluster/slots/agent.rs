//! A node agent as a process, beside the device manager that plays its node's kubelet.

use std::{
    fs::{self, OpenOptions},
    path::{Path, PathBuf},
    process::Stdio,
    sync::Arc,
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use rouse_cluster::{
    device_manager::{DeviceHealth, DeviceManager},
    wait::WAIT_TIMEOUT,
};
use tokio::{
    process::{Child, Command},
    time::{sleep, timeout},
};

use super::{device::SharedDevice, fixture::SlotsFixture};

/// A node with a kubelet that the test plays. Without an agent, its devices are unhealthy.
pub(super) struct SlotNodeFixture {
    /// The name of the Node.
    pub(super) name: String,
    pub(super) kubelet: Arc<DeviceManager>,
    root: PathBuf,
    log: PathBuf,
    kubeconfig: PathBuf,
    /// Marks the agent as a process of the cluster.
    mark: (&'static str, String),
    agent: Option<Child>,
}

impl SlotNodeFixture {
    /// Starts the kubelet of the node that has this name in the test.
    pub(super) async fn new(fixture: &SlotsFixture<'_>, name: &str) -> Self {
        let root = fixture.world.dir.path().join(name);
        fs::create_dir(&root).unwrap();
        Self {
            name: fixture.world.runner.node(name).name().to_owned(),
            kubelet: Arc::new(DeviceManager::start(&root).await.unwrap()),
            log: root.with_extension("log"),
            kubeconfig: fixture.kubeconfig.clone(),
            mark: fixture.world.site.cluster.mark(),
            root,
            agent: None,
        }
    }

    /// Starts the agent.
    pub(super) fn start(&mut self) {
        self.start_with(&[], &[]);
    }

    /// Starts the agent with more arguments and more of an environment.
    pub(super) fn start_with(&mut self, arguments: &[&str], env: &[(&str, String)]) {
        let lines = OpenOptions::new().create(true).append(true).open(&self.log).unwrap();
        let (mark, value) = &self.mark;
        let child = Command::new(env!("CARGO_BIN_EXE_rouse-gateway"))
            .args(["node", "--admin", "127.0.0.1:0"])
            .arg("--node-name")
            .arg(&self.name)
            .arg("--kubelet-dir")
            .arg(&self.root)
            .arg("--container-runtime")
            .arg(self.root.join("no-runtime.sock"))
            .args(arguments)
            .env("KUBECONFIG", &self.kubeconfig)
            .env("ROUSE_LOG", std::env::var("ROUSE_LOG").unwrap_or_else(|_| "info".to_owned()))
            .env(mark, value)
            .envs(env.iter().map(|(name, value)| (*name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(lines)
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        self.agent = Some(child);
    }

    /// Kills the agent with SIGKILL, and returns once the kubelet knows that its plugins are gone.
    pub(super) async fn kill(&mut self, device: &SharedDevice) {
        self.signal(Signal::SIGKILL);
        self.agent_ended().await;
        self.until_all(device, false).await;
    }

    /// Waits until the agent has ended.
    pub(super) async fn agent_ended(&mut self) {
        let mut agent = self.agent.take().unwrap();
        timeout(WAIT_TIMEOUT, agent.wait()).await.expect("the agent does not end").unwrap();
    }

    pub(super) fn signal(&self, signal: Signal) {
        let pid = self.agent.as_ref().and_then(Child::id).expect("the agent has ended");
        kill(Pid::from_raw(pid.try_into().unwrap()), signal).unwrap();
    }

    /// A file in this node's folder, outside of the kubelet's.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.root.with_extension(name)
    }

    /// Waits until an agent of this node has logged these words.
    pub(super) async fn until_logged(&self, words: &str) {
        let logged = async {
            while !log_of(&self.log).contains(words) {
                sleep(Duration::from_millis(20)).await;
            }
        };
        let in_time = timeout(WAIT_TIMEOUT, logged).await;
        in_time.unwrap_or_else(|_| panic!("no '{words}' in {}", log_of(&self.log)));
    }

    /// Restarts the kubelet: it forgets its plugins and keeps its allocations.
    pub(super) async fn restart_kubelet(&mut self) {
        self.kubelet_mut().restart().await.unwrap();
    }

    pub(super) async fn stop_kubelet(&mut self) {
        self.kubelet_mut().stop().await;
    }

    pub(super) async fn resume_kubelet(&mut self) {
        self.kubelet_mut().resume().await.unwrap();
    }

    fn kubelet_mut(&mut self) -> &mut DeviceManager {
        Arc::get_mut(&mut self.kubelet).expect("a runner of Pods has the kubelet")
    }

    /// Waits until the kubelet has all slots of a device, each as healthy as expected.
    pub(super) async fn until_health<const N: usize>(&self, device: &SharedDevice, healthy: [bool; N]) {
        let expected: DeviceHealth =
            healthy.iter().enumerate().map(|(n, healthy)| (device.slot(n), *healthy)).collect();
        let what = format!("{expected:?} on {}", self.name);
        self.until_devices(&device.resource(), &what, |found| *found == expected).await;
    }

    /// Waits until the kubelet has slots of a device, all of them healthy or all unhealthy.
    pub(super) async fn until_all(&self, device: &SharedDevice, healthy: bool) {
        let what = format!("slots with healthy = {healthy} on {}", self.name);
        let fits =
            |found: &DeviceHealth| !found.is_empty() && found.values().all(|health| *health == healthy);
        self.until_devices(&device.resource(), &what, fits).await;
    }

    pub(super) async fn until_devices(
        &self,
        resource: &str,
        what: &str,
        fits: impl FnMut(&DeviceHealth) -> bool,
    ) -> DeviceHealth {
        let found = self.kubelet.until_devices(resource, what, fits).await;
        found.unwrap_or_else(|error| panic!("{error:#}\n{}", log_of(&self.log)))
    }
}

impl Drop for SlotNodeFixture {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- {}\n{}", self.log.display(), log_of(&self.log));
        }
    }
}

fn log_of(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}
