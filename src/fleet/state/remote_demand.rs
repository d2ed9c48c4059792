//! Demand that other gateways report for their own requests.
//!
//! In a cluster every gateway has its own queue, and one gateway decides about engines for all of them. Requests that
//! wait at other gateways are demand like any other, in the band of their model; requests in flight at other gateways
//! keep a model from being idle. The report does not say at which of a model's engines those requests are, so each
//! serving engine counts as used.
//!
//! Requests at other gateways count as waiting since the first report of them. A gateway reports numbers, and a number
//! that only changes moves no model's place in line.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use crate::{
    engine::{Engine, state::LifecycleState},
    fleet::{
        event::GatewayDemand,
        plan::{Planner, QueueDemand},
    },
    model::ModelName,
    units::Tick,
};

type RemoteDemandMap = BTreeMap<String, BTreeMap<ModelName, RemoteModelDemand>>;

/// The demand of every other gateway. Cheap to clone until a report changes it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "RemoteDemandMap", into = "RemoteDemandMap")]
pub(in crate::fleet) struct RemoteDemand {
    by_gateway: Arc<RemoteDemandMap>,
    /// Sums over all gateways, for models that have any demand.
    totals: Arc<BTreeMap<ModelName, RemoteDemandTotal>>,
}

/// One gateway's last report on one model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct RemoteModelDemand {
    waiting: u32,
    in_flight: u32,
    last_request: Tick,
    /// When the first report of waiters arrived; kept while there are some.
    since: Tick,
}

/// The demand of all other gateways for one model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::fleet) struct RemoteDemandTotal {
    pub(in crate::fleet) waiting: u32,
    pub(in crate::fleet) in_flight: u32,
    /// Since when a request waits at one of them.
    oldest: Tick,
}

/// Change of one model by a report.
struct RemoteDemandChange {
    model: ModelName,
    /// A request waits at another gateway, and none did before.
    newly_waiting: bool,
    /// The latest moment at which the model is known to have been used.
    last_used: Tick,
}

impl RemoteDemand {
    /// Replaces the gateway's former report; `None`: the gateway is gone.
    fn update(
        &mut self,
        gateway: &str,
        demand: Option<&BTreeMap<ModelName, GatewayDemand>>,
        now: Tick,
    ) -> Vec<RemoteDemandChange> {
        let before = self.by_gateway.get(gateway).cloned().unwrap_or_default();
        let say = |(model, told): (&ModelName, &GatewayDemand)| {
            let waited = before.get(model).filter(|said| said.waiting > 0);
            let said = RemoteModelDemand {
                waiting: told.waiting,
                in_flight: told.in_flight,
                last_request: told.last_request,
                since: waited.map_or(now, |said| said.since),
            };
            (model.clone(), said)
        };
        let after: BTreeMap<ModelName, RemoteModelDemand> = demand.into_iter().flatten().map(say).collect();
        let models: BTreeSet<ModelName> = before.keys().chain(after.keys()).cloned().collect();
        let said = Arc::make_mut(&mut self.by_gateway);
        match demand {
            Some(_) => said.insert(gateway.to_owned(), after.clone()),
            None => said.remove(gateway),
        };
        let changed = models.into_iter().filter(|model| before.get(model) != after.get(model));
        changed.map(|model| self.update_total(model, &before, &after, now)).collect()
    }

    fn update_total(
        &mut self,
        model: ModelName,
        before: &BTreeMap<ModelName, RemoteModelDemand>,
        after: &BTreeMap<ModelName, RemoteModelDemand>,
        now: Tick,
    ) -> RemoteDemandChange {
        let waited = self.of(&model).waiting;
        let sum = total(&self.by_gateway, &model);
        let sums = Arc::make_mut(&mut self.totals);
        match sum {
            Some(sum) => sums.insert(model.clone(), sum),
            None => sums.remove(&model),
        };
        let in_flight = |said: Option<&RemoteModelDemand>| said.is_some_and(|said| said.in_flight > 0);
        // An answer may have lasted long. Its end counts, which shows only as its absence from the report.
        let ended = in_flight(before.get(&model)) && !in_flight(after.get(&model));
        // Another machine's clock may be ahead.
        let last = after.get(&model).map_or(Tick(0), |said| said.last_request.min(now));
        let wanted = waited == 0 && sum.is_some_and(|sum| sum.waiting > 0);
        RemoteDemandChange { model, newly_waiting: wanted, last_used: if ended { now } else { last } }
    }

    pub(in crate::fleet) fn of(&self, model: &ModelName) -> RemoteDemandTotal {
        self.totals.get(model).copied().unwrap_or_default()
    }

    pub(in crate::fleet) fn is_empty(&self) -> bool {
        self.by_gateway.is_empty()
    }
}

fn total(said: &RemoteDemandMap, model: &ModelName) -> Option<RemoteDemandTotal> {
    let of = || said.values().filter_map(|models| models.get(model));
    let sum = RemoteDemandTotal {
        waiting: of().map(|said| said.waiting).fold(0, u32::saturating_add),
        in_flight: of().map(|said| said.in_flight).fold(0, u32::saturating_add),
        oldest: of().filter(|said| said.waiting > 0).map(|said| said.since).min().unwrap_or_default(),
    };
    (sum.waiting > 0 || sum.in_flight > 0).then_some(sum)
}

impl From<RemoteDemandMap> for RemoteDemand {
    fn from(said: RemoteDemandMap) -> Self {
        let models: BTreeSet<&ModelName> = said.values().flat_map(BTreeMap::keys).collect();
        let sums =
            models.into_iter().filter_map(|model| Some((model.clone(), total(&said, model)?))).collect();
        Self { totals: Arc::new(sums), by_gateway: Arc::new(said) }
    }
}

impl From<RemoteDemand> for RemoteDemandMap {
    fn from(others: RemoteDemand) -> Self {
        Self::clone(&others.by_gateway)
    }
}

impl Planner {
    /// Applies another gateway's report of its demand.
    pub(in crate::fleet) fn apply_remote_demand(
        &mut self,
        gateway: &str,
        demand: Option<&BTreeMap<ModelName, GatewayDemand>>,
        now: Tick,
    ) {
        for RemoteDemandChange { model, newly_waiting: wanted, last_used: used } in
            self.remote_demand.update(gateway, demand, now)
        {
            if wanted {
                self.record_demand(&model, now);
            }
            let engines: Vec<_> =
                self.engines.of_model(&model).map(|e| (e.id.clone(), e.last_lease_end)).collect();
            for (id, _) in engines.iter().filter(|(_, last_end)| *last_end < used) {
                self.engines.change(id, |e| {
                    e.record_request(used, None);
                    (e.last_lease_end, e.last_remote_use) = (used, used);
                });
            }
            self.engines.mark_model_dirty(&model);
        }
    }

    /// Adds the demand of all other gateways to this gateway's own.
    pub(in crate::fleet) fn with_remote_demand(
        &self,
        mut here: BTreeMap<ModelName, QueueDemand>,
    ) -> BTreeMap<ModelName, QueueDemand> {
        for (model, sum) in self.remote_demand.totals.iter().filter(|(_, sum)| sum.waiting > 0) {
            // The band of an unconfigured model is unknown here, and nothing could be done for it.
            let Some(band) = self.spec(model).map(|spec| spec.priority) else { continue };
            let there = QueueDemand { waiting: sum.waiting, remote: sum.waiting, band, oldest: sum.oldest };
            here.entry(model.clone()).and_modify(|here| *here = here.combined_with(there)).or_insert(there);
        }
        here
    }

    /// How many requests may be at this engine: its leases, and all that other gateways have in flight for its model.
    pub(in crate::fleet) fn in_use_count(&self, e: &Engine) -> u32 {
        let serves = matches!(e.state, LifecycleState::Awake | LifecycleState::Draining { .. });
        let elsewhere = if serves { self.remote_demand.of(&e.id.model).in_flight } else { 0 };
        e.leases.saturating_add(elsewhere)
    }
}

impl QueueDemand {
    fn combined_with(self, other: Self) -> Self {
        Self {
            waiting: self.waiting.saturating_add(other.waiting),
            remote: self.remote.saturating_add(other.remote),
            band: self.band.max(other.band),
            oldest: self.oldest.min(other.oldest),
        }
    }
}
