//! Vectors of the roles: prefill and decode are decided one by one.

use rouse::saturation::{Decision, ModelLoad, Profile, ReplicaMetrics, Role, TargetReason, VariantState};
use serde_json::Value;

use crate::{
    PROFILES, decide, reason, replicas, state, target,
    vectors::{count, fields, id, items, section, text},
};

/// The role, as a label or a configuration spells it.
fn role(value: &Value) -> Role {
    serde_json::from_value(value.clone()).unwrap()
}

/// The role that a variant of the vectors has in its name.
fn role_in_name(variant: &str) -> Role {
    role(&Value::from(variant.split_once('-').unwrap().0))
}

fn state_of(variant: &str, role: Role, current: u32) -> VariantState {
    VariantState { role, ..state(variant, 10.0, current) }
}

fn replicas_of(variant: &str, role: Role, loads: &[(f64, f64)]) -> Vec<ReplicaMetrics> {
    replicas(variant, loads).into_iter().map(|metrics| ReplicaMetrics { role, ..metrics }).collect()
}

fn assert_role(vector: &Value, profile: Profile) {
    let states = vec![state_of("v1", role(&vector["in"]), 1)];
    let decision = decide(profile, &ModelLoad { states, ..ModelLoad::default() });
    let roles: Vec<Role> = decision.analyses.into_keys().collect();
    assert_eq!(roles, [role(&vector["role"])], "{}", id(vector));
}

fn assert_groups(vector: &Value, profile: Profile) {
    let states = fields(&vector["states"]).map(|(variant, value)| state_of(variant, role(value), 1));
    let decision = decide(profile, &ModelLoad { states: states.collect(), ..ModelLoad::default() });
    assert_eq!(decision.analyses.len(), fields(&vector["groups"]).count(), "{}", id(vector));
    for (name, size) in fields(&vector["groups"]) {
        let group = role(&Value::from(name));
        let found = decision.targets.iter().filter(|target| target.role == group).count();
        assert_eq!(found, usize::try_from(count(size)).unwrap(), "{}: {name}", id(vector));
    }
}

/// Metrics of variants that the model does not have are left out.
fn assert_filter(vector: &Value, profile: Profile) {
    let metrics = fields(&vector["metrics"]).flat_map(|(variant, number)| {
        let loads = vec![(0.5, 0.0); usize::try_from(count(number)).unwrap()];
        replicas_of(variant, role_in_name(variant), &loads)
    });
    let replicas: Vec<ReplicaMetrics> = metrics.collect();
    let kept = items(&vector["keep"]).map(text).map(|variant| {
        let current = replicas.iter().filter(|metrics| metrics.variant.as_str() == variant).count();
        state_of(variant, role_in_name(variant), u32::try_from(current).unwrap())
    });
    let states: Vec<VariantState> = kept.collect();
    let decision = decide(profile, &ModelLoad { states, replicas, ..ModelLoad::default() });
    let left: u32 = decision.analyses.values().map(|analysis| analysis.total + analysis.unknown).sum();
    assert_eq!(left, count(&vector["left"]), "{}", id(vector));
}

/// A model with two replicas for prefills and two for decoding, of which only those with loads report.
fn divided(profile: Profile, prefill: &[(f64, f64)], decode: &[(f64, f64)]) -> Decision {
    let mut replicas = replicas_of("p", Role::Prefill, prefill);
    replicas.extend(replicas_of("d", Role::Decode, decode));
    let states = vec![state_of("p", Role::Prefill, 2), state_of("d", Role::Decode, 2)];
    decide(profile, &ModelLoad { states, replicas, ..ModelLoad::default() })
}

fn assert_independent(profile: Profile) {
    let decision = divided(profile, &[(0.75, 0.0); 2], &[(0.5, 0.0); 2]);
    assert_eq!((target(&decision, "p"), target(&decision, "d")), (3, 2), "{profile:?}");
    assert!(decision.analyses[&Role::Prefill].scale_up && !decision.analyses[&Role::Decode].scale_up);
}

fn assert_failure_of_one_role(profile: Profile) {
    let decision = divided(profile, &[(0.75, 0.0); 2], &[]);
    assert_eq!((target(&decision, "p"), target(&decision, "d")), (3, 2), "{profile:?}");
    let held = decision.target(&"d".into()).unwrap();
    assert_eq!(held.reason, TargetReason::NoMetrics, "{profile:?}: {}", reason(&decision, "d"));
}

fn assert_order(profile: Profile) {
    let states =
        [Role::Prefill, Role::Both, Role::Decode].map(|role| state_of(&format!("{role:?}"), role, 1));
    let decision = decide(profile, &ModelLoad { states: states.into(), ..ModelLoad::default() });
    let roles: Vec<Role> = decision.targets.iter().map(|target| target.role).collect();
    assert_eq!(roles, [Role::Both, Role::Decode, Role::Prefill], "{profile:?}");
}

#[test]
fn every_profile_divides_a_model_by_roles_as_the_vectors_say() {
    for vector in section("roles") {
        for profile in PROFILES {
            match id(vector) {
                "r12-independent" => assert_independent(profile),
                "r13-role-failure" => assert_failure_of_one_role(profile),
                "r14-role-order" => assert_order(profile),
                _ if vector.get("role").is_some() => assert_role(vector, profile),
                _ if vector.get("groups").is_some() => assert_groups(vector, profile),
                _ if vector.get("keep").is_some() => assert_filter(vector, profile),
                other => panic!("{other} has no test"),
            }
        }
    }
}

#[test]
fn a_role_that_does_not_exist_is_refused() {
    assert!(serde_json::from_value::<Role>(Value::from("encode")).is_err());
}
