//! The two timelines of the design document: what a slow start does without protection, and with it.

use rouse::{
    saturation::{Autoscaler, ModelLoad, Profile, Role, Transition, VariantState},
    units::{Millis, Tick},
};

use crate::{PROFILES, decide, policy, replicas, state, target};

/// The load in parts of one replica's KV cache. Two replicas are short of spare capacity, three are not.
const LOAD: f64 = 1.5;

/// The load, spread over the replicas that serve.
fn load(current: u32, serving: u32) -> ModelLoad {
    let share = (LOAD / f64::from(serving), 0.0);
    let replicas = replicas("variant-1", &vec![share; usize::try_from(serving).unwrap()]);
    let states = vec![VariantState { pending: current - serving, ..state("variant-1", 5.0, current) }];
    ModelLoad { replicas, states, ..ModelLoad::default() }
}

fn at(seconds: u64) -> Tick {
    Tick(0) + Millis::secs(seconds)
}

#[test]
fn without_protection_each_look_at_a_slow_start_adds_a_replica() {
    let mut current = 2;
    let mut walk = Vec::new();
    for _seconds in [0, 30, 60] {
        // This controller forgets what it decided, and takes the replicas that start for replicas that serve.
        let mut unprotected = load(current, 2);
        for state in &mut unprotected.states {
            state.pending = 0;
        }
        current = target(&decide(Profile::Latest, &unprotected), "variant-1");
        walk.push(current);
    }
    assert_eq!(walk, [3, 4, 5]);
    // At 90 seconds all serve, and they are too many.
    let decision = decide(Profile::Latest, &load(current, current));
    assert!(decision.analyses[&Role::Both].scale_down_safe);
}

#[test]
fn with_protection_one_replica_is_added_and_the_model_waits_for_it() {
    for profile in PROFILES {
        let mut autoscaler = Autoscaler::new(policy(profile));
        let mut walk = Vec::new();
        // The new replica is ordered at once, exists at 30 seconds and serves at 90.
        for (seconds, current, serving) in [(0, 2, 2), (15, 2, 2), (30, 3, 2), (60, 3, 2), (90, 3, 3)] {
            let decision = autoscaler.decide(&load(current, serving), at(seconds));
            walk.push((target(&decision, "variant-1"), decision.transition));
        }
        let targets: Vec<u32> = walk.iter().map(|(target, _)| *target).collect();
        assert_eq!(targets, [3, 3, 3, 3, 3], "{profile:?}");
        let variant = || "variant-1".into();
        let ordered = Transition::Ordered { variant: variant(), desired: 3, current: 2 };
        let starting = if profile == Profile::Doc {
            Transition::Reporting { variant: variant(), reporting: 2, current: 3 }
        } else {
            Transition::Pending { variant: variant(), pending: 1 }
        };
        let transitions: Vec<Option<Transition>> =
            walk.into_iter().map(|(_, transition)| transition).collect();
        let expected = [None, Some(ordered), Some(starting.clone()), Some(starting), None];
        assert_eq!(transitions, expected, "{profile:?}");
    }
}
