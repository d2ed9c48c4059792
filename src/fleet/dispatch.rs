//! Who gets a lease, and who is refused.
//!
//! Runs in every gateway over its own waiters. It knows of engines only what the plan tells: which are awake, which
//! want a canary, and for every model a verdict on those who wait in vain.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{
    command::Command,
    event::{Event, Waiter, WaiterId},
    plan::{Demand, Draft, Verdicts},
    queue::Queue,
    seats::{Seated, Seats},
    share::Shares,
};
use crate::{
    engine::Door,
    fault::{Fault, Wait},
    model::ModelName,
    units::Tick,
};

/// Cheap to clone: what a plan does not touch is shared with it.
#[derive(Clone, Debug, Default)]
pub struct Dispatch {
    waiters: Arc<BTreeMap<WaiterId, Arc<Waiter>>>,
    queues: BTreeMap<ModelName, Arc<Queue>>,
    /// Of how many waiters each client is known to be.
    clients: Arc<BTreeMap<u64, u32>>,
}

impl Dispatch {
    pub(super) fn arrived(&mut self, waiter: Waiter) {
        let waiter = Arc::new(waiter);
        *Arc::make_mut(&mut self.clients).entry(waiter.client).or_default() += 1;
        self.queue(&waiter.model).arrived(Arc::clone(&waiter));
        Arc::make_mut(&mut self.waiters).insert(waiter.id, waiter);
    }

    /// The model whose queue it has left.
    pub(super) fn left(&mut self, id: WaiterId) -> Option<ModelName> {
        let waiter = self.take(id)?;
        self.queue(&waiter.model).left(&waiter);
        Some(waiter.model.clone())
    }

    pub(super) fn granted(&mut self, id: WaiterId, canary: bool) {
        if let Some(waiter) = self.take(id) {
            self.queue(&waiter.model).granted(&waiter, canary);
        }
    }

    /// `leases`: on all engines of the model.
    pub(super) fn served(&mut self, model: &ModelName, key: &str, tokens: u64, leases: u32) {
        if self.queues.contains_key(model) {
            self.queue(model).served(key, tokens, leases);
        }
    }

    /// So many leases are held on all engines of the model. Told whether or not its requests have keys: what is kept of
    /// grants must not grow where nothing is ever said to be served.
    pub(super) fn leased(&mut self, model: &ModelName, leases: u32) {
        // Looked at first: a change copies what others still read.
        if self.queues.get(model).is_some_and(|queue| queue.exceeds(leases)) {
            self.queue(model).limit(leases);
        }
    }

    /// No lease is left on any of its engines. When nobody waits either, nothing is owed.
    pub(super) fn rested(&mut self, model: &ModelName) {
        if self.waiting(model) == 0 {
            self.queues.remove(model);
        }
    }

    pub(super) fn set_shares(&mut self, model: &ModelName, band: i32, shares: &Shares) {
        self.queue(model).set_shares(band, shares);
    }

    fn take(&mut self, id: WaiterId) -> Option<Arc<Waiter>> {
        // To be told of one that is not there must not cost a copy of all.
        let waiter =
            self.waiters.contains_key(&id).then(|| Arc::make_mut(&mut self.waiters).remove(&id))??;
        let clients = Arc::make_mut(&mut self.clients);
        if let Some(waits) = clients.get_mut(&waiter.client) {
            *waits -= 1;
            if *waits == 0 {
                clients.remove(&waiter.client);
            }
        }
        Some(waiter)
    }

    /// Everybody who waits, with how often.
    pub(super) fn clients(&self) -> &BTreeMap<u64, u32> {
        &self.clients
    }

    fn queue(&mut self, model: &ModelName) -> &mut Queue {
        Arc::make_mut(self.queues.entry(model.clone()).or_default())
    }

    /// The waiters come first: each would enter its key as one that comes now.
    pub(super) fn snapshot(&self) -> impl Iterator<Item = Event> + '_ {
        let waiters = self.waiters.values().map(|w| Event::Arrived { waiter: Waiter::clone(w) });
        let shares = self.queues.iter().flat_map(|(model, queue)| {
            queue.all_shares().map(|(band, shares)| Event::Shares {
                model: model.clone(),
                band,
                shares: shares.clone(),
            })
        });
        waiters.chain(shares)
    }

    /// Models that somebody waits for.
    pub(super) fn queued(&self) -> impl Iterator<Item = &ModelName> {
        self.queues.iter().filter(|(_, queue)| !queue.is_empty()).map(|(model, _)| model)
    }

    #[must_use]
    pub fn waiting(&self, model: &ModelName) -> usize {
        self.queues.get(model).map_or(0, |queue| queue.len())
    }

    pub(super) fn is_counted(&self, model: &ModelName, key: &str) -> bool {
        let queue = self.queues.get(model);
        queue.is_some_and(|queue| queue.shares().any(|(_, shares)| shares.has(key)))
    }

    pub(super) fn counted(&self) -> impl Iterator<Item = (&ModelName, &str)> {
        let queued = self.queues.iter().filter(|(_, queue)| !queue.is_empty());
        queued.flat_map(|(model, queue)| {
            queue.shares().flat_map(move |(_, shares)| shares.keys().map(move |key| (model, key)))
        })
    }

    /// What the plan needs to know of the queues; in a cluster this is what a gateway publishes.
    #[must_use]
    pub fn demand(&self) -> BTreeMap<ModelName, Demand> {
        let queued = self.queues.iter().filter(|(_, queue)| !queue.is_empty());
        queued.map(|(model, queue)| (model.clone(), queue.demand())).collect()
    }

    /// For each model, the first deadline after this moment.
    pub(super) fn deadlines_after(&self, moment: Tick) -> impl Iterator<Item = Tick> + '_ {
        self.queues.values().filter_map(move |queue| queue.deadline_after(moment))
    }

    /// Grants and refusals; canaries and probes go through the draft, since they change engines.
    pub(super) fn decide(&self, draft: &mut Draft<'_>, verdicts: &Verdicts, now: Tick) -> Vec<Command> {
        let mut out = Vec::new();
        for (model, queue) in self.queues.iter().filter(|(_, queue)| !queue.is_empty()) {
            let seats = Seats::of(draft, model);
            if seats.are_taken() {
                continue;
            }
            for seated in seats.fill(queue.in_turn()) {
                grant(&seated, draft, &mut out);
            }
        }
        let granted = out.iter().filter_map(|command| match command {
            Command::Grant { waiter, .. } => Some(*waiter),
            _ => None,
        });
        let granted: BTreeSet<WaiterId> = granted.collect();
        let crowds = self.crowds(granted.clone(), draft);
        for (model, queue) in &self.queues {
            let crowded = !crowds.is_empty() && queue.ids().any(|id| crowds.holds(id));
            if verdicts.refuses(model) || queue.is_late(now) || crowded {
                let left = queue.in_turn().filter(|waiter| !granted.contains(&waiter.id));
                refuse(model, left, &crowds, verdicts, now, &mut out);
            }
        }
        for engine in draft.unproven() {
            draft.probe(&engine);
        }
        out
    }

    /// Those who leave: first those a model has no room for, of whoever waits for it alone, then those whom there is no
    /// room for among all the rest.
    fn crowds(&self, mut gone: BTreeSet<WaiterId>, draft: &Draft<'_>) -> Crowds {
        let mut own = BTreeSet::new();
        for (model, queue) in self.queues.iter().filter(|(_, queue)| !queue.is_empty()) {
            // Looked at first: those who stay are hardly ever so many.
            if let Some(most) = draft.max_waiting_for(model).filter(|most| queue.len() > *most) {
                let staying: Vec<&Waiter> = queue.in_turn().filter(|w| !gone.contains(&w.id)).collect();
                own.extend(crowd(&staying, most));
            }
        }
        gone.extend(&own);
        let most = draft.max_waiting();
        if self.waiters.len() - gone.len() <= most {
            return Crowds { own, all: BTreeSet::new() };
        }
        let staying = self.waiters.values().map(|w| &**w).filter(|w| !gone.contains(&w.id));
        Crowds { own, all: crowd(&staying.collect::<Vec<_>>(), most) }
    }
}

/// Those whom there is no room for.
struct Crowds {
    /// By what their own model says.
    own: BTreeSet<WaiterId>,
    /// By what holds for all models together.
    all: BTreeSet<WaiterId>,
}

impl Crowds {
    fn is_empty(&self) -> bool {
        self.own.is_empty() && self.all.is_empty()
    }

    fn holds(&self, id: WaiterId) -> bool {
        self.own.contains(&id) || self.all.contains(&id)
    }
}

/// Those of them who are too many, beyond so many: of the key that has most of them the newest, and so on. Else one key
/// that fills the queue would keep everybody else out of it.
fn crowd(waiters: &[&Waiter], most: usize) -> BTreeSet<WaiterId> {
    let crowd = waiters.len().saturating_sub(most);
    if crowd == 0 {
        return BTreeSet::new();
    }
    // By arrival, not by number: a request that comes back to the queue has a new number and its old arrival.
    let mut keys: BTreeMap<&str, Vec<(Tick, WaiterId)>> = BTreeMap::new();
    for waiter in waiters {
        keys.entry(&waiter.key).or_default().push((waiter.arrived, waiter.id));
    }
    keys.values_mut().for_each(|places| places.sort_unstable());
    let largest = || keys.values_mut().max_by_key(|places| (places.len(), places.last().copied()))?.pop();
    std::iter::from_fn(largest).map(|(_, id)| id).take(crowd).collect()
}

/// An engine that must prove itself is opened for the one who does it with.
fn grant(seated: &Seated<'_>, draft: &mut Draft<'_>, out: &mut Vec<Command>) {
    let Seated { waiter, engine, canary } = seated;
    let (generation, canary) = (draft.generation(engine), *canary);
    if canary && matches!(draft.door(engine), Door::Closed | Door::Held) {
        draft.emit(Command::OpenGate { engine: engine.clone(), generation, public: false });
    }
    let grant = Command::Grant { waiter: waiter.id, engine: engine.clone(), generation, canary };
    draft.record(&grant);
    out.push(grant);
}

/// What a refusal says is put together only for those who get one: the queue is looked at for every event.
fn refuse<'w>(
    model: &ModelName,
    queue: impl Iterator<Item = &'w Waiter>,
    crowds: &Crowds,
    verdicts: &Verdicts,
    now: Tick,
    out: &mut Vec<Command>,
) {
    let all = verdicts.refuses(model);
    for (index, waiter) in queue.enumerate() {
        let (late, crowded) = (waiter.deadline <= now, crowds.holds(waiter.id));
        if !(all || late || crowded) {
            continue;
        }
        let wait = Wait {
            waited: now.since(waiter.arrived),
            position: u32::try_from(index + 1).unwrap_or(u32::MAX),
            over: late.then(|| verdicts.patience(waiter)),
            ..verdicts.wait(model)
        };
        let fault = match verdicts.refusal(model, &wait) {
            Some(fault) => fault,
            None if late => verdicts.late(model, wait),
            None if crowds.own.contains(&waiter.id) => {
                let message = format!("too many requests wait for '{model}' (its own queue.maxWaiting)");
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
            only: None,
        }
    }

    #[test]
    fn who_waits_longest_is_not_the_crowd_however_late_its_number() {
        let waiters = [waiter(1, 10), waiter(2, 20), waiter(3, 5)];
        assert_eq!(crowd(&waiters.iter().collect::<Vec<_>>(), 2), BTreeSet::from([WaiterId(2)]));
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
