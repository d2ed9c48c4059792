use serde_json::{Value, json};

use super::*;

const CREATED: &str = "2026-01-01T00:00:00Z";
const IMAGE_ID: &str = "docker.io/library/x@sha256:abc";

fn read(item: &Value, spec: Value, status: Value) -> WarmupPod {
    let mut pod = json!({
        "metadata": {
            "name": "w-1", "namespace": "chat", "creationTimestamp": CREATED,
            "labels": {keys::WARMUP: "hash"},
            "annotations": {
                keys::NAME: "w", keys::NODE: "a", keys::ITEMS: "7", keys::GENERATION: "3", keys::ATTEMPT: "2",
            },
        },
        "spec": spec,
        "status": status,
    });
    crate::workload::merge::into(&mut pod, &json!({"metadata": {"annotations": item}}));
    let (name, facts) = pod_facts(&serde_json::from_value(pod).unwrap()).unwrap();
    assert_eq!(name, WarmPodName::from("chat/w-1"));
    facts
}

fn container(name: &str, image_id: &str, ready: bool, state: Value) -> Value {
    json!({"name": name, "image": "x", "imageID": image_id, "ready": ready, "restartCount": 0, "state": state})
}

fn image(status: Value) -> WarmupPodState {
    let spec = json!({"nodeName": "a", "containers": [{"name": "image"}]});
    read(&json!({keys::ITEM: "x:1"}), spec, status).state
}

fn image_waits(reason: &str, message: &str) -> WarmupPodState {
    let state = json!({"waiting": {"reason": reason, "message": message}});
    image(json!({"phase": "Pending", "containerStatuses": [container("image", "", false, state)]}))
}

fn action(policy: &str, spec: &Value, status: Value) -> WarmupPodState {
    let mut whole = json!({"nodeName": "a", "restartPolicy": policy, "containers": [{"name": "c"}]});
    crate::workload::merge::into(&mut whole, spec);
    read(&json!({keys::ITEM: "action", keys::ACTION: "h"}), whole, status).state
}

fn ended(code: i32) -> Value {
    json!({"terminated": {"exitCode": code, "finishedAt": "2026-01-01T00:00:05Z"}})
}

#[test]
fn a_pod_is_known_by_its_label_and_annotations() {
    let facts = read(&json!({keys::ITEM: "x:1"}), json!({"containers": []}), json!({}));
    assert_eq!((facts.warmup.as_str(), facts.node.as_str()), ("chat/w", "a"));
    assert_eq!(facts.item, WarmupItem::Image("x:1".into()));
    assert_eq!((facts.items_hash, facts.generation, facts.attempt, facts.terminating), (7, 3, 2, false));
    assert_eq!(facts.state, WarmupPodState::Pending { cause: None });
    let facts = read(&json!({keys::ITEM: "action", keys::ACTION: "h"}), json!({"containers": []}), json!({}));
    assert_eq!(facts.item, WarmupItem::Action("h".into()));
    let foreign = json!({"metadata": {"name": "x", "namespace": "chat", "labels": {keys::WARMUP: "hash"}}});
    assert_eq!(pod_facts(&serde_json::from_value(foreign).unwrap()), None);
}

#[test]
fn an_image_is_present_once_a_container_could_be_made_of_it() {
    let start_error = |message: &str| {
        let state = json!({"terminated": {"exitCode": 128, "reason": "StartError", "message": message,
            "finishedAt": "1970-01-01T00:00:00Z"}});
        image(json!({"phase": "Failed", "containerStatuses": [container("image", IMAGE_ID, false, state)]}))
    };
    let at = reached_at_of(CREATED);
    let digest = Some("sha256:abc".to_owned());
    let no_shell = WarmupPodState::Present { digest: digest.clone(), note: None, at };
    assert_eq!(start_error("stat /rouse-warmup: no such file or directory"), no_shell);
    let note = Some(WarmupCause::WrongPlatform);
    assert_eq!(start_error("exec format error"), WarmupPodState::Present { digest, note, at });
    let not_created = image_waits("CreateContainerError", "why");
    assert_eq!(not_created, WarmupPodState::Present { digest: None, note: None, at });
}

fn reached_at_of(text: &str) -> Tick {
    let pod: Pod = serde_json::from_value(json!({"metadata": {"creationTimestamp": text}})).unwrap();
    created(&pod)
}

#[test]
fn a_mounted_image_is_present_once_the_container_was_created_and_not_with_the_image_of_the_stub() {
    let volumes = json!([{"name": "image", "image": {"reference": "x:1"}}]);
    let spec = json!({"nodeName": "a", "containers": [{"name": "image"}], "volumes": volumes});
    let of = |state: Value| {
        let status = json!({"containerStatuses": [container("image", IMAGE_ID, false, state)]});
        read(&json!({keys::ITEM: "x:1"}), spec.clone(), status).state
    };
    let failed = of(json!({"waiting": {"reason": "CreateContainerError", "message": "no mount"}}));
    assert_eq!(failed, WarmupPodState::Pending { cause: Some(WarmupCause::unknown("no mount")) });
    assert_eq!(of(json!({"waiting": {"reason": "ContainerCreating"}})), WarmupPodState::Pulling);
    let WarmupPodState::Present { digest, .. } = of(ended(128)) else { panic!() };
    assert_eq!(digest, None);
}

#[test]
fn a_failed_pull_is_a_cause_and_a_pull_under_way_is_none() {
    assert_eq!(image_waits("ContainerCreating", ""), WarmupPodState::Pulling);
    assert_eq!(image(json!({"phase": "Pending"})), WarmupPodState::Pulling);
    let pending = |cause| WarmupPodState::Pending { cause: Some(cause) };
    assert_eq!(image_waits("ErrImagePull", "x:1: not found"), pending(WarmupCause::NotFound));
    assert_eq!(image_waits("ImagePullBackOff", "401 unauthorized"), pending(WarmupCause::Auth));
    assert_eq!(image_waits("InvalidImageName", ""), pending(WarmupCause::InvalidImage));
}

#[test]
fn what_keeps_the_scheduler_from_binding_a_pod_is_named() {
    for (message, cause) in [
        ("0/1 nodes are available: 1 Too many pods.", WarmupCause::NodeFull),
        ("0/1 nodes are available: 1 Insufficient memory.", WarmupCause::NodeFull),
        ("1 node(s) had untolerated taint {gpu: yes}.", WarmupCause::Taint("gpu".into())),
        ("1 node(s) had untolerated taint(s) {gpu: }.", WarmupCause::Taint("gpu".into())),
        ("1 node(s) had untolerated taint {node.kubernetes.io/unschedulable: }.", WarmupCause::Cordoned),
        ("1 node(s) had untolerated taint {node.kubernetes.io/unreachable: }.", WarmupCause::NodeNotReady),
        ("1 node(s) had untolerated taint {node.kubernetes.io/disk-pressure: }.", WarmupCause::DiskPressure),
        ("0/1 nodes are available: 1 node(s) were unschedulable.", WarmupCause::Cordoned),
        ("something else", WarmupCause::refused("something else")),
    ] {
        let condition =
            json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message});
        let state = image(json!({"phase": "Pending", "conditions": [condition]}));
        assert_eq!(state, WarmupPodState::Pending { cause: Some(cause) }, "{message}");
    }
}

#[test]
fn a_pod_that_the_kubelet_ended_has_failed_with_its_reason() {
    for (reason, message, cause) in [
        ("Evicted", "The node was low on resource: ephemeral-storage.", WarmupCause::DiskPressure),
        ("Evicted", "preempted", WarmupCause::unknown("Evicted: preempted")),
        ("OutOfpods", "Pod was rejected", WarmupCause::NodeFull),
        ("NodeAffinity", "", WarmupCause::unknown("NodeAffinity")),
        ("NodeShutdown", "", WarmupCause::NodeNotReady),
    ] {
        let state = image(json!({"phase": "Failed", "reason": reason, "message": message}));
        assert_eq!(state, WarmupPodState::Failed { cause, at: reached_at_of(CREATED) }, "{reason}");
    }
}

#[test]
fn an_action_is_done_when_every_container_is_ready_by_its_probe_or_has_exited_with_0() {
    let with_init = json!({
        "initContainers": [{"name": "plain"}, {"name": "sidecar", "restartPolicy": "Always"}],
        "containers": [{"name": "c", "readinessProbe": {"exec": {"command": ["x"]}}}, {"name": "d"}],
    });
    let running = json!({"running": {"startedAt": "2026-01-01T00:00:09Z"}});
    let of = |sidecar_ready, second| {
        let inits = [
            container("plain", "i", true, ended(0)),
            container("sidecar", "i", sidecar_ready, running.clone()),
        ];
        let all = [container("c", "i", true, running.clone()), container("d", "i", false, second)];
        action("Never", &with_init, json!({"initContainerStatuses": inits, "containerStatuses": all}))
    };
    let at = reached_at_of("2026-01-01T00:00:09Z");
    assert_eq!(of(true, ended(0)), WarmupPodState::Done { at });
    assert_eq!(of(false, ended(0)), WarmupPodState::Running);
    assert_eq!(of(true, running.clone()), WarmupPodState::Running);
    let without_probe = json!({"containers": [{"name": "c"}]});
    let ready = json!({"containerStatuses": [container("c", "i", true, running.clone())]});
    assert_eq!(action("Never", &without_probe, ready), WarmupPodState::Running, "a kubelet says so at once");
    let cause = WarmupCause::ActionFailed { exit_code: 7 };
    assert!(matches!(of(true, ended(7)), WarmupPodState::Failed { cause: found, .. } if found == cause));
    let succeeded = action("Never", &json!({}), json!({"phase": "Succeeded"}));
    assert_eq!(succeeded, WarmupPodState::Done { at: reached_at_of(CREATED) });
}

#[test]
fn an_action_that_the_kubelet_restarts_runs_until_its_pod_has_failed() {
    let of = |phase: &str, state: Value| {
        let mut status = container("c", "i", false, state);
        crate::workload::merge::into(&mut status, &json!({"lastState": ended(1)}));
        action("OnFailure", &json!({}), json!({"phase": phase, "containerStatuses": [status]}))
    };
    let crash_loop = json!({"waiting": {"reason": "CrashLoopBackOff"}});
    assert_eq!(of("Running", crash_loop), WarmupPodState::Running, "it has not restarted often");
    assert_eq!(of("Running", ended(1)), WarmupPodState::Running);
    assert!(matches!(of("Failed", ended(1)), WarmupPodState::Failed { .. }));
    let pull = json!({"waiting": {"reason": "ErrImagePull", "message": "x: not found"}});
    let pending = WarmupPodState::Pending { cause: Some(WarmupCause::NotFound) };
    assert_eq!(of("Pending", pull), pending);
}

#[test]
fn a_container_that_fails_at_each_of_its_restarts_is_a_failure() {
    let back_off = || json!({"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 2m40s"}});
    let of = |spec: &Value, restarts: i32, state: Value, code: i32| {
        let mut status = container("c", "i", false, state);
        let restarted = json!({"restartCount": restarts, "lastState": ended(code)});
        crate::workload::merge::into(&mut status, &restarted);
        let inits = json!([container("s", "i", true, json!({"running": {}}))]);
        let statuses = json!({"containerStatuses": [status], "initContainerStatuses": inits});
        action("OnFailure", spec, statuses)
    };
    let plain = json!({"initContainers": [{"name": "s", "restartPolicy": "Always"}]});
    let failed = WarmupPodState::Pending { cause: Some(WarmupCause::ActionFailed { exit_code: 3 }) };
    assert_eq!(of(&plain, 4, back_off(), 3), WarmupPodState::Running);
    assert_eq!(of(&plain, 5, json!({"running": {}}), 3), WarmupPodState::Running, "the last try");
    assert_eq!(of(&plain, 5, back_off(), 3), failed);
    assert_eq!(of(&plain, 6, json!({"running": {}}), 3), failed, "it stays a failure");
    assert_eq!(of(&plain, 5, back_off(), 0), WarmupPodState::Running, "a probe ended it");
    assert!(matches!(of(&plain, 6, ended(0), 3), WarmupPodState::Done { .. }));
    let sidecar = json!({
        "initContainers": [{"name": "c", "restartPolicy": "Always"}, {"name": "s"}],
        "containers": [{"name": "d"}],
    });
    assert_eq!(of(&sidecar, 9, back_off(), 3), WarmupPodState::Running, "it is not the action");
}

#[test]
fn the_pods_of_engines_are_those_of_models_and_of_dual_pods() {
    let of =
        |labels: Value| is_engine(&serde_json::from_value(json!({"metadata": {"labels": labels}})).unwrap());
    assert!(of(json!({MANAGED: ROUSE, label::MODEL: "hash"})), "an engine that Rouse manages");
    assert!(of(json!({label::MODEL: "hash"})), "a provider of a model's requester");
    assert!(of(json!({dual_pods::keys::DUAL: "requester"})), "a provider of a user's requester");
    assert!(of(json!({dual_pods::keys::ENGINE_OF: "hash"})), "a sleeper of a model");
    assert!(of(json!({MANAGED: ROUSE, COMPONENT: LAUNCHER})));
    assert!(!of(json!({COMPONENT: LAUNCHER})), "another program's launcher");
    assert!(!of(json!({MANAGED: ROUSE, keys::WARMUP: "hash"})), "a Warmup's Pod");
}

#[test]
fn a_pod_belongs_to_the_warmup_that_owns_it() {
    let of = |owners: Value| {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"ownerReferences": owners}})).unwrap();
        owner_uid(&pod).map(str::to_owned)
    };
    let owner = |kind: &str, uid: &str| json!({"apiVersion": "x/v1", "kind": kind, "name": "w", "uid": uid});
    assert_eq!(of(json!([owner("Job", "j"), owner("Warmup", "u")])).as_deref(), Some("u"));
    assert_eq!(of(json!([])), None);
}

#[test]
fn an_engine_pulls_while_a_container_waits_for_its_image() {
    let of = |labels: &Value, statuses: Value, inits: Value| {
        let pod = json!({
            "metadata": {"name": "m", "namespace": "chat", "labels": labels},
            "spec": {"nodeName": "a", "initContainers": [{"name": "plain"}], "containers": [{"name": "engine"}]},
            "status": {"phase": "Pending", "containerStatuses": statuses, "initContainerStatuses": inits},
        });
        is_pulling_engine(&serde_json::from_value(pod).unwrap())
    };
    let labels = json!({MANAGED: ROUSE, label::MODEL: "hash"});
    let waits =
        |reason: &str, id: &str| container("engine", id, false, json!({"waiting": {"reason": reason}}));
    let init = |state: Value| json!([container("plain", "i", false, state)]);
    let node = Some(NodeName::from("a"));
    assert_eq!(of(&labels, json!([waits("ContainerCreating", "")]), json!([])), node);
    assert_eq!(of(&labels, json!([waits("PodInitializing", "")]), init(ended(0))), node);
    assert_eq!(of(&labels, json!([]), json!([])), node);
    assert_eq!(of(&labels, json!([waits("PodInitializing", "")]), init(json!({"running": {}}))), None);
    assert_eq!(of(&labels, json!([waits("ImagePullBackOff", "")]), json!([])), None);
    assert_eq!(of(&labels, json!([waits("CrashLoopBackOff", "i")]), json!([])), None);
    assert_eq!(of(&json!({MANAGED: ROUSE}), json!([waits("ContainerCreating", "")]), json!([])), None);
}
