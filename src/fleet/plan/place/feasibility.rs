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
            place::{PlacementCandidate, accelerator_sets::MAX_CANDIDATES},
        },
        state::ledger::{AcceleratorAccount, amount::ResourceAmount},
    },
    model::{AcceleratorId, AcceleratorRequirement, ModelName, ModelSpec},
    units::pluralize,
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
            self.main_spec(model)
                .filter(|spec| !self.could_ever_hold(spec))
                .map(|spec| self.misfit_text(spec))
        };
        let dependencies = self.dependencies.closure(model);
        let needed = |of| Some(format!("its dependency '{of}' can never start: {}", misfit(of)?));
        let closure_misfit =
            || if dependencies.is_empty() { None } else { self.closure_misfit_reason(model) };
        misfit(model)
            .or_else(|| dependencies.iter().find_map(needed))
            .or_else(|| closure_misfit().map(|reason| reason.text))
    }

    /// Why this model and its dependencies never fit at once; `None` if they do.
    pub(in crate::fleet) fn closure_misfit_reason(&self, model: &ModelName) -> Option<ModelReason> {
        let names = self.dependencies.closure(model).iter().chain([model]);
        let specs: Vec<&ModelSpec> = names.filter_map(|name| self.main_spec(name)).collect();
        let mut placement_needs: Vec<PlacementNeed> =
            specs.iter().map(|spec| self.placement_need(spec)).collect::<Option<_>>()?;
        placement_needs.sort_by_key(|(need, candidates)| (candidates.len(), Reverse(need.bytes)));
        let capacity = self.total_capacity(&placement_needs);
        if fits_together(&placement_needs, &mut capacity.clone(), &mut MAX_TRIED_ASSIGNMENTS.clone()) {
            return None;
        }
        let need_texts: Vec<String> =
            specs.iter().map(|spec| format!("{} needs {}", spec.name, self.need_text(spec))).collect();
        let capacity_texts: Vec<String> = capacity.iter().map(|(a, all)| self.amount_text(*all, a)).collect();
        let text = format!(
            "the model never fits together with its dependencies: {}; the capacity is {}",
            need_texts.join(", "),
            capacity_texts.join(", ")
        );
        let need = placement_needs.iter().map(|(need, _)| need.bytes).sum();
        let available = capacity.values().map(|all| all.bytes).sum();
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
        let candidates = self.candidates_for(spec, need, MAX_CANDIDATES, usable);
        (!candidates.is_empty() && candidates.len() < MAX_CANDIDATES).then_some((need, candidates))
    }

    /// Total capacity of all accelerators that any of the models could use.
    fn total_capacity<'a>(&self, placement_needs: &'a [PlacementNeed]) -> CapacityMap<'a> {
        let on: BTreeSet<&AcceleratorId> = placement_needs
            .iter()
            .flat_map(|(_, candidates)| candidates)
            .flat_map(|candidate| &candidate.accelerators)
            .collect();
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
            AcceleratorRequirement::Slots { pool, count } => {
                !self.node_sets(pool, *count as usize, 1, |id| self.could_hold(id, spec)).is_empty()
            }
            AcceleratorRequirement::Count(count) => {
                let count = *count as usize;
                self.single_accelerators().filter(|id| self.could_hold(id, spec)).take(count).count() == count
            }
        }
    }

    /// Whether the nodes that take new Pods could hold an engine of this model if everything else were evicted.
    pub(in crate::fleet) fn could_hold_on_open_nodes(&self, spec: &ModelSpec) -> bool {
        let AcceleratorRequirement::Slots { pool, count } = &spec.accelerators else { return true };
        let accounts = &self.ledger.accelerators;
        let could_start = |id: &AcceleratorId| accounts.is_open(id) && self.could_hold(id, spec);
        !self.node_sets(pool, *count as usize, 1, could_start).is_empty()
    }

    fn could_hold(&self, on: &AcceleratorId, spec: &ModelSpec) -> bool {
        self.ledger.accelerators.get(on).is_some_and(|account| account.could_hold(declared_amount(spec)))
    }

    /// Accelerators that are no pools, and in none.
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
                let units = units
                    .map(|units| format!(" and {}", pluralize(units, "accelerator")))
                    .unwrap_or_default();
                let count_text = pluralize(*count, "accelerator");
                format!(
                    "the model needs {} and {count_text} of {pool}, which has {largest}{units} in all",
                    need.bytes
                )
            }
            AcceleratorRequirement::Slots { pool, count } => self.slots_misfit_text(spec, pool, *count),
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
                let available = u32::try_from(self.single_accelerators().count()).unwrap_or(u32::MAX);
                if available < *count {
                    let is = if available == 1 { "is" } else { "are" };
                    return format!(
                        "the model needs {}, and there {is} {available}",
                        pluralize(*count, "accelerator")
                    );
                }
                let fit = self.single_accelerators().filter(|id| self.could_hold(id, spec)).count();
                let counts = match fit {
                    0 => String::new(),
                    fit => format!(" (required: {count}, large enough: {fit} of {available})"),
                };
                format!(
                    "the model needs {} on each accelerator{counts}: the largest has {largest} ({less})",
                    need.bytes
                )
            }
        }
    }

    /// Text on why no node of a pool has accelerators with slots that could hold the model.
    fn slots_misfit_text(&self, spec: &ModelSpec, pool: &AcceleratorId, count: u32) -> String {
        let (need, needed) = (declared_amount(spec), pluralize(count, "accelerator"));
        let most_on_a_node = |counts: &dyn Fn(&AcceleratorAccount) -> bool| {
            let mut by_node: BTreeMap<Option<&str>, u32> = BTreeMap::new();
            for (_, account) in self.ledger.accelerators.in_pool(pool).filter(|(_, a)| counts(a)) {
                *by_node.entry(account.node.as_deref()).or_default() += 1;
            }
            by_node.into_values().max().unwrap_or_default()
        };
        let most = most_on_a_node(&|account| account.configured);
        if most == 0 {
            return format!("the model needs {needed} of {pool}, and no node of it lists any");
        }
        if most < count {
            return format!(
                "the model needs {needed} of one node of {pool}, and no node has more than {most}"
            );
        }
        let fit = most_on_a_node(&|account| account.could_hold(need));
        if most_on_a_node(&|account| account.capacity >= need.bytes) >= count {
            let fit = if fit == 0 { "any".to_owned() } else { format!("more than {fit}") };
            return format!(
                "the model needs a slot on {needed} of one node of {pool}, and no node has slots on {fit}: the pool's \
                 resource must name the DeviceConfiguration that offers the accelerators"
            );
        }
        let counts = match fit {
            0 => String::new(),
            fit => format!(" (required: {count}, large enough on one node: {fit})"),
        };
        let largest = self.largest(spec);
        format!(
            "the model needs {} on each accelerator{counts}: the largest of {pool} has {largest} (grantable, after \
             headroom)",
            need.bytes
        )
    }

    /// Text on an amount of an account.
    fn amount_text(&self, amount: ResourceAmount, on: &AcceleratorId) -> String {
        let noun = self.ledger.accelerators.get(on).map_or("accelerator", AcceleratorAccount::unit_noun);
        match amount.units {
            u32::MAX => format!("{} on {on}", amount.bytes),
            units => format!("{} and {} in {on}", amount.bytes, pluralize(units, noun)),
        }
    }

    fn need_text(&self, spec: &ModelSpec) -> String {
        let need = declared_amount(spec);
        match &spec.accelerators {
            AcceleratorRequirement::InPool { pool, count } => {
                self.amount_text(ResourceAmount { units: *count, ..need }, pool)
            }
            AcceleratorRequirement::Slots { pool, count: 1 } => {
                format!("{} on one accelerator of {pool}", need.bytes)
            }
            AcceleratorRequirement::Slots { pool, count } => {
                format!("{} on each of {count} accelerators of one node of {pool}", need.bytes)
            }
            AcceleratorRequirement::Ids(ids) => {
                let names: Vec<&str> = ids.iter().map(AcceleratorId::as_str).collect();
                format!("{} on {}", need.bytes, names.join(" and "))
            }
            AcceleratorRequirement::Count(0) => "nothing".to_owned(),
            AcceleratorRequirement::Count(1) => format!("{} on one accelerator", need.bytes),
            AcceleratorRequirement::Count(count) => {
                format!("{} on each of {count} accelerators", need.bytes)
            }
        }
    }
}

fn declared_amount(spec: &ModelSpec) -> ResourceAmount {
    let bytes = spec.accelerators.bytes_per_account(spec.memory.awake);
    ResourceAmount { bytes, units: spec.accelerators.units().unwrap_or(1) }
}

/// Whether all of them fit beside each other in some assignment.
fn fits_together(
    placement_needs: &[PlacementNeed],
    free: &mut CapacityMap<'_>,
    attempts_left: &mut u32,
) -> bool {
    let Some(((need, candidates), rest)) = placement_needs.split_first() else { return true };
    for candidate in candidates {
        *attempts_left = attempts_left.saturating_sub(1);
        if *attempts_left == 0 {
            return true;
        }
        let before = free.clone();
        let mut has_room = true;
        for on in &candidate.accelerators {
            let remaining = free.get(on).copied().unwrap_or_default();
            has_room &= remaining.covers(*need);
            if let Some(remaining) = free.get_mut(on) {
                *remaining = remaining.saturating_sub(*need);
            }
        }
        if has_room && fits_together(rest, free, attempts_left) {
            return true;
        }
        *free = before;
    }
    false
}
