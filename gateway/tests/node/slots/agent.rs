//! The node agent as a process, with the rights of its account.

use std::{
    fs::{self, OpenOptions},
    path::PathBuf,
    process::Stdio,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use rouse_cluster::{KubeletNode, wait::WAIT_TIMEOUT};
use tokio::{
    process::{Child, Command},
    time::timeout,
};

use crate::installation::Installation;

pub(super) struct NodeAgentProcess {
    program: PathBuf,
    args: Vec<String>,
    env: Vec<(&'static str, String)>,
    log: PathBuf,
    child: Option<Child>,
}

impl NodeAgentProcess {
    /// The agent of this node, which does not run yet. `accelerators` are the lines of its list.
    pub(super) async fn new(world: &Installation<'_, KubeletNode>, accelerators: &str) -> Self {
        let list = world.dir.path().join("accelerators");
        fs::write(&list, accelerators).unwrap();
        let cluster = world.site.cluster;
        let account = world.site.agent_account().await;
        let kubeconfig = cluster.kubeconfig(&account).unwrap().display().to_string();
        let args = ["node", "--admin=127.0.0.1:0"].map(str::to_owned).into_iter().chain([
            format!("--node-name={}", world.runner.name()),
            format!("--kubelet-dir={}", world.runner.kubelet_folder().display()),
            format!("--container-runtime={}", world.runner.runtime_socket().display()),
            format!("--accelerators-file={}", list.display()),
        ]);
        let log_filter = std::env::var("ROUSE_LOG").unwrap_or_else(|_| "info".to_owned());
        Self {
            program: world.program.clone(),
            args: args.collect(),
            env: vec![("KUBECONFIG", kubeconfig), ("ROUSE_LOG", log_filter), cluster.mark()],
            // Kept with the cluster's logs if a test fails.
            log: cluster.logs().join("node-agent.log"),
            child: None,
        }
    }

    pub(super) fn start(&mut self) {
        assert!(self.child.is_none(), "the agent runs");
        let lines = OpenOptions::new().create(true).append(true).open(&self.log).unwrap();
        let child = Command::new(&self.program)
            .args(&self.args)
            .envs(self.env.iter().map(|(name, value)| (*name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(lines)
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        self.child = Some(child);
    }

    /// Lets the agent run, also after a test that has failed while the agent was stopped or killed.
    pub(super) fn ensure_running(&mut self) {
        if self.child.is_some() {
            self.signal(Signal::SIGCONT);
        } else {
            self.start();
        }
    }

    /// Kills the agent with SIGKILL, and returns when it has ended.
    pub(super) async fn kill(&mut self) {
        self.signal(Signal::SIGKILL);
        let mut child = self.child.take().unwrap();
        timeout(WAIT_TIMEOUT, child.wait()).await.expect("the agent does not end").unwrap();
    }

    pub(super) fn signal(&self, signal: Signal) {
        let pid = self.child.as_ref().and_then(Child::id).expect("the agent has ended");
        kill(Pid::from_raw(pid.try_into().unwrap()), signal).unwrap();
    }
}
