//! Claims slots for containers, and returns what the containers get.
//!
//! A claim is one JSON Patch for each instance, which the API server refuses if another node or plugin has one of the
//! slots. The agent then reads the object, its plugins send their new lists, and only after that does the kubelet get
//! the error: so the Pod that replaces the rejected one does not ask for the same slot. If a claim could not be
//! written, its plugin offers nothing for a while, because every further Pod would be rejected. A slot that the object
//! already gives to this node is granted without a write, but only after a read: the watch may be behind, and the slot
//! may have been freed and claimed by another node since. So an agent that dies at any step of a claim loses nothing:
//! the next Allocate gets the same slot, or the reclaimer frees it.

mod virtual_claim;

use std::{sync::Arc, time::Duration};

use rouse::slots::{ClaimError, ClaimKind, ConfigurationName, InstanceName, SlotChange, SlotName};
use rouse_kubelet::{AllocateError, ContainerAllocation};
use rouse_net::lease::TickClock;
use serde_json::Value;
use tokio::{
    sync::Mutex,
    task,
    time::{self, Instant},
};

use super::{
    agent_metrics::AgentMetrics,
    agent_view::{AgentState, DeviceProblem, KnownInstance, PluginKey},
    container_contents::{GrantedSlot, container_allocation},
    instance_api::InstanceApi,
    reclaim::{Reclaimers, unused_after},
};
use crate::{failpoint, slot_patch::slot_patch, writer};

/// Deadline of a claim. A little less than the five seconds that the plugin's server grants.
const ALLOCATE_TIMEOUT: Duration = Duration::from_millis(4_500);
/// Number of times that a claim is tried while other nodes change the instance.
const MAX_TRIES: u32 = 5;

/// Claims slots of this node.
pub(super) struct Allocator {
    pub(super) state: Arc<AgentState>,
    pub(super) api: InstanceApi,
    /// Held while slots are claimed or freed, so that the reclaimer frees no slot that is being granted.
    pub(super) reclaimers: Mutex<Reclaimers>,
    pub(super) clock: TickClock,
    pub(super) metrics: AgentMetrics,
}

/// Why a container gets no slots. The text is in the rejected Pod's status.
#[derive(Debug, thiserror::Error)]
pub(super) enum AllocationError {
    #[error("no DeviceInstance '{0}' is known to the agent of this node: create the Pod again")]
    UnknownInstance(InstanceName),
    #[error("no DeviceConfiguration '{0}' is in effect on this node: create it, or correct its nodeSelector")]
    UnknownConfiguration(String),
    #[error("this node does not find the device '{device}': check that it is connected and answers")]
    Gone { device: String },
    #[error("the device '{device}' is faulty: check the node's driver")]
    Faulty { device: String },
    #[error(
        "the device '{device}' is in use through {resource}, which another device plugin offers: let one plugin alone \
         offer the devices of this node"
    )]
    Foreign { device: String, resource: String },
    #[error(
        "the device '{device}' is offered by the older DeviceConfiguration '{configuration}': request its resource, or \
         let one DeviceConfiguration alone select this node"
    )]
    Duplicate { device: String, configuration: ConfigurationName },
    #[error(transparent)]
    Refused(#[from] ClaimError),
    #[error("other nodes changed the slots {} times during the claim: create the Pod again", MAX_TRIES)]
    Contended,
    #[error("the claim could not be written: {0}")]
    Write(#[from] writer::Error),
    #[error(
        "the claim was not written within {:?}: check the API server, and create the Pod again",
        ALLOCATE_TIMEOUT
    )]
    Timeout,
}

impl AllocationError {
    /// Whether the claim could not be written. The next one will hardly be either, so each Pod that replaces the
    /// rejected one would be rejected, too.
    const fn is_of_the_api_server(&self) -> bool {
        matches!(self, Self::Write(_) | Self::Timeout)
    }
}

impl Allocator {
    /// Claims the devices of these ids for one container.
    ///
    /// # Errors
    /// The container cannot have them. The plugins' lists have been sent before this returns.
    pub(super) async fn allocate(
        &self,
        key: &PluginKey,
        ids: &[String],
    ) -> Result<ContainerAllocation, AllocateError> {
        let started = Instant::now();
        let granted = time::timeout(ALLOCATE_TIMEOUT, Box::pin(self.grant(key, ids))).await;
        let granted = granted.map_err(|_| AllocationError::Timeout).flatten();
        self.metrics.allocated(key, started.elapsed(), granted.as_ref().err());
        match granted {
            Ok(allocation) => {
                tracing::info!(resource = key.resource(), ?ids, "slots granted");
                Ok(allocation)
            }
            Err(error) => {
                tracing::warn!(resource = key.resource(), ?ids, %error, "slots refused");
                if error.is_of_the_api_server() {
                    let now = self.clock.now();
                    self.state.update(|view| view.claims_failed.insert(key.clone(), now));
                }
                // Lets the streams of the plugins write the lists first.
                task::yield_now().await;
                task::yield_now().await;
                Err(AllocateError(error.to_string()))
            }
        }
    }

    async fn grant(&self, key: &PluginKey, ids: &[String]) -> Result<ContainerAllocation, AllocationError> {
        let mut reclaimers = self.reclaimers.lock().await;
        let granted = match key {
            PluginKey::Instance(name) => self.claim_slots(name, ids).await?,
            PluginKey::Configuration(name) => self.claim_virtual(name, ids).await?,
        };
        let (now, contents) = (self.clock.now(), self.contents(&granted)?);
        for slot in &granted {
            let unused_after = self.state.read(|view| unused_after(view, &slot.configuration));
            reclaimers.claimed(&slot.configuration, unused_after, &slot.slot, now);
        }
        failpoint::hit();
        Ok(contents)
    }

    /// Claims slots of one instance, all or none.
    async fn claim_slots(
        &self,
        name: &InstanceName,
        ids: &[String],
    ) -> Result<Vec<GrantedSlot>, AllocationError> {
        let slots: Vec<SlotName> = ids.iter().map(|id| SlotName::from(id.as_str())).collect();
        let mut is_fresh = false;
        for _ in 0..MAX_TRIES {
            let known = self.usable_instance(name)?;
            match known.usage.claim(&slots, &self.state.me, &ClaimKind::Instance) {
                Ok(changes) if !is_fresh && !tests_each(&slots, &changes) => self.refresh(name).await?,
                Ok(changes) if changes.is_empty() => return self.granted(name, &slots),
                Ok(changes) => match self.write(name, &slot_patch(&known.object, &changes)).await {
                    Ok(()) => return self.granted(name, &slots),
                    Err(writer::Error::Conflict | writer::Error::Gone) => self.refresh(name).await?,
                    Err(error) => return Err(error.into()),
                },
                // Without a read, the slot may have been freed since the watch last showed it.
                Err(error) if is_fresh => return Err(error.into()),
                Err(_) => self.refresh(name).await?,
            }
            is_fresh = true;
        }
        Err(AllocationError::Contended)
    }

    /// Returns an instance whose device is sound.
    fn usable_instance(&self, name: &InstanceName) -> Result<KnownInstance, AllocationError> {
        self.state.read(|view| {
            let known = view.instances.get(name);
            let known = known.ok_or_else(|| AllocationError::UnknownInstance(name.clone()))?;
            let device = known.object.spec.device_id.clone();
            match view.problem_of(&known.object) {
                None => Ok(known.clone()),
                Some(DeviceProblem::Gone) => Err(AllocationError::Gone { device }),
                Some(DeviceProblem::Faulty) => Err(AllocationError::Faulty { device }),
                Some(DeviceProblem::Foreign(resource)) => Err(AllocationError::Foreign { device, resource }),
                Some(DeviceProblem::Duplicate(configuration)) => {
                    Err(AllocationError::Duplicate { device, configuration })
                }
            }
        })
    }

    /// Returns these slots of an instance as its object has them now.
    fn granted(&self, name: &InstanceName, slots: &[SlotName]) -> Result<Vec<GrantedSlot>, AllocationError> {
        self.state.read(|view| {
            let known = view.instances.get(name);
            let known = known.ok_or_else(|| AllocationError::UnknownInstance(name.clone()))?;
            let (spec, device) = (&known.object.spec, view.device_of(&known.object));
            let properties = device.map_or(&spec.properties, |device| &device.properties);
            let granted = |slot: &SlotName| GrantedSlot {
                configuration: spec.configuration.as_str().into(),
                instance: name.clone(),
                slot: slot.clone(),
                usage: known.usage.slots.get(slot).cloned().unwrap_or_default(),
                device_id: spec.device_id.clone(),
                properties: properties.clone(),
            };
            Ok(slots.iter().map(granted).collect())
        })
    }

    /// Returns what a container gets. The slots are of one configuration.
    fn contents(&self, granted: &[GrantedSlot]) -> Result<ContainerAllocation, AllocationError> {
        let Some(first) = granted.first() else { return Ok(ContainerAllocation::default()) };
        self.state.read(|view| {
            let known = view.instances.get(&first.instance);
            let known = known.ok_or_else(|| AllocationError::UnknownInstance(first.instance.clone()))?;
            let name = &known.object.spec.configuration;
            let configuration = view.active_configuration(name);
            let configuration =
                configuration.ok_or_else(|| AllocationError::UnknownConfiguration(name.clone()))?;
            Ok(container_allocation(&configuration.accepted, granted))
        })
    }

    /// Writes a patch, and takes over the object that it makes.
    pub(super) async fn write(&self, name: &InstanceName, operations: &Value) -> Result<(), writer::Error> {
        let written = self.api.patch(name.as_str(), operations).await?;
        failpoint::hit();
        self.state.observe_instance(written);
        Ok(())
    }

    /// Reads an instance again.
    pub(super) async fn refresh(&self, name: &InstanceName) -> Result<(), writer::Error> {
        self.api.refresh(&self.state, name).await
    }
}

/// Whether the patch with these changes tests each slot. What the object says of the others is only as new as the view.
fn tests_each(slots: &[SlotName], changes: &[SlotChange]) -> bool {
    slots.iter().all(|slot| changes.iter().any(|change| change.slot == *slot))
}

#[cfg(test)]
mod tests {
    use rouse::slots::SlotUsage;

    use super::*;

    #[test]
    fn a_slot_that_needs_no_write_is_read_before_it_is_granted() {
        let [first, second] = ["lamp-0", "lamp-1"].map(SlotName::from);
        let own = SlotUsage::Instance { node: "a".into() };
        let claimed = SlotChange { slot: first.clone(), from: SlotUsage::Free, to: own, unused_since: None };
        let slots = [first, second];
        assert!(!tests_each(&slots, &[]), "both are ours already");
        assert!(!tests_each(&slots, std::slice::from_ref(&claimed)), "the second one is ours already");
        assert!(tests_each(&slots[..1], &[claimed]), "the API server tests the claim");
    }

    #[test]
    fn a_lost_race_leaves_the_other_slots_on_offer_and_a_claim_that_could_not_be_written_does_not() {
        assert!(AllocationError::Timeout.is_of_the_api_server());
        assert!(AllocationError::from(writer::Error::Invalid("denied".to_owned())).is_of_the_api_server());
        assert!(!AllocationError::from(ClaimError::NoSlot("lamp-0".into())).is_of_the_api_server());
        assert!(!AllocationError::Contended.is_of_the_api_server());
    }
}
