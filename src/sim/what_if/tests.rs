use super::*;
use crate::{
    journal::JournalLine,
    model::{Accelerator, EngineMemory, FleetSettings},
    sim::{Scenario, ScenarioAction, SimulatedRequest, SimulatedWorld, simulated_model},
    units::Bytes,
};

const ASSUMED: TransitionTimes =
    TransitionTimes { start: Millis::secs(5), wake: Millis::secs(1), sleep: Millis(500) };
const START: Tick = Tick(1_700_000_000_000);

/// Each model nearly fills an accelerator.
fn configuration(accelerators: usize, models: &[&str]) -> FleetConfig {
    let accelerator =
        |n| Accelerator { metered: true, ..Accelerator::new(format!("gpu-{n}").into(), Bytes::gib(24)) };
    let memory = EngineMemory { awake: Bytes::gib(20), asleep: Bytes::mib(256), host: Bytes::gib(1) };
    FleetConfig {
        settings: FleetSettings { host_memory: Bytes::gib(64), ..FleetSettings::default() },
        accelerators: (0..accelerators).map(accelerator).collect(),
        models: models.iter().map(|name| simulated_model(*name, memory)).collect(),
    }
}

fn machine(configuration: FleetConfig) -> MachineRecord {
    MachineRecord { configuration, measured: BTreeMap::new(), stop_time: None }
}

fn request(after: Millis, model: &str, end: RecordedEnd) -> RecordedRequest {
    RecordedRequest {
        at: START + after,
        model: model.into(),
        key: String::new(),
        key_priority: 0,
        client: 0,
        tokens: 0,
        wait: Millis::ZERO,
        end,
    }
}

fn run(
    configuration: &FleetConfig,
    changes: &MachineChanges,
    requests: &[RecordedRequest],
) -> (MachineReport, MachineActivity) {
    let machine = machine(changes.apply(configuration).unwrap());
    let report = simulate_machine(&machine, requests, ASSUMED).unwrap_or_else(|failure| panic!("{failure}"));
    let activity = report.activity.unwrap();
    (report, activity)
}

#[test]
fn with_an_accelerator_for_each_model_nothing_is_swapped() {
    let configuration = configuration(1, &["a", "b", "c"]);
    let model = |minute: usize| ["a", "b", "c"][minute % 3];
    let minutes = 0..60;
    let end = RecordedEnd::Served(Millis::secs(5));
    let requests: Vec<_> =
        minutes.map(|minute| request(Millis::secs(60 * minute as u64), model(minute), end)).collect();
    let (one, one_activity) = run(&configuration, &MachineChanges::default(), &requests);
    let more = MachineChanges { accelerators: Some(AcceleratorCount::More(2)), ..MachineChanges::default() };
    let (three, three_activity) = run(&configuration, &more, &requests);
    assert_eq!((one_activity.swaps, one_activity.starts), (59, 3));
    assert_eq!((three_activity.swaps, three_activity.starts, three_activity.wakes), (0, 3, 0));
    assert!(one.wait_mean > 3.0 * three.wait_mean, "{} {}", one.wait_mean, three.wait_mean);
    assert_eq!((one.requests, one.refused, one.left), (60, 0, 0));
    let hours = three_activity.hours;
    assert!((hours.total - 3.0 * 59.0 / 60.0).abs() < 1e-6, "{hours:?}");
    // Each of the three is awake from its first request on, and has a request for five seconds of three minutes.
    assert!(hours.awake > 2.8 && hours.awake < hours.total, "{hours:?}");
    let busy = hours.awake - hours.idle;
    assert!((busy - 59.0 * 5.0 / 3600.0).abs() < 0.01, "{hours:?}");
}

#[test]
fn a_model_that_saturation_scales_has_its_engines_as_spares() {
    let mut configuration = configuration(2, &["a"]);
    let model = &mut configuration.models[0];
    (model.replicas, model.scaled, model.max_concurrency) = (2, true, Some(1));
    let end = RecordedEnd::Served(Millis::secs(30));
    let requests: Vec<_> = (0..10).map(|n| request(Millis::secs(n), "a", end)).collect();
    let (_, activity) = run(&configuration, &MachineChanges::default(), &requests);
    assert_eq!(activity.starts, 2);
}

#[test]
fn longer_turns_swap_less() {
    let configuration = configuration(1, &["a", "b"]);
    let end = RecordedEnd::Served(Millis::secs(2));
    let both = |second| ["a", "b"].map(|model| request(Millis::secs(second), model, end));
    let requests: Vec<_> = (0..600).flat_map(both).collect();
    let turn = |max_turn| MachineChanges { max_turn: Some(max_turn), ..MachineChanges::default() };
    let (_, short) = run(&configuration, &turn(Millis::secs(10)), &requests);
    let (_, long) = run(&configuration, &turn(Millis::secs(60)), &requests);
    assert!(long.swaps > 0 && short.swaps > 2 * long.swaps, "{} {}", short.swaps, long.swaps);
}

#[test]
fn each_model_takes_its_own_measured_times() {
    let mut machine = machine(configuration(2, &["quick", "slow"]));
    for (model, start) in [("quick", 2), ("slow", 20)] {
        let start = Some(Millis::secs(start));
        let measured = LearnedMeasurements { start, ..LearnedMeasurements::default() };
        machine.measured.insert(model.into(), measured);
    }
    for (model, start) in [("quick", 2.0), ("slow", 20.0)] {
        let requests = [request(Millis::ZERO, model, RecordedEnd::Served(Millis::secs(1)))];
        let report = simulate_machine(&machine, &requests, ASSUMED).unwrap();
        assert!((report.wait_mean - start).abs() < 0.1, "{model}: {}", report.wait_mean);
    }
}

#[test]
fn a_client_leaves_again_after_its_wait_and_a_model_that_fits_nowhere_is_refused() {
    let configuration = configuration(1, &["a"]);
    let left = RecordedRequest { wait: Millis::secs(1), ..request(Millis::ZERO, "a", RecordedEnd::Left) };
    let (report, _) = run(&configuration, &MachineChanges::default(), &[left]);
    assert_eq!((report.requests, report.left, report.refused), (1, 1, 0));
    let larger = MachineChanges { memory: vec![("a".into(), Bytes::gib(40))], ..MachineChanges::default() };
    let (report, _) = run(&configuration, &larger, &[request(Millis::ZERO, "a", RecordedEnd::Refused)]);
    assert_eq!((report.left, report.refused), (0, 1));
}

/// Two models on one accelerator, by turns.
fn recorded_world() -> SimulatedWorld {
    let mut scenario = Scenario::new("recorded", configuration(1, &["a", "b"]));
    for n in 0..20 {
        let model = if n % 2 == 0 { "a" } else { "b" };
        let request = SimulatedRequest::stream(model, Millis::secs(2));
        scenario = scenario.at(Millis::secs(30 * n), ScenarioAction::SendRequest(request));
    }
    let mut world = SimulatedWorld::new(scenario).with_journal();
    world.run_until(Millis::secs(700)).unwrap_or_else(|failure| panic!("{failure}"));
    world
}

#[test]
fn a_journal_tells_configuration_times_and_requests_and_its_simulation_does_the_same() {
    let world = recorded_world();
    let record = read_journal_record(world.journal()).unwrap();
    assert_eq!(record.machine.configuration, configuration(1, &["a", "b"]));
    assert_eq!((record.configurations, record.estimated, record.requests.len()), (1, 0, 20));
    for model in ["a", "b"] {
        let times = record.machine.measured[model];
        for (time, least) in [(times.start, 8000), (times.wake, 800), (times.sleep, 400)] {
            assert!((least..least + 200).contains(&time.unwrap().0), "{model}: {times:?}");
        }
    }
    for request in &record.requests {
        let RecordedEnd::Served(duration) = request.end else { panic!("{request:?}") };
        assert!(request.wait > Millis::ZERO && (2000..2200).contains(&duration.0), "{request:?}");
    }
    let recorded = MachineReport::of_recording(&record.requests);
    let simulated = simulate_machine(&record.machine, &record.requests, ASSUMED).unwrap();
    assert_eq!(simulated.activity.unwrap().swaps, world.tally().count("swaps"));
    assert!((simulated.wait_mean - recorded.wait_mean).abs() < 0.1, "{recorded:?} {simulated:?}");
}

#[test]
fn requests_that_did_not_wait_are_estimated_from_samples() {
    let mut scenario = Scenario::new("awake", configuration(1, &["a"]));
    let start = scenario.start;
    for at in [0, 20, 40] {
        let request = SimulatedRequest::stream("a", Millis::secs(2));
        scenario = scenario.at(Millis::secs(at), ScenarioAction::SendRequest(request));
    }
    let mut world = SimulatedWorld::new(scenario).with_journal();
    world.run_until(Millis::secs(60)).unwrap_or_else(|failure| panic!("{failure}"));
    let record = read_journal_record(world.journal()).unwrap();
    let found: Vec<_> = record.requests.iter().map(|request| request.at.since(start)).collect();
    assert_eq!(found, [0, 20, 40].map(Millis::secs));
    assert_eq!(record.estimated, 2);
}

#[test]
fn a_rotated_journal_tells_the_configuration_too() {
    let world = recorded_world();
    let lines = [
        JournalLine::header("0.1.0", world.now()),
        JournalLine::Turn { at: world.now(), events: world.fleet().snapshot() },
    ];
    let record = read_journal_record(&lines).unwrap();
    assert_eq!(record.machine.configuration, configuration(1, &["a", "b"]));
    assert!(record.machine.measured["a"].wake.is_some(), "the learned times stand in for measured ones");
    assert_eq!(read_journal_record(&lines[..1]), Err(JournalRecordError::NoConfiguration));
}

#[test]
fn changes_that_contradict_the_configuration_are_refused() {
    let configuration = configuration(2, &["a", "b"]);
    let with = |count| MachineChanges { accelerators: Some(count), ..MachineChanges::default() };
    for (text, expected) in [("4", 4), ("+2", 4), ("-1", 1)] {
        let changed = with(text.parse().unwrap()).apply(&configuration).unwrap();
        assert_eq!(changed.accelerators.len(), expected, "{text}");
    }
    for text in ["", "+", "x", "1.5", "++2", "-+1"] {
        assert_eq!(text.parse::<AcceleratorCount>(), Err(Error::UnreadableCount(text.to_owned())));
    }
    for (changes, named) in [
        (with(AcceleratorCount::Fewer(2)), "would have 0 accelerators"),
        (
            MachineChanges { pinned: vec!["c".into()], ..MachineChanges::default() },
            "has no model 'c': it has a, b",
        ),
        (
            MachineChanges { max_turn: Some(Millis::ZERO), ..MachineChanges::default() },
            "maxTurn must be longer",
        ),
    ] {
        let error = changes.apply(&configuration).unwrap_err().to_string();
        assert!(error.contains(named), "{error}");
    }
}
