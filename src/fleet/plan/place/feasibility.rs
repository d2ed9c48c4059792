//! Whether a model, with all its dependencies, could be awake if everything else were evicted.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};

use crate::{
    fleet::{
        explain::ModelReason,
        plan::{
            Planner,
            place::{MAX_CANDIDATES, PlacementCandidate},
        },
        state::ledger::amount::ResourceAmount,
    },
    model::{AcceleratorId, AcceleratorRequirement, ModelName, ModelSpec},
};

/// Limit on tried placements of models beside each other; beyond it, they are assumed to fit.
const MAX_TRIED_ASSIGNMENTS: u32 = 10_000;

/// One model's need on each of its accelerators, and its candidates.
type PlacementNeed = (ResourceAmount, Vec<PlacementCandidate>);
type CapacityMap<'a> = BTreeMap<&'a AcceleratorId, ResourceAmount>;

impl Planner {
    /// Why this model can neither start nor wake as configured; `None` if it can.
    pub(in crate::fleet) fn impossible_reason(&self, model: &ModelName) -> Option<String> {
        self.dependencies.closure_error(model).map(str::to_owned).or_else(|| self.unplaceable_reason(model))
    }

    /// Why this model, alone or with its dependencies, fits nowhere whatever is evicted; `None` if it fits.
    pub(in crate::fleet) fn unplaceable_reason(&self, model: &ModelName) -> Option<String> {
        let misfit = |model: &ModelName| {
            self.spec(model).filter(|spec| !self.could_ever_hold(spec)).map(|spec| self.misfit_text(spec))
        };
        let needs = self.dependencies.closure(model);
        let needed = |of| Some(format!("its dependency '{of}' can never start: {}", misfit(of)?));
        let together = || if needs.is_empty() { None } else { self.closure_misfit_reason(model) };
        misfit(model)
            .or_else(|| needs.iter().find_map(needed))
            .or_else(|| together().map(|reason| reason.text))
    }

    /// Why this model and its dependencies never fit at once; `None` if they do.
    pub(in crate::fleet) fn closure_misfit_reason(&self, model: &ModelName) -> Option<ModelReason> {
        let names = self.dependencies.closure(model).iter().chain([model]);
        let specs: Vec<&ModelSpec> = names.filter_map(|name| self.spec(name)).collect();
        let mut wanted: Vec<PlacementNeed> =
            specs.iter().map(|spec| self.placement_need(spec)).collect::<Option<_>>()?;
        wanted.sort_by_key(|(need, places)| (places.len(), Reverse(need.bytes)));
        let there = self.total_capacity(&wanted);
        if fits_together(&wanted, &mut there.clone(), &mut MAX_TRIED_ASSIGNMENTS.clone()) {
            return None;
        }
        let needs: Vec<String> =
            specs.iter().map(|spec| format!("{} needs {}", spec.name, need_text(spec))).collect();
        let rooms: Vec<String> = there.iter().map(|(a, all)| amount_text(*all, a)).collect();
        let text = format!(
            "the model never fits together with its dependencies: {}; the capacity is {}",
            needs.join(", "),
            rooms.join(", ")
        );
        let need = wanted.iter().map(|(need, _)| need.bytes).sum();
        let available = there.values().map(|all| all.bytes).sum();
        let mut reason = ModelReason::unplaceable(text, need, available);
        reason.named_models =
            specs.iter().map(|spec| spec.name.clone()).filter(|name| name != model).collect();
        Some(reason)
    }

    /// Returns what the model needs and its candidates.
    ///
    /// `None` if the model fits nowhere, which has a reason of its own, or if it has more candidates than are listed.
    fn placement_need(&self, spec: &ModelSpec) -> Option<PlacementNeed> {
        let need = declared_amount(spec);
        let accounts = &self.ledger.accelerators;
        let usable = |a: &AcceleratorId| accounts.get(a).is_some_and(|a| a.could_hold(need));
        let places = self.candidates_for(spec, need, usable);
        (!places.is_empty() && places.len() < MAX_CANDIDATES).then_some((need, places))
    }

    /// Total capacity of all accelerators that any of the models could use.
    fn total_capacity<'a>(&self, wanted: &'a [PlacementNeed]) -> CapacityMap<'a> {
        let on: BTreeSet<&AcceleratorId> =
            wanted.iter().flat_map(|(_, places)| places).flat_map(|place| &place.accelerators).collect();
        let all = |a: &AcceleratorId| {
            let account = self.ledger.accelerators.get(a)?;
            Some(ResourceAmount { bytes: account.capacity, units: account.units.unwrap_or(u32::MAX) })
        };
        on.into_iter().filter_map(|a| Some((a, all(a)?))).collect()
    }

    /// Whether some accelerators could hold an engine of this model if everything else were evicted.
    pub(in crate::fleet) fn could_ever_hold(&self, spec: &ModelSpec) -> bool {
        match &spec.accelerators {
            accelerators if accelerators.is_none() => true,
            AcceleratorRequirement::Ids(ids) => ids.iter().all(|id| self.could_hold(id, spec)),
            AcceleratorRequirement::InPool { pool, .. } => self.could_hold(pool, spec),
            AcceleratorRequirement::Count(count) => {
                let count = *count as usize;
                self.single_accelerators().filter(|id| self.could_hold(id, spec)).take(count).count() == count
            }
        }
    }

    fn could_hold(&self, on: &AcceleratorId, spec: &ModelSpec) -> bool {
        self.ledger.accelerators.get(on).is_some_and(|account| account.could_hold(declared_amount(spec)))
    }

    /// Accelerators that are not pools.
    fn single_accelerators(&self) -> impl Iterator<Item = &AcceleratorId> {
        self.ledger.accelerators.iter().filter(|(_, account)| account.units.is_none()).map(|(id, _)| id)
    }

    /// Text on why no accelerator could hold the model.
    pub(in crate::fleet) fn misfit_text(&self, spec: &ModelSpec) -> String {
        let (need, largest) = (declared_amount(spec), self.largest(spec));
        let less = "grantable, after headroom";
        match &spec.accelerators {
            AcceleratorRequirement::InPool { pool, count } => {
                let units = self.ledger.accelerators.get(pool).and_then(|account| account.units);
                let units =
                    units.map(|units| format!(" and {}", accelerator_count_text(units))).unwrap_or_default();
                let wanted = accelerator_count_text(*count);
                format!(
                    "the model needs {} and {wanted} of {pool}, which has {largest}{units} in all",
                    need.bytes
                )
            }
            AcceleratorRequirement::Ids(ids) => match ids.iter().find(|id| !self.could_hold(id, spec)) {
                Some(id) => match self.ledger.accelerators.get(id) {
                    Some(account) => {
                        format!(
                            "the model needs {} on {id}, which has {} ({less})",
                            need.bytes, account.capacity
                        )
                    }
                    None => format!("the model needs the accelerator {id}, which does not exist"),
                },
                None => format!("the model needs {} on each of its accelerators", need.bytes),
            },
            AcceleratorRequirement::Count(count) => {
                let there = u32::try_from(self.single_accelerators().count()).unwrap_or(u32::MAX);
                if there < *count {
                    let is = if there == 1 { "is" } else { "are" };
                    return format!(
                        "the model needs {}, and there {is} {there}",
                        accelerator_count_text(*count)
                    );
                }
                let fit = self.single_accelerators().filter(|id| self.could_hold(id, spec)).count();
                let few = match fit {
                    0 => String::new(),
                    fit => format!(" (required: {count}, large enough: {fit} of {there})"),
                };
                format!(
                    "the model needs {} on each accelerator{few}: the largest has {largest} ({less})",
                    need.bytes
                )
            }
        }
    }
}

/// A number of accelerators as text.
fn accelerator_count_text(count: u32) -> String {
    format!("{count} accelerator{}", if count == 1 { "" } else { "s" })
}

fn declared_amount(spec: &ModelSpec) -> ResourceAmount {
    let bytes = spec.accelerators.bytes_per_account(spec.memory.awake);
    ResourceAmount { bytes, units: spec.accelerators.units().unwrap_or(1) }
}

fn amount_text(of: ResourceAmount, on: &AcceleratorId) -> String {
    match of.units {
        u32::MAX => format!("{} on {on}", of.bytes),
        units => format!("{} and {} in {on}", of.bytes, accelerator_count_text(units)),
    }
}

fn need_text(spec: &ModelSpec) -> String {
    let need = declared_amount(spec);
    match &spec.accelerators {
        AcceleratorRequirement::InPool { pool, count } => {
            amount_text(ResourceAmount { units: *count, ..need }, pool)
        }
        AcceleratorRequirement::Ids(ids) => {
            let names: Vec<&str> = ids.iter().map(AcceleratorId::as_str).collect();
            format!("{} on {}", need.bytes, names.join(" and "))
        }
        AcceleratorRequirement::Count(0) => "nothing".to_owned(),
        AcceleratorRequirement::Count(1) => format!("{} on one accelerator", need.bytes),
        AcceleratorRequirement::Count(count) => format!("{} on each of {count} accelerators", need.bytes),
    }
}

/// Whether all of them fit beside each other in some assignment.
fn fits_together(wanted: &[PlacementNeed], free: &mut CapacityMap<'_>, ways: &mut u32) -> bool {
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
                *left = left.saturating_sub(*need);
            }
        }
        if has_room && fits_together(rest, free, ways) {
            return true;
        }
        *free = before;
    }
    false
}
