use rouse::{
    fault::FailureCause,
    fleet::event::{AdoptedEngine, Event, GatewayDemand},
    model::Accelerator,
};

use super::*;

/// Records a turn with these events.
fn turn(inputs: &StatusInputs, fleet: &mut Fleet, events: &[Event]) {
    let now = Tick(1);
    events.iter().for_each(|event| fleet.on(event, now));
    let (plan, changes) = (fleet.plan(now), fleet.take_routing_changes());
    inputs.record_turn(fleet, &plan, &changes);
}

/// The thread that writes statuses may be in the next term already, and must not write what was decided before.
#[test]
fn facts_of_a_former_own_term_count_in_no_other_term() {
    let (inputs, mut fleet) = (StatusInputs::default(), Fleet::new());
    let leads = |leads| Event::LeadershipChanged { leads };
    let floor = |epoch| Event::GenerationFloor { generation: generation_floor::of_epoch(epoch) };
    turn(&inputs, &mut fleet, &[leads(false)]);
    assert!(!inputs.decides_in(0));
    turn(&inputs, &mut fleet, &[leads(true), floor(7)]);
    assert!(!inputs.decides_in(7), "it does not know yet what runs");
    turn(&inputs, &mut fleet, &[Event::AdoptionDone]);
    assert!(inputs.decides_in(7) && !inputs.decides_in(8));
    turn(&inputs, &mut fleet, &[leads(false), leads(true), floor(8), Event::AdoptionDone]);
    assert!(inputs.decides_in(8) && !inputs.decides_in(7));
    turn(&inputs, &mut fleet, &[leads(false)]);
    assert!(!inputs.decides_in(8));
}

#[test]
fn the_last_request_in_a_status_follows_each_gateways_reports() {
    let file = "accelerators: [{id: gpu-0, memory: 80Gi}]\n\
                models: [{name: m, memory: {awake: 20Gi}, engine: {kind: custom, command: [x, '${PORT}']}}]";
    let configuration = rouse_config::parse(file, "test").unwrap().core;
    let found = AdoptedEngine {
        address: ([127, 0, 0, 1], 1).into(),
        accelerators: vec!["gpu-0".into()],
        asleep: None,
        ready: true,
        fingerprint: configuration.models[0].fingerprint,
        last_lease_end: Tick(1),
        started: Tick(1),
    };
    let model = ModelName::from("m");
    let (engine, generation) = (EngineId::new(model.clone(), 0), Generation(1));
    let (inputs, mut fleet) = (StatusInputs::default(), Fleet::new());
    let configured = Event::Configured { configuration: Box::new(configuration) };
    let adopted = Event::Adopted { engine: engine.clone(), generation, found };
    turn(&inputs, &mut fleet, &[configured, adopted, Event::AdoptionDone]);
    assert_eq!(inputs.take_facts()[&model].last_request, Some(Tick(1)));
    let mut reports = |at: Tick| {
        let demand = GatewayDemand { waiting: 0, in_flight: 0, last_request: at };
        let demand = Some(BTreeMap::from([(model.clone(), demand)]));
        fleet.on(&Event::RemoteDemand { gateway: "other".to_owned(), demand }, at);
        let (plan, changes) = (fleet.plan(at), fleet.take_routing_changes());
        inputs.record_turn(&fleet, &plan, &changes);
        inputs.take_facts().remove(&model).map(|facts| facts.last_request)
    };
    assert_eq!(reports(Tick(5_000)), Some(Some(Tick(5_000))));
    assert_eq!(reports(Tick(5_000)), None, "it says nothing new");

    // While it is in use here, no turn says when a request ended.
    let unknown = ModelName::from("unknown");
    let ended = |at: Tick| {
        inputs.record_last_requests([(&model, at), (&unknown, at)].into_iter());
        inputs.take_facts()
    };
    assert_eq!(
        ended(Tick(6_000)).into_values().map(|facts| facts.last_request).collect::<Vec<_>>(),
        [Some(Tick(6_000))]
    );
    assert!(ended(Tick(5_500)).is_empty(), "an earlier time is no later request");
    let gone = Event::Gone { engine, generation, cause: FailureCause::Stopped };
    fleet.on(&gone, Tick(6_001));
    let (plan, changes) = (fleet.plan(Tick(6_001)), fleet.take_routing_changes());
    inputs.record_turn(&fleet, &plan, &changes);
    let facts = &inputs.take_facts()[&model];
    assert_eq!((facts.last_request, facts.engines[0].state), (Some(Tick(6_000)), EngineState::Backoff));
}

#[test]
fn what_saturation_decided_about_a_model_that_it_no_longer_scales_is_in_no_later_status() {
    let inputs = StatusInputs::default();
    let [ended, other] = ["ended", "other"].map(ModelName::from);
    for model in [&ended, &other] {
        inputs.lock().facts.insert(model.clone(), ModelFacts::default());
        inputs.record_saturation(model, SaturationFacts::default());
    }
    let scaled = inputs.take_facts();
    assert!(scaled.len() == 2 && scaled.values().all(|facts| facts.saturation.is_some()), "{scaled:?}");
    inputs.forget_saturation_of(&ended);
    let changed = inputs.take_facts();
    assert_eq!(changed.keys().collect::<Vec<_>>(), [&ended]);
    assert_eq!(changed[&ended].saturation, None);
    assert_eq!(inputs.lock().saturation.keys().collect::<Vec<_>>(), [&other]);
}

#[test]
fn a_status_has_each_variants_memory_use_and_as_the_models_own_the_cheapest_ones() {
    let inputs = StatusInputs::default();
    let model = ModelName::from("m");
    inputs.lock().facts.insert(model.clone(), ModelFacts::default());
    inputs.lock().published_variants.insert(model.clone(), "small".into());
    let engine = |variant: &str| EngineId { variant: variant.into(), ..EngineId::new(model.clone(), 0) };
    let peaks = |facts: &ModelFacts| {
        let peak = |learned: &LearnedStatus| learned.peak.as_ref().unwrap().bytes().unwrap();
        facts.learned_of_variants.values().map(peak).collect::<Vec<_>>()
    };
    inputs.record_usage(&engine("large"), Bytes::gib(70), Tick(1));
    let facts = inputs.take_facts().remove(&model).unwrap();
    assert_eq!((facts.peak, peaks(&facts)), (None, vec![Bytes::gib(70)]));
    inputs.record_usage(&engine("large"), Bytes::gib(60), Tick(2));
    assert!(inputs.take_facts().is_empty(), "no peak is higher");
    inputs.record_usage(&engine("small"), Bytes::gib(20), Tick(3));
    let facts = inputs.take_facts().remove(&model).unwrap();
    let own = facts.learned.as_ref().and_then(|learned| learned.peak.clone());
    assert_eq!((facts.peak, own), (Some(Bytes::gib(20)), Some(Bytes::gib(20).into())));
    assert_eq!(peaks(&facts), [Bytes::gib(70), Bytes::gib(20)]);
}

#[test]
fn a_status_names_the_accelerators_of_an_engine_only_if_the_leader_chose_them() {
    let file = "accelerators: [{id: gpu-0, memory: 80Gi}]\n\
                models: [{name: m, memory: {awake: 20Gi}, engine: {kind: custom, command: [x, '${PORT}']}}]";
    let named = |requirement: AcceleratorRequirement, accelerator: Accelerator| {
        let mut configuration = rouse_config::parse(file, "test").unwrap().core;
        configuration.models[0].accelerators = requirement;
        let found = AdoptedEngine {
            address: ([127, 0, 0, 1], 1).into(),
            accelerators: vec![accelerator.id.clone()],
            asleep: None,
            ready: true,
            fingerprint: configuration.models[0].fingerprint,
            last_lease_end: Tick(1),
            started: Tick(1),
        };
        configuration.accelerators = vec![accelerator];
        let (inputs, mut fleet) = (StatusInputs::default(), Fleet::new());
        let (engine, generation) = (EngineId::new("m".into(), 0), Generation(1));
        let adopted = Event::Adopted { engine, generation, found };
        let configured = Event::Configured { configuration: Box::new(configuration) };
        turn(&inputs, &mut fleet, &[configured, adopted, Event::AdoptionDone]);
        let facts = inputs.take_facts().remove(&ModelName::from("m")).unwrap();
        let [engine] = facts.engines.as_slice() else { panic!("{facts:?}") };
        engine.accelerators.clone()
    };
    let gpu = Accelerator {
        units: Some(2),
        pool: Some("p".into()),
        node: Some("n".to_owned()),
        ..Accelerator::new("GPU-1".into(), Bytes::gib(80))
    };
    let slots = AcceleratorRequirement::Slots { pool: "p".into(), count: 1 };
    assert_eq!(named(slots, gpu), ["GPU-1"]);
    let pool = Accelerator { units: Some(1), ..Accelerator::new("p".into(), Bytes::gib(80)) };
    assert_eq!(named(AcceleratorRequirement::InPool { pool: "p".into(), count: 1 }, pool), [""; 0]);
}
