//! The node agent as a process, with the rights of its account.

use std::{fs, path::PathBuf};

use nix::sys::signal::Signal;
use rouse_cluster::KubeletNode;

use super::agent_process::AgentProcess;
use crate::installation::Installation;

pub(super) struct NodeAgentProcess {
    process: AgentProcess,
    /// The list of accelerators.
    accelerators: PathBuf,
}

impl NodeAgentProcess {
    /// The agent of this node, which does not run yet. `accelerators` are the lines of its list.
    pub(super) async fn new(world: &Installation<'_, KubeletNode>, accelerators: &str) -> Self {
        let list = world.dir.path().join("accelerators");
        fs::write(&list, accelerators).unwrap();
        let cluster = world.site.cluster;
        let account = world.site.agent_account().await;
        let kubeconfig = cluster.kubeconfig(&account).unwrap();
        let process = AgentProcess::new(
            world.program.clone(),
            world.runner.name(),
            [&world.runner.kubelet_folder(), &world.runner.runtime_socket()],
            &kubeconfig,
            cluster.mark(),
            // Kept with the cluster's logs if a test fails.
            cluster.logs().join("node-agent.log"),
        );
        Self { process, accelerators: list }
    }

    pub(super) fn start(&mut self) {
        self.process.start(&["--accelerators-file", self.accelerators.to_str().unwrap()], &[]);
    }

    /// Lets the agent run, also after a test that has failed while the agent was stopped or killed.
    pub(super) fn ensure_running(&mut self) {
        if self.process.child.is_some() {
            self.signal(Signal::SIGCONT);
        } else {
            self.start();
        }
    }

    /// Kills the agent with SIGKILL, and returns when it has ended.
    pub(super) async fn kill(&mut self) {
        self.process.kill().await;
    }

    pub(super) fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }
}
