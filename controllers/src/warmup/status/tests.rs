use std::collections::BTreeMap;

use rouse::{pairing::ids::NodeName, warmup::WarmupCause};

use super::*;

const START: Tick = Tick(1_780_000_000_000);

fn warmup(status: Option<&WarmupStatus>) -> Warmup {
    let object = json!({
        "apiVersion": "rouse.dev/v1alpha1", "kind": "Warmup",
        "metadata": {"name": "w", "namespace": "chat", "uid": "u", "resourceVersion": "7", "generation": 3},
        "spec": {"targetModel": {"name": "qwen"}},
        "status": status,
    });
    serde_json::from_value(object).unwrap()
}

fn report(reason: WarmupReason) -> WarmupReport {
    let progress = WarmupProgress {
        phase: WarmupPhase::InProgress,
        generation: 3,
        start: Some(START),
        ..WarmupProgress::default()
    };
    WarmupReport {
        progress,
        desired: 4,
        active: 1,
        succeeded: 2,
        failed: 1,
        items: BTreeMap::from([(ItemState::Present, 5), (ItemState::Pulling, 1)]),
        nodes: Vec::new(),
        more_nodes: 0,
        reason,
        message: "1 node left".to_owned(),
    }
}

/// Returns status and reason of this condition, if it is there.
fn condition_of<'a>(status: &'a WarmupStatus, kind: &str) -> Option<(&'a str, &'a str)> {
    let found = status.conditions.iter().find(|condition| condition.type_ == kind)?;
    Some((found.status.as_str(), found.reason.as_str()))
}

#[test]
fn the_conditions_say_whether_the_spec_is_valid_the_targets_exist_and_all_is_done() {
    for (reason, accepted, found, complete) in [
        (WarmupReason::Warming, "True", Some(("True", "TargetsFound")), "False"),
        (WarmupReason::WaitingForTarget, "True", Some(("False", "WaitingForTarget")), "False"),
        (WarmupReason::TargetNotFound, "True", Some(("False", "TargetNotFound")), "False"),
        (WarmupReason::InvalidSpec, "False", None, "False"),
        (WarmupReason::MaxFailedNodesExceeded, "True", Some(("True", "TargetsFound")), "False"),
        (WarmupReason::AllNodesWarm, "True", Some(("True", "TargetsFound")), "True"),
        (WarmupReason::CompletedWithFailures, "True", Some(("True", "TargetsFound")), "True"),
    ] {
        let status = status(&warmup(None), None, &report(reason), START);
        assert_eq!(condition_of(&status, "Accepted").unwrap().0, accepted, "{reason}");
        assert_eq!(condition_of(&status, "TargetsFound"), found, "{reason}");
        assert_eq!(condition_of(&status, "Complete"), Some((complete, reason.as_str())), "{reason}");
        assert!(status.conditions.iter().all(|condition| condition.observed_generation == Some(3)));
    }
}

#[test]
fn a_condition_keeps_the_time_of_its_last_transition() {
    let of = |warmup: &Warmup, reason, now| status(warmup, None, &report(reason), now);
    let first = of(&warmup(None), WarmupReason::Warming, START);
    let later = Tick(START.0 + 60_000);
    let second = of(&warmup(Some(&first)), WarmupReason::WaitingForNodes, later);
    let done = of(&warmup(Some(&second)), WarmupReason::AllNodesWarm, later);
    let times = |status: &WarmupStatus| -> Vec<Tick> {
        status.conditions.iter().map(|condition| tick(&condition.last_transition_time)).collect()
    };
    assert_eq!(times(&first), [START; 3]);
    assert_eq!(times(&second), [START; 3], "no condition has another status");
    assert_eq!(times(&done), [START, START, later]);
}

#[test]
fn the_progress_is_read_back_as_it_was_written() {
    let group = |state, items, cause: Option<&str>, nodes: &str| RecordGroup {
        state,
        items,
        attempts: 2,
        cause: cause.map(str::to_owned),
        nodes: nodes.to_owned(),
        uids: (state == RecordState::Failed).then(|| "AABAAC".to_owned()),
    };
    let groups = [
        group(RecordState::Failed, 7, Some("NotFound"), "AAAAAAABAAAAAAAC"),
        group(RecordState::Retried, 9, None, "AAAAAAAD"),
    ];
    let mut report = report(WarmupReason::Paused);
    report.progress = WarmupProgress {
        phase: WarmupPhase::Paused,
        start_generation: 2,
        spec_hash: Some("0a".into()),
        paused_since: Some(Tick(START.0 + 5_000)),
        paused_for: Millis(12_000),
        record: WarmupRecord::from_groups(&groups).unwrap(),
        ..report.progress
    };
    let written = status(&warmup(None), Some("model qwen".to_owned()), &report, START);
    let name = ObjectName::new("chat", "w");
    assert_eq!(progress(&name, Some(&written)), report.progress);
    assert_eq!(progress(&name, None), WarmupProgress::default());
    let object = object(&name, &warmup(Some(&written)), &written);
    let metadata = json!({"name": "w", "namespace": "chat", "uid": "u", "resourceVersion": "7"});
    assert_eq!(object["metadata"], metadata);
    assert_eq!(object["status"]["target"], "model qwen");
    assert_eq!(object["status"]["observedGeneration"], 3);
}

#[test]
fn the_status_of_an_earlier_version_begins_with_the_generation_that_it_describes() {
    let written = WarmupStatus {
        start_generation: None,
        ..status(&warmup(None), None, &report(WarmupReason::Warming), START)
    };
    let read = progress(&ObjectName::new("chat", "w"), Some(&written));
    assert_eq!((read.generation, read.start_generation), (3, 3));
}

/// Returns a record of so many nodes, with a hash of its own for each, and with their uids.
fn full_record(nodes: usize) -> WarmupRecord {
    let digits = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ";
    let key = |number: usize| {
        let digit = |power: u32| char::from(digits[number / 26_usize.pow(power) % 26]);
        format!("AAAA{}{}{}{}", digit(3), digit(2), digit(1), digit(0))
    };
    let uids = Some("AAB".repeat(nodes));
    let nodes: String = (0..nodes).map(key).collect();
    let group = RecordGroup { state: RecordState::Done, items: 7, attempts: 0, cause: None, nodes, uids };
    WarmupRecord::from_groups(&[group]).unwrap()
}

fn failed_node(name: String) -> NodeReport {
    NodeReport {
        node: NodeName::from(name),
        item: Some(rouse::warmup::WarmupItem::Image("registry.example.com/team/vllm-openai:v0.11.0".into())),
        state: ItemState::Failed,
        cause: Some(WarmupCause::unknown(&"a long message of a registry ".repeat(9))),
        attempts: 12,
        next_try: Some(START),
        duration: Some(Millis(120_000)),
        digest: Some(format!("sha256:{:064x}", 7)),
    }
}

#[test]
fn the_object_of_five_thousand_nodes_has_less_than_a_hundred_kilobytes() {
    // The nodes' uids in the record take the place of some listed nodes.
    for (padding, listed) in [(20, 75..200), (200, 30..100)] {
        let mut report = report(WarmupReason::Warming);
        report.progress.record = full_record(5_000);
        assert_eq!(report.progress.record.len(), 5_000);
        let name = |number: usize| format!("node-{number:04}-{}", "x".repeat(padding));
        report.nodes = (0..200).map(|number| failed_node(name(number))).collect();
        report.more_nodes = 4_800;
        let status = status(&warmup(None), None, &report, START);
        let object = object(&ObjectName::new("chat", "w"), &warmup(None), &status);
        let size = object.to_string().len();
        assert!((85_000..98_000).contains(&size), "{size} bytes");
        assert!(listed.contains(&status.nodes.len()), "{} nodes", status.nodes.len());
        assert_eq!(status.failed_nodes.len(), status.nodes.len());
        assert_eq!(usize::try_from(status.more_nodes).unwrap(), 5_000 - status.nodes.len());
        let messages = status.nodes.iter().filter(|node| node.message.is_some()).count();
        assert_eq!(messages, MAX_MESSAGES.min(status.nodes.len()));
    }
}

#[test]
fn few_nodes_are_listed_all() {
    let mut report = report(WarmupReason::Warming);
    report.progress.record = full_record(100);
    report.nodes = (0..200).map(|number| failed_node(format!("node-{number:04}"))).collect();
    let status = status(&warmup(None), None, &report, START);
    assert_eq!((status.nodes.len(), status.failed_nodes.len(), status.more_nodes), (200, 200, 0));
}
