//! Compares this node's claims with the slots that its containers use, every ten seconds.
//!
//! The kubelet reports no end of a container. A slot without a container is first marked in the object, and freed when
//! it has been unused for as long as its configuration says. A query that fails changes nothing.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use rouse::{
    pairing::ids::NodeName,
    slots::{ConfigurationName, InstanceName, InstanceUsage, Reclaimer, SlotChange, SlotName, UnusedChange},
    units::{Millis, Tick},
};
use rouse_kubelet::{KubeletUsage, SlotUsageSource as _, SlotsInUse};
use tokio::time::{self, Instant, MissedTickBehavior};

use super::{
    agent_view::{AgentState, AgentView},
    allocator::Allocator,
};
use crate::{slot_patch::slot_patch, writer};

const RECLAIM_INTERVAL: Duration = Duration::from_secs(10);
/// How long writes may keep containers from their slots. What is left is written in the next round.
const WRITE_LIMIT: Duration = Duration::from_secs(1);
/// How long a slot of a configuration that no longer exists may be unused.
const DEFAULT_UNUSED_AFTER: Millis = Millis::secs(300);

/// The reclaimer of each configuration.
#[derive(Debug)]
pub(super) struct Reclaimers {
    me: NodeName,
    by_configuration: BTreeMap<ConfigurationName, ConfiguredReclaimer>,
}

#[derive(Debug)]
struct ConfiguredReclaimer {
    unused_after: Millis,
    reclaimer: Reclaimer,
}

impl Reclaimers {
    pub(super) const fn new(me: NodeName) -> Self {
        Self { me, by_configuration: BTreeMap::new() }
    }

    /// Records that a slot was given to a container, which the kubelet may not list yet.
    pub(super) fn claimed(
        &mut self,
        configuration: &ConfigurationName,
        unused_after: Millis,
        slot: &SlotName,
        now: Tick,
    ) {
        self.of(configuration, unused_after).claimed(slot, now);
    }

    /// Returns a configuration's reclaimer. A change of the time makes a new one.
    fn of(&mut self, configuration: &ConfigurationName, unused_after: Millis) -> &mut Reclaimer {
        let make =
            || ConfiguredReclaimer { unused_after, reclaimer: Reclaimer::new(self.me.clone(), unused_after) };
        let known = self.by_configuration.entry(configuration.clone()).or_insert_with(make);
        if known.unused_after != unused_after {
            *known = make();
        }
        &mut known.reclaimer
    }
}

/// Reclaims until it is dropped.
pub(super) async fn run(allocator: Arc<Allocator>, source: KubeletUsage) {
    until_listed(&allocator.state).await;
    let mut ticks = time::interval(RECLAIM_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut failure = None;
    loop {
        ticks.tick().await;
        let found = source.in_use().await;
        allocator.metrics.usage_queried(found.is_ok());
        match found {
            Ok(found) => {
                if failure.take().is_some() {
                    tracing::info!("the slots in use are listed again");
                }
                allocator.reclaim(found).await;
            }
            Err(error) => {
                let error = rouse::error_chain::one_line(&error);
                if failure.as_ref() != Some(&error) {
                    tracing::warn!(error, "cannot list the slots in use, so no slot is freed");
                    failure = Some(error);
                }
            }
        }
    }
}

/// Waits until the API server has listed the claims. An agent that has just started knows none.
async fn until_listed(state: &AgentState) {
    let mut changed = state.subscribe();
    while !state.read(|view| view.configurations_listed && view.instances_listed) {
        // The state holds the sender, so this cannot fail.
        if changed.changed().await.is_err() {
            return;
        }
    }
}

impl Allocator {
    /// Marks, frees and restores this node's slots.
    async fn reclaim(&self, found: SlotsInUse) {
        self.set_foreign(found.foreign);
        // No slot is granted meanwhile.
        let mut reclaimers = self.reclaimers.lock().await;
        let (now, started) = (self.clock.now(), Instant::now());
        for (configuration, (unused_after, instances)) in by_configuration(&self.state) {
            let reclaimer = reclaimers.of(&configuration, unused_after);
            for (instance, changes) in reclaimer.plan(&instances, &found.ids, now) {
                if !self.change(&instance, &changes).await || started.elapsed() >= WRITE_LIMIT {
                    // A container that needs a slot must not wait for the slow calls of all instances.
                    return;
                }
            }
        }
    }

    fn set_foreign(&self, foreign: BTreeMap<String, String>) {
        if self.state.read(|view| view.foreign != foreign) {
            self.state.update(|view| view.foreign = foreign);
        }
    }

    /// Writes the changes of one instance. A change that fails is planned again. Returns false if the API server fails.
    async fn change(&self, instance: &InstanceName, changes: &[SlotChange]) -> bool {
        let Some(known) = self.state.read(|view| view.instances.get(instance).cloned()) else { return true };
        match self.write(instance, &slot_patch(&known.object, changes)).await {
            Ok(()) => {
                for change in changes {
                    let action = action(change);
                    self.metrics.reclaimed(action);
                    tracing::info!(%instance, slot = %change.slot, action, "slot reconciled");
                }
                true
            }
            Err(writer::Error::Conflict | writer::Error::Gone) => self.refresh(instance).await.is_ok(),
            Err(error) => {
                tracing::warn!(%instance, %error, "slots not reconciled, retrying");
                false
            }
        }
    }
}

type ConfiguredInstances = (Millis, BTreeMap<InstanceName, InstanceUsage>);

/// Returns the instances of each configuration, with the time that their slots may be unused.
///
/// A configuration that has been deleted, or that no longer selects this node, still has slots to be freed.
fn by_configuration(state: &AgentState) -> BTreeMap<ConfigurationName, ConfiguredInstances> {
    state.read(|view| {
        let mut all = BTreeMap::<ConfigurationName, ConfiguredInstances>::new();
        for (name, known) in &view.instances {
            let configuration = ConfigurationName::from(known.object.spec.configuration.as_str());
            let unused_after = unused_after(view, &configuration);
            let (_, instances) = all.entry(configuration).or_insert_with(|| (unused_after, BTreeMap::new()));
            instances.insert(name.clone(), known.usage.clone());
        }
        all
    })
}

/// Returns how long a slot of this configuration may be unused.
pub(super) fn unused_after(view: &AgentView, configuration: &ConfigurationName) -> Millis {
    let known = view.configurations.get(configuration);
    known.map_or(DEFAULT_UNUSED_AFTER, |known| known.accepted.unused_after)
}

/// Returns what a change does, for metrics and logs.
const fn action(change: &SlotChange) -> &'static str {
    match (change.from.is_free(), change.to.is_free(), &change.unused_since) {
        (true, false, _) => "restored",
        (false, true, _) => "freed",
        (_, _, Some(UnusedChange::Set { .. })) => "unused",
        _ => "used",
    }
}

#[cfg(test)]
mod tests {
    use rouse::slots::SlotUsage;

    use super::*;

    fn change(from: SlotUsage, to: SlotUsage, unused_since: Option<UnusedChange>) -> SlotChange {
        SlotChange { slot: "lamp-0".into(), from, to, unused_since }
    }

    #[test]
    fn a_change_is_named_by_what_it_does() {
        let own = || SlotUsage::Instance { node: "a".into() };
        let (set, clear) = (UnusedChange::Set { at: Tick(1) }, UnusedChange::Clear { was: Tick(1) });
        assert_eq!(action(&change(SlotUsage::Free, own(), None)), "restored");
        assert_eq!(action(&change(own(), SlotUsage::Free, Some(clear))), "freed");
        assert_eq!(action(&change(own(), own(), Some(set))), "unused");
        assert_eq!(action(&change(own(), own(), Some(clear))), "used");
    }

    #[test]
    fn a_slot_that_was_just_given_to_a_container_is_not_marked_even_if_the_kubelet_does_not_list_it_yet() {
        let (lamps, now) = (ConfigurationName::from("lamps"), Tick(1_000_000));
        let mut usage = InstanceUsage { capacity: 1, nodes: ["a".into()].into(), ..InstanceUsage::default() };
        usage.slots.insert("lamp-0".into(), SlotUsage::Instance { node: "a".into() });
        let instances = BTreeMap::from([(InstanceName::from("lamp"), usage)]);
        let mut reclaimers = Reclaimers::new("a".into());
        reclaimers.claimed(&lamps, DEFAULT_UNUSED_AFTER, &"lamp-0".into(), now);
        let mut plan = |after: u64| {
            let reclaimer = reclaimers.of(&lamps, DEFAULT_UNUSED_AFTER);
            reclaimer.plan(&instances, &Default::default(), now + Millis::secs(after)).len()
        };
        assert_eq!(plan(59), 0);
        assert_eq!(plan(61), 1);
    }
}
