//! Warmups in simulated time: five thousand nodes, and a leader that is killed at every command.
//!
//! The time of decisions is measured without the wait for a core. In optimised builds the first decision and 99.9 % of
//! all are held to the limit. In others the median is, and 99 % of all to a few times the limit, since the same code
//! takes several times as long. What one decision orders is bounded in every build, because the time grows with that.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::time::{Duration, Instant};

use rouse::{
    sim::warmup::{WarmupFaults, WarmupRunTally, WarmupScenario, WarmupWorld},
    units::{Millis, Tick},
    warmup::{WarmupLimits, WarmupPhase, WarmupPlan, WarmupReason, Warmups},
};
use rouse_testing::run_queue;

/// Time limit of a decision.
const MAX_DECISION_TIME: Duration = Duration::from_millis(5);
/// How many times the limit a decision of an unoptimised build may take, but for one of a hundred.
const UNOPTIMISED_FACTOR: u32 = 4;
const MAX_RECORD_BYTES: usize = 60_000;
/// Of the record and the listed nodes together. Numbers and conditions take a few hundred more.
const MAX_STATUS_BYTES: usize = 100_000;
const DAY: Millis = Millis::secs(24 * 3600);

fn plan(warmups: &mut Warmups, now: Tick) -> WarmupPlan {
    warmups.plan(now)
}

fn run(scenario: WarmupScenario) -> (WarmupWorld, WarmupRunTally) {
    let mut world = WarmupWorld::new(scenario);
    let tally = world.run(DAY, &mut plan).unwrap();
    (world, tally)
}

#[test]
fn five_thousand_nodes_are_warmed_fifty_at_a_time_with_three_commands_each() {
    let limits = WarmupLimits { parallelism: Some(50), ..WarmupLimits::default() };
    let scenario = WarmupScenario { nodes: 5_000, limits, ..WarmupScenario::default() };
    let (mut durations, mut most_commands) = (Vec::new(), 0_usize);
    let mut world = WarmupWorld::new(scenario);
    let mut decide = |warmups: &mut Warmups, now| {
        let plan = timed_plan(warmups, now, &mut durations);
        most_commands = most_commands.max(plan.commands.len());
        plan
    };
    let tally = world.run(DAY, &mut decide).unwrap();
    let first = durations[0];
    durations.sort_unstable();
    let within = |thousandths: usize| durations[durations.len() * thousandths / 1000];
    let (median, nearly_all, most) = (within(500), within(990), within(999));
    println!(
        "{} decisions: the first {first:?}, median {median:?}, 99 % within {nearly_all:?}, 99.9 % within {most:?}; \
         {} commands, {most_commands} at most in one decision, {} statuses, record {} B, listed nodes {} B",
        durations.len(),
        tally.commands,
        tally.status_writes,
        tally.max_record_bytes,
        tally.max_listing_bytes,
    );
    assert_eq!(tally.ended.map(|(phase, _)| phase), Some(WarmupPhase::Completed));
    assert_eq!((tally.succeeded, tally.failed, tally.max_active), (5_000, 0, 50));
    assert_eq!(tally.max_commands_per_node, 3, "create, label, delete");
    assert_eq!((tally.max_pods_per_item, tally.max_pulls_per_image), (1, 1));
    assert_eq!((world.labelled_nodes(), world.pod_count()), (5_000, 0));
    assert!(tally.max_record_bytes > 5_000 * 8 && tally.max_record_bytes <= MAX_RECORD_BYTES);
    assert!(tally.max_record_bytes + tally.max_listing_bytes <= MAX_STATUS_BYTES);
    // A decision creates, labels and deletes for the nodes that may be active at a time, and for no others.
    assert!(most_commands <= 3 * 50, "{most_commands} commands in one decision");
    assert!(median <= MAX_DECISION_TIME, "{median:?}");
    assert!(nearly_all <= MAX_DECISION_TIME * UNOPTIMISED_FACTOR, "{nearly_all:?}");
    if !cfg!(debug_assertions) {
        assert!(first <= MAX_DECISION_TIME && most <= MAX_DECISION_TIME, "{first:?}, {most:?}");
    }
}

#[expect(clippy::disallowed_methods, reason = "what is measured is how long it really takes")]
fn timed_plan(warmups: &mut Warmups, now: Tick, durations: &mut Vec<Duration>) -> WarmupPlan {
    let waited = run_queue::current_thread_wait();
    let begin = Instant::now();
    let plan = warmups.plan(now);
    let passed = begin.elapsed();
    durations.push(passed.saturating_sub(run_queue::current_thread_wait().saturating_sub(waited)));
    plan
}

#[test]
fn two_thousand_nodes_with_faults_stay_within_the_limits() {
    let limits = WarmupLimits {
        parallelism: Some(50),
        backoff_limit: Some(2),
        max_failed_nodes: 2_000,
        ..WarmupLimits::default()
    };
    let faults = WarmupFaults::frequent();
    let (_, tally) = run(WarmupScenario { nodes: 2_000, limits, faults, ..WarmupScenario::default() });
    assert_eq!(tally.ended.map(|(phase, _)| phase), Some(WarmupPhase::Completed));
    assert_eq!(tally.succeeded + tally.failed, 2_000);
    assert!(tally.failed > 0 && tally.max_active == 50, "{tally:?}");
    assert!(tally.max_record_bytes <= MAX_RECORD_BYTES, "{tally:?}");
    assert!(tally.max_record_bytes + tally.max_listing_bytes <= MAX_STATUS_BYTES, "{tally:?}");
}

#[test]
fn a_leader_killed_at_any_command_repeats_nothing_and_forgets_nothing() {
    let limits = WarmupLimits { parallelism: Some(2), ..WarmupLimits::default() };
    let scenario =
        WarmupScenario { nodes: 4, images: 2, has_action: true, limits, ..WarmupScenario::default() };
    let (_, whole) = run(scenario.clone());
    // Three Pods, their deletions and a label for each node.
    assert_eq!(whole.commands, 4 * 7);
    for killed_after in 0..=whole.commands {
        let killed = WarmupScenario { kill_leader_after: Some(killed_after), ..scenario.clone() };
        let (world, tally) = run(killed);
        assert_eq!((tally.succeeded, tally.failed), (4, 0), "killed after {killed_after}");
        assert_eq!(tally.ended.map(|(phase, _)| phase), Some(WarmupPhase::Completed));
        assert_eq!(
            (tally.max_pods_per_item, tally.max_pulls_per_image),
            (1, 1),
            "killed after {killed_after}"
        );
        assert!(tally.commands <= whole.commands, "killed after {killed_after}: {tally:?}");
        assert_eq!((world.pod_count(), world.labelled_nodes()), (0, 4), "killed after {killed_after}");
    }
}

#[test]
fn attempts_are_apart_by_the_back_off_and_end_at_the_limit() {
    let limits = WarmupLimits { backoff_limit: Some(3), ..WarmupLimits::default() };
    let faults = WarmupFaults { failed_pull: 1.0, ..WarmupFaults::default() };
    let (world, tally) = run(WarmupScenario { nodes: 1, limits, faults, ..WarmupScenario::default() });
    assert_eq!((tally.max_pods_per_item, tally.failed), (4, 1));
    let (phase, end) = tally.ended.unwrap();
    assert_eq!(phase, WarmupPhase::Failed);
    // Pauses of 10, 20 and 40 seconds, or of 60, 120 and 240 if the registry limits the rate, each with up to a quarter
    // more, and four pulls of up to a minute.
    let took = end.since(world.stored().start.unwrap());
    assert!(took >= Millis::secs(70) && took <= Millis::secs(800), "{took}");
}

#[test]
fn a_timeout_and_a_time_to_live_end_at_their_moment() {
    let limits = WarmupLimits {
        timeout: Some(Millis::secs(300)),
        ttl: Some(Millis::secs(3600)),
        ..WarmupLimits::default()
    };
    let faults = WarmupFaults { failed_pull: 1.0, ..WarmupFaults::default() };
    let mut world =
        WarmupWorld::new(WarmupScenario { nodes: 3, limits, faults, ..WarmupScenario::default() });
    let tally = world.run(Millis::secs(3899), &mut plan).unwrap();
    let (phase, end) = tally.ended.unwrap();
    let start = world.stored().start.unwrap();
    assert_eq!((phase, end.since(start)), (WarmupPhase::Failed, Millis::secs(300)));
    assert_eq!(world.report().map(|report| report.reason), Some(WarmupReason::TimeoutExceeded));
    assert!(!tally.is_deleted);
    assert_eq!(world.pod_count(), 0);
    assert!(world.run(Millis::secs(60), &mut plan).unwrap().is_deleted);
}

#[test]
fn a_pause_of_a_day_costs_no_time() {
    let limits =
        WarmupLimits { parallelism: Some(1), timeout: Some(Millis::secs(3600)), ..WarmupLimits::default() };
    let mut world = WarmupWorld::new(WarmupScenario { nodes: 5, limits, ..WarmupScenario::default() });
    world.run(Millis::secs(1), &mut plan).unwrap();
    world.set_paused(true);
    let paused = world.run(DAY, &mut plan).unwrap();
    assert!(paused.succeeded <= 1 && paused.ended.is_none(), "{paused:?}");
    world.set_paused(false);
    let tally = world.run(DAY, &mut plan).unwrap();
    assert_eq!((tally.succeeded, tally.ended.map(|(phase, _)| phase)), (5, Some(WarmupPhase::Completed)));
}
