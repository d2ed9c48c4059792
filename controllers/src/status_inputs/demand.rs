//! Tracks which models have waiters or requests in flight at this gateway, and how soon a change must be reported.
//!
//! Each turn updates only the models whose waiters, leases or engines changed in it ([`RoutingChanges`]). Debug builds
//! compare the result with a scan of the whole fleet.

use std::collections::BTreeSet;

use rouse::{
    engine::state::LifecycleState,
    fleet::{Fleet, RoutingChanges},
    model::ModelName,
};

/// How soon a change of this gateway's demand must be reported, the least urgent first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DemandUrgency {
    /// A model began or ceased to be in use, or waiters changed that need no decision of the leader: an engine serves
    /// their model or starts for it.
    Use,
    /// A model without an engine that serves or starts got its first waiter, or lost its last: the leader must start an
    /// engine, or must not start one for which no request waits.
    WaiterEdge,
}

/// Models with a change of demand, and the highest urgency among them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DemandChange {
    pub urgency: DemandUrgency,
    pub models: BTreeSet<ModelName>,
}

/// Models with demand at this gateway as of the last turn, and the changes that were not taken yet.
#[derive(Debug, Default)]
pub(super) struct DemandTracker {
    queued: BTreeSet<ModelName>,
    used: BTreeSet<ModelName>,
    pending: Option<DemandChange>,
}

impl DemandTracker {
    /// Updates the models that a turn may have changed, and returns whether any of them changed.
    pub(super) fn update(&mut self, fleet: &Fleet, changes: &RoutingChanges) -> bool {
        let mut changed = false;
        for model in changes.demand.union(&changes.models) {
            let waits = fleet.waiting(model) > 0;
            let used = is_used(fleet, model);
            let waited = set_member(&mut self.queued, model, waits);
            let was_used = set_member(&mut self.used, model, used);
            if (waited, was_used) != (waits, used) {
                let needs_leader = waited != waits && !is_provided(fleet, model);
                let urgency = if needs_leader { DemandUrgency::WaiterEdge } else { DemandUrgency::Use };
                self.add(model, urgency);
                changed = true;
            }
        }
        debug_assert!(self.is_current(fleet), "a change of demand was missed: {self:?}");
        changed
    }

    pub(super) fn take_change(&mut self) -> Option<DemandChange> {
        self.pending.take()
    }

    fn add(&mut self, model: &ModelName, urgency: DemandUrgency) {
        let pending = self.pending.get_or_insert_with(|| DemandChange { urgency, models: BTreeSet::new() });
        pending.urgency = pending.urgency.max(urgency);
        pending.models.insert(model.clone());
    }

    /// Whether a scan of the whole fleet finds the same models.
    fn is_current(&self, fleet: &Fleet) -> bool {
        let used = fleet.engines().filter(|engine| engine.leases > 0);
        let used: BTreeSet<&ModelName> = used.map(|engine| &engine.id.model).collect();
        self.queued.iter().eq(fleet.queued_models()) && self.used.iter().eq(used)
    }
}

/// Puts a model into the set or takes it out, and returns whether it was there before.
fn set_member(set: &mut BTreeSet<ModelName>, model: &ModelName, member: bool) -> bool {
    if member { !set.insert(model.clone()) } else { set.remove(model) }
}

fn is_used(fleet: &Fleet, model: &ModelName) -> bool {
    fleet.engines_of(model).any(|engine| engine.leases > 0)
}

/// Whether an engine of the model serves or is on its way up, as far as this gateway knows.
///
/// One whose stub refuses requests may need the leader, so it does not count.
fn is_provided(fleet: &Fleet, model: &ModelName) -> bool {
    fleet.engines_of(model).any(|engine| match engine.state {
        LifecycleState::Launching | LifecycleState::Loading | LifecycleState::Waking { .. } => true,
        LifecycleState::Awake => !engine.is_blocked_by_stub(),
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use rouse::{
        fleet::event::{Event, Waiter, WaiterId},
        units::Tick,
    };

    use super::*;

    /// A follower without a view of any engine, with these models.
    fn follower(models: &[&str]) -> Fleet {
        let mut text = "accelerators: [{id: own, memory: 8Gi}]\nmodels:\n".to_owned();
        for model in models {
            let engine = "{kind: custom, command: [e, '${PORT}']}";
            text += &format!("  - {{name: {model}, memory: {{awake: 1Gi}}, engine: {engine}}}\n");
        }
        let config = rouse_config::parse(&text, "test").unwrap_or_else(|errors| panic!("{errors}"));
        let mut fleet = Fleet::new();
        fleet.on(&Event::LeadershipChanged { leads: false }, Tick(1));
        fleet.on(&Event::Configured { configuration: Box::new(config.core) }, Tick(1));
        fleet
    }

    fn arrives(id: u64, model: &str) -> Event {
        let waiter = Waiter {
            id: WaiterId(id),
            model: model.into(),
            band: 0,
            key: String::new(),
            client: 0,
            arrived: Tick(1),
            deadline: Tick(1_000_000),
            stream: true,
            required_engine: None,
        };
        Event::Arrived { waiter }
    }

    fn change(urgency: DemandUrgency, models: &[&str]) -> Option<DemandChange> {
        Some(DemandChange { urgency, models: models.iter().map(|model| ModelName::from(*model)).collect() })
    }

    #[test]
    fn the_first_waiter_and_the_loss_of_the_last_are_changes_and_what_lies_between_is_none() {
        let mut fleet = follower(&["a", "b"]);
        let mut tracker = DemandTracker::default();
        let mut turn = |events: &[Event]| {
            events.iter().for_each(|event| fleet.on(event, Tick(2)));
            let changes = fleet.take_routing_changes();
            tracker.update(&fleet, &changes);
            tracker.take_change()
        };
        let left = |id| Event::Left { waiter: WaiterId(id) };
        assert_eq!(turn(&[]), None);
        assert_eq!(turn(&[arrives(1, "a")]), change(DemandUrgency::WaiterEdge, &["a"]));
        assert_eq!(turn(&[arrives(2, "a")]), None, "it is not the first");
        assert_eq!(turn(&[left(1)]), None, "it is not the last");
        let both = turn(&[left(2), arrives(3, "b")]);
        assert_eq!(both, change(DemandUrgency::WaiterEdge, &["a", "b"]), "the more urgent one counts");
        assert_eq!(turn(&[left(3)]), change(DemandUrgency::WaiterEdge, &["b"]));
        assert_eq!(turn(&[arrives(4, "a"), left(4)]), None, "it came and left within a turn");
    }

    #[test]
    fn a_turn_costs_what_changed_in_it() {
        let names: Vec<String> = (0..200).map(|n| format!("model-{n}")).collect();
        let mut fleet = follower(&names.iter().map(String::as_str).collect::<Vec<_>>());
        fleet.take_routing_changes();
        fleet.on(&arrives(1, "model-7"), Tick(2));
        let changes = fleet.take_routing_changes();
        assert_eq!(changes.demand, BTreeSet::from([ModelName::from("model-7")]));
        assert!(changes.models.is_empty() && !changes.reconfigured, "{changes:?}");
    }
}
