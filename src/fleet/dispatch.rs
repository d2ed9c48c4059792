//! Grants leases to waiters and refuses waiters.
//!
//! Runs in every gateway over its own waiters. Dispatch knows only what the plan provides about engines: which are
//! awake, which want a canary, and for every model a verdict on waiters without prospects.

pub(in crate::fleet) mod assignment;
pub(in crate::fleet) mod fairness;
pub(in crate::fleet) mod queue;

use std::{
    cell::OnceCell,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use crate::{
    engine::Admission,
    fault::{Fault, WaitDetails},
    fleet::{
        command::Command,
        dispatch::{
            assignment::{AssignedWaiter, WaiterAssigner},
            fairness::FairnessCounters,
            queue::ModelQueue,
        },
        event::{Event, Waiter, WaiterId},
        plan::{PlanBuilder, QueueDemand, WaiterVerdicts},
        quote::{WaitRange, book::QuoteBook, forecast::WaitForecaster},
        state::engines::take_models,
    },
    model::ModelName,
    shared_map::SharedMap,
    units::Tick,
};

/// The waiters and queues of one gateway. Cheap to clone: a plan shares what it does not change.
#[derive(Clone, Debug, Default)]
pub struct Dispatch {
    waiters: SharedMap<WaiterId, Arc<Waiter>>,
    queues: BTreeMap<ModelName, Arc<ModelQueue>>,
    /// Number of waiters of each client.
    clients: Arc<BTreeMap<u64, u32>>,
    /// Models whose number of waiters changed since the last [`Dispatch::take_changed`].
    changed: Arc<BTreeSet<ModelName>>,
}

impl Dispatch {
    pub(in crate::fleet) fn add_waiter(&mut self, waiter: Waiter) {
        let waiter = Arc::new(waiter);
        *Arc::make_mut(&mut self.clients).entry(waiter.client).or_default() += 1;
        self.mark_changed(&waiter.model);
        self.queue_mut(&waiter.model).add_waiter(Arc::clone(&waiter));
        self.waiters.insert(waiter.id, waiter);
    }

    /// Removes a waiter and returns its model.
    pub(in crate::fleet) fn remove_waiter(&mut self, id: WaiterId) -> Option<ModelName> {
        let waiter = self.take_waiter(id)?;
        self.queue_mut(&waiter.model).remove_waiter(&waiter);
        Some(waiter.model.clone())
    }

    pub(in crate::fleet) fn record_grant(&mut self, id: WaiterId, canary: bool) {
        if let Some(waiter) = self.take_waiter(id) {
            self.queue_mut(&waiter.model).record_grant(&waiter, canary);
        }
    }

    /// Records served tokens. `leases`: on all engines of the model.
    pub(in crate::fleet) fn record_served(&mut self, model: &ModelName, key: &str, tokens: u64, leases: u32) {
        if self.queues.contains_key(model) {
            self.queue_mut(model).record_served(key, tokens, leases);
        }
    }

    /// Limits the grants in flight to the leases on all engines of the model.
    ///
    /// Called whether or not its requests have keys: the record of grants must not grow where no `Served` event ever
    /// arrives.
    pub(in crate::fleet) fn limit_in_flight(&mut self, model: &ModelName, leases: u32) {
        // Checked first, because a change copies what other copies still share.
        if self.queues.get(model).is_some_and(|queue| queue.exceeds_in_flight(leases)) {
            self.queue_mut(model).limit_in_flight(leases);
        }
    }

    /// Drops the queue of a model without leases if it has no waiters either: nothing is owed any more.
    pub(in crate::fleet) fn drop_queue_if_empty(&mut self, model: &ModelName) {
        if self.waiting(model) == 0 {
            self.queues.remove(model);
        }
    }

    pub(in crate::fleet) fn set_counters(&mut self, model: &ModelName, band: i32, shares: &FairnessCounters) {
        self.queue_mut(model).set_counters(band, shares);
    }

    /// Returns a request that waits.
    pub(in crate::fleet) fn waiter(&self, id: WaiterId) -> Option<&Waiter> {
        self.waiters.get(&id).map(|waiter| &**waiter)
    }

    fn take_waiter(&mut self, id: WaiterId) -> Option<Arc<Waiter>> {
        let waiter = self.waiters.remove(&id)?;
        self.mark_changed(&waiter.model);
        let clients = Arc::make_mut(&mut self.clients);
        if let Some(waits) = clients.get_mut(&waiter.client) {
            *waits -= 1;
            if *waits == 0 {
                clients.remove(&waiter.client);
            }
        }
        Some(waiter)
    }

    fn mark_changed(&mut self, model: &ModelName) {
        // Checked first, because a change copies what other copies still share.
        if !self.changed.contains(model) {
            Arc::make_mut(&mut self.changed).insert(model.clone());
        }
    }

    /// Returns the models whose number of waiters changed since the last call.
    pub(in crate::fleet) fn take_changed(&mut self) -> BTreeSet<ModelName> {
        take_models(&mut self.changed)
    }

    /// Number of waiters of each client, by the client's hash.
    pub(in crate::fleet) fn clients(&self) -> &BTreeMap<u64, u32> {
        &self.clients
    }

    fn queue_mut(&mut self, model: &ModelName) -> &mut ModelQueue {
        Arc::make_mut(self.queues.entry(model.clone()).or_default())
    }

    /// Waiters come first: replayed after the counters, each would count its key as one that comes now.
    pub(in crate::fleet) fn snapshot(&self) -> impl Iterator<Item = Event> + '_ {
        let waiters = self.waiters.values().map(|w| Event::Arrived { waiter: Waiter::clone(w) });
        let shares = self.queues.iter().flat_map(|(model, queue)| {
            queue.counters().map(|(band, shares)| Event::FairnessRestored {
                model: model.clone(),
                band,
                counters: shares.clone(),
            })
        });
        waiters.chain(shares)
    }

    /// Models with waiters.
    pub(in crate::fleet) fn queued_models(&self) -> impl Iterator<Item = &ModelName> {
        self.queues.iter().filter(|(_, queue)| !queue.is_empty()).map(|(model, _)| model)
    }

    #[must_use]
    pub fn waiting(&self, model: &ModelName) -> usize {
        self.queues.get(model).map_or(0, |queue| queue.len())
    }

    pub(in crate::fleet) fn tracks_key(&self, model: &ModelName, key: &str) -> bool {
        let queue = self.queues.get(model);
        queue.is_some_and(|queue| queue.keyed_counters().any(|(_, shares)| shares.contains(key)))
    }

    pub(in crate::fleet) fn tracked_keys(&self) -> impl Iterator<Item = (&ModelName, &str)> {
        let queued = self.queues.iter().filter(|(_, queue)| !queue.is_empty());
        queued.flat_map(|(model, queue)| {
            queue.keyed_counters().flat_map(move |(_, shares)| shares.keys().map(move |key| (model, key)))
        })
    }

    /// Returns the queues' numbers, as the plan needs them.
    #[must_use]
    pub fn demand(&self) -> BTreeMap<ModelName, QueueDemand> {
        let queued = self.queues.iter().filter(|(_, queue)| !queue.is_empty());
        queued.map(|(model, queue)| (model.clone(), queue.demand())).collect()
    }

    /// Returns each model's first deadline after this moment.
    pub(in crate::fleet) fn deadlines_after(&self, moment: Tick) -> impl Iterator<Item = Tick> + '_ {
        self.queues.values().filter_map(move |queue| queue.deadline_after(moment))
    }

    /// Decides grants and refusals. Canaries and probes go through the draft, since they change engines.
    pub(in crate::fleet) fn decide(
        &self,
        builder: &mut PlanBuilder<'_>,
        verdicts: &WaiterVerdicts,
        quotes: &QuoteBook,
        now: Tick,
    ) -> Vec<Command> {
        let mut out = Vec::new();
        for (model, queue) in self.queues.iter().filter(|(_, queue)| !queue.is_empty()) {
            let assigner = WaiterAssigner::for_model(builder, model);
            if assigner.is_full() {
                continue;
            }
            for assigned in assigner.assign(queue.in_fair_order()) {
                grant(&assigned, builder, &mut out);
            }
        }
        let granted = out.iter().filter_map(|command| match command {
            Command::Grant { waiter, .. } => Some(*waiter),
            _ => None,
        });
        let granted: BTreeSet<WaiterId> = granted.collect();
        let overflow = self.overflow(&granted, builder);
        // Made for the first refusal, and shared by all of them.
        let (draft, forecaster) = (&*builder, OnceCell::new());
        for (model, queue) in &self.queues {
            let overflowing = !overflow.is_empty() && queue.waiter_ids().any(|id| overflow.contains(id));
            if verdicts.refuses(model) || queue.has_expired_waiter(now) || overflowing {
                let ungranted = queue.in_fair_order().filter(|waiter| !granted.contains(&waiter.id));
                let expected_wait = || {
                    let forecaster = forecaster.get_or_init(|| new_forecaster(draft, quotes, now));
                    Some(forecaster.forecast(model, draft.waiting(model))?.range)
                };
                refuse(model, ungranted, &overflow, verdicts, &expected_wait, now, &mut out);
            }
        }
        drop(forecaster);
        for engine in builder.engines_awaiting_probe() {
            builder.probe(&engine);
        }
        out
    }

    /// Selects the waiters to refuse because a queue is too long: first per model, then over all models.
    fn overflow(&self, granted: &BTreeSet<WaiterId>, builder: &PlanBuilder<'_>) -> QueueOverflow {
        let mut beyond_model_limit = BTreeSet::new();
        for (model, queue) in self.queues.iter().filter(|(_, queue)| !queue.is_empty()) {
            // Checked first, because queues are hardly ever that long.
            if let Some(most) = builder.max_waiting_for(model).filter(|most| queue.len() > *most) {
                let remaining: Vec<&Waiter> =
                    queue.in_fair_order().filter(|w| !granted.contains(&w.id)).collect();
                beyond_model_limit.extend(overflowing_waiters(&remaining, most));
            }
        }
        let most = builder.max_waiting();
        if self.waiters.len() - granted.len() - beyond_model_limit.len() <= most {
            return QueueOverflow { beyond_model_limit, beyond_total_limit: BTreeSet::new() };
        }
        let stays = |w: &&Waiter| !granted.contains(&w.id) && !beyond_model_limit.contains(&w.id);
        let remaining: Vec<&Waiter> = self.waiters.values().map(|w| &**w).filter(stays).collect();
        let beyond_total_limit = overflowing_waiters(&remaining, most);
        QueueOverflow { beyond_model_limit, beyond_total_limit }
    }
}

/// Waiters beyond a queue limit.
struct QueueOverflow {
    /// Beyond the model's own limit.
    beyond_model_limit: BTreeSet<WaiterId>,
    /// Beyond the limit for all models together.
    beyond_total_limit: BTreeSet<WaiterId>,
}

impl QueueOverflow {
    fn is_empty(&self) -> bool {
        self.beyond_model_limit.is_empty() && self.beyond_total_limit.is_empty()
    }

    fn contains(&self, id: WaiterId) -> bool {
        self.beyond_model_limit.contains(&id) || self.beyond_total_limit.contains(&id)
    }
}

/// Selects the waiters beyond the limit: repeatedly the newest of the key with the most waiters.
///
/// Otherwise one key that fills the queue would keep all others out of it.
fn overflowing_waiters(waiters: &[&Waiter], most: usize) -> BTreeSet<WaiterId> {
    let excess = waiters.len().saturating_sub(most);
    if excess == 0 {
        return BTreeSet::new();
    }
    // By arrival, not by number: a request that returns to the queue has a new number and its old arrival.
    let mut keys: BTreeMap<&str, Vec<(Tick, WaiterId)>> = BTreeMap::new();
    for waiter in waiters {
        keys.entry(&waiter.key).or_default().push((waiter.arrived, waiter.id));
    }
    keys.values_mut().for_each(|arrivals| arrivals.sort_unstable());
    let largest =
        || keys.values_mut().max_by_key(|arrivals| (arrivals.len(), arrivals.last().copied()))?.pop();
    std::iter::from_fn(largest).map(|(_, id)| id).take(excess).collect()
}

/// Grants a lease. An engine that must prove itself opens its gate for its canary.
fn grant(assigned: &AssignedWaiter<'_>, builder: &mut PlanBuilder<'_>, out: &mut Vec<Command>) {
    let AssignedWaiter { waiter, engine, canary } = assigned;
    let (generation, canary) = (builder.generation(engine), *canary);
    if canary && matches!(builder.admission(engine), Admission::Closed | Admission::AwaitingStub) {
        builder.emit(Command::OpenGate { engine: engine.clone(), generation, public: false });
    }
    let grant = Command::Grant { waiter: waiter.id, engine: engine.clone(), generation, canary };
    builder.record(&grant);
    out.push(grant);
}

/// Forecasts how long requests that arrive now are expected to wait.
fn new_forecaster<'b>(builder: &'b PlanBuilder<'_>, quotes: &'b QuoteBook, now: Tick) -> WaitForecaster<'b> {
    let (planner, demand, clients) = (builder.planner.clone(), builder.demand, builder.waiting_clients);
    WaitForecaster::new(planner, demand, clients, &builder.turn_order, quotes, now)
}

/// Refuses waiters. Builds the refusal only for refused waiters, because this runs for every event.
fn refuse<'w>(
    model: &ModelName,
    queue: impl Iterator<Item = &'w Waiter>,
    overflow: &QueueOverflow,
    verdicts: &WaiterVerdicts,
    expected_wait: &dyn Fn() -> Option<WaitRange>,
    now: Tick,
    out: &mut Vec<Command>,
) {
    let refuses_all = verdicts.refuses(model);
    let mut expected = None;
    for (index, waiter) in queue.enumerate() {
        let (expired, overflowing) = (waiter.deadline <= now, overflow.contains(waiter.id));
        if !(refuses_all || expired || overflowing) {
            continue;
        }
        let wait = WaitDetails {
            waited: now.since(waiter.arrived),
            position: u32::try_from(index + 1).unwrap_or(u32::MAX),
            expired_limit: expired.then(|| verdicts.wait_limit(waiter)),
            expected_wait: expected.get_or_insert_with(expected_wait).map(Box::new),
            ..verdicts.wait_details(model)
        };
        let fault = match verdicts.refusal(model, &wait) {
            Some(fault) => fault,
            None if expired => verdicts.deadline_fault(model, wait),
            None if overflow.beyond_model_limit.contains(&waiter.id) => {
                let message = format!("too many requests wait for '{model}' (the model's queue.maxWaiting)");
                Fault::QueueFull { message, wait }
            }
            None => {
                Fault::QueueFull { message: "too many requests wait (queue.maxWaiting)".to_owned(), wait }
            }
        };
        out.push(Command::Refuse { waiter: waiter.id, fault });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::Fleet;

    fn waiter(id: u64, arrived: u64) -> Waiter {
        Waiter {
            id: WaiterId(id),
            model: "m".into(),
            band: 0,
            key: "a".to_owned(),
            arrived: Tick(arrived),
            deadline: Tick(1000),
            stream: true,
            client: 0,
            required_engine: None,
        }
    }

    #[test]
    fn who_waits_longest_is_not_the_crowd_however_late_its_number() {
        let waiters = [waiter(1, 10), waiter(2, 20), waiter(3, 5)];
        assert_eq!(
            overflowing_waiters(&waiters.iter().collect::<Vec<_>>(), 2),
            BTreeSet::from([WaiterId(2)])
        );
    }

    #[test]
    fn nothing_is_left_of_a_queue_that_never_had_a_lease() {
        let mut fleet = Fleet::new();
        fleet.on(&Event::AdoptionDone, Tick(1));
        fleet.on(&Event::Arrived { waiter: waiter(1, 1) }, Tick(1));
        let plan = fleet.plan(Tick(1));
        fleet.issued(&plan.commands, Tick(1));
        assert!(matches!(plan.commands[..], [Command::Refuse { .. }]));
        assert!(fleet.dispatch.queues.is_empty());
        fleet.on(&Event::Arrived { waiter: waiter(2, 2) }, Tick(2));
        fleet.on(&Event::Left { waiter: WaiterId(2) }, Tick(2));
        assert!(fleet.dispatch.queues.is_empty());
    }
}
