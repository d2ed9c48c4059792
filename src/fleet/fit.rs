//! Whether a model and all that it needs could be awake together, were everything else put away.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};

use super::{
    explain::Reason,
    placement::{Candidate, MOST},
    plan::Draft,
    portion::Portion,
};
use crate::model::{AcceleratorId, Accelerators, EngineId, ModelSpec};

/// So many ways of placing models beside each other are looked at; beyond, they are taken to fit.
const WAYS: u32 = 10_000;

/// What one model takes of each of its accelerators, and where it could be.
type Wanted = (Portion, Vec<Candidate>);
type Room<'a> = BTreeMap<&'a AcceleratorId, Portion>;

impl Draft<'_> {
    /// Whatever is put away, there is not enough for all of them at once.
    pub(super) fn never_fits_together(&self, id: &EngineId) -> Option<Reason> {
        let names = self.planner.needs.closure(&id.model).iter().chain([&id.model]);
        let specs: Vec<&ModelSpec> = names.filter_map(|name| self.planner.spec(name)).collect();
        let mut wanted: Vec<Wanted> =
            specs.iter().map(|spec| self.wanted_by_spec(spec)).collect::<Option<_>>()?;
        wanted.sort_by_key(|(need, places)| (places.len(), Reverse(need.bytes)));
        let there = self.there_is(&wanted);
        if fit(&wanted, &mut there.clone(), &mut WAYS.clone()) {
            return None;
        }
        let needs: Vec<String> =
            specs.iter().map(|spec| format!("{} needs {}", spec.name, want(spec))).collect();
        let rooms: Vec<String> = there.iter().map(|(a, all)| amount(*all, a)).collect();
        let text = format!(
            "it never fits beside all that it needs: {}; there is {}",
            needs.join(", "),
            rooms.join(", ")
        );
        let need = wanted.iter().map(|(need, _)| need.bytes).sum();
        let available = there.values().map(|all| all.bytes).sum();
        let mut reason = Reason::never(text, need, available);
        reason.named = specs.iter().map(|spec| spec.name.clone()).filter(|name| *name != id.model).collect();
        Some(reason)
    }

    /// `None`: it fits nowhere, which it says itself, or there are more ways than are known.
    fn wanted_by_spec(&self, spec: &ModelSpec) -> Option<Wanted> {
        let need = declared(spec);
        let accounts = &self.planner.ledger.accelerators;
        let usable = |a: &AcceleratorId| accounts.get(a).is_some_and(|a| a.could_hold(need));
        let places = self.places_for(spec, need, usable);
        (!places.is_empty() && places.len() < MOST).then_some((need, places))
    }

    /// All that any of them could be on, empty.
    fn there_is<'a>(&self, wanted: &'a [Wanted]) -> Room<'a> {
        let on: BTreeSet<&AcceleratorId> =
            wanted.iter().flat_map(|(_, places)| places).flat_map(|place| &place.accelerators).collect();
        let all = |a: &AcceleratorId| {
            let account = self.planner.ledger.accelerators.get(a)?;
            Some(Portion { bytes: account.capacity, units: account.units.unwrap_or(u32::MAX) })
        };
        on.into_iter().filter_map(|a| Some((a, all(a)?))).collect()
    }
}

fn declared(spec: &ModelSpec) -> Portion {
    let bytes = spec.accelerators.in_one_place(spec.memory.awake);
    Portion { bytes, units: spec.accelerators.units().unwrap_or(1) }
}

fn amount(of: Portion, on: &AcceleratorId) -> String {
    match of.units {
        u32::MAX => format!("{} on {on}", of.bytes),
        units => format!("{} and {units} accelerators in {on}", of.bytes),
    }
}

fn want(spec: &ModelSpec) -> String {
    let need = declared(spec);
    match &spec.accelerators {
        Accelerators::Of { pool, count } => amount(Portion { units: *count, ..need }, pool),
        Accelerators::Ids(ids) => {
            let names: Vec<&str> = ids.iter().map(AcceleratorId::as_str).collect();
            format!("{} on {}", need.bytes, names.join(" and "))
        }
        Accelerators::Count(0) => "nothing".to_owned(),
        Accelerators::Count(1) => format!("{} on one accelerator", need.bytes),
        Accelerators::Count(count) => format!("{} on each of {count} accelerators", need.bytes),
    }
}

/// All of them beside each other, somehow.
fn fit(wanted: &[Wanted], free: &mut Room<'_>, ways: &mut u32) -> bool {
    let Some(((need, places), rest)) = wanted.split_first() else { return true };
    for place in places {
        *ways = ways.saturating_sub(1);
        if *ways == 0 {
            return true;
        }
        let before = free.clone();
        let mut has_room = true;
        for on in &place.accelerators {
            let left = free.get(on).copied().unwrap_or_default();
            has_room &= left.covers(*need);
            if let Some(left) = free.get_mut(on) {
                *left = left.less(*need);
            }
        }
        if has_room && fit(rest, free, ways) {
            return true;
        }
        *free = before;
    }
    false
}
