//! Places models in pools.
//!
//! A model whose pool has a problem is still served: its running engines go on, and its clients wait and learn why.
//! Dropping it because of one wrong label would end in seconds what took minutes to load.

use std::{collections::BTreeMap, sync::Arc};

use rouse::{
    model::{AcceleratorRequirement, ModelName, ModelSpec},
    pairing::ids::ProviderMode,
};

use super::{
    model_entry::ModelEntry,
    pool::PoolEntry,
    pool_membership::PoolMembership,
    resolved::{PoolProblem, RejectedModel, Resolved, ResolvedPool, ServedModel, list},
    selectors::Selectors,
};
use crate::{
    conflicts::{self, ModelClaim},
    convert::{self, ConversionPolicy, ModelHosting, ModelVariant},
    crd::ledger::ObjectName,
    rejection::{Rejection, Rejections},
};

/// Places each model by itself, then checks the models against each other.
pub(super) fn resolve(
    models: &BTreeMap<ObjectName, ModelEntry>,
    pools: &BTreeMap<String, PoolEntry>,
    membership: &PoolMembership,
    policy: ConversionPolicy,
) -> Resolved {
    let selectors = Selectors::new(pools.iter().map(|(name, entry)| (name.as_str(), &entry.selector)));
    let placer = Placer { selectors, entries: pools, pools: &membership.pools, policy };
    let placed: Vec<_> = models.values().map(|entry| placer.model(entry)).collect();
    let claim = |(entry, placed): (&ModelEntry, &Result<_, _>)| ModelClaim {
        sound: placed.is_ok(),
        ..entry.claim.clone()
    };
    let claims: Vec<_> = models.values().zip(&placed).map(claim).collect();
    let mut among_others = conflicts::find_conflicts(&claims);
    let mut resolved = Resolved {
        pools: Arc::clone(&membership.pools),
        nodes: Arc::clone(&membership.nodes),
        ..Resolved::default()
    };
    for ((object, entry), placed) in models.iter().zip(placed) {
        let refused = match (placed, among_others.remove(object)) {
            (Ok(served), None) => {
                resolved.objects.insert(served.spec.name.clone(), object.clone());
                resolved.served.insert(object.clone(), served);
                continue;
            }
            (Ok(_), Some(refusal)) => refusal.into(),
            (Err(refused), None) => refused,
            (Err(Rejections(mut all)), Some(refusal)) => {
                all.push(refusal);
                Rejections(all)
            }
        };
        let (uid, generation) = (entry.version.uid.clone(), entry.version.generation);
        resolved.rejected.insert(object.clone(), RejectedModel { uid, generation, rejections: refused });
    }
    name_dependencies(&mut resolved);
    resolved
}

/// Fills in the dependencies of served models by model name.
///
/// Objects refer to objects, while decisions use model names. All dependencies of a served model are served.
fn name_dependencies(resolved: &mut Resolved) {
    let named = |resolved: &Resolved, served: &ServedModel| -> Vec<ModelName> {
        let needed = served.model.dependencies.iter();
        needed.filter_map(|object| Some(resolved.served.get(object)?.spec.name.clone())).collect()
    };
    let needing = resolved.served.iter().filter(|(_, served)| !served.model.dependencies.is_empty());
    let all: Vec<_> = needing.map(|(object, served)| (object.clone(), named(resolved, served))).collect();
    for (object, dependencies) in all {
        if let Some(served) = resolved.served.get_mut(&object) {
            served.spec.dependencies = dependencies;
        }
    }
}

struct Placer<'a> {
    selectors: Selectors<'a>,
    entries: &'a BTreeMap<String, PoolEntry>,
    pools: &'a BTreeMap<String, ResolvedPool>,
    policy: ConversionPolicy,
}

/// The chosen variant and its pool.
struct VariantPlacement<'a> {
    variant: usize,
    name: &'a str,
    pool: Option<&'a ResolvedPool>,
    blocked_by: Option<String>,
}

impl Placer<'_> {
    fn model(&self, entry: &ModelEntry) -> Result<ServedModel, Rejections> {
        let model = entry.converted.as_ref().map_err(Clone::clone)?;
        match &model.hosting {
            ModelHosting::External(_) => external(entry, model),
            ModelHosting::DualPods(_) => {
                check_dual_pods_mode(self.policy.dual_pods, model)?;
                let served = self.run(entry, model)?;
                // Pairing puts these engines to sleep while the model has no requester Pod, so to the model they only
                // start and stop.
                let engine = rouse_config::EngineConfig {
                    sleep: rouse_config::SleepApi::None,
                    ..(*served.engine).clone()
                };
                let spec = ModelSpec { can_sleep: false, ..served.spec };
                Ok(ServedModel { engine: Arc::new(engine), spec, ..served })
            }
            ModelHosting::Deployment(_) => self.run(entry, model),
        }
    }

    fn run(
        &self,
        entry: &ModelEntry,
        model: &Arc<convert::ConvertedModel>,
    ) -> Result<ServedModel, Rejections> {
        let placement = self.place(model)?;
        let variant = model.variants.get(placement.variant).ok_or_else(nothing_to_run)?;
        Ok(served(entry, model, variant, &placement))
    }

    /// Picks the cheapest variant that fits a pool, or returns the rejection of the cheapest.
    fn place(&self, model: &convert::ConvertedModel) -> Result<VariantPlacement<'_>, Rejections> {
        let mut why = None;
        for (index, variant) in model.variants.iter().enumerate() {
            match self.variant(model, index, variant) {
                Ok(placement) => return Ok(placement),
                Err(refusal) => why = why.or(Some(refusal)),
            }
        }
        Err(why.map_or_else(nothing_to_run, Rejections::from))
    }

    fn variant(
        &self,
        model: &convert::ConvertedModel,
        index: usize,
        variant: &ModelVariant,
    ) -> Result<VariantPlacement<'_>, Rejection> {
        let found = self.selectors.matching_pools(&variant.node_selector);
        let (name, waits) = match found.as_slice() {
            [] => return Err(self.no_pool(variant)),
            [name] => (*name, None),
            several => {
                let named = || list(several.iter().map(|name| format!("'{name}'")));
                let oldest = self.oldest(several).ok_or_else(|| Rejection::SeveralPools(named()))?;
                (
                    oldest,
                    Some(format!("the model's nodeSelector matches the pools {}, which overlap", named())),
                )
            }
        };
        let pool = self.pools.get(name);
        let object = &model.object;
        if let Some(terms) = pool.and_then(|pool| pool.terms.as_ref()) {
            if !terms.allows(&object.namespace) {
                let (pool, namespace) = (name.to_owned(), object.namespace.clone());
                return Err(Rejection::Namespace { pool, namespace });
            }
            if let Some(field) = keep_awake_field(&variant.spec).filter(|_| !terms.pinnable) {
                return Err(Rejection::Pinned { pool: name.to_owned(), field });
            }
        }
        let problem = pool.and_then(|pool| pool.problem.as_ref());
        let waits = problem.map(|problem| match waits {
            Some(waits) => format!("{waits}: {problem}"),
            None => format!("the pool '{name}' is not ready: {problem}"),
        });
        Ok(VariantPlacement { variant: index, name, pool, blocked_by: waits })
    }

    /// Picks the oldest of overlapping pools, since running engines have their reservations there.
    fn oldest<'b>(&self, pools: &[&'b str]) -> Option<&'b str> {
        let overlaps = |name: &str| {
            let problem = self.pools.get(name).and_then(|pool| pool.problem.as_ref());
            matches!(problem, Some(PoolProblem::Overlap(with)) if pools.iter().any(|other| with.contains_key(*other)))
        };
        let age = |name: &str| {
            let created = self.entries.get(name).and_then(|entry| entry.created);
            (created.is_none(), created, name.to_owned())
        };
        pools.iter().copied().filter(|name| overlaps(name)).min_by_key(|name| age(name))
    }

    fn no_pool(&self, variant: &ModelVariant) -> Rejection {
        let pools = self.entries.iter();
        let pools = pools.map(|(name, entry)| format!("'{name}' ({})", pairs(&entry.selector)));
        Rejection::NoPool { wanted: pairs(&variant.node_selector), pools: list(pools) }
    }
}

/// Checks that this gateway serves requesters of such a model.
fn check_dual_pods_mode(
    mode: Option<ProviderMode>,
    model: &convert::ConvertedModel,
) -> Result<(), Rejections> {
    let configured = matches!(&model.hosting, ModelHosting::DualPods(pods) if pods.has_server_config());
    let text = match mode {
        Some(_) if configured => return Ok(()),
        None => "this gateway does not serve mode dualPods: set kubernetes.dualPods in its configuration",
        Some(ProviderMode::Sleep | ProviderMode::Launcher)
            if model.engine.sleep != rouse_config::SleepApi::Vllm =>
        {
            "in mode dualPods the engine must be able to sleep: use vllm, with --enable-sleep-mode in its command"
        }
        Some(ProviderMode::Sleep | ProviderMode::Launcher | ProviderMode::Plain) => return Ok(()),
    };
    Err(Rejection::Unsupported(text).into())
}

/// Returns the spec field that keeps engines awake without requests, if any.
const fn keep_awake_field(spec: &ModelSpec) -> Option<&'static str> {
    match spec {
        ModelSpec { pinned: true, .. } => Some("pinned"),
        ModelSpec { min_replicas: 1.., .. } => Some("minReplicas"),
        _ => None,
    }
}

fn pairs(labels: &BTreeMap<String, String>) -> String {
    let pairs: Vec<_> = labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
    if pairs.is_empty() { "no labels".to_owned() } else { pairs.join(",") }
}

/// Error for a model without variants, which the conversion never returns.
fn nothing_to_run() -> Rejections {
    Rejection::Spec("the model has no variant to run".to_owned()).into()
}

fn external(entry: &ModelEntry, model: &Arc<convert::ConvertedModel>) -> Result<ServedModel, Rejections> {
    let variant = model.variants.first().ok_or_else(nothing_to_run)?;
    Ok(ServedModel {
        uid: entry.version.uid.clone(),
        generation: entry.version.generation,
        model: Arc::clone(model),
        variant: 0,
        spec: variant.spec.clone(),
        engine: Arc::clone(&model.engine),
        pool: None,
        quota: None,
        blocked_by: None,
        notes: Vec::new(),
    })
}

fn served(
    entry: &ModelEntry,
    model: &Arc<convert::ConvertedModel>,
    variant: &ModelVariant,
    placement: &VariantPlacement<'_>,
) -> ServedModel {
    let terms = placement.pool.and_then(|pool| pool.terms.as_deref());
    let quota = terms.and_then(|terms| terms.quota(&model.object.namespace));
    let most = terms.and_then(|terms| terms.max_priority).unwrap_or(i32::MAX);
    let alone = terms.is_some_and(|terms| terms.slots == 1);
    let spec = on_pool(&variant.spec, placement.name, alone);
    let spec = ModelSpec { priority: spec.priority.min(most), ..spec };
    let mut notes = Vec::new();
    if model.variants.len() > 1 {
        notes.push(format!(
            "this version runs only one of the {} variants, the cheapest that a pool accepts: '{}'",
            model.variants.len(),
            variant.name
        ));
    }
    if spec.priority < variant.spec.priority {
        notes.push(format!(
            "the priority is limited to {most}, the highest that the pool '{}' allows",
            placement.name
        ));
    }
    let engine = if model.engine.fingerprint == spec.fingerprint {
        Arc::clone(&model.engine)
    } else {
        Arc::new(rouse_config::EngineConfig { fingerprint: spec.fingerprint, ..(*model.engine).clone() })
    };
    ServedModel {
        uid: entry.version.uid.clone(),
        generation: entry.version.generation,
        model: Arc::clone(model),
        variant: placement.variant,
        spec,
        engine,
        pool: Some(placement.name.to_owned()),
        quota,
        blocked_by: placement.blocked_by.clone(),
        notes,
    }
}

/// Assigns a spec to its pool.
///
/// The decisions treat the pool as one accelerator with the memory of all. `alone`: each engine has its accelerators to
/// itself.
fn on_pool(spec: &ModelSpec, pool: &str, alone: bool) -> ModelSpec {
    ModelSpec {
        accelerators: AcceleratorRequirement::InPool { pool: pool.into(), count: spec.accelerators.count() },
        explicit_memory: spec.explicit_memory || alone,
        ..spec.clone()
    }
}
