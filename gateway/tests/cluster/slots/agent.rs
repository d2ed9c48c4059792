//! A node agent as a process, beside the device manager that plays its node's kubelet.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use nix::sys::signal::Signal;
use rouse_cluster::{
    device_manager::{DeviceHealth, DeviceManager},
    wait::WAIT_TIMEOUT,
};
use tokio::time::{sleep, timeout};

use super::{agent_process::AgentProcess, device::SharedDevice, fixture::SlotsFixture};

/// A node with a kubelet that the test plays. Without an agent, its devices are unhealthy.
pub(super) struct SlotNodeFixture {
    /// The name of the Node.
    pub(super) name: String,
    pub(super) kubelet: Arc<DeviceManager>,
    root: PathBuf,
    log: PathBuf,
    agent: AgentProcess,
}

impl SlotNodeFixture {
    /// Starts the kubelet of the node that has this name in the test.
    pub(super) async fn new(fixture: &SlotsFixture<'_>, name: &str) -> Self {
        let root = fixture.world.dir.path().join(name);
        fs::create_dir(&root).unwrap();
        let (name, log) = (fixture.world.runner.node(name).name().to_owned(), root.with_extension("log"));
        let agent = AgentProcess::new(
            env!("CARGO_BIN_EXE_rouse-gateway").into(),
            &name,
            [&root, &root.join("no-runtime.sock")],
            &fixture.kubeconfig,
            fixture.world.site.cluster.mark(),
            log.clone(),
        );
        Self { name, kubelet: Arc::new(DeviceManager::start(&root).await.unwrap()), root, log, agent }
    }

    /// Starts the agent.
    pub(super) fn start(&mut self) {
        self.start_with(&[], &[]);
    }

    /// Starts the agent with more arguments and more of an environment.
    pub(super) fn start_with(&mut self, args: &[&str], env: &[(&str, String)]) {
        self.agent.start(args, env);
    }

    /// Kills the agent with SIGKILL, and returns once the kubelet knows that its plugins are gone.
    pub(super) async fn kill(&mut self, device: &SharedDevice) {
        self.agent.kill().await;
        self.until_all(device, false).await;
    }

    /// Waits until the agent has ended.
    pub(super) async fn agent_ended(&mut self) {
        self.agent.ended().await;
    }

    pub(super) fn signal(&self, signal: Signal) {
        self.agent.signal(signal);
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
