//! Rouse's autoscaler against an HPA and a KEDA scaler, in simulated time, on traces that were fixed before the tuning.
//!
//! Three traces are built in; the fourth has the seed of the day, which `ROUSE_DAY` reproduces. Each test prints what
//! the three cost and how long they were saturated. `docs/simulation.md` explains the world and the measures.

use rouse::{
    model::VariantName,
    sim::saturation::{
        AutoscalerKind, EngineSpeed, LoadReport, LoadScenario, RequestTrace, SimulatedVariant, built_in,
        read_trace, seeded, simulate,
    },
    units::Millis,
};
use rouse_testing::sample::day;

/// Most saturated seconds and replica-hours of Rouse, as a share of those of the better of the two others.
const MAX_SATURATED_SHARE: f64 = 0.8;
const MAX_HOURS_SHARE: f64 = 1.0;

/// The better autoscaler has fewer saturated seconds.
fn assert_better_at_no_more_hours(trace: &RequestTrace) {
    let scenario = LoadScenario::default();
    let [rouse, hpa, keda] = AutoscalerKind::ALL.map(|kind| simulate(trace, &scenario, kind));
    println!("{}: {} requests in {}", trace.name, trace.requests.len(), trace.lasts);
    for report in [&rouse, &hpa, &keda] {
        let LoadReport { autoscaler, saturated_seconds, replica_hours, ttft_mean, ttft_p99, .. } = report;
        println!(
            "{autoscaler:6} {saturated_seconds:>6} s saturated, {replica_hours:>7.2} replica-hours, \
             first token after {ttft_mean:.2} s, p99 {ttft_p99:.1} s"
        );
    }
    let better = if keda.saturated_seconds < hpa.saturated_seconds { &keda } else { &hpa };
    assert!(better.saturated_seconds > 60, "{}: the trace asks too little", trace.name);
    let saturated_share = rouse.saturated_seconds as f64 / better.saturated_seconds as f64;
    assert!(saturated_share <= MAX_SATURATED_SHARE, "{}: {saturated_share:.3}", trace.name);
    let hours_share = rouse.replica_hours / better.replica_hours;
    assert!(hours_share <= MAX_HOURS_SHARE, "{}: {hours_share:.3}", trace.name);
}

#[test]
fn a_day_is_saturated_for_less_time_at_no_more_replica_hours() {
    assert_better_at_no_more_hours(&built_in("daily").unwrap());
}

#[test]
fn a_burst_saturates_for_less_time_at_no_more_replica_hours() {
    assert_better_at_no_more_hours(&built_in("burst").unwrap());
}

#[test]
fn a_slow_ramp_saturates_for_less_time_at_no_more_replica_hours() {
    assert_better_at_no_more_hours(&built_in("ramp").unwrap());
}

#[test]
fn the_load_of_the_day_saturates_for_less_time_at_no_more_replica_hours() {
    let day = day();
    println!("ROUSE_DAY={day}");
    assert_better_at_no_more_hours(&seeded(day));
}

#[test]
fn the_same_trace_gives_the_same_report() {
    let (trace, scenario) = (built_in("burst").unwrap(), LoadScenario::default());
    for kind in AutoscalerKind::ALL {
        assert_eq!(simulate(&trace, &scenario, kind), simulate(&trace, &scenario, kind), "{kind}");
    }
}

#[test]
fn a_model_at_zero_starts_for_a_request_and_goes_back_to_zero() {
    let trace = read_trace("two", "0,800,50\n1000,800,50\n").unwrap();
    let variant = SimulatedVariant { min: 0, ..SimulatedVariant::default() };
    let scenario = LoadScenario { variants: vec![variant], ..LoadScenario::default() };
    for kind in [AutoscalerKind::Rouse, AutoscalerKind::Keda] {
        let report = simulate(&trace, &scenario, kind);
        // Each decision for a start comes at the next quarter of a minute, and the start takes two minutes.
        assert!((135.0..137.0).contains(&report.ttft_p99), "{kind}: {}", report.ttft_p99);
        assert!((129.0..132.0).contains(&report.ttft_mean), "{kind}: {}", report.ttft_mean);
        let replicas = |at: Millis| report.samples.iter().find(|sample| sample.at == at).unwrap().replicas;
        assert_eq!(replicas(Millis::secs(300)), 1, "{kind}");
        assert_eq!(replicas(Millis::secs(900)), 0, "{kind}");
    }
}

#[test]
fn load_beyond_the_cheap_variant_goes_to_the_dear_one_and_costs_less_than_with_an_hpa_for_each() {
    let small = SimulatedVariant { name: VariantName::from("small"), max: 2, ..SimulatedVariant::default() };
    let speed = EngineSpeed::default().times(2.0);
    let large = SimulatedVariant { name: VariantName::from("large"), cost: 3.0, min: 0, max: 8, speed };
    let scenario = LoadScenario { variants: vec![small, large], ..LoadScenario::default() };
    let trace = built_in("ramp").unwrap();
    let [rouse, hpa, keda] = AutoscalerKind::ALL.map(|kind| simulate(&trace, &scenario, kind));
    assert_eq!(rouse.samples[0].replicas, 1, "the large variant has no minimum");
    let most = rouse.samples.iter().map(|sample| sample.replicas).max();
    assert!(most > Some(2), "{most:?} replicas at most");
    for other in [&hpa, &keda] {
        let kind = other.autoscaler;
        assert!(rouse.saturated_seconds < other.saturated_seconds, "{kind}: {}", other.saturated_seconds);
    }
    let most = keda.samples.iter().map(|sample| sample.replicas).max();
    assert!(most > Some(2), "{most:?} replicas at most: KEDA starts the large variant, too");
    assert!(rouse.cost < hpa.cost, "{} against {}", rouse.cost, hpa.cost);
}
