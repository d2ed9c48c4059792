//! What each revision of a pool must hold during a rollout.

use std::collections::BTreeSet;

use rouse_controllers::crd::AcceleratorPool;

use super::{
    objects::{ENGINES, MODELS_PER_POOL},
    rollout::is_rolled,
};
use crate::{crowd, support::check_ledger};

/// A model's name and the number of its engine.
type EngineKey = (String, u32);

/// Asserts that each revision has one reservation for each engine that no rollout stops, and none twice, and that the
/// last one has all engines of the pool's models.
pub(super) fn check_pool(pool: usize, revisions: &[AcceleratorPool]) {
    check_ledger(revisions);
    let first = pool * MODELS_PER_POOL;
    let models = first..first + MODELS_PER_POOL;
    let steady = engines_of(models.clone().filter(|model| !is_rolled(*model)));
    let mut reserved = BTreeSet::new();
    for revision in revisions {
        let version = revision.metadata.resource_version.as_deref().unwrap_or_default();
        let reservations = &revision.status.as_ref().unwrap().ledger.reservations;
        reserved = reservations.iter().map(|own| (own.model.name.clone(), own.replica)).collect();
        assert_eq!(
            reserved.len(),
            reservations.len(),
            "pool {pool}, {version}: an engine has two reservations"
        );
        let lost: Vec<&EngineKey> = steady.difference(&reserved).collect();
        assert!(lost.is_empty(), "pool {pool}, {version}: {lost:?} have no reservations");
    }
    let lost: Vec<EngineKey> = engines_of(models).difference(&reserved).cloned().collect();
    assert!(lost.is_empty(), "pool {pool} in the end: {lost:?} have no reservations");
}

fn engines_of(models: impl Iterator<Item = usize>) -> BTreeSet<EngineKey> {
    models.flat_map(|model| (0..ENGINES).map(move |engine| (crowd::model(model), engine))).collect()
}
