//! Properties of every decision.

use std::collections::BTreeSet;

use proptest::{prelude::*, sample::Index};
use rouse::{
    saturation::{
        Autoscaler, Decision, ModelLoad, Profile, ReplicaMetrics, SaturationPolicy, TargetReason,
        VariantState,
    },
    units::{Millis, Tick},
};

use crate::{PROFILES, decide, policy, replicas, state};

/// What a replica reports: its KV use in twentieths, and its queue. Either may be missing.
type ReplicaReport = (Option<u8>, Option<u8>);

/// Current and pending replicas, the cost, the room below and above, the last decision, and what replicas report.
type VariantPlan = (u32, u32, u8, u32, Option<u32>, Option<u32>, Vec<ReplicaReport>);

fn report(may_be_missing: bool) -> BoxedStrategy<ReplicaReport> {
    let (kv, queue) = (0..=20_u8, 0..8_u8);
    if may_be_missing {
        return (prop::option::weighted(0.9, kv), prop::option::weighted(0.9, queue)).boxed();
    }
    (kv.prop_map(Some), queue.prop_map(Some)).boxed()
}

/// Variants within their bounds. With `is_known`, every replica that serves reports, and nothing was decided before.
fn variants(is_known: bool) -> impl Strategy<Value = Vec<VariantPlan>> {
    let size = if is_known { 5..=5_usize } else { 0..=5 };
    let reports = prop::collection::vec(report(!is_known), size);
    let desired = if is_known { Just(None).boxed() } else { prop::option::of(0..6_u32).boxed() };
    let pending = if is_known { 0..1_u32 } else { 0..2 };
    let plan = (0..5_u32, pending, 0..4_u8, 0..3_u32, prop::option::of(0..3_u32), desired, reports);
    prop::collection::vec(plan, 1..4)
}

fn build(variants: &[VariantPlan], parked: u32) -> ModelLoad {
    let mut load = ModelLoad { parked, ..ModelLoad::default() };
    for (n, (current, pending, cost, below, above, desired, reports)) in variants.iter().enumerate() {
        let name = format!("v{n}");
        let pending = (*pending).min(*current);
        load.states.push(VariantState {
            variant: name.as_str().into(),
            cost: f64::from(*cost),
            current: *current,
            desired: *desired,
            pending,
            min: current.saturating_sub(*below),
            max: above.map(|above| (current + above).max(1)),
            ..VariantState::default()
        });
        let serving = usize::try_from(current - pending).unwrap();
        for (number, (kv, queue)) in reports.iter().take(serving).enumerate() {
            load.replicas.push(ReplicaMetrics {
                replica: format!("{name}-{number}"),
                variant: name.as_str().into(),
                kv_use: kv.map(|kv| f64::from(kv) / 20.0),
                waiting: queue.map(f64::from),
                ..ReplicaMetrics::default()
            });
        }
    }
    load
}

fn profiles() -> impl Strategy<Value = Profile> {
    prop::sample::select(PROFILES.to_vec())
}

/// The variants whose number changes, with the change.
fn moves<'a>(load: &'a ModelLoad, decision: &Decision) -> Vec<(&'a VariantState, i64)> {
    let change = |state: &'a VariantState| {
        let target = decision.target(&state.variant).unwrap().replicas;
        (state, i64::from(target) - i64::from(state.current))
    };
    load.states.iter().map(change).filter(|(_, change)| *change != 0).collect()
}

/// What of a model's load is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gap {
    /// No replica reports.
    Model,
    /// No replica of one variant reports.
    Variant,
    /// One replica does not report, and others of its variant do.
    Replica,
    /// One value of a replica is no number.
    Number,
}

const GAPS: [Gap; 4] = [Gap::Model, Gap::Variant, Gap::Replica, Gap::Number];

/// Why a profile may take a replica away with this gap; `None`: it promises not to. The rules are those of ADR 13.
const fn departure(profile: Profile, gap: Gap) -> Option<&'static str> {
    match (profile, gap) {
        (Profile::Rouse, _) | (_, Gap::Model) | (Profile::Doc, Gap::Replica) => None,
        (_, Gap::Number) => Some("the document and the project read what is no number as 0: an idle replica"),
        (Profile::Doc, Gap::Variant) => {
            Some("the document compares reports with replicas only for variants that report at all")
        }
        (Profile::Latest, Gap::Variant | Gap::Replica) => Some(
            "the project waits for pending replicas only, and ignores one that serves and does not report",
        ),
    }
}

/// The load with a gap at this replica, or at its variant; `None` if it has no place for such a gap.
fn with_gap(load: &ModelLoad, gap: Gap, at: usize) -> Option<ModelLoad> {
    let mut load = load.clone();
    let variant = load.replicas[at].variant.clone();
    match gap {
        Gap::Model => load.replicas.clear(),
        Gap::Variant => load.replicas.retain(|metrics| metrics.variant != variant),
        Gap::Replica => {
            load.replicas.remove(at);
            load.replicas.iter().find(|metrics| metrics.variant == variant)?;
        }
        Gap::Number => {
            load.replicas[at].kv_use = Some(f64::NAN);
            load.replicas[at].waiting = Some(0.0);
        }
    }
    Some(load)
}

#[test]
fn each_departure_from_the_rule_that_an_unknown_load_takes_nothing_away_is_one() {
    let states = vec![state("v0", 1.0, 1), state("v1", 2.0, 3)];
    let idle = |variant: &str, count: usize| replicas(variant, &vec![(0.0, 0.0); count]);
    let whole =
        ModelLoad { states, replicas: [idle("v0", 1), idle("v1", 3)].concat(), ..ModelLoad::default() };
    for (profile, gap) in PROFILES.into_iter().flat_map(|profile| GAPS.map(|gap| (profile, gap))) {
        // The only replica of the cheaper variant, or one of those of the dearer one.
        let at = if gap == Gap::Variant { 0 } else { 1 };
        let load = with_gap(&whole, gap, at).unwrap();
        let decision = decide(profile, &load);
        let is_lower = moves(&load, &decision).iter().any(|(_, change)| *change < 0);
        let reason = departure(profile, gap);
        assert_eq!(is_lower, reason.is_some(), "{profile:?}, {gap:?}: {reason:?}, {:?}", decision.targets);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn the_order_of_the_inputs_does_not_matter(
        plans in variants(false), parked in 0..20_u32, profile in profiles(), at in any::<Index>(),
    ) {
        let load = build(&plans, parked);
        let mut other = load.clone();
        other.states.reverse();
        other.replicas.reverse();
        if !other.replicas.is_empty() {
            let middle = at.index(other.replicas.len());
            other.replicas.rotate_left(middle);
        }
        prop_assert_eq!(decide(profile, &load), decide(profile, &other));
    }

    #[test]
    fn every_variant_has_one_target_and_in_the_default_profile_it_is_within_its_bounds(
        plans in variants(false), parked in 0..20_u32, profile in profiles(),
    ) {
        let load = build(&plans, parked);
        let decision = decide(profile, &load);
        let targets: BTreeSet<_> = decision.targets.iter().map(|target| &target.variant).collect();
        prop_assert_eq!(targets.len(), decision.targets.len());
        prop_assert_eq!(decision.targets.len(), load.states.len());
        for state in &load.states {
            let target = decision.target(&state.variant).unwrap();
            let is_bounded = profile == Profile::Rouse || !matches!(
                target.reason,
                TargetReason::Transition(_) | TargetReason::NoMetrics
            );
            prop_assert!(!is_bounded || state.clamp(target.replicas) == target.replicas, "{:?}", target);
        }
    }

    #[test]
    fn the_profiles_of_the_vectors_move_at_most_one_variant_by_one(
        plans in variants(true), parked in 0..20_u32,
        profile in prop::sample::select(vec![Profile::Doc, Profile::Latest]),
    ) {
        let load = build(&plans, parked);
        let decision = decide(profile, &load);
        let moves = moves(&load, &decision);
        prop_assert!(moves.len() <= 1, "{:?}", moves);
        prop_assert!(moves.iter().all(|(_, change)| change.abs() == 1), "{:?}", moves);
    }

    #[test]
    fn the_default_profile_takes_one_replica_or_fills_the_cheaper_variants_first(
        plans in variants(true), parked in 0..20_u32,
    ) {
        let load = build(&plans, parked);
        let decision = decide(Profile::Rouse, &load);
        let mut moves = moves(&load, &decision);
        moves.sort_by(|(state, _), (other, _)| {
            state.cost.total_cmp(&other.cost).then_with(|| state.variant.cmp(&other.variant))
        });
        if moves.iter().any(|(_, change)| *change < 0) {
            prop_assert_eq!(moves.iter().map(|(_, change)| *change).collect::<Vec<_>>(), [-1]);
        } else if let Some(((_, _), fuller)) = moves.split_last() {
            for (state, change) in fuller {
                let filled = i64::from(state.current) + change;
                prop_assert_eq!(state.max.map(i64::from), Some(filled), "{:?} has room", state.variant);
            }
            let added: i64 = moves.iter().map(|(_, change)| change).sum();
            prop_assert!(added <= i64::from(policy(Profile::Rouse).max_step));
        }
    }

    #[test]
    fn an_unknown_load_never_scales_down(plans in variants(true), parked in 0..20_u32, at in any::<Index>()) {
        let load = build(&plans, parked);
        prop_assume!(!load.replicas.is_empty());
        let at = at.index(load.replicas.len());
        for (profile, gap) in PROFILES.into_iter().flat_map(|profile| GAPS.map(|gap| (profile, gap))) {
            let Some(load) = with_gap(&load, gap, at).filter(|_| departure(profile, gap).is_none()) else {
                continue;
            };
            let mut autoscaler = Autoscaler::new(policy(profile));
            for seconds in [0, 600, 1200] {
                let decision = autoscaler.decide(&load, Tick(0) + Millis::secs(seconds));
                let moves = moves(&load, &decision);
                prop_assert!(moves.iter().all(|(_, change)| *change > 0), "{:?}, {:?}: {:?}", profile, gap, moves);
            }
        }
    }

    #[test]
    fn a_decision_is_final_until_the_world_follows_it(plans in variants(true), parked in 0..20_u32) {
        let load = build(&plans, parked);
        for profile in PROFILES {
            let mut autoscaler = Autoscaler::new(SaturationPolicy::default());
            autoscaler.set_policy(policy(profile));
            let first = autoscaler.decide(&load, Tick(0));
            let second = autoscaler.decide(&load, Tick(15_000));
            for (before, after) in first.targets.iter().zip(&second.targets) {
                prop_assert_eq!(before.replicas, after.replicas, "{:?}: {:?}, then {:?}", profile, before, after);
            }
        }
    }
}
