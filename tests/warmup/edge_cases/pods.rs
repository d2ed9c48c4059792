//! Edge cases of Pods: those that fail, are refused, are deleted, or wait for something else on their node.

use std::sync::Arc;

use rouse::{
    units::Millis,
    warmup::{
        CommandError, ItemState, WarmupCause, WarmupCommand, WarmupEvent, WarmupLimits, WarmupPhase,
        WarmupPodState, WarmupReason, WarmupTargets,
    },
};

use crate::harness::{START, WarmupHarness, action, created, image, items, targets};

#[test]
fn a_full_node_waits_without_a_failure() {
    let limits = WarmupLimits { backoff_limit: Some(0), parallelism: Some(1), ..WarmupLimits::default() };
    let mut cluster = WarmupHarness::new(&["n1", "n2"], limits);
    cluster.settle();
    cluster.pull_fails("n1", WarmupCause::NodeFull);
    // Its Pod goes, and another node takes the room.
    assert_eq!(created(&cluster.settle()), ["n2"]);
    assert_eq!(cluster.cause("n1"), Some(WarmupCause::NodeFull));
    assert_eq!(cluster.counts(), [2, 0, 0, 1]);
    cluster.pulled("n2");
    assert_eq!(created(&cluster.pass(13)), ["n1"]);
    assert_eq!(cluster.report().nodes[0].attempts, 0);
    cluster.pulled("n1");
    cluster.settle();
    assert_eq!(cluster.report().reason, WarmupReason::AllNodesWarm);
}

#[test]
fn a_pull_that_fails_counts() {
    let limits = WarmupLimits { backoff_limit: Some(1), ..WarmupLimits::default() };
    let mut cluster = WarmupHarness::new(&["n1"], limits);
    cluster.settle();
    cluster.pull_fails("n1", WarmupCause::Network);
    cluster.settle();
    assert!(cluster.pods.is_empty());
    let node = &cluster.report().nodes[0];
    assert_eq!((node.attempts, node.state), (1, ItemState::Pending));
    assert!(node.next_try.is_some_and(|at| at >= START + Millis::secs(10) && at < START + Millis(12_500)));
    assert_eq!(created(&cluster.pass(13)), ["n1"]);
    cluster.pull_fails("n1", WarmupCause::Network);
    cluster.settle();
    assert_eq!(cluster.report().reason, WarmupReason::MaxFailedNodesExceeded);
    assert_eq!(cluster.cause("n1"), Some(WarmupCause::Network));
}

#[test]
fn an_image_that_cannot_start_is_present_nevertheless() {
    let mut cluster = WarmupHarness::new(&["n1"], WarmupLimits::default());
    cluster.settle();
    let note = Some(WarmupCause::WrongPlatform);
    cluster.play("n1", &image("app:1"), WarmupPodState::Present { digest: None, note, at: START });
    cluster.settle();
    assert_eq!(cluster.report().reason, WarmupReason::AllNodesWarm);
}

#[test]
fn a_full_disk_backs_off_and_disk_pressure_waits() {
    let mut cluster = WarmupHarness::new(&["n1"], WarmupLimits::default());
    cluster.settle();
    cluster.pull_fails("n1", WarmupCause::NoSpace);
    cluster.edit_node("n1", |facts| facts.disk_pressure = true);
    assert!(created(&cluster.pass(600)).is_empty());
    assert_eq!(cluster.cause("n1"), Some(WarmupCause::DiskPressure));
    assert_eq!(cluster.report().nodes[0].attempts, 1);
    cluster.edit_node("n1", |facts| facts.disk_pressure = false);
    assert_eq!(created(&cluster.settle()), ["n1"]);
}

#[test]
fn attempts_survive_the_collection_of_pods_and_a_restart() {
    let limits = WarmupLimits { backoff_limit: Some(2), ..WarmupLimits::default() };
    let mut cluster = WarmupHarness::new(&["n1"], limits);
    for attempt in 0..3 {
        let commands = cluster.pass(400);
        let attempts = commands.iter().filter_map(|command| match command {
            WarmupCommand::CreatePod { attempt, .. } => Some(*attempt),
            _ => None,
        });
        assert_eq!(attempts.collect::<Vec<_>>(), [attempt]);
        cluster.pull_fails("n1", WarmupCause::Network);
        cluster.settle();
        assert!(cluster.pods.is_empty());
        cluster.restart();
    }
    cluster.settle();
    assert_eq!(cluster.counts(), [1, 0, 1, 0]);
    assert_eq!(cluster.report().progress.phase, WarmupPhase::Failed);
}

#[test]
fn retries_without_a_limit_back_off_to_minutes() {
    let mut cluster = WarmupHarness::new(&["n1"], WarmupLimits::default());
    let mut pods = 0;
    let mut seconds = 0;
    while seconds < 24 * 3600 {
        pods += created(&cluster.pass(1)).len();
        if !cluster.pods.is_empty() {
            cluster.pull_fails("n1", WarmupCause::Network);
        }
        seconds += 1;
    }
    // One in five minutes, and a few more at the beginning.
    assert!((220..300).contains(&pods), "{pods} Pods in a day");
    assert_eq!(cluster.report().progress.phase, WarmupPhase::InProgress);
}

#[test]
fn pods_deleted_by_hand_change_no_outcome() {
    let limits = WarmupLimits { backoff_limit: Some(0), ..WarmupLimits::default() };
    let mut cluster = WarmupHarness::new(&["n1", "n2"], limits);
    cluster.stores = false;
    cluster.plan();
    cluster.pulled("n1");
    cluster.plan();
    // The Pod with the success goes before the success is stored, another one before its success.
    for name in cluster.pods.keys().cloned().collect::<Vec<_>>() {
        cluster.remove_pod(&name);
    }
    cluster.stores = true;
    assert!(created(&cluster.pass(9)).is_empty());
    assert_eq!(cluster.counts(), [2, 1, 0, 0]);
    assert_eq!(created(&cluster.pass(5)), ["n2"]);
    cluster.pulled("n2");
    cluster.settle();
    assert_eq!(cluster.report().reason, WarmupReason::AllNodesWarm);
}

#[test]
fn a_quota_or_admission_refuses_and_is_named_with_a_pause() {
    let names: Vec<String> = (0..20).map(|n| format!("n{n:02}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut cluster =
        WarmupHarness::new(&names, WarmupLimits { parallelism: Some(4), ..WarmupLimits::default() });
    assert_eq!(cluster.refuse().len(), 4);
    // No other node is tried meanwhile, and then a single one.
    assert!(cluster.settle().is_empty());
    assert_eq!(cluster.report().reason, WarmupReason::PodsRefused);
    assert!(cluster.report().message.ends_with("the Pod is refused: exceeded quota: pods=0"));
    assert_eq!(cluster.cause("n00"), Some(WarmupCause::Refused("exceeded quota: pods=0".to_owned())));
    cluster.now = cluster.now + Millis::secs(13);
    assert_eq!(cluster.refuse().len(), 1);
    assert_eq!(cluster.refuse().len(), 0);
    cluster.now = cluster.now + Millis::secs(26);
    // One shows that the quota has room again, and the others follow.
    assert_eq!(created(&cluster.settle()).len(), 4);
    assert_eq!(cluster.report().reason, WarmupReason::Warming);
    assert_eq!(cluster.report().nodes[0].attempts, 0);
}

#[test]
fn a_creation_whose_reply_is_lost_takes_room_until_it_is_known() {
    let limits = WarmupLimits { parallelism: Some(1), ..WarmupLimits::default() };
    let mut cluster = WarmupHarness::new(&["n1", "n2"], limits);
    let plan = cluster.warmups.plan(cluster.now);
    cluster.warmups.issued(&plan.commands, cluster.now);
    let command = plan.commands[0].clone();
    cluster.send(WarmupEvent::Failed { command, error: CommandError::Transient });
    assert!(created(&cluster.pass(9)).is_empty());
    assert_eq!(created(&cluster.pass(1)), ["n2"]);
}

#[test]
fn a_terminating_pod_still_takes_room() {
    let limits = WarmupLimits { parallelism: Some(1), max_failed_nodes: 9, ..WarmupLimits::default() };
    let mut cluster = WarmupHarness::new(&["n1", "n2"], limits);
    cluster.keeps_terminating = true;
    cluster.settle();
    cluster.pull_fails("n1", WarmupCause::NotFound);
    assert!(created(&cluster.pass(1000)).is_empty());
    assert_eq!(cluster.counts(), [2, 0, 1, 1]);
    let name = cluster.pod_name("n1", &image("app:1"));
    cluster.remove_pod(&name);
    assert_eq!(created(&cluster.settle()), ["n2"]);
}

#[test]
fn two_warmups_pull_the_same_image_one_after_the_other() {
    let mut cluster = WarmupHarness::new(&["n1"], WarmupLimits::default());
    let other = rouse::warmup::WarmupId::from("a/newer");
    let mut request = cluster.request.clone();
    request.created = rouse::units::Tick(START.0 + 1);
    cluster.send(WarmupEvent::Warmup {
        id: other.clone(),
        request: Arc::new(request),
        stored: Arc::default(),
    });
    cluster.send(WarmupEvent::Targets { id: other, targets: targets(&["n1"]) });
    let ids = |commands: &[WarmupCommand]| -> Vec<String> {
        let ids = commands.iter().filter_map(|command| match command {
            WarmupCommand::CreatePod { id, .. } => Some(id.to_string()),
            _ => None,
        });
        ids.collect()
    };
    // The older one pulls, whatever its name.
    assert_eq!(ids(&cluster.plan()), ["ns/w"]);
    assert!(cluster.plan().is_empty());
    cluster.pulled("n1");
    // The Pod has ended: the other one begins in the same decision, and finds the image at once.
    let commands = cluster.warmups.plan(cluster.now).commands;
    assert_eq!(ids(&commands), ["a/newer"]);
}

#[test]
fn an_engine_that_waits_for_its_image_goes_first() {
    let mut cluster = WarmupHarness::new(&["n1", "n2"], WarmupLimits::default());
    cluster.send(WarmupEvent::EnginesPulling { node: "n1".into(), pods: 1 });
    assert_eq!(created(&cluster.settle()), ["n2"]);
    assert!(created(&cluster.pass(100)).is_empty());
    assert_eq!(cluster.cause("n1"), Some(WarmupCause::EnginePulling));
    assert_eq!(cluster.cause("n2"), None);
    assert_eq!(cluster.report().reason, WarmupReason::Warming);
    cluster.pulled("n2");
    cluster.settle();
    assert_eq!(cluster.report().reason, WarmupReason::WaitingForNodes);
    assert_eq!(
        cluster.report().message,
        "1 of 2 nodes warm, 1 waiting; n1: an engine on the node pulls its image: the Warmup goes on after it"
    );
    cluster.send(WarmupEvent::EnginesPulling { node: "n1".into(), pods: 0 });
    assert_eq!(created(&cluster.settle()), ["n1"]);
    assert_eq!(cluster.cause("n1"), None);
}

#[test]
fn a_back_off_and_a_node_that_takes_no_pods_are_named_before_an_engine_that_pulls() {
    let mut cluster = WarmupHarness::new(&["n1", "n2"], WarmupLimits::default());
    cluster.settle();
    cluster.pull_fails("n1", WarmupCause::Network);
    cluster.edit_node("n2", |facts| facts.cordoned = true);
    for node in ["n1", "n2"] {
        cluster.send(WarmupEvent::EnginesPulling { node: node.into(), pods: 1 });
    }
    cluster.settle();
    assert_eq!(cluster.cause("n1"), Some(WarmupCause::Network));
    assert_eq!(cluster.cause("n2"), Some(WarmupCause::Cordoned));
    assert!(created(&cluster.pass(13)).is_empty());
    assert_eq!(cluster.cause("n1"), Some(WarmupCause::EnginePulling));
}

#[test]
fn an_action_that_stays_running_is_done_when_it_is_ready() {
    let targets = WarmupTargets::Nodes([("n1".into(), items(&[], true))].into());
    let mut cluster = WarmupHarness::with_targets(&["n1"], targets, WarmupLimits::default());
    cluster.settle();
    cluster.play("n1", &action(), WarmupPodState::Running);
    cluster.pass(100);
    assert_eq!(cluster.counts(), [1, 0, 0, 1]);
    cluster.play("n1", &action(), WarmupPodState::Done { at: cluster.now });
    cluster.settle();
    assert_eq!(cluster.report().reason, WarmupReason::AllNodesWarm);
    assert!(cluster.pods.is_empty());
}
