//! Finds pinned models that cannot all be awake.
//!
//! No pinned model makes room for another, so the last one would never start.

use rouse::{
    model::{AcceleratorRequirement, FleetConfig, ModelName, ModelSpec},
    units::Bytes,
};

/// Limit of the placement search. Past it, nothing is reported, since the file may be right.
const MAX_PLACEMENT_STEPS: u32 = 10_000;

/// One engine's share of one accelerator.
struct PinnedShare {
    model: usize,
    need: Bytes,
    /// Index of the accelerator, if the model names it.
    required_index: Option<usize>,
}

/// Returns each pinned model that does not fit beside the earlier ones, and why. `fits`: whether a model fits alone.
pub(super) fn unplaceable_pinned(
    core: &FleetConfig,
    fits: impl Fn(&ModelSpec) -> bool,
) -> Vec<(ModelName, String)> {
    let mut together: Vec<&ModelSpec> = Vec::new();
    let mut crowded = Vec::new();
    for spec in core.models.iter().filter(|spec| spec.pinned && fits(spec)) {
        together.push(spec);
        if all_fit(core, &together) {
            continue;
        }
        together.pop();
        let others: Vec<_> = together.iter().map(|other| format!("'{}'", other.name)).collect();
        let text = format!(
            "is pinned together with {}, but these models cannot all be awake at once: pin fewer models, or lower memory.awake",
            others.join(", ")
        );
        crowded.push((spec.name.clone(), text));
    }
    crowded
}

fn all_fit(core: &FleetConfig, models: &[&ModelSpec]) -> bool {
    let mut free: Vec<Bytes> = core.accelerators.iter().map(|device| device.capacity).collect();
    let mut shares = Vec::new();
    for (model, spec) in models.iter().enumerate() {
        let need = spec.memory.awake;
        match &spec.accelerators {
            AcceleratorRequirement::Count(count) => {
                shares.extend((0..*count).map(|_| PinnedShare { model, need, required_index: None }))
            }
            AcceleratorRequirement::Ids(ids) => shares.extend(ids.iter().map(|id| {
                let only = core.accelerators.iter().position(|device| device.id == *id);
                PinnedShare { model, need, required_index: only }
            })),
            // The file has no syntax for this.
            AcceleratorRequirement::InPool { .. } | AcceleratorRequirement::Slots { .. } => {}
        }
    }
    let mut tries = MAX_PLACEMENT_STEPS;
    place_shares(&shares, &mut free, 0, &mut tries)
}

/// Places the shares one by one, with backtracking.
///
/// Shares of one model go to different accelerators in ascending order: `from` is the first one for the next share.
#[expect(clippy::indexing_slicing, reason = "candidates are indices of `free`")]
fn place_shares(shares: &[PinnedShare], free: &mut [Bytes], from: usize, tries: &mut u32) -> bool {
    let Some((share, rest)) = shares.split_first() else { return true };
    let Some(left) = tries.checked_sub(1) else { return true };
    *tries = left;
    let candidates = share.required_index.map_or(from..free.len(), |only| only..only + 1);
    for at in candidates {
        let before = free[at];
        if before < share.need {
            continue;
        }
        free[at] = before.saturating_sub(share.need);
        let same = rest.first().is_some_and(|next| next.model == share.model);
        if place_shares(rest, free, if same { at + 1 } else { 0 }, tries) {
            return true;
        }
        free[at] = before;
    }
    false
}

#[cfg(test)]
mod tests {
    use crate::{check, parse};

    fn crowded(models: &[(&str, &str)]) -> String {
        let mut text =
            "headroom: 0\naccelerators: [{id: a, memory: 10Gi}, {id: b, memory: 8Gi}]\nmodels:\n".to_owned();
        for (name, keys) in models {
            text += &format!(
                "  - {{name: {name}, engine: {{kind: custom, command: [x, '${{HOST}}:${{PORT}}'], startTimeout: 1m}}, {keys}}}\n"
            );
        }
        let errors = check(&parse(&text, "t").unwrap()).errors;
        errors.iter().map(|error| error.text.as_str()).collect::<Vec<_>>().join("\n")
    }

    const LARGE: &str = "memory: {awake: 8Gi}, pinned: true";

    #[test]
    fn pinned_models_that_cannot_all_be_awake_are_named() {
        assert_eq!(crowded(&[("one", LARGE), ("two", LARGE)]), "");
        let third = "model 'small': is pinned together with 'one', 'two', but these models cannot all be awake at once: \
                     pin fewer models, or lower memory.awake";
        assert_eq!(
            crowded(&[("one", LARGE), ("two", LARGE), ("small", "memory: {awake: 3Gi}, pinned: true")]),
            third
        );
        assert_eq!(
            crowded(&[("one", LARGE), ("two", LARGE), ("small", "memory: {awake: 2Gi}, pinned: true")]),
            ""
        );
        assert_eq!(
            crowded(&[("one", LARGE), ("two", LARGE), ("small", "memory: {awake: 3Gi}")]),
            "",
            "it is not pinned"
        );
        let there = "memory: {awake: 6Gi}, pinned: true, accelerators: [b]";
        assert!(
            crowded(&[("one", there), ("two", there)])
                .starts_with("model 'two': is pinned together with 'one',")
        );
        // The larger model fits only on the accelerator that the search tries first for the other.
        assert_eq!(
            crowded(&[
                ("any", "memory: {awake: 4Gi}, pinned: true"),
                ("there", "memory: {awake: 9Gi}, pinned: true")
            ]),
            ""
        );
        let both = "memory: {awake: 4Gi}, accelerators: 2, pinned: true";
        assert_eq!(crowded(&[("one", both), ("two", both)]), "");
    }
}
