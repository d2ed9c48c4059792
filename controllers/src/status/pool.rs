//! Computes the status of an AcceleratorPool: sums and condition. Only reservations change its ledger.

use rouse::units::{Bytes, Tick, pluralize};

use crate::{
    condition::{READY, condition},
    crd::{AcceleratorPoolStatus, Quantity},
    index::{ResolvedPool, list},
    ledger::update_sums,
};

/// Computes the wanted status, with the stored ledger.
#[must_use]
pub fn pool_status(
    pool: &ResolvedPool,
    stored: Option<&AcceleratorPoolStatus>,
    now: Tick,
) -> AcceleratorPoolStatus {
    let before = stored.map(|status| status.conditions.as_slice()).unwrap_or_default();
    let (ready, reason, message) = match &pool.problem {
        Some(problem) => (false, problem.reason(), problem.to_string()),
        None => (true, "Ready", capacity_summary(pool)),
    };
    let ledger = stored.map(|status| status.ledger.clone()).unwrap_or_default();
    let mut status = AcceleratorPoolStatus {
        observed_generation: pool.generation,
        nodes: pool.nodes,
        accelerators: pool.accelerators,
        total: pool.total.map(Quantity::from),
        conditions: vec![condition(READY, ready, reason, &message, pool.generation, before, now)],
        ledger,
        ..AcceleratorPoolStatus::default()
    };
    update_sums(&mut status);
    status
}

/// Whether the status is worth a write. Ignores the ledger and its sums, which reservations write.
#[must_use]
pub fn pool_differs(stored: Option<&AcceleratorPoolStatus>, desired: &AcceleratorPoolStatus) -> bool {
    let owned_fields = |status: &AcceleratorPoolStatus| {
        let AcceleratorPoolStatus { observed_generation, nodes, accelerators, .. } = *status;
        (observed_generation, nodes, accelerators, status.total.clone(), status.conditions.clone())
    };
    stored.is_none_or(|stored| owned_fields(stored) != owned_fields(desired))
}

fn capacity_summary(pool: &ResolvedPool) -> String {
    let slots = pool.slots.as_ref();
    let slots = slots.map(|slots| format!(" of {}", pluralize(slots.each, "slot"))).unwrap_or_default();
    let mut text = format!(
        "{} with {}{slots}, {} to grant",
        pluralize(pool.nodes, "node"),
        pluralize(pool.accelerators, "accelerator"),
        pool.total.unwrap_or(Bytes::ZERO)
    );
    if !pool.warnings.is_empty() {
        text.push_str(". Not counted: ");
        text.push_str(&list(pool.warnings.iter().cloned()));
    }
    text
}
