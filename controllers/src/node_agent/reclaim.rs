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
use rouse_kubelet::{KubeletUsage, SlotsInUse};
use tokio::time::{self, Instant, MissedTickBehavior};

use super::{
    agent_view::{AgentState, AgentView, PluginKey},
    allocator::Allocator,
};
use crate::{slot_patch::slot_patch, writer};

const RECLAIM_INTERVAL: Duration = Duration::from_secs(10);
/// How long writes may keep containers from their slots. What is left is written in the next round.
const WRITE_LIMIT: Duration = Duration::from_secs(1);
/// How long a plugin offers nothing after a claim that could not be written. A kubelet reports the number of healthy
/// devices every ten seconds, and until then the scheduler goes on binding Pods, which are rejected.
const CLAIM_PAUSE: Millis = Millis::secs(20);
/// How long a slot of a configuration that no longer exists may be unused.
const DEFAULT_UNUSED_AFTER: Millis = Millis::secs(300);

/// The reclaimer of each configuration.
#[derive(Debug)]
pub(super) struct Reclaimers {
    me: NodeName,
    by_configuration: BTreeMap<ConfigurationName, Reclaimer>,
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

    /// Returns a configuration's reclaimer. Another time does not end the protection of slots that were just granted.
    fn of(&mut self, configuration: &ConfigurationName, unused_after: Millis) -> &mut Reclaimer {
        let make = || Reclaimer::new(self.me.clone(), unused_after);
        let reclaimer = self.by_configuration.entry(configuration.clone()).or_insert_with(make);
        reclaimer.set_unused_after(unused_after);
        reclaimer
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
        allocator.offer_again().await;
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
    while !state.read(AgentView::is_listed) {
        // The state holds the sender, so this cannot fail.
        if changed.changed().await.is_err() {
            return;
        }
    }
}

impl Allocator {
    /// Marks, frees and restores this node's slots.
    async fn reclaim(&self, found: SlotsInUse) {
        if let Some(foreign) = found.foreign {
            self.set_foreign(foreign);
        }
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

    /// Offers the slots of plugins again whose claims could not be written, once the API server answers.
    async fn offer_again(&self) {
        let now = self.clock.now();
        let due: Vec<PluginKey> = self.state.read(|view| {
            let due = view.claims_failed.iter().filter(|(_, at)| now.since(**at) >= CLAIM_PAUSE);
            due.map(|(key, _)| key.clone()).collect()
        });
        if due.is_empty() {
            return;
        }
        let any = self.state.read(|view| view.instances.keys().next().cloned());
        if let Some(instance) = any
            && let Err(error) = self.refresh(&instance).await
        {
            tracing::warn!(%error, "the API server does not answer, so no slots are offered");
            return;
        }
        self.state.update(|view| view.claims_failed.retain(|key, _| !due.contains(key)));
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
                is_of_one_instance(&error)
            }
        }
    }
}

/// Whether a failed write says nothing of writes to other instances.
const fn is_of_one_instance(error: &writer::Error) -> bool {
    matches!(error, writer::Error::Invalid(_))
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

    /// An instance whose one slot is that of node `a`.
    fn claimed_lamp() -> BTreeMap<InstanceName, InstanceUsage> {
        let mut usage = InstanceUsage { capacity: 1, nodes: ["a".into()].into(), ..InstanceUsage::default() };
        usage.slots.insert("lamp-0".into(), SlotUsage::Instance { node: "a".into() });
        BTreeMap::from([("lamp".into(), usage)])
    }

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

    /// How many instances change in rounds that begin so many seconds after a container got the slot.
    fn changed_after(unused_after: Millis, seconds: [u64; 2]) -> [usize; 2] {
        let (lamps, now, instances) = (ConfigurationName::from("lamps"), Tick(1_000_000), claimed_lamp());
        let mut reclaimers = Reclaimers::new("a".into());
        reclaimers.claimed(&lamps, DEFAULT_UNUSED_AFTER, &"lamp-0".into(), now);
        seconds.map(|after| {
            let reclaimer = reclaimers.of(&lamps, unused_after);
            reclaimer.plan(&instances, &Default::default(), now + Millis::secs(after)).len()
        })
    }

    #[test]
    fn a_slot_that_was_just_given_to_a_container_is_not_marked_even_if_the_kubelet_does_not_list_it_yet() {
        assert_eq!(changed_after(DEFAULT_UNUSED_AFTER, [59, 61]), [0, 1]);
    }

    #[test]
    fn another_time_for_unused_slots_does_not_end_the_protection_of_a_slot_that_was_just_given() {
        assert_eq!(changed_after(Millis::secs(1), [10, 61]), [0, 1]);
    }

    #[test]
    fn a_refused_write_stops_no_writes_to_other_instances_and_a_late_one_does() {
        assert!(is_of_one_instance(&writer::Error::Invalid("spec: wrong".to_owned())));
        assert!(!is_of_one_instance(&writer::Error::Timeout));
    }
}
