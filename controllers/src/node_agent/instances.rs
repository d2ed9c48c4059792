//! Creates an instance for each device that this node sees, and keeps the node's name in its list.
//!
//! ```text
//!   seen, no object ──create──▶ no slots ──lay out──▶ slots ──join──▶ lists this node ──not seen for 300 s──▶ leave
//! ```
//!
//! Each step is one write, and follows from the objects alone. So an agent that is killed between two steps goes on
//! where it stopped, and several agents that see one device do each step once: all but one get a conflict, read the
//! object again, and find nothing to do. Once an instance has slots, only the leader adds and removes slots.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use rouse::{
    pairing::ids::NodeName,
    slots::InstanceName,
    stable_hash::fnv1a,
    units::{Millis, Tick},
};
use rouse_net::{lease::TickClock, timer::sleep_until_some};
use tokio::time::Instant;

use super::{
    agent_view::{AgentState, AgentView, KnownConfiguration, KnownInstance, SeenDevice},
    instance_api::InstanceApi,
};
use crate::{
    crd::{DeviceInstance, DeviceInstanceSpec},
    slot_patch::{layout_patch, nodes_patch},
    writer,
};

/// How long a device may be out of sight before the node leaves its instance.
const GONE_AFTER: Millis = Millis::secs(300);
/// Delay before a retry after a failed write.
const RETRY_DELAY: Duration = Duration::from_secs(2);
/// Mean delay before a retry after another writer was first. It doubles with each further conflict.
const CONFLICT_DELAY: Millis = Millis(50);
const MAX_DOUBLINGS: u32 = 6;
/// Delay before a retry after the API server refused a write.
const REFUSED_RETRY_DELAY: Duration = Duration::from_secs(10);

/// Reconciles the instances of this node's devices with what the node sees.
pub(super) struct InstanceReconciler {
    state: Arc<AgentState>,
    api: InstanceApi,
    clock: TickClock,
    /// Since when this node does not see the device of an instance that lists it.
    out_of_sight: BTreeMap<InstanceName, Tick>,
    /// Instances whose next step has failed. Changes of other instances are no reason to try again at once.
    retries: BTreeMap<InstanceName, StepRetry>,
}

/// When a step that has failed is tried again.
#[derive(Clone, Copy, Debug)]
struct StepRetry {
    at: Instant,
    /// Number of times in a row that another writer was first.
    conflicts: u32,
}

/// One write to an instance.
#[derive(Clone, Debug, PartialEq)]
enum InstanceStep {
    Create(Box<DeviceInstance>),
    /// Adds the first slots.
    LayOut {
        capacity: u32,
    },
    Join,
    Leave,
}

impl InstanceReconciler {
    pub(super) const fn new(state: Arc<AgentState>, api: InstanceApi, clock: TickClock) -> Self {
        Self { state, api, clock, out_of_sight: BTreeMap::new(), retries: BTreeMap::new() }
    }

    /// Reconciles until it is dropped.
    pub(super) async fn run(mut self) {
        let mut changed = self.state.subscribe();
        loop {
            changed.mark_unchanged();
            let now = self.clock.now();
            let me = self.state.me.clone();
            let steps = self.state.read(|view| {
                update_out_of_sight(&mut self.out_of_sight, view, &me, now);
                next_steps(view, &me, &self.out_of_sight, now)
            });
            let leave_at = self.next_leave(now).map(|left| Instant::now() + left);
            let mut failed = std::mem::take(&mut self.retries);
            for (name, step) in steps {
                let before = failed.remove(&name);
                let retry = match before.filter(|retry| retry.at > Instant::now()) {
                    Some(retry) => Some(retry),
                    None => self.execute(&name, step, before.map_or(0, |retry| retry.conflicts)).await,
                };
                self.retries.extend(retry.map(|retry| (name, retry)));
            }
            let wake_at = self.retries.values().map(|retry| retry.at).chain(leave_at).min();
            tokio::select! {
                // The state holds the sender, so this cannot fail.
                _ = changed.changed() => {}
                () = sleep_until_some(wake_at) => {}
            }
        }
    }

    /// Returns the time until the next device has been out of sight for too long.
    fn next_leave(&self, now: Tick) -> Option<Duration> {
        let due = self.out_of_sight.values().map(|since| *since + GONE_AFTER).filter(|due| *due > now).min();
        due.map(|due| due.since(now).duration())
    }

    /// Makes one write, after so many conflicts in a row. Returns when to retry if it failed.
    async fn execute(&self, name: &InstanceName, step: InstanceStep, conflicts: u32) -> Option<StepRetry> {
        let label = step.label();
        let error = match self.write(name, step).await {
            Ok(()) => {
                tracing::info!(instance = %name, step = label, "instance written");
                return None;
            }
            Err(error) => error,
        };
        let delay = match error {
            // Another agent was first.
            writer::Error::Conflict | writer::Error::Gone => {
                match self.api.refresh(&self.state, name).await {
                    Ok(()) => {
                        let at = Instant::now() + conflict_delay(&self.state.me, conflicts);
                        return Some(StepRetry { at, conflicts: conflicts.saturating_add(1) });
                    }
                    Err(error) => {
                        tracing::warn!(instance = %name, %error, "instance not read after a conflict, retrying");
                        RETRY_DELAY
                    }
                }
            }
            writer::Error::Invalid(_) => REFUSED_RETRY_DELAY,
            _ => RETRY_DELAY,
        };
        tracing::warn!(instance = %name, step = label, %error, ?delay, "instance not written, retrying");
        Some(StepRetry { at: Instant::now() + delay, conflicts })
    }

    async fn write(&self, name: &InstanceName, step: InstanceStep) -> Result<(), writer::Error> {
        let known = self.state.read(|view| view.instances.get(name).cloned());
        let written = match (step, known) {
            (InstanceStep::Create(object), _) => self.api.create(&object).await?,
            (InstanceStep::LayOut { capacity }, Some(known)) => {
                let layout = known.usage.layout(name, capacity);
                self.api.patch(name.as_str(), &layout_patch(&known.object, &layout)).await?
            }
            (InstanceStep::Join, Some(known)) => {
                let mut nodes = known.usage.nodes;
                nodes.insert(self.state.me.clone());
                self.api.patch(name.as_str(), &nodes_patch(&known.object, &nodes)).await?
            }
            (InstanceStep::Leave, Some(known)) => {
                let mut nodes = known.usage.nodes;
                nodes.remove(&self.state.me);
                self.api.patch(name.as_str(), &nodes_patch(&known.object, &nodes)).await?
            }
            (_, None) => return Err(writer::Error::Gone),
        };
        self.state.observe_instance(written);
        Ok(())
    }
}

impl InstanceStep {
    const fn label(&self) -> &'static str {
        match self {
            Self::Create(_) => "create",
            Self::LayOut { .. } => "lay out",
            Self::Join => "join",
            Self::Leave => "leave",
        }
    }
}

/// Returns the delay before the retry after so many conflicts.
///
/// All nodes that see a device join its instance at the same time, each in the version that it has read, so all but one
/// have to try again. With one delay for all of them, the number of tries would grow with the square of their number.
fn conflict_delay(me: &NodeName, conflicts: u32) -> Duration {
    let range = CONFLICT_DELAY.0 << conflicts.min(MAX_DOUBLINGS);
    let hash = fnv1a(me.as_str().bytes().chain(conflicts.to_le_bytes()));
    Millis(CONFLICT_DELAY.0 / 2 + hash % range).duration()
}

/// Records since when this node has not seen the devices of instances that list it.
///
/// A configuration that has not been searched since the agent's start says nothing yet.
fn update_out_of_sight(
    out_of_sight: &mut BTreeMap<InstanceName, Tick>,
    view: &AgentView,
    me: &NodeName,
    now: Tick,
) {
    let is_out_of_sight = |known: &KnownInstance| {
        let configuration = known.object.spec.configuration.as_str();
        let is_searched =
            view.active_configuration(configuration).is_none() || view.devices.contains_key(configuration);
        known.usage.nodes.contains(me) && is_searched && view.device_of(&known.object).is_none()
    };
    let is_complete = view.is_complete();
    let missing = view.instances.iter().filter(|(_, known)| is_complete && is_out_of_sight(known));
    let missing: BTreeMap<InstanceName, Tick> =
        missing.map(|(name, _)| (name.clone(), out_of_sight.get(name).copied().unwrap_or(now))).collect();
    *out_of_sight = missing;
}

/// Returns the next write of each instance that needs one.
fn next_steps(
    view: &AgentView,
    me: &NodeName,
    out_of_sight: &BTreeMap<InstanceName, Tick>,
    now: Tick,
) -> Vec<(InstanceName, InstanceStep)> {
    if !view.is_listed() {
        return Vec::new();
    }
    let seen = view.seen_devices(me).filter_map(|(name, configuration, id, device)| {
        let step = match view.instances.get(&name) {
            None => InstanceStep::Create(Box::new(new_instance(&name, configuration, id, device))),
            Some(known) if !stands_for(known, configuration, id) => {
                tracing::error!(instance = %name, device = id, "two devices have instances of one name");
                return None;
            }
            Some(known) if known.usage.slots.is_empty() => {
                InstanceStep::LayOut { capacity: configuration.accepted.capacity }
            }
            Some(known) if !known.usage.nodes.contains(me) => InstanceStep::Join,
            Some(_) => return None,
        };
        Some((name, step))
    });
    let is_gone = |since: Tick| since + GONE_AFTER <= now;
    let gone = out_of_sight.iter().filter(|(_, since)| is_gone(**since));
    seen.chain(gone.map(|(name, _)| (name.clone(), InstanceStep::Leave))).collect()
}

/// Whether an instance is that of this device. Digests of two devices may be the same.
fn stands_for(known: &KnownInstance, configuration: &KnownConfiguration, device_id: &str) -> bool {
    let spec = &known.object.spec;
    spec.configuration == configuration.accepted.name.as_str() && spec.device_id == device_id
}

/// Returns the object of a device.
///
/// The configuration does not own it: Kubernetes would delete it with its configuration at once, and with it the claims
/// of containers that run. If the configuration was created anew, their slots would be free for every node. So the
/// leader deletes it, once no slot is in use.
fn new_instance(
    name: &InstanceName,
    configuration: &KnownConfiguration,
    device_id: &str,
    device: &SeenDevice,
) -> DeviceInstance {
    let KnownConfiguration { accepted, .. } = configuration;
    let spec = DeviceInstanceSpec {
        configuration: accepted.name.to_string(),
        shared: accepted.shared,
        capacity: accepted.capacity,
        device_id: device_id.to_owned(),
        properties: device.properties.clone(),
    };
    DeviceInstance::new(name.as_str(), spec)
}

#[cfg(test)]
mod tests;
