use super::*;
use crate::{
    saturation::{ReplicaMetrics, Role, TargetReason, VariantEngines, VariantState},
    units::Millis,
};

const NOW: Tick = Tick(1_780_000_000_000);
const SECOND: Millis = Millis::secs(1);

/// One model with one variant, as its gateway sees it from one decision to the next.
struct ScalingScene {
    scaling: ModelScaling,
    engines: VariantEngines,
    /// Used share of the KV cache of every engine.
    kv_use: f64,
    availability: MetricsAvailability,
    external: Option<u32>,
    now: Tick,
}

impl ScalingScene {
    fn new(stored: Option<u32>) -> Self {
        let target = |replicas| RecordedTarget {
            variant: VariantName::default(),
            replicas,
            reason: "stored".to_owned(),
            decided: Some(NOW),
        };
        Self {
            scaling: ModelScaling::restored(stored.map(target).into_iter().collect()),
            engines: VariantEngines::default(),
            kv_use: 0.1,
            availability: MetricsAvailability::Known,
            external: None,
            now: NOW,
        }
    }

    /// Decides, and returns the numbers that the fleet is told.
    fn step(&mut self) -> Vec<u32> {
        self.take_step().orders.iter().map(|order| order.replicas).collect()
    }

    fn take_step(&mut self) -> ScalingStep {
        let engines = self.engines;
        let replica = |number: u32| ReplicaMetrics {
            replica: number.to_string(),
            kv_use: Some(self.kv_use),
            waiting: Some(0.0),
            ..ReplicaMetrics::default()
        };
        let state = VariantState {
            current: engines.current,
            pending: engines.pending,
            asleep: engines.asleep,
            max: Some(5),
            ..VariantState::default()
        };
        let load = ModelLoad {
            replicas: (engines.pending..engines.current).map(replica).collect(),
            states: vec![state],
            ..ModelLoad::default()
        };
        let variants = BTreeMap::from([(VariantName::default(), engines)]);
        let fleet = FleetLoad { variants, ..FleetLoad::default() };
        let input = ScalingInput {
            policy: SaturationPolicy { stabilisation: Millis::ZERO, ..SaturationPolicy::default() },
            load,
            fleet: &fleet,
            availability: &self.availability,
            external: self.external,
        };
        self.now = self.now + SECOND;
        self.scaling.step(input, self.now)
    }

    /// The fleet does what it was told.
    fn obey(&mut self, replicas: u32) {
        (self.engines.current, self.engines.target) = (replicas, Some(replicas));
    }

    fn targets(&self) -> Vec<u32> {
        self.scaling.targets().iter().map(|target| target.replicas).collect()
    }
}

#[test]
fn a_target_is_sent_once_and_again_if_the_fleet_has_lost_it() {
    let mut scene = ScalingScene::new(None);
    scene.engines.current = 1;
    assert_eq!(scene.step(), [1]);
    scene.obey(1);
    assert!(scene.step().is_empty());
    scene.engines.target = None;
    assert_eq!(scene.step(), [1]);
}

#[test]
fn a_new_leader_sends_the_stored_target_even_while_the_load_is_unknown() {
    let mut scene = ScalingScene::new(Some(3));
    scene.engines.current = 1;
    scene.availability = MetricsAvailability::SourceFailed("cannot reach Prometheus".to_owned());
    assert_eq!(scene.step(), [3]);
    assert_eq!((scene.targets(), scene.scaling.decided_at()), (vec![3], None));
    scene.engines.target = Some(3);
    assert!(scene.step().is_empty(), "an outage changes nothing");
}

#[test]
fn a_new_leader_keeps_an_engine_that_was_started_before_its_target_was_stored() {
    for availability in
        [MetricsAvailability::Known, MetricsAvailability::SourceFailed("no answer".to_owned())]
    {
        let mut scene = ScalingScene::new(Some(1));
        (scene.engines.current, scene.engines.pending, scene.availability) = (2, 1, availability);
        assert_eq!(scene.step(), [2]);
        scene.engines.target = Some(2);
        assert!(scene.step().is_empty(), "once");
        assert_eq!(scene.targets(), [2]);
    }
}

#[test]
fn an_engine_that_a_request_has_started_is_no_transition() {
    let mut scene = ScalingScene::new(Some(0));
    assert_eq!(scene.step(), [0]);
    // The fleet starts the first engine for a request, whatever the target is.
    (scene.engines.current, scene.engines.target) = (1, Some(0));
    scene.kv_use = 0.95;
    let orders = scene.step();
    assert!(orders.len() == 1 && orders[0] > 1, "it is full, so another one is wanted: {orders:?}");
}

#[test]
fn a_target_that_idleness_has_lowered_in_the_fleet_is_not_raised_again() {
    let mut scene = ScalingScene::new(Some(2));
    (scene.engines.current, scene.kv_use) = (2, 0.5);
    assert_eq!(scene.step(), [2]);
    scene.obey(2);
    (scene.engines.current, scene.engines.target, scene.engines.asleep) = (0, Some(0), 2);
    assert!(scene.step().is_empty());
    assert_eq!(scene.targets(), [0]);
}

#[test]
fn a_refused_engine_is_given_up_until_memory_is_released() {
    let mut scene = ScalingScene::new(None);
    (scene.engines.current, scene.kv_use) = (1, 0.95);
    let wanted = scene.step();
    assert!(wanted[0] > 1, "{wanted:?}");
    (scene.engines.target, scene.engines.refused) = (Some(wanted[0]), Some(RefusalCause::Memory));
    assert_eq!(scene.step(), [1], "what runs");
    (scene.engines.target, scene.engines.refused) = (Some(1), None);
    assert!(scene.step().is_empty(), "it is not tried again at once");
    scene.engines.free = crate::units::Bytes::gib(80);
    assert!(scene.step().first().is_some_and(|again| *again > 1));
}

#[test]
fn an_engine_whose_starts_keep_failing_is_given_up_and_does_not_count_as_refused_by_memory() {
    let mut scene = ScalingScene::new(None);
    (scene.engines.current, scene.kv_use) = (1, 0.95);
    let wanted = scene.step();
    (scene.engines.target, scene.engines.refused) = (Some(wanted[0]), Some(RefusalCause::StartFailed));
    let step = scene.take_step();
    assert_eq!(step.orders.iter().map(|order| order.replicas).collect::<Vec<_>>(), [1]);
    assert!(step.refused.is_empty(), "{:?}", step.refused);
    (scene.engines.target, scene.engines.refused) = (Some(1), None);
    assert!(
        scene.step().first().is_some_and(|again| *again > 1),
        "the fleet has nothing against it any more"
    );
}

#[test]
fn another_autoscaler_sets_the_number_and_reads_the_one_by_the_load() {
    let mut scene = ScalingScene::new(None);
    (scene.engines.current, scene.external, scene.kv_use) = (1, Some(2), 0.95);
    assert_eq!(scene.step(), [2], "what it asked for");
    assert!(scene.targets()[0] > 1, "what the load needs: {:?}", scene.targets());
    scene.obey(2);
    scene.kv_use = 0.05;
    assert!(scene.step().is_empty());
    assert!(scene.targets()[0] <= 2, "the decision by the load starts from what runs");
    scene.external = Some(1);
    assert_eq!(scene.step(), [1]);
}

#[test]
fn the_reason_of_a_start_gives_way_once_to_one_that_lasts_and_the_fleet_learns_it() {
    let mut scene = ScalingScene::new(Some(0));
    assert_eq!(scene.step(), [0]);
    // The fleet starts the first engine for a request.
    (scene.engines.current, scene.engines.pending, scene.engines.target) = (1, 1, Some(0));
    assert_eq!(scene.step(), [1]);
    let reason = |scene: &ScalingScene| scene.scaling.targets()[0].reason.clone();
    assert!(reason(&scene).starts_with("no replica reports"), "{}", reason(&scene));
    let decided = scene.scaling.targets()[0].decided;
    (scene.engines.pending, scene.engines.target) = (0, Some(1));
    assert_eq!(scene.step(), [1], "with another reason");
    assert!(reason(&scene).starts_with("no step is needed"), "{}", reason(&scene));
    assert_eq!(scene.scaling.targets()[0].decided, decided);
    scene.kv_use = 0.2;
    assert!(scene.step().is_empty());
}

#[test]
fn a_target_keeps_its_reason_and_time_until_its_number_changes() {
    let decision = |numbers: &[(&str, u32)]| {
        let target = |(variant, replicas): &(&str, u32)| Target {
            variant: (*variant).into(),
            role: Role::Both,
            replicas: *replicas,
            reason: TargetReason::External,
        };
        Decision { targets: numbers.iter().map(target).collect(), ..Decision::default() }
    };
    let mut scaling = ModelScaling::default();
    let later = NOW + SECOND;
    assert!(scaling.record_targets(&decision(&[("a", 1), ("b", 2)]), NOW).is_empty());
    let before = scaling.targets().to_vec();
    assert!(scaling.record_targets(&decision(&[("a", 1), ("b", 2)]), later).is_empty());
    assert_eq!(scaling.targets(), before);
    let scaled = scaling.record_targets(&decision(&[("a", 2), ("b", 1)]), later);
    let [up, down] = ["a", "b"].map(VariantName::from);
    assert_eq!(scaled, [(up, ScalingDirection::Up), (down, ScalingDirection::Down)]);
    assert_eq!(scaling.targets()[0].decided, Some(later));
    scaling.record_targets(&decision(&[("a", 2)]), later);
    assert_eq!(scaling.targets().len(), 1, "a variant that is gone");
}
