//! What a kubelet reports about the Pod of a Warmup.

use k8s_openapi::api::core::v1::{Container, Pod};
use serde_json::{Value, json};

/// How a runtime names the image that a container has.
const IMAGE_ID: &str =
    "registry.example.com/image@sha256:4bcff63911fcb4448bd4fdacec207030997caf25e9bea4045fa6c8c44de311d1";

/// What a kubelet reports about a Pod.
#[derive(Clone, Debug)]
pub(super) enum PodReport {
    /// The container waits for its image.
    Pulling,
    /// The pull has failed: the kubelet's reason and message.
    PullFailed(&'static str, String),
    /// The node has the image, and the command has exited with 0.
    Present,
    /// The node has the image, and its command cannot start: the runtime's message.
    StartError(&'static str),
    /// The container runs, and may be ready.
    Running { ready: bool },
    /// The container has exited with this code.
    Exited(i32),
    /// The containers of these names have exited with 0, and all others run and are ready.
    ExitedBesideReady(&'static [&'static str]),
    /// The kubelet has evicted the Pod: its message.
    Evicted(&'static str),
}

/// The status that a kubelet writes.
pub(super) fn status(pod: &Pod, report: &PodReport) -> Value {
    let waiting = |reason: &str, message: &str| json!({"waiting": {"reason": reason, "message": message}});
    let ended = |code: i32, reason: &str, message: &str| {
        let end = json!({"exitCode": code, "reason": reason, "message": message});
        json!({"terminated": end})
    };
    match report {
        PodReport::Pulling => containers(pod, "Pending", "", false, &waiting("ContainerCreating", "")),
        PodReport::PullFailed(reason, message) => {
            containers(pod, "Pending", "", false, &waiting(reason, message))
        }
        PodReport::Present | PodReport::Exited(0) => {
            containers(pod, "Succeeded", IMAGE_ID, false, &ended(0, "Completed", ""))
        }
        PodReport::StartError(message) => {
            containers(pod, "Failed", IMAGE_ID, false, &ended(128, "StartError", message))
        }
        PodReport::Running { ready } => containers(pod, "Running", IMAGE_ID, *ready, &json!({"running": {}})),
        PodReport::Exited(code) => containers(pod, "Failed", IMAGE_ID, false, &ended(*code, "Error", "")),
        PodReport::ExitedBesideReady(exited) => exited_beside_ready(pod, exited),
        PodReport::Evicted(message) => json!({"phase": "Failed", "reason": "Evicted", "message": message}),
    }
}

/// A status with this state of all containers.
fn containers(pod: &Pod, phase: &str, image_id: &str, ready: bool, state: &Value) -> Value {
    let all = pod.spec.iter().flat_map(|spec| &spec.containers);
    let statuses: Vec<Value> = all
        .map(|container| {
            json!({
                "name": container.name, "image": container.image, "imageID": image_id, "ready": ready,
                "started": phase == "Running", "restartCount": 0, "state": state,
            })
        })
        .collect();
    let is_ready = json!({"type": "Ready", "status": if ready { "True" } else { "False" }});
    let scheduled = json!({"type": "PodScheduled", "status": "True"});
    json!({"phase": phase, "containerStatuses": statuses, "conditions": [scheduled, is_ready]})
}

/// A status in which these containers have exited with 0. All others run and are ready, init containers included.
fn exited_beside_ready(pod: &Pod, exited: &[&str]) -> Value {
    let status = |container: &Container| {
        let has_exited = exited.contains(&container.name.as_str());
        let state = if has_exited {
            json!({"terminated": {"exitCode": 0, "reason": "Completed"}})
        } else {
            json!({"running": {}})
        };
        json!({
            "name": container.name, "image": container.image, "imageID": IMAGE_ID, "ready": !has_exited,
            "started": !has_exited, "restartCount": 0, "state": state,
        })
    };
    let spec = pod.spec.as_ref().unwrap();
    let main: Vec<Value> = spec.containers.iter().map(status).collect();
    let inits: Vec<Value> = spec.init_containers.iter().flatten().map(status).collect();
    let conditions =
        json!([{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "False"}]);
    json!({"phase": "Running", "containerStatuses": main, "initContainerStatuses": inits, "conditions": conditions})
}
