//! What other gateways say of their own requests.
//!
//! In a cluster every gateway queues for itself, and one decides about engines for all of them. What waits elsewhere is
//! demand like any other, in the band of its model; what is in flight elsewhere keeps a model from being idle. Which of
//! a model's engines those requests are at is not told, so each one that serves counts as used.
//!
//! Who waits elsewhere has waited since that was first heard: a gateway reports numbers, and a number that only changes
//! moves nobody's place in line.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use super::{
    event::Elsewhere,
    plan::{Demand, Planner},
};
use crate::{
    engine::{Engine, state::State},
    model::ModelName,
    units::Tick,
};

type Map = BTreeMap<String, BTreeMap<ModelName, Said>>;

/// Every other gateway's requests. Cheap to clone until one of them says something else.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Map", into = "Map")]
pub(super) struct Others {
    said: Arc<Map>,
    /// Of all gateways together, and only where there is any.
    sums: Arc<BTreeMap<ModelName, Sum>>,
}

/// What one gateway said last of one model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Said {
    waiting: u32,
    in_flight: u32,
    last_request: Tick,
    /// When it was first heard that somebody waits there, for as long as somebody does.
    since: Tick,
}

/// What all other gateways have of one model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sum {
    pub(super) waiting: u32,
    pub(super) in_flight: u32,
    /// Since when somebody waits at one of them.
    oldest: Tick,
}

/// What became different of one model.
struct Heard {
    model: ModelName,
    /// Somebody waits elsewhere, where nobody did.
    wanted: bool,
    /// The latest moment at which it is known to have been used.
    used: Tick,
}

impl Others {
    /// The map replaces what this gateway said before; `None`: it is gone.
    fn hear(
        &mut self,
        gateway: &str,
        demand: Option<&BTreeMap<ModelName, Elsewhere>>,
        now: Tick,
    ) -> Vec<Heard> {
        let before = self.said.get(gateway).cloned().unwrap_or_default();
        let say = |(model, told): (&ModelName, &Elsewhere)| {
            let waited = before.get(model).filter(|said| said.waiting > 0);
            let said = Said {
                waiting: told.waiting,
                in_flight: told.in_flight,
                last_request: told.last_request,
                since: waited.map_or(now, |said| said.since),
            };
            (model.clone(), said)
        };
        let after: BTreeMap<ModelName, Said> = demand.into_iter().flatten().map(say).collect();
        let models: BTreeSet<ModelName> = before.keys().chain(after.keys()).cloned().collect();
        let said = Arc::make_mut(&mut self.said);
        match demand {
            Some(_) => said.insert(gateway.to_owned(), after.clone()),
            None => said.remove(gateway),
        };
        let changed = models.into_iter().filter(|model| before.get(model) != after.get(model));
        changed.map(|model| self.changed(model, &before, &after, now)).collect()
    }

    fn changed(
        &mut self,
        model: ModelName,
        before: &BTreeMap<ModelName, Said>,
        after: &BTreeMap<ModelName, Said>,
        now: Tick,
    ) -> Heard {
        let waited = self.of(&model).waiting;
        let sum = sum(&self.said, &model);
        let sums = Arc::make_mut(&mut self.sums);
        match sum {
            Some(sum) => sums.insert(model.clone(), sum),
            None => sums.remove(&model),
        };
        let in_flight = |said: Option<&Said>| said.is_some_and(|said| said.in_flight > 0);
        // An answer may have lasted for long: what counts is its end, of which nobody tells but by its absence.
        let ended = in_flight(before.get(&model)) && !in_flight(after.get(&model));
        // Another machine's clock may be ahead.
        let last = after.get(&model).map_or(Tick(0), |said| said.last_request.min(now));
        let wanted = waited == 0 && sum.is_some_and(|sum| sum.waiting > 0);
        Heard { model, wanted, used: if ended { now } else { last } }
    }

    pub(super) fn of(&self, model: &ModelName) -> Sum {
        self.sums.get(model).copied().unwrap_or_default()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.said.is_empty()
    }
}

fn sum(said: &Map, model: &ModelName) -> Option<Sum> {
    let of = || said.values().filter_map(|models| models.get(model));
    let sum = Sum {
        waiting: of().map(|said| said.waiting).fold(0, u32::saturating_add),
        in_flight: of().map(|said| said.in_flight).fold(0, u32::saturating_add),
        oldest: of().filter(|said| said.waiting > 0).map(|said| said.since).min().unwrap_or_default(),
    };
    (sum.waiting > 0 || sum.in_flight > 0).then_some(sum)
}

impl From<Map> for Others {
    fn from(said: Map) -> Self {
        let models: BTreeSet<&ModelName> = said.values().flat_map(BTreeMap::keys).collect();
        let sums = models.into_iter().filter_map(|model| Some((model.clone(), sum(&said, model)?))).collect();
        Self { sums: Arc::new(sums), said: Arc::new(said) }
    }
}

impl From<Others> for Map {
    fn from(others: Others) -> Self {
        Self::clone(&others.said)
    }
}

impl Planner {
    /// Another gateway says what it has of each model.
    pub(super) fn heard(
        &mut self,
        gateway: &str,
        demand: Option<&BTreeMap<ModelName, Elsewhere>>,
        now: Tick,
    ) {
        for Heard { model, wanted, used } in self.elsewhere.hear(gateway, demand, now) {
            if wanted {
                self.wanted(&model, now);
            }
            let engines: Vec<_> = self.engines.of(&model).map(|e| (e.id.clone(), e.last_end)).collect();
            for (id, _) in engines.iter().filter(|(_, last_end)| *last_end < used) {
                self.engines.change(id, |e| {
                    e.is_asked_for(used, None);
                    (e.last_end, e.used_elsewhere) = (used, used);
                });
            }
            self.engines.touch(&model);
        }
    }

    /// What is asked for at this gateway, and at all others as well.
    pub(super) fn anywhere(&self, mut here: BTreeMap<ModelName, Demand>) -> BTreeMap<ModelName, Demand> {
        for (model, sum) in self.elsewhere.sums.iter().filter(|(_, sum)| sum.waiting > 0) {
            // Of what is not configured nobody here knows the band, and nothing could be done about it.
            let Some(band) = self.spec(model).map(|spec| spec.priority) else { continue };
            let there = Demand { waiting: sum.waiting, elsewhere: sum.waiting, band, oldest: sum.oldest };
            here.entry(model.clone()).and_modify(|here| *here = here.and(there)).or_insert(there);
        }
        here
    }

    /// How many requests may be at this engine: its leases, and whatever other gateways have in flight at its model.
    pub(super) fn uses(&self, e: &Engine) -> u32 {
        let serves = matches!(e.state, State::Awake | State::Draining { .. });
        let elsewhere = if serves { self.elsewhere.of(&e.id.model).in_flight } else { 0 };
        e.leases.saturating_add(elsewhere)
    }
}

impl Demand {
    fn and(self, other: Self) -> Self {
        Self {
            waiting: self.waiting.saturating_add(other.waiting),
            elsewhere: self.elsewhere.saturating_add(other.elsewhere),
            band: self.band.max(other.band),
            oldest: self.oldest.min(other.oldest),
        }
    }
}
