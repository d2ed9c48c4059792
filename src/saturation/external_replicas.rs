//! Distributes the number of engines that another autoscaler asks for over the variants of a model.
//!
//! The subresource `scale` has one number for the whole model. As few variants change as possible: more engines are of
//! the cheapest variant that may have more, and fewer are taken from the dearest.

use std::collections::BTreeMap;

use super::VariantState;
use crate::model::VariantName;

/// Returns the number of engines of each variant.
///
/// `before` has the last numbers; a variant without one has what runs. If the bounds of the variants do not allow the
/// total, they come as close to it as they allow.
pub(super) fn distribute(
    total: u32,
    states: &[VariantState],
    before: &BTreeMap<VariantName, u32>,
) -> BTreeMap<VariantName, u32> {
    let last = |state: &VariantState| before.get(&state.variant).copied().unwrap_or(state.current);
    let mut numbers: BTreeMap<VariantName, u32> =
        states.iter().map(|state| (state.variant.clone(), state.clamp(last(state)))).collect();
    let sum = numbers.values().fold(0_u32, |sum, number| sum.saturating_add(*number));
    let mut by_cost: Vec<&VariantState> = states.iter().collect();
    by_cost.sort_by(|one, other| one.compare_by_cost(other));
    let (mut missing, mut surplus) = (total.saturating_sub(sum), sum.saturating_sub(total));
    // With equal costs the first by name gains, and the last by name loses.
    for state in &by_cost {
        let Some(number) = numbers.get_mut(&state.variant) else { continue };
        let more = missing.min(state.clamp(u32::MAX).saturating_sub(*number));
        *number = number.saturating_add(more);
        missing -= more;
    }
    for state in by_cost.iter().rev() {
        let Some(number) = numbers.get_mut(&state.variant) else { continue };
        let fewer = surplus.min(number.saturating_sub(state.min));
        *number -= fewer;
        surplus -= fewer;
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variant(name: &str, cost: f64, current: u32, (min, max): (u32, u32)) -> VariantState {
        VariantState { variant: name.into(), cost, current, min, max: Some(max), ..VariantState::default() }
    }

    fn distributed(total: u32, states: &[VariantState]) -> Vec<u32> {
        let before = BTreeMap::new();
        distribute(total, states, &before).into_values().collect()
    }

    #[test]
    fn more_engines_are_of_the_cheapest_variant_and_fewer_of_the_dearest() {
        let states = [variant("a", 20.0, 2, (0, 4)), variant("b", 5.0, 1, (0, 3))];
        assert_eq!(distributed(3, &states), [2, 1], "as it is");
        assert_eq!(distributed(5, &states), [2, 3]);
        assert_eq!(distributed(6, &states), [3, 3], "the cheapest has all that it may have");
        assert_eq!(distributed(2, &states), [1, 1]);
        assert_eq!(distributed(0, &states), [0, 0]);
    }

    #[test]
    fn the_bounds_of_variants_hold_and_names_decide_between_equal_costs() {
        let states = [variant("a", 5.0, 1, (1, 2)), variant("b", 5.0, 1, (0, 2))];
        assert_eq!(distributed(3, &states), [2, 1]);
        assert_eq!(distributed(1, &states), [1, 0]);
        assert_eq!(distributed(0, &states), [1, 0]);
        assert_eq!(distributed(9, &states), [2, 2]);
        let before = BTreeMap::from([("b".into(), 2)]);
        let numbers: Vec<u32> = distribute(3, &states, &before).into_values().collect();
        assert_eq!(numbers, [1, 2], "what was asked for and is still coming");
    }
}
