//! Who gets a lease, and who is refused.
//!
//! Runs in every gateway over its own waiters. It knows of engines only what the plan tells: which are awake, which
//! want a canary, and for every model a verdict on those who wait in vain.

use std::collections::BTreeMap;

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
    pub(super) fn decide(&self, draft: &mut Draft<'_>, verdicts: &mut Verdicts, now: Tick) -> Vec<Command> {
        let mut out = Vec::new();
        let crowd = self.waiters.len().saturating_sub(draft.max_waiting());
        let newest: Vec<WaiterId> = self.waiters.keys().rev().take(crowd).copied().collect();
        for (model, queue) in &self.queues {
            let mut queue: Vec<&Waiter> = queue.values().filter_map(|id| self.waiters.get(id)).collect();
            for (engine, places) in draft.places(model) {
                self.grant(&mut queue, &engine, places, draft, &mut out);
            }
            let gone = !draft.is_configured(model);
            let wait = verdicts.wait(model);
            for (index, waiter) in queue.iter().enumerate() {
                let wait = Wait {
                    waited: now.since(waiter.arrived),
                    position: u32::try_from(index + 1).unwrap_or(u32::MAX),
                    ..wait.clone()
                };
                let fault = if let Some(fault) = verdicts.refusal(model, &wait) {
                    fault
                } else if gone {
                    // A reload took it away, and nothing will ever start it.
                    Fault::ModelNotFound { model: model.to_string() }
                } else if waiter.deadline <= now {
                    verdicts.late(model, wait)
                } else if newest.contains(&waiter.id) {
                    Fault::QueueFull { message: "too many requests wait (queue.maxWaiting)".to_owned(), wait }
                } else {
                    continue;
                };
                out.push(Command::Refuse { waiter: waiter.id, fault });
            }
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

/// What an engine has to give to waiters right now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Places {
    Free(usize),
    /// It must prove itself first.
    Canary,
}
