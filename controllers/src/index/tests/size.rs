//! Tests how much one change recomputes in a large cluster. The tests count work and measure no time.

use super::*;

const MODELS: usize = 2000;
const POOLS: usize = 200;
const NODES: usize = 1000;

fn name(kind: &str, n: usize) -> String {
    format!("{kind}-{n:04}")
}

fn of_pool(n: usize) -> Value {
    json!({"nodeSelector": {"inference-pool": name("pool", n % POOLS)}})
}

fn large() -> ClusterIndex {
    let mut index = ClusterIndex::new(SCOPE);
    (0..POOLS).for_each(|n| index.apply(pool(&name("pool", n), json!({}))));
    (0..NODES).for_each(|n| index.apply(node(&name("node", n), &name("pool", n % POOLS), json!("8"))));
    (0..MODELS).for_each(|n| index.apply(model(&name("model", n), of_pool(n))));
    index
}

/// Counts models with another converted object than before.
fn others(before: &Resolved, after: &Resolved) -> usize {
    let same = |(name, served): &(&ObjectName, &ServedModel)| {
        before.served.get(*name).is_some_and(|before| Arc::ptr_eq(&before.model, &served.model))
    };
    after.served.len() - after.served.iter().filter(same).count()
}

#[test]
fn a_change_of_one_model_reads_that_one_again_and_no_pool() {
    let mut index = large();
    let before = index.resolved();
    assert_eq!((before.served.len(), before.rejected.len()), (MODELS, 0));
    assert!(before.pools.values().all(|pool| pool.accelerators == 40 && pool.problem.is_none()));
    assert_eq!(index.conversions(), MODELS as u64);

    index.apply(model_at(
        &name("model", 7),
        crate::index::tests::with(of_pool(7), json!({"memory": "1Gi"})),
        2,
    ));
    let after = index.resolved();
    assert_eq!(index.conversions(), MODELS as u64 + 1);
    assert_eq!(others(&before, &after), 1);
    assert!(Arc::ptr_eq(&before.pools, &after.pools), "no node was looked at");

    // A pool's change resolves the pool again and converts no model.
    index.apply(pool_at(&name("pool", 3), json!({"maxPriority": -1}), 2));
    let third = index.resolved();
    assert_eq!((index.conversions(), others(&after, &third)), (MODELS as u64 + 1, 0));
    let capped = third.served.values().filter(|served| served.spec.priority == -1).count();
    assert_eq!(capped, MODELS / POOLS);
}

#[test]
fn what_changes_nothing_costs_nothing() {
    let mut index = large();
    let before = index.resolved();
    // Irrelevant changes: a written status, a kubelet's heartbeat, a stub's report that an engine fell asleep.
    let mut model = model_at(&name("model", 7), of_pool(7), 1);
    model.status = Some(InferenceModelStatus {
        ready: true,
        observed_generation: Some(1),
        ..InferenceModelStatus::default()
    });
    index.apply(model);
    let mut pool = pool_at(&name("pool", 7), json!({}), 1);
    pool.status = Some(AcceleratorPoolStatus { count: 3, ..AcceleratorPoolStatus::default() });
    index.apply(pool);
    index.apply(node(&name("node", 7), &name("pool", 7), json!("8")));
    let labels = json!({
        "inference-pool": name("pool", 7), "nvidia.com/gpu.memory": "81920", "warm.rouse.dev/0123456789abcdef": "rouse",
    });
    index.apply(labelled(&name("node", 7), labels, json!("8")));
    index.delete(&ObjectKey::Model(object("never-there")));
    assert!(Arc::ptr_eq(&before, &index.resolved()));
    assert_eq!(index.conversions(), MODELS as u64);
    assert!(index.model_status(&object(&name("model", 7))).unwrap().ready);
    assert_eq!(index.pool_status(&name("pool", 7)).unwrap().count, 3);
}
