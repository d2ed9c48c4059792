//! Where models go, and what their pools make of them.
//!
//! A model whose pool is in trouble is still served: its engines that run go on, its clients wait and are told why. To
//! drop it would end in seconds, for one wrong label, what took minutes to load.

use std::{collections::BTreeMap, sync::Arc};

use rouse::{
    model::{Accelerators, ModelName, ModelSpec},
    pairing::ids::Mode,
};

use super::{
    entry::ModelEntry,
    ground::Ground,
    pool::PoolEntry,
    selectors::Selectors,
    settled::{Pool, Rejected, Served, Settled, Trouble, list},
};
use crate::{
    config,
    controllers::{
        convert::{self, Policy, Run, Variant},
        crd::ledger::ObjectName,
        refusal::{Refusal, Refused},
        settle::{self, Claim},
    },
};

/// Each model by itself on the ground, then beside the others.
pub(super) fn settle(
    models: &BTreeMap<ObjectName, ModelEntry>,
    pools: &BTreeMap<String, PoolEntry>,
    ground: &Ground,
    policy: Policy,
) -> Settled {
    let selectors = Selectors::new(pools.iter().map(|(name, entry)| (name.as_str(), &entry.selector)));
    let placer = Placer { selectors, entries: pools, pools: &ground.pools, policy };
    let placed: Vec<_> = models.values().map(|entry| placer.model(entry)).collect();
    let claim = |(entry, placed): (&ModelEntry, &Result<_, _>)| Claim {
        sound: placed.is_ok(),
        ..entry.claim.clone()
    };
    let claims: Vec<_> = models.values().zip(&placed).map(claim).collect();
    let mut among_others = settle::settle(&claims);
    let mut settled =
        Settled { pools: Arc::clone(&ground.pools), nodes: Arc::clone(&ground.nodes), ..Settled::default() };
    for ((object, entry), placed) in models.iter().zip(placed) {
        let refused = match (placed, among_others.remove(object)) {
            (Ok(served), None) => {
                settled.objects.insert(served.spec.name.clone(), object.clone());
                settled.served.insert(object.clone(), served);
                continue;
            }
            (Ok(_), Some(refusal)) => refusal.into(),
            (Err(refused), None) => refused,
            (Err(Refused(mut all)), Some(refusal)) => {
                all.push(refusal);
                Refused(all)
            }
        };
        let (uid, generation) = (entry.version.uid.clone(), entry.version.generation);
        settled.rejected.insert(object.clone(), Rejected { uid, generation, refused });
    }
    name_dependencies(&mut settled);
    settled
}

/// Objects need objects, and decisions go by the names of models. All that a served model needs are served.
fn name_dependencies(settled: &mut Settled) {
    let named = |settled: &Settled, served: &Served| -> Vec<ModelName> {
        let needed = served.model.dependencies.iter();
        needed.filter_map(|object| Some(settled.served.get(object)?.spec.name.clone())).collect()
    };
    let needing = settled.served.iter().filter(|(_, served)| !served.model.dependencies.is_empty());
    let all: Vec<_> = needing.map(|(object, served)| (object.clone(), named(settled, served))).collect();
    for (object, dependencies) in all {
        if let Some(served) = settled.served.get_mut(&object) {
            served.spec.dependencies = dependencies;
        }
    }
}

struct Placer<'a> {
    selectors: Selectors<'a>,
    entries: &'a BTreeMap<String, PoolEntry>,
    pools: &'a BTreeMap<String, Pool>,
    policy: Policy,
}

/// Where one variant goes.
struct Place<'a> {
    variant: usize,
    name: &'a str,
    pool: Option<&'a Pool>,
    waits: Option<String>,
}

impl Placer<'_> {
    fn model(&self, entry: &ModelEntry) -> Result<Served, Refused> {
        let model = entry.made.as_ref().map_err(Clone::clone)?;
        match &model.run {
            Run::External(_) => external(entry, model),
            Run::DualPods(_) => {
                asks(self.policy.dual_pods, model)?;
                let served = self.run(entry, model)?;
                // Its engines sleep while it has no Pod: who decides about Pods stops and starts it.
                let engine = config::Model { sleep: config::SleepApi::None, ..(*served.engine).clone() };
                let spec = ModelSpec { can_sleep: false, ..served.spec };
                Ok(Served { engine: Arc::new(engine), spec, ..served })
            }
            Run::Deployment(_) => self.run(entry, model),
        }
    }

    fn run(&self, entry: &ModelEntry, model: &Arc<convert::Model>) -> Result<Served, Refused> {
        let place = self.place(model)?;
        let variant = model.variants.get(place.variant).ok_or_else(nothing_to_run)?;
        Ok(served(entry, model, variant, &place))
    }

    /// The cheapest variant that a pool takes. When none is taken, why the cheapest is not.
    fn place(&self, model: &convert::Model) -> Result<Place<'_>, Refused> {
        let mut why = None;
        for (index, variant) in model.variants.iter().enumerate() {
            match self.variant(model, index, variant) {
                Ok(place) => return Ok(place),
                Err(refusal) => why = why.or(Some(refusal)),
            }
        }
        Err(why.map_or_else(nothing_to_run, Refused::from))
    }

    fn variant(&self, model: &convert::Model, index: usize, variant: &Variant) -> Result<Place<'_>, Refusal> {
        let found = self.selectors.within(&variant.node_selector);
        let (name, waits) = match found.as_slice() {
            [] => return Err(self.no_pool(variant)),
            [name] => (*name, None),
            several => {
                let named = || list(several.iter().map(|name| format!("'{name}'")));
                let oldest = self.oldest(several).ok_or_else(|| Refusal::SeveralPools(named()))?;
                (oldest, Some(format!("its nodeSelector is of the pools {}, which overlap", named())))
            }
        };
        let pool = self.pools.get(name);
        let object = &model.object;
        if let Some(terms) = pool.and_then(|pool| pool.terms.as_ref()) {
            if !terms.allows(&object.namespace) {
                let (pool, namespace) = (name.to_owned(), object.namespace.clone());
                return Err(Refusal::Namespace { pool, namespace });
            }
            if let Some(field) = kept_by(&variant.spec).filter(|_| !terms.pinnable) {
                return Err(Refusal::Pinned { pool: name.to_owned(), field });
            }
        }
        let trouble = pool.and_then(|pool| pool.trouble.as_ref());
        let waits = trouble.map(|trouble| match waits {
            Some(waits) => format!("{waits}: {trouble}"),
            None => format!("the pool '{name}' is not ready: {trouble}"),
        });
        Ok(Place { variant: index, name, pool, waits })
    }

    /// Of pools that overlap, the one that was there first: what runs is booked there.
    fn oldest<'b>(&self, pools: &[&'b str]) -> Option<&'b str> {
        let overlaps = |name: &str| {
            let trouble = self.pools.get(name).and_then(|pool| pool.trouble.as_ref());
            matches!(trouble, Some(Trouble::Overlap(with)) if pools.iter().any(|other| with.contains_key(*other)))
        };
        let age = |name: &str| {
            let created = self.entries.get(name).and_then(|entry| entry.created);
            (created.is_none(), created, name.to_owned())
        };
        pools.iter().copied().filter(|name| overlaps(name)).min_by_key(|name| age(name))
    }

    fn no_pool(&self, variant: &Variant) -> Refusal {
        let pools = self.entries.iter();
        let pools = pools.map(|(name, entry)| format!("'{name}' ({})", pairs(&entry.selector)));
        Refusal::NoPool { wanted: pairs(&variant.node_selector), pools: list(pools) }
    }
}

/// Whether somebody here serves the requesters of such a model.
fn asks(mode: Option<Mode>, model: &convert::Model) -> Result<(), Refused> {
    let configured = matches!(&model.run, Run::DualPods(pods) if pods.is_configured());
    let text = match mode {
        Some(_) if configured => return Ok(()),
        None => "nobody here serves mode dualPods: set kubernetes.dualPods in the gateway's configuration",
        Some(Mode::Launcher) => "mode dualPods goes with kubernetes.dualPods.mode sleep or plain",
        Some(Mode::Sleep) if model.engine.sleep != config::SleepApi::Vllm => {
            "in mode dualPods an engine must be able to sleep: a vllm whose command has --enable-sleep-mode"
        }
        Some(Mode::Sleep | Mode::Plain) => return Ok(()),
    };
    Err(Refusal::Unsupported(text).into())
}

/// What of a model's spec keeps engines of it awake without requests, if anything does.
const fn kept_by(spec: &ModelSpec) -> Option<&'static str> {
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

/// The conversion gives every model a variant.
fn nothing_to_run() -> Refused {
    Refusal::Spec("there is no variant to run".to_owned()).into()
}

fn external(entry: &ModelEntry, model: &Arc<convert::Model>) -> Result<Served, Refused> {
    let variant = model.variants.first().ok_or_else(nothing_to_run)?;
    Ok(Served {
        uid: entry.version.uid.clone(),
        generation: entry.version.generation,
        model: Arc::clone(model),
        variant: 0,
        spec: variant.spec.clone(),
        engine: Arc::clone(&model.engine),
        pool: None,
        quota: None,
        waits: None,
        notes: Vec::new(),
    })
}

fn served(entry: &ModelEntry, model: &Arc<convert::Model>, variant: &Variant, place: &Place<'_>) -> Served {
    let terms = place.pool.and_then(|pool| pool.terms.as_deref());
    let quota = terms.and_then(|terms| terms.quota(&model.object.namespace));
    let most = terms.and_then(|terms| terms.max_priority).unwrap_or(i32::MAX);
    let alone = terms.is_some_and(|terms| terms.slots == 1);
    let spec = on_pool(&variant.spec, place.name, alone);
    let spec = ModelSpec { priority: spec.priority.min(most), ..spec };
    let mut notes = Vec::new();
    if model.variants.len() > 1 {
        notes.push(format!(
            "of its {} variants this version runs one, the cheapest that a pool takes: '{}'",
            model.variants.len(),
            variant.name
        ));
    }
    if spec.priority < variant.spec.priority {
        notes.push(format!("its priority is {most}, the highest that the pool '{}' allows", place.name));
    }
    let engine = if model.engine.fingerprint == spec.fingerprint {
        Arc::clone(&model.engine)
    } else {
        Arc::new(config::Model { fingerprint: spec.fingerprint, ..(*model.engine).clone() })
    };
    Served {
        uid: entry.version.uid.clone(),
        generation: entry.version.generation,
        model: Arc::clone(model),
        variant: place.variant,
        spec,
        engine,
        pool: Some(place.name.to_owned()),
        quota,
        waits: place.waits.clone(),
        notes,
    }
}

/// The pool is one accelerator to the decisions, with the memory of all that are behind it. `alone`: an engine has its
/// accelerators to itself.
fn on_pool(spec: &ModelSpec, pool: &str, alone: bool) -> ModelSpec {
    ModelSpec {
        accelerators: Accelerators::Of { pool: pool.into(), count: spec.accelerators.count() },
        explicit_memory: spec.explicit_memory || alone,
        ..spec.clone()
    }
}
