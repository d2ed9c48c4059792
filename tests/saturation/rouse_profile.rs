//! What the default profile does beyond `latest`.

use std::collections::BTreeMap;

use rouse::{
    saturation::{
        Autoscaler, LastDecision, ModelLoad, Profile, RefusalCause, ReplicaMetrics, Role, SaturationPolicy,
        ScaleUpCause, TargetReason, Thresholds, Transition, VariantState,
    },
    units::{Millis, Tick},
};

use crate::{NOW, decide, policy, reason, replicas, state, target};

const BUSY: (f64, f64) = (0.75, 0.0);
const IDLE: (f64, f64) = (0.0, 0.0);
const FULL: (f64, f64) = (0.95, 9.0);

fn load(states: Vec<VariantState>, replicas: Vec<ReplicaMetrics>) -> ModelLoad {
    ModelLoad { states, replicas, ..ModelLoad::default() }
}

/// One variant whose replicas all report.
fn one_variant(loads: &[(f64, f64)]) -> ModelLoad {
    load(vec![state("a", 5.0, u32::try_from(loads.len()).unwrap())], replicas("a", loads))
}

fn after(seconds: u64) -> Tick {
    NOW + Millis::secs(seconds)
}

fn refuse(variant: &str, cause: RefusalCause) -> BTreeMap<rouse::model::VariantName, RefusalCause> {
    BTreeMap::from([(variant.into(), cause)])
}

#[test]
fn an_unknown_load_is_not_an_idle_replica() {
    for unknown in [None, Some(f64::NAN), Some(f64::INFINITY), Some(-1.0)] {
        let mut load = one_variant(&[IDLE, IDLE, IDLE]);
        assert_eq!(target(&decide(Profile::Rouse, &load), "a"), 2);
        load.replicas[2].kv_use = unknown;
        assert_eq!(target(&decide(Profile::Latest, &load), "a"), 2, "latest reads it as 0");
        let decision = decide(Profile::Rouse, &load);
        assert_eq!(target(&decision, "a"), 3, "{unknown:?}");
        assert_eq!(reason(&decision, "a"), "the load of 1 of 3 replicas is unknown, so none is taken away");
    }
}

#[test]
fn a_replica_that_serves_and_does_not_report_is_unknown() {
    let load = load(vec![state("a", 5.0, 3)], replicas("a", &[IDLE, IDLE]));
    let decision = decide(Profile::Rouse, &load);
    assert_eq!(decision.analyses[&Role::Both].unknown, 1);
    assert_eq!(target(&decision, "a"), 3);
}

#[test]
fn few_known_replicas_are_no_evidence_for_the_others() {
    let short = load(vec![state("a", 5.0, 5)], replicas("a", &[BUSY, BUSY]));
    assert_eq!(target(&decide(Profile::Rouse, &short), "a"), 5);
    let half = load(vec![state("a", 5.0, 4)], replicas("a", &[BUSY, BUSY]));
    assert_eq!(target(&decide(Profile::Rouse, &half), "a"), 5);
}

#[test]
fn one_known_value_is_enough_to_be_saturated() {
    let mut full = one_variant(&[FULL]);
    full.replicas[0].kv_use = None;
    let decision = decide(Profile::Rouse, &full);
    assert_eq!(decision.analyses[&Role::Both].unknown, 0);
    assert!(decision.saturated && target(&decision, "a") > 1);
}

#[test]
fn half_of_the_replicas_saturated_is_a_shortage_whatever_the_mean() {
    let half = one_variant(&[FULL, IDLE]);
    let decision = decide(Profile::Rouse, &half);
    assert_eq!(decision.analyses[&Role::Both].cause, ScaleUpCause::Saturated);
    assert!(target(&decision, "a") > 2 && !decision.saturated);
    assert!(reason(&decision, "a").starts_with("half of the replicas are saturated: "));
    let fewer = one_variant(&[FULL, IDLE, IDLE]);
    assert!(target(&decide(Profile::Rouse, &fewer), "a") <= 3);
}

#[test]
fn no_step_down_leaves_half_of_the_replicas_saturated() {
    // Two of five are no shortage, two of four would be one.
    let loads = one_variant(&[FULL, FULL, IDLE, IDLE, IDLE]);
    assert_eq!(target(&decide(Profile::Rouse, &loads), "a"), 5);
    assert_eq!(target(&decide(Profile::Latest, &loads), "a"), 4);
}

#[test]
fn a_larger_shortage_is_a_larger_step_up_to_the_limit() {
    // Six wait at each, and two at each would do: nine replicas.
    let loads = one_variant(&[(0.5, 6.0), (0.5, 6.0), (0.5, 6.0)]);
    let decision = decide(Profile::Rouse, &loads);
    assert_eq!(decision.analyses[&Role::Both].shortage, 6);
    assert_eq!(target(&decision, "a"), 7, "four at a time");
    assert_eq!(target(&decide(Profile::Latest, &loads), "a"), 4);
    let wide = SaturationPolicy { max_step: 9, ..policy(Profile::Rouse) };
    assert_eq!(target(&Autoscaler::new(wide).decide(&loads, NOW), "a"), 9);
}

#[test]
fn what_the_cheapest_has_no_room_for_goes_to_the_next_even_to_one_without_replicas() {
    let states =
        vec![VariantState { max: Some(4), ..state("a", 5.0, 3) }, state("b", 20.0, 0), state("c", 50.0, 0)];
    let loads = load(states, replicas("a", &[(0.5, 6.0), (0.5, 6.0), (0.5, 6.0)]));
    let decision = decide(Profile::Rouse, &loads);
    assert_eq!([target(&decision, "a"), target(&decision, "b"), target(&decision, "c")], [4, 3, 0]);
}

#[test]
fn no_replica_is_added_for_which_no_accelerator_is_free() {
    let states = vec![
        VariantState { accelerator: "H100".to_owned(), ..state("a", 5.0, 1) },
        VariantState { accelerator: "L4".to_owned(), gpus: 2, ..state("b", 20.0, 0) },
    ];
    let accelerators = [("H100".to_owned(), 0), ("L4".to_owned(), 3)].into_iter().collect();
    let mut loads = load(states, replicas("a", &[BUSY]));
    loads.accelerators = Some(accelerators);
    let decision = decide(Profile::Rouse, &loads);
    assert_eq!((target(&decision, "a"), target(&decision, "b")), (1, 1));
    assert_eq!(decision.accelerators_left.unwrap().free()["L4"], 1);
}

#[test]
fn of_equal_cost_a_sleeper_goes_first_then_a_warm_node() {
    let cold = state("a", 5.0, 1);
    let warm = VariantState { warm: true, ..state("b", 5.0, 0) };
    let sleeper = VariantState { asleep: 1, ..state("c", 5.0, 0) };
    let mut loads = load(vec![cold, warm, sleeper], replicas("a", &[BUSY]));
    assert_eq!(target(&decide(Profile::Rouse, &loads), "c"), 1);
    loads.states.truncate(2);
    assert_eq!(target(&decide(Profile::Rouse, &loads), "b"), 1);
}

#[test]
fn the_dearest_variant_gives_its_last_replica_up_and_the_model_does_not() {
    let states = vec![state("a", 5.0, 1), state("b", 20.0, 1)];
    let both = load(states, [replicas("a", &[IDLE]), replicas("b", &[IDLE])].concat());
    let decision = decide(Profile::Rouse, &both);
    assert_eq!((target(&decision, "a"), target(&decision, "b")), (1, 0));
    assert_eq!(target(&decide(Profile::Rouse, &one_variant(&[IDLE])), "a"), 1);
}

#[test]
fn a_step_down_waits_until_it_has_been_safe_for_the_window() {
    let policy = SaturationPolicy { stabilisation: Millis::secs(300), ..policy(Profile::Rouse) };
    let mut autoscaler = Autoscaler::new(policy);
    let (idle, steady) = (one_variant(&[IDLE; 3]), one_variant(&[(0.65, 0.0); 3]));
    let mut walk = |seconds, load: &ModelLoad| target(&autoscaler.decide(load, after(seconds)), "a");
    assert_eq!([walk(0, &idle), walk(299, &idle)], [3, 3]);
    // The window begins anew after each moment at which the step was not safe.
    assert_eq!([walk(300, &steady), walk(301, &idle), walk(600, &idle), walk(601, &idle)], [3, 3, 3, 2]);
}

#[test]
fn the_next_step_down_waits_a_minute_after_the_last_one_was_carried_out() {
    let mut autoscaler = Autoscaler::new(policy(Profile::Rouse));
    let mut walk = |seconds, replicas: usize| {
        target(&autoscaler.decide(&one_variant(&vec![IDLE; replicas]), after(seconds)), "a")
    };
    assert_eq!([walk(0, 4), walk(15, 3), walk(59, 3), walk(60, 3), walk(75, 2)], [3, 3, 3, 2, 2]);
    // Another autoscaler carries the step out late, and reads the same number until then.
    let mut autoscaler = Autoscaler::new(policy(Profile::Rouse));
    let mut walk = |seconds, replicas: usize| {
        let mut loads = one_variant(&vec![IDLE; replicas]);
        loads.states[0].desired = Some(loads.states[0].current);
        autoscaler.restore(LastDecision::default());
        target(&autoscaler.decide(&loads, after(seconds)), "a")
    };
    assert_eq!([walk(0, 4), walk(15, 4), walk(300, 4), walk(315, 3), walk(360, 3)], [3, 3, 3, 3, 2]);
}

#[test]
fn a_waiting_step_down_says_how_long_it_waits() {
    let decision = Autoscaler::new(SaturationPolicy::default()).decide(&one_variant(&[IDLE; 3]), NOW);
    assert_eq!(
        reason(&decision, "a"),
        "a replica less would do, and is taken away if that still holds in 5m"
    );
}

#[test]
fn requests_that_wait_at_the_gateways_count_as_waiting_in_the_engines() {
    let mut loads = one_variant(&[(0.5, 0.0), (0.5, 0.0)]);
    assert_eq!(target(&decide(Profile::Rouse, &loads), "a"), 2);
    loads.parked = 6;
    let decision = decide(Profile::Rouse, &loads);
    assert_eq!(decision.analyses[&Role::Both].cause, ScaleUpCause::Queue);
    assert_eq!(target(&decision, "a"), 3);
    assert_eq!(target(&decide(Profile::Latest, &loads), "a"), 2);
    // Were they counted here, they would wait for as long as they wait.
    loads.parked = 60;
    assert!(!decide(Profile::Rouse, &loads).saturated);
}

#[test]
fn a_step_down_in_flight_is_taken_back_when_the_load_rises() {
    let mut loads = one_variant(&[BUSY; 3]);
    loads.states[0].desired = Some(2);
    let decision = decide(Profile::Rouse, &loads);
    assert_eq!(decision.targets[0].reason, TargetReason::ScaleDownCancelled { desired: 2 });
    assert_eq!(target(&decision, "a"), 3);
    assert_eq!(target(&decide(Profile::Latest, &loads), "a"), 2);
}

#[test]
fn a_replica_that_memory_refused_does_not_hold_the_model_in_transition() {
    let mut autoscaler = Autoscaler::new(policy(Profile::Rouse));
    let states = vec![state("a", 5.0, 1), state("b", 20.0, 0)];
    let mut loads = load(states, replicas("a", &[BUSY]));
    assert_eq!(target(&autoscaler.decide(&loads, after(0)), "a"), 2);
    let decision = autoscaler.decide(&loads, after(15));
    assert!(matches!(decision.transition, Some(Transition::Ordered { desired: 2, current: 1, .. })));
    // Refused: the order is taken back, and the next dearer variant gets the replica.
    loads.refused = refuse("a", RefusalCause::Memory);
    let decision = autoscaler.decide(&loads, after(30));
    assert_eq!(decision.transition, None);
    assert_eq!((target(&decision, "a"), target(&decision, "b")), (1, 1));
    assert_eq!(decision.targets[0].reason, TargetReason::Refused { cause: RefusalCause::Memory });
}

#[test]
fn a_replica_whose_starts_keep_failing_does_not_hold_the_model_in_transition() {
    let mut autoscaler = Autoscaler::new(policy(Profile::Rouse));
    let states = vec![state("a", 5.0, 1), state("b", 20.0, 0)];
    let mut loads = load(states, replicas("a", &[BUSY]));
    assert_eq!(target(&autoscaler.decide(&loads, after(0)), "a"), 2);
    // It starts, and then once more after it has failed.
    (loads.states[0].current, loads.states[0].pending) = (2, 1);
    let decision = autoscaler.decide(&loads, after(15));
    assert!(matches!(decision.transition, Some(Transition::Pending { pending: 1, .. })));
    loads.refused = refuse("a", RefusalCause::StartFailed);
    let decision = autoscaler.decide(&loads, after(30));
    assert_eq!(decision.transition, None);
    assert_eq!((target(&decision, "a"), target(&decision, "b")), (2, 1), "the attempt goes on");
    assert_eq!(reason(&decision, "a"), "the starts of another replica keep failing");
    // It failed again: what runs is the target, and the other variant starts.
    (loads.states[0].current, loads.states[0].pending) = (1, 0);
    (loads.states[1].current, loads.states[1].pending) = (1, 1);
    let decision = autoscaler.decide(&loads, after(45));
    assert!(
        matches!(&decision.transition, Some(Transition::Pending { variant, .. }) if variant.as_str() == "b")
    );
    assert_eq!((target(&decision, "a"), target(&decision, "b")), (1, 1));
}

#[test]
fn a_variant_that_memory_refuses_is_tried_ever_less_often_until_memory_is_released() {
    let mut autoscaler = Autoscaler::new(policy(Profile::Rouse));
    let mut loads = one_variant(&[BUSY]);
    loads.refused = refuse("a", RefusalCause::Memory);
    let mut walk = |seconds, loads: &ModelLoad| target(&autoscaler.decide(loads, after(seconds)), "a");
    assert_eq!(walk(0, &loads), 1);
    // Minutes 1, 2, 4, 8 and 16 after the try before, and no longer than that.
    for tried in [1, 3, 7, 15, 31, 47, 63] {
        let at = tried * 60;
        assert_eq!(
            [walk(at - 1, &loads), walk(at, &loads), walk(at + 1, &loads)],
            [1, 2, 1],
            "minute {tried}"
        );
    }
    loads.refused.clear();
    assert_eq!(walk(4000, &loads), 2);
    loads.refused = refuse("a", RefusalCause::Memory);
    assert_eq!(
        [walk(4001, &loads), walk(4060, &loads), walk(4061, &loads)],
        [1, 1, 2],
        "the first pause again"
    );
}

#[test]
fn a_variant_whose_starts_fail_is_tried_once_for_each_pause() {
    let mut autoscaler = Autoscaler::new(policy(Profile::Rouse));
    let mut loads = one_variant(&[BUSY]);
    loads.refused = refuse("a", RefusalCause::StartFailed);
    let mut walk = |seconds| target(&autoscaler.decide(&loads, after(seconds)), "a");
    assert_eq!([walk(0), walk(60), walk(119), walk(120), walk(179), walk(180)], [1, 2, 1, 2, 1, 2]);
}

#[test]
fn from_zero_exactly_one_variant_starts_the_cheapest_warm_one_that_fits() {
    let states = vec![
        state("cold", 1.0, 0),
        VariantState { warm: true, ..state("warm", 5.0, 0) },
        VariantState { asleep: 1, ..state("dear", 20.0, 0) },
    ];
    let mut loads = ModelLoad { parked: 7, ..load(states, Vec::new()) };
    let mut started = |refused: &[&str]| {
        loads.refused = refused.iter().map(|variant| ((*variant).into(), RefusalCause::Memory)).collect();
        let decision = decide(Profile::Rouse, &loads);
        let started = decision.targets.iter().filter(|target| target.replicas > 0);
        started.map(|target| format!("{} {}", target.variant, target.replicas)).collect::<Vec<_>>()
    };
    assert_eq!(started(&[]), ["warm 1"]);
    assert_eq!(started(&["warm"]), ["dear 1"]);
    assert_eq!(started(&["warm", "dear"]), ["cold 1"]);
    assert_eq!(started(&["warm", "dear", "cold"]), [""; 0]);
}

#[test]
fn what_started_from_zero_is_kept_while_requests_wait_and_forgotten_when_none_do() {
    let mut autoscaler = Autoscaler::new(policy(Profile::Rouse));
    let states = vec![state("a", 5.0, 0), VariantState { warm: false, ..state("b", 20.0, 0) }];
    let mut loads = ModelLoad { parked: 3, ..load(states, Vec::new()) };
    assert_eq!(target(&autoscaler.decide(&loads, after(0)), "a"), 1);
    // Another variant becomes the better choice before the first counts as current.
    loads.states[1].warm = true;
    let decision = autoscaler.decide(&loads, after(1));
    assert_eq!((target(&decision, "a"), target(&decision, "b")), (1, 0));
    loads.parked = 0;
    let decision = autoscaler.decide(&loads, after(2));
    assert_eq!((target(&decision, "a"), target(&decision, "b")), (0, 0));
    assert_eq!(reason(&decision, "a"), "the model sleeps, and no request waits");
}

#[test]
fn a_model_that_sleeps_wakes_in_each_of_its_roles() {
    let of_role = |variant: &str, role| VariantState { role, ..state(variant, 5.0, 0) };
    let states = vec![
        of_role("p1", Role::Prefill),
        of_role("p2", Role::Prefill),
        of_role("d1", Role::Decode),
        of_role("d2", Role::Decode),
    ];
    let decision = decide(Profile::Rouse, &ModelLoad { parked: 1, ..load(states, Vec::new()) });
    let started = decision.targets.iter().filter(|target| target.replicas > 0);
    assert_eq!(started.map(|target| target.variant.as_str()).collect::<Vec<_>>(), ["d1", "p1"]);
}

#[test]
fn a_floor_holds_in_a_model_that_sleeps() {
    let states = vec![VariantState { min: 2, ..state("a", 5.0, 0) }];
    assert_eq!(target(&decide(Profile::Rouse, &load(states, Vec::new())), "a"), 2);
}

#[test]
fn another_autoscaler_sets_numbers_and_stops_no_model() {
    let states = vec![VariantState { max: Some(6), ..state("a", 5.0, 2) }];
    let mut loads = load(states, replicas("a", &[BUSY; 2]));
    for (wanted, expected) in [(5, 5), (9, 6), (1, 1), (0, 2)] {
        loads.external = Some([("a".into(), wanted)].into());
        assert_eq!(target(&decide(Profile::Rouse, &loads), "a"), expected, "{wanted}");
    }
    // From zero, the requests that wait start it.
    loads.states[0].current = 0;
    loads.replicas.clear();
    loads.parked = 1;
    assert_eq!(target(&decide(Profile::Rouse, &loads), "a"), 1);
}

#[test]
fn a_restored_autoscaler_goes_on_with_the_last_decision() {
    let mut first = Autoscaler::new(policy(Profile::Rouse));
    let loads = one_variant(&[BUSY; 2]);
    assert_eq!(target(&first.decide(&loads, after(0)), "a"), 3);
    let stored = serde_json::to_string(first.last().unwrap()).unwrap();
    let mut second = Autoscaler::new(policy(Profile::Rouse));
    second.restore(serde_json::from_str::<LastDecision>(&stored).unwrap());
    let decision = second.decide(&loads, after(15));
    assert_eq!(target(&decision, "a"), 3);
    assert!(decision.transition.is_some());
    assert_eq!(second.last().unwrap().changed_at, after(0), "no number has changed");
}

#[test]
fn contradictory_thresholds_change_nothing() {
    let mut loads = one_variant(&[IDLE; 3]);
    loads.thresholds = Thresholds { queue_spare_trigger: 6.0, ..Thresholds::default() };
    let decision = decide(Profile::Rouse, &loads);
    assert_eq!(target(&decision, "a"), 3);
    assert!(reason(&decision, "a").contains("queueSpareTrigger (6) is above queueLengthThreshold (5)"));
}

#[test]
fn every_reason_has_the_numbers_that_decided() {
    let up = decide(Profile::Rouse, &one_variant(&[BUSY, BUSY]));
    assert_eq!(
        reason(&up, "a"),
        "too little KV cache is spare: 1 replica more (from 2 to 3); spare on average: 5.0 % of the KV cache and 5.0 \
         places in the queue"
    );
    let down = decide(Profile::Rouse, &one_variant(&[(0.2, 0.0); 3]));
    assert_eq!(
        reason(&down, "a"),
        "1 replica less (from 3 to 2); spare without it: 50.0 % of the KV cache and 5.0 places in the queue"
    );
    let mut waiting = one_variant(&[BUSY, BUSY]);
    waiting.states[0].pending = 1;
    let waiting = decide(Profile::Rouse, &waiting);
    assert_eq!(
        reason(&waiting, "a"),
        "an earlier decision takes effect: 1 replica of variant a not serving yet"
    );
}
