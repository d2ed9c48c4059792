//! Who gets a lease, and who is refused.
//!
//! Runs in every gateway over its own waiters. It knows of engines only what the plan tells: which are awake, which
//! want a canary, and for every model a verdict on those who wait in vain.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    command::Command,
    event::{Event, Waiter, WaiterId},
    plan::{Demand, Draft, Verdicts},
};
use crate::{
    engine::Door,
    fault::{Fault, Wait},
    model::{EngineId, ModelName},
    units::Tick,
};

#[derive(Clone, Debug, Default)]
pub struct Dispatch {
    waiters: BTreeMap<WaiterId, Waiter>,
    /// Waiters by model, in the order in which they are served.
    queues: BTreeMap<ModelName, BTreeMap<Place, WaiterId>>,
}

/// A place in a model's queue: highest band first, then the earliest arrival.
type Place = (std::cmp::Reverse<i32>, Tick, WaiterId);

fn place(waiter: &Waiter) -> Place {
    (std::cmp::Reverse(waiter.band), waiter.arrived, waiter.id)
}

impl Dispatch {
    pub(super) fn arrived(&mut self, waiter: Waiter) {
        self.queues.entry(waiter.model.clone()).or_default().insert(place(&waiter), waiter.id);
        self.waiters.insert(waiter.id, waiter);
    }

    pub(super) fn left(&mut self, id: WaiterId) {
        let Some(waiter) = self.waiters.remove(&id) else {
            return;
        };
        if let Some(queue) = self.queues.get_mut(&waiter.model) {
            queue.remove(&place(&waiter));
            if queue.is_empty() {
                self.queues.remove(&waiter.model);
            }
        }
    }

    pub(super) fn snapshot(&self) -> impl Iterator<Item = Event> + '_ {
        self.waiters.values().map(|waiter| Event::Arrived { waiter: waiter.clone() })
    }

    #[must_use]
    pub fn waiting(&self, model: &ModelName) -> usize {
        self.queues.get(model).map_or(0, BTreeMap::len)
    }

    /// What the plan needs to know of the queues; in a cluster this is what a gateway publishes.
    #[must_use]
    pub fn demand(&self) -> BTreeMap<ModelName, Demand> {
        let summary = |queue: &BTreeMap<Place, WaiterId>| Demand {
            waiting: u32::try_from(queue.len()).unwrap_or(u32::MAX),
            band: queue.keys().next().map_or(0, |(band, ..)| band.0),
            oldest: queue.keys().map(|(_, arrived, _)| *arrived).min().unwrap_or_default(),
        };
        self.queues.iter().map(|(model, queue)| (model.clone(), summary(queue))).collect()
    }

    pub(super) fn deadlines(&self) -> impl Iterator<Item = Tick> + '_ {
        self.waiters.values().map(|w| w.deadline)
    }

    /// Grants and refusals; canaries and probes go through the draft, since they change engines.
    pub(super) fn decide(&self, draft: &mut Draft<'_>, verdicts: &Verdicts, now: Tick) -> Vec<Command> {
        let mut out = Vec::new();
        let mut queues: Vec<(&ModelName, Vec<&Waiter>)> = Vec::with_capacity(self.queues.len());
        for (model, queue) in &self.queues {
            let mut queue: Vec<&Waiter> = queue.values().filter_map(|id| self.waiters.get(id)).collect();
            for (engine, places) in draft.places(model, queue.len()) {
                self.grant(&mut queue, &engine, places, draft, &mut out);
            }
            queues.push((model, queue));
        }
        let newest = newest(&queues, draft.max_waiting());
        for (model, queue) in queues {
            refuse(model, &queue, &newest, verdicts, now, &mut out);
        }
        for engine in draft.unproven() {
            draft.probe(&engine);
        }
        out
    }

    /// Gives `places` leases to the first in the queue; an engine that must prove itself gets one stream, alone.
    fn grant(
        &self,
        queue: &mut Vec<&Waiter>,
        engine: &EngineId,
        places: Places,
        draft: &mut Draft<'_>,
        out: &mut Vec<Command>,
    ) {
        let generation = draft.generation(engine);
        match places {
            Places::Free(n) => {
                for waiter in queue.drain(..n.min(queue.len())) {
                    let grant = Command::Grant {
                        waiter: waiter.id,
                        engine: engine.clone(),
                        generation,
                        canary: false,
                    };
                    draft.record(&grant);
                    out.push(grant);
                }
            }
            Places::Canary => {
                let Some(at) = queue.iter().position(|w| w.stream) else {
                    return;
                };
                let waiter = queue.remove(at);
                if draft.door(engine) == Door::Closed {
                    draft.emit(Command::OpenGate { engine: engine.clone(), generation, public: false });
                }
                let grant =
                    Command::Grant { waiter: waiter.id, engine: engine.clone(), generation, canary: true };
                draft.record(&grant);
                out.push(grant);
            }
        }
    }
}

/// Those who came last, of all that still wait, beyond so many.
fn newest(queues: &[(&ModelName, Vec<&Waiter>)], most: usize) -> BTreeSet<WaiterId> {
    let waiting: usize = queues.iter().map(|(_, queue)| queue.len()).sum();
    let Some(crowd) = waiting.checked_sub(most).filter(|crowd| *crowd > 0) else {
        return BTreeSet::new();
    };
    let all: BTreeSet<WaiterId> = queues.iter().flat_map(|(_, queue)| queue).map(|w| w.id).collect();
    all.into_iter().rev().take(crowd).collect()
}

/// What a refusal says is put together only for those who get one: the queue is looked at for every event.
fn refuse(
    model: &ModelName,
    queue: &[&Waiter],
    newest: &BTreeSet<WaiterId>,
    verdicts: &Verdicts,
    now: Tick,
    out: &mut Vec<Command>,
) {
    let all = verdicts.refuses(model);
    for (index, waiter) in queue.iter().enumerate() {
        let (late, crowded) = (waiter.deadline <= now, newest.contains(&waiter.id));
        if !(all || late || crowded) {
            continue;
        }
        let wait = Wait {
            waited: now.since(waiter.arrived),
            position: u32::try_from(index + 1).unwrap_or(u32::MAX),
            ..verdicts.wait(model)
        };
        let fault = match verdicts.refusal(model, &wait) {
            Some(fault) => fault,
            None if late => verdicts.late(model, wait),
            None => {
                Fault::QueueFull { message: "too many requests wait (queue.maxWaiting)".to_owned(), wait }
            }
        };
        out.push(Command::Refuse { waiter: waiter.id, fault });
    }
}

/// What an engine has to give to waiters right now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Places {
    Free(usize),
    /// It must prove itself first.
    Canary,
}
