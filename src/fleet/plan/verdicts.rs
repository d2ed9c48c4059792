//! The plan's verdicts on waiters: which are refused, and with which fault.
//!
//! Apart from the plan, because every gateway's dispatch reads the verdicts, also where another gateway leads.

use std::{collections::BTreeMap, sync::Arc};

use crate::{
    fault::{FailureCause, Fault, WaitDetails, WaitLimit},
    fleet::{
        event::Waiter,
        explain::{ModelReason, SaturatedEngines},
        plan::{ModelRecord, PlanBuilder},
    },
    model::ModelName,
    units::{Millis, Tick},
};

/// The plan's verdicts on waiters.
pub struct WaiterVerdicts {
    reasons: Arc<BTreeMap<ModelName, ModelReason>>,
    models: Arc<BTreeMap<ModelName, ModelRecord>>,
    /// Requested models whose engines all have as many requests as their saturation allows, before this turn's grants.
    saturated: BTreeMap<ModelName, SaturatedEngines>,
    max_wait: Millis,
    can_explain: bool,
    shutdown: bool,
    now: Tick,
}

impl PlanBuilder<'_> {
    pub(in crate::fleet) fn verdicts(&self) -> WaiterVerdicts {
        let requested = self.demand.keys();
        let saturated =
            requested.filter_map(|model| Some((model.clone(), self.planner.saturated_engines(model)?)));
        WaiterVerdicts {
            reasons: Arc::clone(&self.reasons),
            models: Arc::clone(&self.planner.models),
            saturated: saturated.collect(),
            max_wait: self.planner.settings.queue.max_wait,
            can_explain: self.planner.can_explain(),
            shutdown: self.planner.shutdown.is_some(),
            now: self.now,
        }
    }
}

impl WaiterVerdicts {
    /// Wait details of a model, without each waiter's own values.
    pub(in crate::fleet) fn wait_details(&self, model: &ModelName) -> WaitDetails {
        let full = || match self.saturated.get(model) {
            Some(engines) => ModelReason::saturated(engines),
            None => ModelReason::at_capacity(),
        };
        self.reasons.get(model).map_or_else(|| full().wait_details(self.now), |r| r.wait_details(self.now))
    }

    /// Which limit set this waiter's deadline.
    pub(in crate::fleet) fn wait_limit(&self, waiter: &Waiter) -> WaitLimit {
        let spec = self.models.get(&waiter.model).and_then(|model| model.spec.as_ref());
        let longest = spec.and_then(|spec| spec.queue.max_wait).unwrap_or(self.max_wait);
        let shorter = waiter.deadline.since(waiter.arrived) < longest;
        if shorter { WaitLimit::Request } else { WaitLimit::Queue }
    }

    fn is_configured(&self, model: &ModelName) -> bool {
        self.models.get(model).is_some_and(|model| model.spec.is_some())
    }

    /// Whether all waiters of this model are refused.
    pub(in crate::fleet) fn refuses(&self, model: &ModelName) -> bool {
        let refused = |reason: &ModelReason| reason.is_final();
        self.shutdown || !self.is_configured(model) || self.reasons.get(model).is_some_and(refused)
    }

    /// The fault for all waiters of this model, if they are refused.
    pub(in crate::fleet) fn refusal(&self, model: &ModelName, wait: &WaitDetails) -> Option<Fault> {
        if self.shutdown {
            return Some(Fault::ShuttingDown);
        }
        if !self.is_configured(model) {
            return Some(Fault::ModelNotFound { model: model.to_string(), suggestions: Vec::new() });
        }
        self.reasons.get(model)?.refusal(model, wait)
    }

    /// The fault of a waiter whose deadline has passed.
    pub(in crate::fleet) fn deadline_fault(&self, model: &ModelName, wait: WaitDetails) -> Fault {
        match self.reasons.get(model) {
            Some(reason) => reason.deadline_fault(model, wait),
            None if !self.can_explain => {
                Fault::ModelNotReady { model: model.clone(), cause: FailureCause::Deadline, wait }
            }
            None if self.saturated.contains_key(model) => {
                Fault::QueueFull { message: format!("every awake engine of '{model}' is saturated"), wait }
            }
            None => Fault::QueueFull { message: format!("'{model}' is at its maxConcurrency"), wait },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        engine::{
            saturation_limit::{MAX_LIMIT_AGE, SaturationLimit},
            turn_clients::TurnClients,
        },
        fleet::{
            Fleet,
            event::{AdoptedEngine, Event, WaiterId},
            tests::adopted_engine,
        },
        model::{Accelerator, EngineId, EngineMemory, FleetConfig, FleetSettings, ModelSpec},
        sim::simulated_model,
        units::{Bytes, Generation},
    };

    const NOW: Tick = Tick(1_000_000);
    const GENERATION: Generation = Generation(1);

    /// A fleet with one engine, which has the only request that its saturation allows, and one waiter.
    fn saturated_fleet() -> Fleet {
        let memory = EngineMemory { awake: Bytes::gib(1), asleep: Bytes::mib(256), host: Bytes::gib(1) };
        let gpu = Accelerator::new("gpu-0".into(), Bytes::gib(24));
        let settings = FleetSettings { host_memory: Bytes::gib(64), ..FleetSettings::default() };
        let models = vec![ModelSpec { explicit_memory: true, ..simulated_model("m", memory) }];
        let configuration = Box::new(FleetConfig { settings, accelerators: vec![gpu], models });
        let accelerators = vec!["gpu-0".into()];
        let found = AdoptedEngine { accelerators, started: NOW, ..adopted_engine(None) };
        let engine = || EngineId::new("m".into(), 0);
        let until = NOW + MAX_LIMIT_AGE;
        let limit = SaturationLimit { leases: Some(1), until, kv_percent: Some(91), waiting: Some(12) };
        let waiter = Waiter {
            id: WaiterId(1),
            model: "m".into(),
            band: 0,
            key: String::new(),
            client: 0,
            arrived: NOW,
            deadline: NOW + Millis::secs(60),
            stream: true,
            required_engine: None,
        };
        let mut fleet = Fleet::new();
        for event in [
            Event::Configured { configuration },
            Event::Adopted { engine: engine(), generation: GENERATION, found },
            Event::AdoptionDone,
        ] {
            fleet.on(&event, NOW);
        }
        let plan = fleet.plan(NOW);
        fleet.issued(&plan.commands, NOW);
        for event in [
            Event::GateSampled {
                engine: engine(),
                generation: GENERATION,
                leases: 1,
                last_lease_end: Tick(0),
                last_byte: Tick(0),
                clients: TurnClients::default(),
                idle_gap: None,
            },
            Event::SaturationChanged { engine: engine(), generation: GENERATION, limit: Some(limit) },
            Event::Arrived { waiter },
        ] {
            fleet.on(&event, NOW);
        }
        fleet
    }

    #[test]
    fn verdicts_keep_the_saturated_engines_and_make_their_text_for_the_waiter_that_gets_it() {
        let fleet = saturated_fleet();
        let (model, demand) = (ModelName::from("m"), fleet.dispatch.demand());
        let builder = PlanBuilder::new(fleet.planner.clone(), &demand, fleet.dispatch.clients(), NOW);
        let verdicts = builder.verdicts();
        let kept: Option<&SaturatedEngines> = verdicts.saturated.get(&model);
        assert!(kept.is_some() && kept == builder.planner.saturated_engines(&model).as_ref());
        assert_eq!(
            verdicts.wait_details(&model).waited_for,
            "every awake engine is saturated: m#0 (KV cache 91 % used, 12 requests in its queue)"
        );
    }
}
