//! Claims any devices of a configuration: distinct ones, each with a patch of its own.
//!
//! No write covers several objects. So the claims are made one by one, and those that were made are given back if one
//! of the others fails. Then the choice starts anew with what the objects say now.

use std::{
    collections::{BTreeMap, BTreeSet},
    slice,
};

use rouse::slots::{ConfigurationName, InstanceName, SlotChange, VirtualClaim, VirtualId, virtual_devices};

use super::{AllocationError, Allocator, MAX_TRIES};
use crate::{
    node_agent::{
        agent_view::{KnownInstance, usages},
        container_contents::GrantedSlot,
    },
    slot_patch::slot_patch,
    writer,
};

impl Allocator {
    /// Claims one slot for each virtual device, of distinct instances, all or none.
    pub(super) async fn claim_virtual(
        &self,
        configuration: &ConfigurationName,
        ids: &[String],
    ) -> Result<Vec<GrantedSlot>, AllocationError> {
        let ids: Vec<VirtualId> = ids.iter().map(|id| VirtualId::from(id.as_str())).collect();
        let mut read = BTreeSet::new();
        for _ in 0..MAX_TRIES {
            let (instances, sound) = self.state.read(|view| {
                let instances = view.instances_of(&self.state.me, configuration);
                let sound = view.sound_among(&instances);
                (instances, sound)
            });
            let claims = virtual_devices::choose(&ids, &usages(&instances), &self.state.me, &sound)?;
            let unread = held_unread(&claims, &read);
            if !unread.is_empty() {
                // No write tests these slots, and the watch may be behind: they may have been freed and claimed since.
                for instance in unread {
                    self.refresh(&instance).await?;
                    read.insert(instance);
                }
                continue;
            }
            if !self.claim_all(&instances, &claims).await? {
                continue;
            }
            self.release_others(&claims).await;
            let granted =
                claims.iter().map(|claim| self.granted(&claim.instance, slice::from_ref(&claim.slot)));
            return Ok(granted.collect::<Result<Vec<_>, _>>()?.concat());
        }
        Err(AllocationError::Contended)
    }

    /// Makes the claims; false if another writer was first. The claims that were made are then given back.
    async fn claim_all(
        &self,
        instances: &BTreeMap<InstanceName, KnownInstance>,
        claims: &[VirtualClaim],
    ) -> Result<bool, AllocationError> {
        let mut made = Vec::new();
        for VirtualClaim { instance, change, .. } in claims {
            let (Some(change), Some(known)) = (change, instances.get(instance)) else { continue };
            let error = match self.write(instance, &slot_patch(&known.object, slice::from_ref(change))).await
            {
                Ok(()) => {
                    made.push((instance, change));
                    continue;
                }
                Err(error) => error,
            };
            self.give_back(&made).await;
            if !matches!(error, writer::Error::Conflict | writer::Error::Gone) {
                return Err(error.into());
            }
            self.refresh(instance).await?;
            return Ok(false);
        }
        Ok(true)
    }

    /// Undoes claims. A claim whose slot this node had before stays.
    async fn give_back(&self, made: &[(&InstanceName, &SlotChange)]) {
        for (instance, change) in made.iter().filter(|(_, change)| change.from != change.to) {
            let undone = SlotChange {
                slot: change.slot.clone(),
                from: change.to.clone(),
                to: change.from.clone(),
                unused_since: None,
            };
            self.free(instance, &undone).await;
        }
    }

    /// Frees the slots that this node has under the same virtual devices on other instances.
    async fn release_others(&self, claims: &[VirtualClaim]) {
        for (instance, change) in claims.iter().flat_map(|claim| &claim.releases) {
            self.free(instance, change).await;
        }
    }

    /// Frees a slot. If that fails, the reclaimer frees it later.
    async fn free(&self, instance: &InstanceName, change: &SlotChange) {
        let Some(known) = self.state.read(|view| view.instances.get(instance).cloned()) else { return };
        if let Err(error) = self.write(instance, &slot_patch(&known.object, slice::from_ref(change))).await {
            tracing::warn!(%instance, slot = %change.slot, %error, "slot not freed, the reclaimer will free it");
        }
    }
}

/// Returns the instances whose slot the node has already, according to a view that no read has confirmed.
fn held_unread(claims: &[VirtualClaim], read: &BTreeSet<InstanceName>) -> Vec<InstanceName> {
    let held = claims.iter().filter(|claim| claim.change.is_none() && !read.contains(&claim.instance));
    held.map(|claim| claim.instance.clone()).collect()
}

#[cfg(test)]
mod tests {
    use rouse::slots::SlotUsage;

    use super::*;

    #[test]
    fn an_instance_whose_slot_needs_no_write_is_read_once() {
        let change = SlotChange {
            slot: "lamp-1-0".into(),
            from: SlotUsage::Free,
            to: SlotUsage::Instance { node: "a".into() },
            unused_since: None,
        };
        let claim = |instance: &str, change: Option<SlotChange>| VirtualClaim {
            virtual_id: "lamps-0".into(),
            instance: instance.into(),
            slot: format!("{instance}-0").into(),
            change,
            releases: Vec::new(),
        };
        let claims = [claim("lamp-0", None), claim("lamp-1", Some(change))];
        assert_eq!(held_unread(&claims, &BTreeSet::new()), [InstanceName::from("lamp-0")]);
        assert_eq!(held_unread(&claims, &BTreeSet::from(["lamp-0".into()])), []);
    }
}
