//! A node agent's process.

use std::{
    fs::OpenOptions,
    path::{Path, PathBuf},
    process::Stdio,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use rouse_cluster::wait::WAIT_TIMEOUT;
use tokio::{
    process::{Child, Command},
    time::timeout,
};

/// An agent, which may run or not.
pub(crate) struct AgentProcess {
    program: PathBuf,
    args: Vec<String>,
    env: Vec<(&'static str, String)>,
    log: PathBuf,
    pub(crate) child: Option<Child>,
}

impl AgentProcess {
    /// The agent of this node, which does not run yet. `mark` marks it as a process of the cluster.
    pub(crate) fn new(
        program: PathBuf,
        node: &str,
        [kubelet_folder, container_runtime]: [&Path; 2],
        kubeconfig: &Path,
        mark: (&'static str, String),
        log: PathBuf,
    ) -> Self {
        let args = ["node", "--admin=127.0.0.1:0"].map(str::to_owned).into_iter().chain([
            format!("--node-name={node}"),
            format!("--kubelet-dir={}", kubelet_folder.display()),
            format!("--container-runtime={}", container_runtime.display()),
        ]);
        let log_filter = std::env::var("ROUSE_LOG").unwrap_or_else(|_| "info".to_owned());
        let kubeconfig = kubeconfig.display().to_string();
        let env = vec![("KUBECONFIG", kubeconfig), ("ROUSE_LOG", log_filter), mark];
        Self { program, args: args.collect(), env, log, child: None }
    }

    /// Starts the agent with more arguments and more of an environment.
    pub(crate) fn start(&mut self, args: &[&str], env: &[(&str, String)]) {
        assert!(self.child.is_none(), "the agent runs");
        let lines = OpenOptions::new().create(true).append(true).open(&self.log).unwrap();
        let child = Command::new(&self.program)
            .args(&self.args)
            .args(args)
            .envs(self.env.iter().map(|(name, value)| (*name, value)))
            .envs(env.iter().map(|(name, value)| (*name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(lines)
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        self.child = Some(child);
    }

    /// Kills the agent with SIGKILL, and returns when it has ended.
    pub(crate) async fn kill(&mut self) {
        self.signal(Signal::SIGKILL);
        self.ended().await;
    }

    /// Waits until the agent has ended.
    pub(crate) async fn ended(&mut self) {
        let mut child = self.child.take().unwrap();
        timeout(WAIT_TIMEOUT, child.wait()).await.expect("the agent does not end").unwrap();
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = self.child.as_ref().and_then(Child::id).expect("the agent has ended");
        kill(Pid::from_raw(pid.try_into().unwrap()), signal).unwrap();
    }
}
