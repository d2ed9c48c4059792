//! Records Events on the Node when a device that it lists cannot be used any more, and when it can again.
//!
//! The library's recorder serves: the Events are few, and each names its DeviceInstance, so that Events about two
//! devices do not count as one.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Client, Resource as _, ResourceExt as _,
    runtime::events::{Event, EventType, Recorder, Reporter},
};
use rouse::{pairing::ids::NodeName, slots::InstanceName};
use rouse_net::timer::sleep_until_some;
use tokio::time::{self, Instant};

use super::agent_view::{AgentState, AgentView, DeviceProblem, KnownInstance};
use crate::crd::DeviceInstance;

const CONTROLLER: &str = "rouse.dev/node-agent";
/// Minimum interval between two Events about one device: an endpoint may come and go all the time.
const MIN_INTERVAL: Duration = Duration::from_secs(60);
/// Maximum number of Events within that time. If a network fails, all nodes lose sight of all servers at once.
const MAX_EVENTS: usize = 10;
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum length of the device's id in a note, which has 1,024 bytes at most.
const MAX_ID_CHARS: usize = 200;

/// Records Events.
pub(super) struct DeviceEventRecorder {
    state: Arc<AgentState>,
    recorder: Recorder,
    /// The problem of each device, as the last Event says, and when that was sent. `None`: sound.
    reported: BTreeMap<InstanceName, (Option<DeviceProblem>, Instant)>,
    sent: SentEvents,
}

/// When the last Events were sent, as many as may be sent within [`MIN_INTERVAL`].
#[derive(Debug, Default)]
struct SentEvents(VecDeque<Instant>);

/// The present problem of a device; `None` if the device is sound.
type CurrentProblem = (Arc<DeviceInstance>, Option<DeviceProblem>);

impl DeviceEventRecorder {
    pub(super) fn new(state: Arc<AgentState>, client: Client) -> Self {
        let reporter =
            Reporter { controller: CONTROLLER.to_owned(), instance: Some(state.me.as_str().to_owned()) };
        let recorder = Recorder::new(client, reporter);
        Self { state, recorder, reported: BTreeMap::new(), sent: SentEvents::default() }
    }

    /// Records Events until it is dropped.
    pub(super) async fn run(mut self) {
        let mut changed = self.state.subscribe();
        loop {
            changed.mark_unchanged();
            let me = &self.state.me;
            let (node, devices) = self.state.read(|view| (node_reference(view, me), health(view, me)));
            self.reported.retain(|name, _| devices.contains_key(name));
            let mut due = None;
            for (name, (instance, problem)) in devices {
                let now = Instant::now();
                let known = self.reported.get(&name);
                if known.map_or_else(|| problem.is_none(), |(reported, _)| *reported == problem) {
                    continue;
                }
                let of_device = known.map(|(_, at)| *at + MIN_INTERVAL);
                match of_device.max(self.sent.next_at()).filter(|at| *at > now) {
                    Some(at) => due = Some(due.map_or(at, |due: Instant| due.min(at))),
                    None => {
                        self.record(&node, &instance, problem.as_ref()).await;
                        self.sent.add(now);
                        self.reported.insert(name, (problem, now));
                    }
                }
            }
            tokio::select! {
                // The state holds the sender, so this cannot fail.
                _ = changed.changed() => {}
                () = sleep_until_some(due) => {}
            }
        }
    }

    async fn record(
        &self,
        node: &ObjectReference,
        instance: &DeviceInstance,
        problem: Option<&DeviceProblem>,
    ) {
        let device: String = instance.spec.device_id.chars().take(MAX_ID_CHARS).collect();
        let (reason, note) = content(&device, problem);
        let type_ = if problem.is_some() { EventType::Warning } else { EventType::Normal };
        let event = Event {
            type_,
            reason: reason.to_owned(),
            note: Some(note),
            action: "Watch".to_owned(),
            secondary: Some(instance.object_ref(&())),
        };
        tracing::info!(instance = %instance.name_any(), reason, "device health changed");
        let published = time::timeout(CALL_TIMEOUT, self.recorder.publish(&event, node)).await;
        // An Event that is lost is no reason to try again: the lists of the plugins say the same.
        match published {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(%error, reason, "Event not written"),
            Err(_) => tracing::debug!(reason, "Event not written in time"),
        }
    }
}

impl SentEvents {
    /// Returns when the next Event may be sent; `None` if there were few.
    fn next_at(&self) -> Option<Instant> {
        let oldest = self.0.front().filter(|_| self.0.len() >= MAX_EVENTS)?;
        Some(*oldest + MIN_INTERVAL)
    }

    fn add(&mut self, now: Instant) {
        if self.0.len() >= MAX_EVENTS {
            self.0.pop_front();
        }
        self.0.push_back(now);
    }
}

/// Returns the problem of each device whose instance lists this node.
fn health(view: &AgentView, me: &NodeName) -> BTreeMap<InstanceName, CurrentProblem> {
    let own = view.instances.iter().filter(|(_, known)| {
        let configuration = known.object.spec.configuration.as_str();
        let is_searched = view.devices.contains_key(configuration);
        known.usage.nodes.contains(me) && view.active_configuration(configuration).is_some() && is_searched
    });
    let health = |(name, known): (&InstanceName, &KnownInstance)| {
        (name.clone(), (Arc::clone(&known.object), view.problem_of(&known.object)))
    };
    own.map(health).collect()
}

fn node_reference(view: &AgentView, me: &NodeName) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Node".to_owned()),
        name: Some(me.as_str().to_owned()),
        uid: view.own_node.as_ref().and_then(|node| node.uid.clone()),
        ..ObjectReference::default()
    }
}

/// Returns the reason and the note of an Event.
fn content(device: &str, problem: Option<&DeviceProblem>) -> (&'static str, String) {
    match problem {
        None => (
            "DeviceHealthy",
            format!("the device '{device}' is seen and healthy, its free slots are offered"),
        ),
        Some(DeviceProblem::Gone) => (
            "DeviceGone",
            format!("this node no longer finds the device '{device}': no Pod gets one of its slots"),
        ),
        Some(DeviceProblem::Faulty) => (
            "DeviceFaulty",
            format!("the device '{device}' is faulty: no Pod gets one of its slots; check the node's driver"),
        ),
        Some(DeviceProblem::Foreign(resource)) => (
            "DeviceConflict",
            format!(
                "a container has the device '{device}' as {resource}, which another device plugin offers: no Pod gets \
                 one of its slots; let one plugin alone offer the devices of this node"
            ),
        ),
        Some(DeviceProblem::Duplicate(configuration)) => (
            "DeviceConflict",
            format!(
                "the older DeviceConfiguration '{configuration}' offers the device '{device}' on this node, so no \
                 other one does; let one DeviceConfiguration alone select this node"
            ),
        ),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::node_agent::testing::{instance, view_of};

    #[test]
    fn each_problem_has_a_reason_of_its_own_and_says_what_to_do_or_what_it_means() {
        let foreign = DeviceProblem::Foreign("nvidia.com/gpu".to_owned());
        let duplicate = DeviceProblem::Duplicate("gpus".into());
        for (problem, reason, part) in [
            (None, "DeviceHealthy", "are offered"),
            (Some(&DeviceProblem::Gone), "DeviceGone", "no longer finds"),
            (Some(&DeviceProblem::Faulty), "DeviceFaulty", "check the node's driver"),
            (Some(&foreign), "DeviceConflict", "as nvidia.com/gpu"),
            (Some(&duplicate), "DeviceConflict", "DeviceConfiguration 'gpus'"),
        ] {
            let (found, note) = content("GPU-a", problem);
            assert_eq!(found, reason);
            assert!(note.contains(part) && note.contains("'GPU-a'"), "{note}");
        }
    }

    #[test]
    fn the_eleventh_event_waits_until_the_first_is_a_minute_old() {
        let (mut sent, start) = (SentEvents::default(), Instant::now());
        for second in 0..10 {
            assert_eq!(sent.next_at(), None, "after {second} Events");
            sent.add(start + Duration::from_secs(second));
        }
        assert_eq!(sent.next_at(), Some(start + MIN_INTERVAL));
        sent.add(start + MIN_INTERVAL);
        assert_eq!(sent.next_at(), Some(start + Duration::from_secs(1) + MIN_INTERVAL));
        assert_eq!(sent.0.len(), MAX_EVENTS);
    }

    #[test]
    fn a_device_that_was_not_searched_yet_has_no_health() {
        let mut view = view_of("lamps", &json!({"discovery": {"static": {"devices": [{"id": "one"}]}}}));
        let status = json!({"nodes": ["a"], "deviceUsage": {"x-0": ""}});
        view.apply_instance(Arc::new(instance("lamps", "one", true, &status)));
        let problems = |view: &AgentView| {
            health(view, &"a".into()).into_values().map(|(_, problem)| problem).collect::<Vec<_>>()
        };
        assert_eq!(problems(&view), []);
        view.devices.insert("lamps".into(), BTreeMap::new());
        assert_eq!(problems(&view), [Some(DeviceProblem::Gone)]);
        assert_eq!(health(&view, &"b".into()).len(), 0, "another node's agent reports it");
    }
}
