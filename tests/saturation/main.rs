//! Saturation: the vectors of the rules, in all profiles, and what the default profile does beyond them.
//!
//! Every vector goes through [`Autoscaler::decide`], which is what the controller and the simulator call.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use rouse::{
    model::VariantName,
    saturation::{
        Autoscaler, Decision, ModelLoad, Profile, ReplicaMetrics, SaturationPolicy, VariantState, ZeroRule,
    },
    units::{Millis, Tick},
};

mod analysis_vectors;
mod capacity_vectors;
mod properties;
mod role_vectors;
mod rouse_profile;
mod target_vectors;
mod threshold_vectors;
mod timelines;
mod token_vectors;
mod vectors;

const PROFILES: [Profile; 3] = [Profile::Doc, Profile::Latest, Profile::Rouse];
const NOW: Tick = Tick(1_000_000);

/// A policy without a stabilisation window, so that one call decides.
fn policy(profile: Profile) -> SaturationPolicy {
    SaturationPolicy { profile, stabilisation: Millis::ZERO, ..SaturationPolicy::default() }
}

fn decide(profile: Profile, load: &ModelLoad) -> Decision {
    Autoscaler::new(policy(profile)).decide(load, NOW)
}

fn decide_with(zero: ZeroRule, profile: Profile, load: &ModelLoad) -> Decision {
    Autoscaler::new(SaturationPolicy { zero, ..policy(profile) }).decide(load, NOW)
}

fn state(variant: &str, cost: f64, current: u32) -> VariantState {
    VariantState { variant: variant.into(), cost, current, ..VariantState::default() }
}

/// Replicas of one variant, each with its KV use and the length of its queue.
fn replicas(variant: &str, loads: &[(f64, f64)]) -> Vec<ReplicaMetrics> {
    let replica = |(n, (kv, queue)): (usize, &(f64, f64))| ReplicaMetrics {
        replica: format!("{variant}-p{}", n + 1),
        variant: variant.into(),
        kv_use: Some(*kv),
        waiting: Some(*queue),
        ..ReplicaMetrics::default()
    };
    loads.iter().enumerate().map(replica).collect()
}

fn target(decision: &Decision, variant: &str) -> u32 {
    decision.target(&VariantName::from(variant)).unwrap_or_else(|| panic!("no target for {variant}")).replicas
}

fn reason(decision: &Decision, variant: &str) -> String {
    decision.target(&VariantName::from(variant)).unwrap().reason.to_string()
}
