//! Writes this node's accelerators into its AcceleratorNode.
//!
//! The leader creates the object, and owns all of its status but the list. It leaves a list alone that is not `partial`
//! (`status/node.rs`). So the agent applies the list and `partial: false`, both by force: it takes them from a leader
//! that listed what stubs reported before. The leader's writes carry the version that it read, so none of its older
//! lists overwrites this one.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use prometheus::IntCounterVec;
use rouse::{
    pairing::ids::NodeName,
    units::{Bytes, Millis, Tick},
};
use rouse_net::lease::TickClock;
use serde_json::{Value, json};
use tokio::time;

use super::{
    MANAGER,
    agent_view::{AgentState, AgentView},
};
use crate::{
    condition::{tick, time as object_time},
    convert::device_configuration::AcceptedDiscovery,
    crd::{AcceleratorNode, AcceleratorNodeStatus, node::NodeAccelerator},
    failpoint, writer,
};

/// Maximum age of `lastSeen` of an accelerator that is seen. Each refresh is a write.
const MAX_SEEN_AGE: Millis = Millis::secs(300);
/// How often that age is checked.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);
/// Delay after a write. Should the API server store a list in another form, that costs no more than a write a second.
const WRITE_PAUSE: Duration = Duration::from_secs(1);
/// Delay before a retry after a failed write.
const RETRY_DELAY: Duration = Duration::from_secs(5);
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// Keeps the list.
pub(super) struct AcceleratorLister {
    pub(super) state: Arc<AgentState>,
    pub(super) client: Client,
    /// Memory of each accelerator that no engine may reserve.
    pub(super) headroom: Bytes,
    pub(super) clock: TickClock,
    pub(super) writes: IntCounterVec,
}

impl AcceleratorLister {
    /// Keeps the list until it is dropped.
    pub(super) async fn run(self) {
        let mut changed = self.state.subscribe();
        loop {
            changed.mark_unchanged();
            let (me, now) = (&self.state.me, self.clock.now());
            let status = self.state.read(|view| wanted_status(view, me, self.headroom, now));
            let Some(status) = status else {
                // Either way the list is compared again.
                drop(time::timeout(CHECK_INTERVAL, changed.changed()).await);
                continue;
            };
            match self.write(&status).await {
                Ok(node) => {
                    self.state.update(|view| view.accelerator_node = Some(Arc::new(node)));
                    time::sleep(WRITE_PAUSE).await;
                }
                Err(error) => {
                    tracing::warn!(%error, "accelerators not listed in the AcceleratorNode, retrying");
                    time::sleep(RETRY_DELAY).await;
                }
            }
        }
    }

    async fn write(&self, status: &Value) -> Result<AcceleratorNode, writer::Error> {
        let object = json!({
            "apiVersion": "rouse.dev/v1alpha1",
            "kind": "AcceleratorNode",
            "metadata": {"name": self.state.me.as_str()},
            "status": status,
        });
        let api: Api<AcceleratorNode> = Api::all(self.client.clone());
        let parameters = PatchParams::apply(MANAGER).force();
        failpoint::hit();
        let patch = Patch::Apply(object);
        let call = api.patch_status(self.state.me.as_str(), &parameters, &patch);
        let outcome = time::timeout(CALL_TIMEOUT, call).await.map_err(|_| writer::Error::Timeout);
        let outcome = outcome.and_then(|written| written.map_err(writer::Error::from));
        let label = outcome.as_ref().map_or_else(writer::Error::label, |_| "done");
        self.writes.with_label_values(&["AcceleratorNode", label]).inc();
        outcome
    }
}

/// Returns the status to apply, if the object's list differs: an empty one gives the list back to the leader.
///
/// `None` as long as the leader has not written the object's status: with it the API server adds defaults of fields that
/// are the leader's, which an agent may not change.
fn wanted_status(view: &AgentView, me: &NodeName, headroom: Bytes, now: Tick) -> Option<Value> {
    let stored = view.accelerator_node.as_ref()?.status.as_ref()?;
    if !view.instances_listed || !view.configurations_listed || view.own_node.is_none() {
        return None;
    }
    let listed = accelerators(view, me, stored, headroom, now);
    if listed.is_empty() {
        // Only an agent says when it last saw an accelerator.
        let is_agents = !stored.partial && stored.accelerators.iter().any(|known| known.last_seen.is_some());
        let has_configuration = view.active().any(|(_, known)| is_of_accelerators(&known.accepted.discovery));
        return (is_agents && !has_configuration).then(|| json!({}));
    }
    (stored.partial || differs(&stored.accelerators, &listed, now))
        .then(|| json!({"accelerators": listed, "partial": false}))
}

/// Returns the accelerators that this node sees, and those that it saw until lately, sorted by index.
fn accelerators(
    view: &AgentView,
    me: &NodeName,
    stored: &AcceleratorNodeStatus,
    headroom: Bytes,
    now: Tick,
) -> Vec<NodeAccelerator> {
    let known = |uuid: &str| stored.accelerators.iter().find(|known| known.uuid == uuid);
    let mut listed = BTreeMap::new();
    for (_, configuration, uuid, device) in view.seen_devices(me) {
        let capacity = device.memory.map(|memory| memory.saturating_sub(headroom).into());
        // A file may not tell the memory.
        let capacity = capacity.or_else(|| Some(known(uuid)?.capacity.clone()));
        let (true, Some(capacity)) = (is_of_accelerators(&configuration.accepted.discovery), capacity) else {
            continue;
        };
        listed.insert(
            uuid.clone(),
            NodeAccelerator {
                uuid: uuid.clone(),
                index: device.index,
                capacity,
                healthy: device.healthy && !view.foreign.contains_key(uuid),
                last_sleep: known(uuid).and_then(|known| known.last_sleep.clone()),
                last_seen: Some(object_time(now)),
            },
        );
    }
    // An accelerator that is out of sight stays in the list as long as its instance lists this node.
    let own = view.instances.values().filter(|instance| instance.usage.nodes.contains(me));
    for uuid in own.map(|instance| &instance.object.spec.device_id) {
        if let Some(known) = known(uuid).filter(|_| !listed.contains_key(uuid)) {
            listed.insert(uuid.clone(), NodeAccelerator { healthy: false, ..known.clone() });
        }
    }
    let mut listed: Vec<NodeAccelerator> = listed.into_values().collect();
    listed.sort_by_key(|accelerator| accelerator.index.unwrap_or(u32::MAX));
    listed
}

fn is_of_accelerators(discovery: &AcceptedDiscovery) -> bool {
    *discovery == AcceptedDiscovery::Accelerators
}

/// Whether the list is worth a write: it differs in more than `lastSeen`, or that is too old.
fn differs(stored: &[NodeAccelerator], listed: &[NodeAccelerator], now: Tick) -> bool {
    let is_old = |stored: &NodeAccelerator| {
        stored.last_seen.as_ref().is_none_or(|seen| now.since(tick(seen)) >= MAX_SEEN_AGE)
    };
    let is_same = |(stored, listed): (&NodeAccelerator, &NodeAccelerator)| {
        let as_stored = NodeAccelerator { last_seen: stored.last_seen.clone(), ..listed.clone() };
        let is_seen = stored.last_seen != listed.last_seen;
        *stored == as_stored && !(is_seen && is_old(stored))
    };
    stored.len() != listed.len() || !stored.iter().zip(listed).all(is_same)
}

#[cfg(test)]
mod tests;
