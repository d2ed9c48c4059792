//! Pods that request a slot and answer on a port: single ones, and those of a ReplicaSet.

use std::{collections::BTreeMap, time::Duration};

use k8s_openapi::api::{apps::v1::ReplicaSet, core::v1::Pod};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, ListParams, PostParams},
};
use rouse_cluster::{
    node::image,
    wait::{self, WAIT_TIMEOUT},
};
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};

use super::slots_node::SlotsNode;
use crate::{pairs::is_ready, shared_node::find_program};

/// Between two looks at processes, which send no event.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// A Pod whose container runs.
pub(super) struct RunningWorker {
    pub(super) pod: Pod,
    /// The pids of all its processes.
    pub(super) processes: Vec<i32>,
    /// The pid of its container's first process.
    pub(super) pid: i32,
}

impl SlotsNode {
    /// A Pod whose container requests one of this resource.
    fn worker(&self, resource: &str) -> Value {
        json!({
            "nodeSelector": {"kubernetes.io/hostname": self.name()},
            "terminationGracePeriodSeconds": 1,
            "containers": [{
                "name": "worker",
                "image": image("engine-sim"),
                "args": ["--host=0.0.0.0", "--port=8000"],
                "readinessProbe": {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 1},
                "resources": {"limits": {resource: "1"}},
            }],
        })
    }

    pub(super) fn pods(&self) -> Api<Pod> {
        self.ground.installation.pods()
    }

    /// Creates a Pod that requests one of this resource.
    pub(super) async fn create_worker(&self, name: &str, resource: &str) {
        let pod = json!({"metadata": {"name": name}, "spec": self.worker(resource)});
        self.pods().create(&PostParams::default(), &serde_json::from_value(pod).unwrap()).await.unwrap();
    }

    pub(super) async fn delete_worker(&self, name: &str) {
        self.pods().delete(name, &DeleteParams::default()).await.unwrap();
        wait::until(&self.pods(), name, "its end", Option::is_none).await.unwrap();
    }

    /// Waits until this Pod fits, and returns it.
    pub(super) async fn until_worker(&self, name: &str, what: &str, fits: impl Fn(&Pod) -> bool) -> Pod {
        let fits = |pod: &Option<Pod>| pod.as_ref().is_some_and(&fits);
        wait::until(&self.pods(), name, what, fits).await.unwrap().unwrap()
    }

    /// Waits until this Pod is ready.
    pub(super) async fn until_ready(&self, name: &str) -> RunningWorker {
        let pod = self.until_worker(name, "ready", is_ready).await;
        self.running(&pod).expect("a ready Pod has a process")
    }

    /// The Pod, if its container's process runs.
    fn running(&self, pod: &Pod) -> Option<RunningWorker> {
        let processes = self.runner().processes(pod).unwrap();
        let pid = find_program(&processes, "/engine-sim")?;
        Some(RunningWorker { pod: pod.clone(), processes, pid })
    }

    fn sets(&self) -> Api<ReplicaSet> {
        self.ground.installation.sets()
    }

    /// Creates a ReplicaSet of one Pod that requests one of this resource. Its Pods have the label `app`.
    pub(super) async fn create_set(&self, name: &str, resource: &str) {
        let set = json!({"metadata": {"name": name}, "spec": {
            "replicas": 1,
            "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}}, "spec": self.worker(resource)},
        }});
        self.sets().create(&PostParams::default(), &serde_json::from_value(set).unwrap()).await.unwrap();
    }

    /// Deletes a ReplicaSet, and waits until all its Pods are gone.
    pub(super) async fn delete_set(&self, name: &str) {
        self.sets().delete(name, &DeleteParams::background()).await.unwrap();
        let gone = async {
            while !self.pods_of(name).await.is_empty() {
                sleep(LOOK_INTERVAL).await;
            }
        };
        timeout(WAIT_TIMEOUT, gone).await.unwrap_or_else(|_| panic!("Pods of {name} are left"));
    }

    pub(super) async fn pods_of(&self, set: &str) -> Vec<Pod> {
        let own = ListParams::default().labels(&format!("app={set}"));
        self.pods().list(&own).await.unwrap().items
    }

    /// Waits until a Pod of this ReplicaSet is ready and its process runs: the object of a Pod whose node has lost its
    /// power says that it is ready until the kubelet is back.
    pub(super) async fn until_set_ready(&self, set: &str) -> RunningWorker {
        let found = async {
            loop {
                let pods = self.pods_of(set).await;
                if let Some(found) = pods.iter().filter(|pod| is_ready(pod)).find_map(|pod| self.running(pod))
                {
                    return found;
                }
                sleep(LOOK_INTERVAL).await;
            }
        };
        timeout(WAIT_TIMEOUT, found).await.unwrap_or_else(|_| panic!("no Pod of {set} is ready"))
    }
}

impl RunningWorker {
    pub(super) fn name(&self) -> String {
        self.pod.name_any()
    }

    /// The variables of its container.
    pub(super) fn environment(&self) -> BTreeMap<String, String> {
        environment_of(self.pid)
    }

    /// What this Pod is known by: another Pod, or another process of it, differs.
    pub(super) fn identity(&self) -> (Option<String>, Vec<i32>) {
        (self.pod.uid(), self.processes.clone())
    }
}

/// The variables with which this process started.
pub(super) fn environment_of(pid: i32) -> BTreeMap<String, String> {
    let bytes = std::fs::read(format!("/proc/{pid}/environ")).unwrap();
    let text = String::from_utf8(bytes).unwrap();
    let variables = text.split('\0').filter_map(|variable| variable.split_once('='));
    variables.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// The phase of a Pod.
pub(super) fn phase(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default()
}

/// Whether the scheduler has found no node for the Pod, for want of this resource.
pub(super) fn waits_for(pod: &Pod, resource: &str) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let mut placed = conditions.filter(|condition| condition.type_ == "PodScheduled");
    let words = format!("Insufficient {resource}");
    placed.any(|condition| {
        condition.status == "False" && condition.message.as_ref().is_some_and(|text| text.contains(&words))
    })
}
