//! Sends Events on Warmups: the changes of their phases, nodes that have failed, and the end of a finished Warmup.

use std::collections::{BTreeMap, BTreeSet};

use rouse::{
    pairing::ids::NodeName,
    units::Tick,
    warmup::{ItemState, NodeReport, WarmupPhase, WarmupProgress, WarmupReport},
};

use crate::{
    crd::ledger::ObjectName,
    event_content::{EventContent, EventReason},
    recorder::{EventRequest, EventSender, RegardingKind},
};

/// Number of failed nodes that one Event names.
const MAX_NAMED_NODES: usize = 3;

/// What the last Events on each Warmup said.
pub(super) struct WarmupEvents {
    sender: EventSender,
    sent: BTreeMap<ObjectName, SentState>,
    /// Warmups with an Event on their deletion.
    expired: BTreeSet<ObjectName>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct SentState {
    phase: WarmupPhase,
    /// An edit begins the Warmup anew.
    start: Option<Tick>,
    /// Failed nodes; `None` until a first report: a former leader has sent Events on those.
    failed: Option<BTreeSet<NodeName>>,
}

impl WarmupEvents {
    pub(super) const fn new(sender: EventSender) -> Self {
        Self { sender, sent: BTreeMap::new(), expired: BTreeSet::new() }
    }

    /// Forgets what was sent, at the end of a term.
    pub(super) fn clear(&mut self) {
        self.sent.clear();
        self.expired.clear();
    }

    pub(super) fn forget(&mut self, name: &ObjectName) {
        self.sent.remove(name);
        self.expired.remove(name);
    }

    /// Sends Events on what is new in a report. `stored`: the progress on which a former leader has sent Events.
    pub(super) fn send_new(
        &mut self,
        name: &ObjectName,
        uid: &str,
        stored: &WarmupProgress,
        report: &WarmupReport,
    ) {
        let sent = self.sent.entry(name.clone()).or_insert_with(|| {
            let failed = stored.start.is_none().then(BTreeSet::new);
            SentState { phase: stored.phase, start: stored.start, failed }
        });
        for content in new_events(sent, report) {
            self.send(name, uid, content);
        }
    }

    /// Sends one Event on the deletion of a finished Warmup. A deletion that fails is tried again.
    pub(super) fn send_expired(&mut self, name: &ObjectName, uid: &str) {
        if self.expired.insert(name.clone()) {
            let note = "the Warmup has ended ttlSecondsAfterFinished ago: it is deleted, with its Pods";
            self.send(name, uid, EventReason::Expired.with_note(note));
        }
    }

    fn send(&self, name: &ObjectName, uid: &str, content: EventContent) {
        let (object, uid) = (name.clone(), uid.to_owned());
        self.sender.send(EventRequest { regarding: RegardingKind::Warmup, object, uid, content });
    }
}

/// Returns the Events on what is new, and takes them as sent.
fn new_events(sent: &mut SentState, report: &WarmupReport) -> Vec<EventContent> {
    let mut events = Vec::new();
    let progress = &report.progress;
    // A status has whole seconds.
    let seconds = |start: Option<Tick>| start.map(|start| start.0 / 1000);
    let has_begun = progress.start.is_some() && seconds(progress.start) != seconds(sent.start);
    if has_begun {
        events.push(EventReason::Started.with_note(report.message.as_str()));
        sent.failed = Some(BTreeSet::new());
    }
    let failed: Vec<&NodeReport> =
        report.nodes.iter().filter(|node| node.state == ItemState::Failed).collect();
    if let Some(known) = &sent.failed {
        let new: Vec<&NodeReport> =
            failed.iter().copied().filter(|node| !known.contains(&node.node)).collect();
        events.extend(failed_nodes(&new).map(|note| EventReason::NodeFailed.with_note(note)));
    }
    sent.failed = Some(failed.into_iter().map(|node| node.node.clone()).collect());
    let before = if has_begun { WarmupPhase::InProgress } else { sent.phase };
    let reason = match progress.phase {
        phase if phase == before => None,
        WarmupPhase::Paused => Some(EventReason::Paused),
        WarmupPhase::InProgress if before == WarmupPhase::Paused => Some(EventReason::Resumed),
        WarmupPhase::Completed => Some(EventReason::Completed),
        WarmupPhase::Failed => Some(EventReason::Failed),
        WarmupPhase::InProgress | WarmupPhase::New => None,
    };
    events.extend(reason.map(|reason| reason.with_note(report.message.as_str())));
    (sent.phase, sent.start) = (progress.phase, progress.start);
    events
}

/// Names the nodes that have failed; `None` without any.
fn failed_nodes(nodes: &[&NodeReport]) -> Option<String> {
    let name = |node: &&NodeReport| match &node.cause {
        Some(cause) => format!("{}: {cause}", node.node),
        None => node.node.to_string(),
    };
    let mut named: Vec<String> = nodes.iter().take(MAX_NAMED_NODES).map(name).collect();
    let others = nodes.len().saturating_sub(MAX_NAMED_NODES);
    if others > 0 {
        named.push(format!("and {others} more nodes"));
    }
    (!named.is_empty()).then(|| named.join("; "))
}

#[cfg(test)]
mod tests {
    use rouse::warmup::{WarmupCause, WarmupReason};

    use super::*;

    fn report(phase: WarmupPhase, failed: &[&str]) -> WarmupReport {
        let node = |name: &&str| NodeReport {
            node: NodeName::from(*name),
            item: None,
            state: ItemState::Failed,
            cause: Some(WarmupCause::NodeGone),
            attempts: 1,
            next_try: None,
            duration: None,
            digest: None,
        };
        WarmupReport {
            progress: WarmupProgress { phase, start: Some(Tick(5_000)), ..WarmupProgress::default() },
            desired: 2,
            active: 0,
            succeeded: 0,
            failed: 0,
            items: BTreeMap::new(),
            nodes: failed.iter().map(node).collect(),
            more_nodes: 0,
            reason: WarmupReason::Warming,
            message: "2 nodes left".to_owned(),
        }
    }

    fn reasons(sent: &mut SentState, report: &WarmupReport) -> Vec<EventReason> {
        new_events(sent, report).into_iter().map(|event| event.reason).collect()
    }

    #[test]
    fn each_phase_and_each_failed_node_has_one_event() {
        use EventReason::{Completed, NodeFailed, Paused, Resumed, Started};
        let mut sent = SentState { failed: Some(BTreeSet::new()), ..SentState::default() };
        let running = report(WarmupPhase::InProgress, &[]);
        assert_eq!(reasons(&mut sent, &running), [Started]);
        assert_eq!(reasons(&mut sent, &running), []);
        let one_failed = report(WarmupPhase::InProgress, &["a"]);
        assert_eq!(reasons(&mut sent, &one_failed), [NodeFailed]);
        assert_eq!(reasons(&mut sent, &one_failed), []);
        assert_eq!(reasons(&mut sent, &report(WarmupPhase::Paused, &["a"])), [Paused]);
        assert_eq!(reasons(&mut sent, &report(WarmupPhase::InProgress, &["a"])), [Resumed]);
        assert_eq!(reasons(&mut sent, &report(WarmupPhase::Completed, &["a", "b"])), [NodeFailed, Completed]);
    }

    #[test]
    fn a_new_leader_repeats_no_event_of_its_predecessor() {
        let mut sent = SentState { phase: WarmupPhase::InProgress, start: Some(Tick(5_900)), failed: None };
        assert_eq!(reasons(&mut sent, &report(WarmupPhase::InProgress, &["a"])), []);
        assert_eq!(reasons(&mut sent, &report(WarmupPhase::Failed, &["a"])), [EventReason::Failed]);
    }

    #[test]
    fn the_deletion_of_a_finished_warmup_has_one_event() {
        let (sender, mut sent) = EventSender::for_test();
        let mut events = WarmupEvents::new(sender);
        let name = ObjectName::new("chat", "w");
        events.send_expired(&name, "u");
        events.send_expired(&name, "u");
        let sent: Vec<EventRequest> = std::iter::from_fn(|| sent.try_recv().ok()).collect();
        assert_eq!(sent.len(), 1);
        assert_eq!((sent[0].uid.as_str(), sent[0].content.reason), ("u", EventReason::Expired));
    }

    #[test]
    fn many_failed_nodes_are_counted() {
        let report = report(WarmupPhase::InProgress, &["a", "b", "c", "d", "e"]);
        let nodes: Vec<&NodeReport> = report.nodes.iter().collect();
        let note = failed_nodes(&nodes).unwrap();
        assert!(note.starts_with("a: the node is gone") && note.ends_with("and 2 more nodes"), "{note}");
    }
}
