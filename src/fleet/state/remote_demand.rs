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
        let to_remote_demand = |(model, reported): (&ModelName, &GatewayDemand)| {
            let previous = before.get(model).filter(|previous| previous.waiting > 0);
            let demand_of_model = RemoteModelDemand {
                waiting: reported.waiting,
                in_flight: reported.in_flight,
                last_request: reported.last_request,
                since: previous.map_or(now, |previous| previous.since),
            };
            (model.clone(), demand_of_model)
        };
        let after: BTreeMap<ModelName, RemoteModelDemand> =
            demand.into_iter().flatten().map(to_remote_demand).collect();
        let models: BTreeSet<ModelName> = before.keys().chain(after.keys()).cloned().collect();
        let by_gateway = Arc::make_mut(&mut self.by_gateway);
        match demand {
            Some(_) => by_gateway.insert(gateway.to_owned(), after.clone()),
            None => by_gateway.remove(gateway),
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
        let in_flight =
            |demand: Option<&RemoteModelDemand>| demand.is_some_and(|demand| demand.in_flight > 0);
        // An answer may have lasted long. Its end counts, which shows only as its absence from the report.
        let ended = in_flight(before.get(&model)) && !in_flight(after.get(&model));
        // Another machine's clock may be ahead.
        let last = after.get(&model).map_or(Tick(0), |demand| demand.last_request.min(now));
        let newly_waiting = waited == 0 && sum.is_some_and(|sum| sum.waiting > 0);
        RemoteDemandChange { model, newly_waiting, last_used: if ended { now } else { last } }
    }

    pub(in crate::fleet) fn of(&self, model: &ModelName) -> RemoteDemandTotal {
        self.totals.get(model).copied().unwrap_or_default()
    }

    /// Models with requests in flight at other gateways.
    pub(in crate::fleet) fn models_in_flight(&self) -> impl Iterator<Item = &ModelName> {
        self.totals.iter().filter(|(_, total)| total.in_flight > 0).map(|(model, _)| model)
    }

    pub(in crate::fleet) fn is_empty(&self) -> bool {
        self.by_gateway.is_empty()
    }
}

fn total(by_gateway: &RemoteDemandMap, model: &ModelName) -> Option<RemoteDemandTotal> {
    let of = || by_gateway.values().filter_map(|models| models.get(model));
    let sum = RemoteDemandTotal {
        waiting: of().map(|demand| demand.waiting).fold(0, u32::saturating_add),
        in_flight: of().map(|demand| demand.in_flight).fold(0, u32::saturating_add),
        oldest: of().filter(|demand| demand.waiting > 0).map(|demand| demand.since).min().unwrap_or_default(),
    };
    (sum.waiting > 0 || sum.in_flight > 0).then_some(sum)
}

impl From<RemoteDemandMap> for RemoteDemand {
    fn from(by_gateway: RemoteDemandMap) -> Self {
        let models: BTreeSet<&ModelName> = by_gateway.values().flat_map(BTreeMap::keys).collect();
        let sums = models
            .into_iter()
            .filter_map(|model| Some((model.clone(), total(&by_gateway, model)?)))
            .collect();
        Self { totals: Arc::new(sums), by_gateway: Arc::new(by_gateway) }
    }
}

impl From<RemoteDemand> for RemoteDemandMap {
    fn from(remote_demand: RemoteDemand) -> Self {
        Self::clone(&remote_demand.by_gateway)
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
        for RemoteDemandChange { model, newly_waiting, last_used } in
            self.remote_demand.update(gateway, demand, now)
        {
            if newly_waiting {
                self.record_demand(&model, now);
            }
            let engines: Vec<_> =
                self.engines.of_model(&model).map(|e| (e.id.clone(), e.last_lease_end)).collect();
            if engines.iter().any(|(_, last_end)| *last_end < last_used) {
                self.engines.mark_use_changed(&model);
            }
            for (id, _) in engines.iter().filter(|(_, last_end)| *last_end < last_used) {
                self.engines.change(id, |e| {
                    e.record_request(last_used, None);
                    (e.last_lease_end, e.last_remote_use) = (last_used, last_used);
                });
            }
            self.engines.mark_model_dirty(&model);
        }
    }

    /// Adds the demand of all other gateways to this gateway's own.
    pub(in crate::fleet) fn with_remote_demand(
        &self,
        mut demand: BTreeMap<ModelName, QueueDemand>,
    ) -> BTreeMap<ModelName, QueueDemand> {
        for (model, sum) in self.remote_demand.totals.iter().filter(|(_, sum)| sum.waiting > 0) {
            // The band of an unconfigured model is unknown here, and nothing could be done for it.
            let Some(band) = self.spec(model).map(|spec| spec.priority) else { continue };
            let remote = QueueDemand { waiting: sum.waiting, remote: sum.waiting, band, oldest: sum.oldest };
            demand
                .entry(model.clone())
                .and_modify(|total| *total = total.combined_with(remote))
                .or_insert(remote);
        }
        demand
    }

    /// How many requests may be at this engine: its leases, and all that other gateways have in flight for its model.
    pub(in crate::fleet) fn in_use_count(&self, e: &Engine) -> u32 {
        let serves = matches!(e.state, LifecycleState::Awake | LifecycleState::Draining { .. });
        let remote_in_flight = if serves { self.remote_demand.of(&e.id.model).in_flight } else { 0 };
        e.leases.saturating_add(remote_in_flight)
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
