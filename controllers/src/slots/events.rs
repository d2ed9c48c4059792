//! Sends Events on what the leader did about slots.

use rouse::{
    slots::{InstanceEnd, InstanceName, NodeLoss, RejectedPod, SlotsCommand},
    units::pluralize,
};

use crate::{
    crd::ledger::ObjectName,
    event_content::{EventContent, EventReason},
    recorder::{EventRequest, EventSender, RegardingKind},
};

/// Sends one Event on each command that was executed and that users should know of.
pub(super) struct SlotsEvents(EventSender);

/// What an Event on a command has besides the command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct EventDetails {
    /// Uid of the command's instance.
    pub(super) uid: String,
    /// Why the kubelet rejected the command's Pod.
    pub(super) rejection: String,
}

impl SlotsEvents {
    pub(super) const fn new(sender: EventSender) -> Self {
        Self(sender)
    }

    /// Sends the Event on this command, if it has one.
    pub(super) fn send_executed(&self, command: &SlotsCommand, details: &EventDetails) {
        let EventDetails { uid, rejection } = details;
        self.0.send(match command {
            SlotsCommand::FreeNode { instance, node, cause, changes, .. } => {
                let why = match cause {
                    NodeLoss::Gone => "does not exist any more",
                    NodeLoss::NotReady => {
                        "has not been ready for some minutes and has no Pod with a slot left"
                    }
                    NodeLoss::NoAgent => {
                        "has had no node agent for some minutes and has no Pod with a slot of the device"
                    }
                };
                let freed = pluralize(changes.len(), "slot");
                let note =
                    format!("the node {node} {why}: it does not see the device, and {freed} became free");
                on_instance(instance, uid, EventReason::NodeLost.with_note(note))
            }
            SlotsCommand::DeleteInstance { instance, cause, .. } => {
                let note = match cause {
                    InstanceEnd::NoConfiguration => "its DeviceConfiguration does not exist: it is deleted",
                    InstanceEnd::NoNodes => "no node has seen the device for some minutes: it is deleted",
                };
                on_instance(instance, uid, EventReason::Deleted.with_note(note))
            }
            SlotsCommand::DeletePod { pod } => on_pod(pod, rejection),
            SlotsCommand::SetLayout { .. } => return,
        });
    }
}

fn on_instance(instance: &InstanceName, uid: &str, content: EventContent) -> EventRequest {
    let object = ObjectName::new("", instance.as_str());
    EventRequest { regarding: RegardingKind::DeviceInstance, object, uid: uid.to_owned(), content }
}

fn on_pod(pod: &RejectedPod, rejection: &str) -> EventRequest {
    let note = format!("it got no slot, so it is deleted, and its owner makes another one: {rejection}");
    EventRequest {
        regarding: RegardingKind::Pod,
        object: ObjectName::new(pod.namespace.as_str(), pod.name.as_str()),
        uid: pod.uid.to_string(),
        content: EventReason::Rejected.with_note(note),
    }
}

#[cfg(test)]
mod tests {
    use rouse::slots::{SlotChange, SlotUsage};

    use super::*;

    #[test]
    fn a_lost_node_is_named_with_the_number_of_its_slots() {
        let (sender, mut sent) = EventSender::for_test();
        let change = SlotChange {
            slot: "cam-1-0".into(),
            from: SlotUsage::Instance { node: "a".into() },
            to: SlotUsage::Free,
            unused_since: None,
        };
        let command = SlotsCommand::FreeNode {
            instance: "cam-1".into(),
            version: "7".to_owned(),
            node: "a".into(),
            cause: NodeLoss::Gone,
            changes: vec![change],
        };
        let details = EventDetails { uid: "u".to_owned(), ..EventDetails::default() };
        SlotsEvents::new(sender).send_executed(&command, &details);
        let event = sent.try_recv().unwrap();
        assert_eq!((event.regarding, event.uid.as_str()), (RegardingKind::DeviceInstance, "u"));
        assert_eq!(event.object, ObjectName::new("", "cam-1"));
        assert_eq!(event.content.reason, EventReason::NodeLost);
        assert!(
            event.content.note.contains("the node a does not exist")
                && event.content.note.contains("1 slot ")
        );
    }

    #[test]
    fn the_owner_of_a_rejected_pod_reads_what_the_kubelet_said() {
        let (sender, mut sent) = EventSender::for_test();
        let pod = RejectedPod {
            namespace: "chat".to_owned(),
            name: "one".to_owned(),
            uid: "u".into(),
            owner: "rs-u".into(),
        };
        let details = EventDetails { uid: String::new(), rejection: "slot cam-1-0 is taken".to_owned() };
        SlotsEvents::new(sender).send_executed(&SlotsCommand::DeletePod { pod }, &details);
        let event = sent.try_recv().unwrap();
        assert_eq!((event.regarding, event.uid.as_str()), (RegardingKind::Pod, "u"));
        assert_eq!(event.object, ObjectName::new("chat", "one"));
        assert!(event.content.note.ends_with("slot cam-1-0 is taken"), "{}", event.content.note);
    }

    #[test]
    fn another_layout_has_no_event() {
        let (sender, mut sent) = EventSender::for_test();
        let command = SlotsCommand::SetLayout {
            instance: "cam-1".into(),
            version: "7".to_owned(),
            changes: Vec::new(),
        };
        SlotsEvents::new(sender).send_executed(&command, &EventDetails::default());
        assert!(sent.try_recv().is_err());
    }
}
