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
    units::{Bytes, Tick},
};
use rouse_net::lease::TickClock;
use serde_json::{Value, json};
use tokio::time;

use super::{
    MANAGER,
    agent_view::{AgentState, AgentView, SeenDevice},
};
use crate::{
    condition::time as object_time,
    crd::{AcceleratorNode, AcceleratorNodeStatus, node::NodeAccelerator},
    failpoint, writer,
};

/// How often the agent notes which accelerators it sees, if nothing changes.
const NOTE_INTERVAL: Duration = Duration::from_secs(60);
/// Delay after a write. Should the API server store a list in another form, that costs no more than a write a second.
const WRITE_PAUSE: Duration = Duration::from_secs(1);
/// Delay before a retry after a failed write.
const RETRY_DELAY: Duration = Duration::from_secs(5);
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// When each accelerator was last seen. It is written only with another change: a write for each node every few minutes
/// would be the largest load of a fleet at rest.
type LastSeen = BTreeMap<String, Tick>;

/// Keeps the list in the AcceleratorNode up to date.
pub(super) struct AcceleratorLister {
    pub(super) state: Arc<AgentState>,
    pub(super) client: Client,
    /// Memory of each accelerator that no engine may reserve.
    pub(super) headroom: Bytes,
    pub(super) clock: TickClock,
    pub(super) writes: IntCounterVec,
}

impl AcceleratorLister {
    /// Writes the list after each change, until it is dropped.
    pub(super) async fn run(self) {
        let mut changed = self.state.subscribe();
        let mut last_seen = LastSeen::new();
        loop {
            changed.mark_unchanged();
            let (me, now) = (&self.state.me, self.clock.now());
            let status = self.state.read(|view| {
                last_seen.extend(seen_accelerators(view, me).map(|(uuid, _)| (uuid.clone(), now)));
                wanted_status(view, me, self.headroom, &last_seen, now)
            });
            let Some(status) = status else {
                // Either way the list is compared again.
                drop(time::timeout(NOTE_INTERVAL, changed.changed()).await);
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
        self.writes.with_label_values(&["AcceleratorNode", writer::outcome_label(&outcome)]).inc();
        outcome
    }
}

/// Returns the status to apply, if the object's list differs: an empty one gives the list back to the leader.
///
/// `None` as long as the leader has not written the object's status: with it the API server adds defaults of fields
/// that are the leader's, which an agent may not change.
fn wanted_status(
    view: &AgentView,
    me: &NodeName,
    headroom: Bytes,
    last_seen: &LastSeen,
    now: Tick,
) -> Option<Value> {
    let stored = view.accelerator_node.as_ref()?.status.as_ref()?;
    if !view.is_complete() {
        return None;
    }
    let listed = accelerators(view, me, stored, headroom, last_seen, now);
    if listed.is_empty() {
        // Only an agent writes when it last saw an accelerator.
        let is_agents = !stored.partial && stored.accelerators.iter().any(|known| known.last_seen.is_some());
        let has_configuration = view.active().any(|(_, known)| known.accepted.is_of_accelerators());
        return (is_agents && !has_configuration).then(|| json!({}));
    }
    (stored.partial || differs(&stored.accelerators, &listed))
        .then(|| json!({"accelerators": listed, "partial": false}))
}

/// Returns the accelerators that this node sees, by UUID.
fn seen_accelerators<'a>(
    view: &'a AgentView,
    me: &'a NodeName,
) -> impl Iterator<Item = (&'a String, &'a SeenDevice)> {
    let seen = view.seen_devices(me).filter(|(_, known, ..)| known.accepted.is_of_accelerators());
    seen.map(|(_, _, uuid, device)| (uuid, device))
}

/// Returns the accelerators that this node sees, and those that it saw until lately, sorted by index.
fn accelerators(
    view: &AgentView,
    me: &NodeName,
    stored: &AcceleratorNodeStatus,
    headroom: Bytes,
    last_seen: &LastSeen,
    now: Tick,
) -> Vec<NodeAccelerator> {
    let known = |uuid: &str| stored.accelerators.iter().find(|known| known.uuid == uuid);
    let offered_by = view.accelerator_configuration();
    let mut listed = BTreeMap::new();
    for (uuid, device) in seen_accelerators(view, me) {
        let capacity = device.memory.map(|memory| memory.saturating_sub(headroom).into());
        // A file may lack the memory, and an instance always does.
        let capacity = capacity.or_else(|| Some(known(uuid)?.capacity.clone()));
        let Some(capacity) = capacity else { continue };
        listed.insert(
            uuid.clone(),
            NodeAccelerator {
                uuid: uuid.clone(),
                index: device.index,
                capacity,
                healthy: device.healthy && !view.foreign.contains_key(uuid),
                configuration: offered_by.map(|configuration| configuration.name.to_string()),
                slots: offered_by.map(|configuration| configuration.capacity),
                last_sleep: known(uuid).and_then(|known| known.last_sleep.clone()),
                last_seen: Some(object_time(now)),
            },
        );
    }
    // An accelerator that is out of sight stays in the list as long as its instance lists this node.
    let own = view.instances.values().filter(|instance| instance.usage.nodes.contains(me));
    for uuid in own.map(|instance| &instance.object.spec.device_id) {
        if let Some(known) = known(uuid).filter(|_| !listed.contains_key(uuid)) {
            let seen = last_seen.get(uuid).map(|at| object_time(*at)).or_else(|| known.last_seen.clone());
            let out_of_sight = NodeAccelerator { healthy: false, last_seen: seen, ..known.clone() };
            listed.insert(uuid.clone(), out_of_sight);
        }
    }
    let mut listed: Vec<NodeAccelerator> = listed.into_values().collect();
    listed.sort_by_key(|accelerator| accelerator.index.unwrap_or(u32::MAX));
    listed
}

/// Whether the list is worth a write: it differs in more than the moments of `lastSeen` and the order, which is the API
/// server's.
fn differs(stored: &[NodeAccelerator], listed: &[NodeAccelerator]) -> bool {
    let by_uuid: BTreeMap<&str, &NodeAccelerator> =
        stored.iter().map(|known| (known.uuid.as_str(), known)).collect();
    let is_stored = |listed: &NodeAccelerator| {
        by_uuid.get(listed.uuid.as_str()).is_some_and(|stored| {
            let as_stored = NodeAccelerator { last_seen: stored.last_seen.clone(), ..listed.clone() };
            **stored == as_stored && stored.last_seen.is_some() == listed.last_seen.is_some()
        })
    };
    stored.len() != listed.len() || !listed.iter().all(is_stored)
}

#[cfg(test)]
mod tests;
