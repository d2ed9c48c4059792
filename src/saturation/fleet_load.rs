//! What the fleet knows about one model at one moment: the state that an autoscaler is given.

use std::{collections::BTreeMap, net::SocketAddr};

use super::{RefusalCause, VariantState};
use crate::{
    engine::{Engine, state::LifecycleState},
    fleet::{Fleet, Plan, report::ReplicaWait},
    model::{EngineId, ModelName, ModelSpec, VariantName},
    units::{Bytes, Generation, Tick},
};

/// Engines, waiting requests and targets of one model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FleetLoad {
    pub awake: Vec<AwakeEngine>,
    pub variants: BTreeMap<VariantName, VariantEngines>,
    /// Requests that wait at all gateways.
    pub parked: u32,
}

/// An engine that serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AwakeEngine {
    pub id: EngineId,
    pub generation: Generation,
    pub address: Option<SocketAddr>,
    /// When it became awake.
    pub since: Tick,
}

/// The engines of one variant, in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VariantEngines {
    /// Awake, starting or waking, or about to.
    pub current: u32,
    /// Those of `current` that do not serve yet.
    pub pending: u32,
    pub asleep: u32,
    /// The target in effect, within the bounds of the configuration; `None` without a target.
    pub target: Option<u32>,
    /// Why the next engine does not come; `None`: nothing is known against it.
    pub refused: Option<RefusalCause>,
    /// Memory that may still be reserved where its engines may run.
    pub free: Bytes,
}

impl FleetLoad {
    /// Reads the model; `None` if the fleet does not have it.
    #[must_use]
    pub fn of(fleet: &Fleet, plan: &Plan, model: &ModelName) -> Option<Self> {
        let spec = fleet.spec(model)?;
        let serving = fleet.engines_of(model).filter(|engine| engine.state == LifecycleState::Awake);
        let awake: Vec<AwakeEngine> = serving.map(AwakeEngine::of).collect();
        let reports = fleet.variants(plan, model).into_iter();
        let variants = reports.map(|(variant, report)| {
            let serving = awake.iter().filter(|engine| engine.id.variant == variant).count();
            let serving = u32::try_from(serving).unwrap_or(u32::MAX);
            let free = spec.for_variant(&variant).map(|spec| fleet.free_memory(&spec.accelerators));
            let engines = VariantEngines {
                current: report.current,
                pending: report.current.saturating_sub(serving),
                asleep: report.asleep,
                target: report.target,
                refused: report.wait.as_ref().and_then(refusal),
                free: free.unwrap_or_default(),
            };
            (variant, engines)
        });
        let variants = variants.collect();
        Some(Self { awake, variants, parked: fleet.waiting_everywhere(model) })
    }

    /// Number of engines of all variants.
    #[must_use]
    pub fn current(&self) -> u32 {
        self.variants.values().fold(0, |sum, variant| sum.saturating_add(variant.current))
    }

    /// Returns the state of a variant, whose cost and type of accelerators the fleet does not know.
    ///
    /// `spec`: that of the variant.
    #[must_use]
    pub fn variant_state(&self, variant: &VariantName, spec: &ModelSpec) -> VariantState {
        let engines = self.variants.get(variant).copied().unwrap_or_default();
        VariantState {
            variant: variant.clone(),
            current: engines.current,
            pending: engines.pending,
            asleep: engines.asleep,
            min: spec.min_replicas,
            max: Some(spec.replicas),
            gpus: spec.accelerators.count(),
            ..VariantState::default()
        }
    }
}

const fn refusal(wait: &ReplicaWait) -> Option<RefusalCause> {
    match wait {
        // No memory would help it.
        ReplicaWait { failed: true, .. } => Some(RefusalCause::StartFailed),
        ReplicaWait { insufficient_memory: true, .. } => Some(RefusalCause::Memory),
        ReplicaWait { .. } => None,
    }
}

impl AwakeEngine {
    fn of(engine: &Engine) -> Self {
        let Engine { id, generation, address, since, .. } = engine;
        Self { id: id.clone(), generation: *generation, address: *address, since: *since }
    }
}
