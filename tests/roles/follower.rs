//! A follower: serves what the leader publishes, refuses only what is certain, and commands nothing.
//!
//! Apart from the changes of the leader, because here another gateway leads all the time.

use std::collections::BTreeMap;

use rouse::{
    engine::state::LifecycleState,
    fault::Fault,
    fleet::{
        Fleet,
        command::{CloseReason, Command},
        event::{Event, LearnedMeasurements, OperationId, OperatorAction, PublishedEngineState},
    },
    model::{Accelerator, FleetConfig, FleetSettings, QueuePolicy, SleepLevel, VariantName},
    units::{Bytes, Generation, Millis},
};

use crate::harness::{LeadershipHarness, ONE, START, TWO, closes, engine, grants, model, opens, refused};

#[test]
fn a_follower_orders_nothing_and_grants_what_is_published_awake() {
    let mut world = LeadershipHarness::follower(QueuePolicy::Wait);
    assert_eq!(world.arrive("a"), []);
    assert_eq!(world.fleet.next_deadline(), Some(world.now + Millis::secs(540)));
    for state in [PublishedEngineState::Launching, PublishedEngineState::Loading] {
        assert_eq!(world.publish("a", ONE, state), []);
    }
    // Reports about its start are for the leader.
    world.send(&Event::Ready { engine: engine("a"), generation: ONE });
    assert_eq!(world.turn(), []);
    let commands = world.publish("a", ONE, PublishedEngineState::Awake);
    assert_eq!(commands, [opens("a", ONE), grants(1, "a", ONE)]);
    world.report_use("a", ONE, 0);
    world.after(3600);
    assert_eq!(world.turn(), [], "to put it away is for the leader");
    assert!(!world.fleet.leads() && world.fleet.is_ready());
}

#[test]
fn a_gate_is_open_while_its_engine_is_published_awake() {
    let mut world = LeadershipHarness::serving(1);
    let turn = world.of("a").turn_start;
    let commands = world.after(5).publish("a", ONE, PublishedEngineState::Draining);
    assert_eq!(closes(&commands), [(ONE, CloseReason::PublishedNotAwake, false)]);
    assert!(matches!(world.of("a").state, LifecycleState::Draining { .. }) && world.of("a").leases == 1);
    assert_eq!(world.arrive("a"), []);
    let commands = world.publish("a", ONE, PublishedEngineState::Awake);
    assert_eq!(commands, [opens("a", ONE), grants(1, "a", ONE)]);
    assert_eq!(world.of("a").turn_start, turn, "its turn was not over");
    let commands = world.publish("a", ONE, PublishedEngineState::Asleep(SleepLevel::One));
    assert_eq!(closes(&commands), [(ONE, CloseReason::PublishedNotAwake, false)]);
    assert_eq!(world.publish("a", ONE, PublishedEngineState::Waking), []);
}

#[test]
fn the_life_that_is_published_replaces_the_one_that_was_known() {
    let mut world = LeadershipHarness::serving(2);
    let commands = world.publish("a", TWO, PublishedEngineState::Awake);
    assert_eq!(closes(&commands), [(ONE, CloseReason::Fault, true)], "whoever used the other is told");
    assert!(commands.contains(&opens("a", TWO)) && world.of("a").leases == 0);
    assert_eq!(world.publish("a", ONE, PublishedEngineState::Asleep(SleepLevel::One)), [], "that is over");
    world.send(&Event::Published { engine: engine("a"), generation: ONE, published: None });
    assert_eq!(world.turn(), []);
    world.send(&Event::Published { engine: engine("a"), generation: TWO, published: None });
    assert_eq!(closes(&world.turn()), [(TWO, CloseReason::Fault, true)]);
    assert_eq!(world.of("a").state, LifecycleState::Cold);
}

#[test]
fn who_uses_an_engine_that_is_published_failing_is_told() {
    let mut world = LeadershipHarness::serving(1);
    assert_eq!(
        closes(&world.publish("a", ONE, PublishedEngineState::Failing)),
        [(ONE, CloseReason::Fault, true)]
    );
    assert_eq!(world.publish("a", ONE, PublishedEngineState::Backoff), []);
    assert_eq!(world.arrive("a"), []);
    world.after(300);
    assert_eq!(world.turn(), [], "when it is tried again is for the leader");
}

#[test]
fn a_follower_holds_what_its_stub_lets_nobody_into() {
    let mut world = LeadershipHarness::serving(1);
    world.send(&Event::StubGateClosed { engine: engine("a"), generation: ONE });
    assert_eq!(world.turn(), [Command::AwaitStub { engine: engine("a"), generation: ONE }]);
    assert_eq!(world.arrive("a"), []);
    world.send(&Event::StubGateOpened { engine: engine("a"), generation: ONE });
    assert_eq!(world.turn(), [opens("a", ONE), grants(1, "a", ONE)]);
}

#[test]
fn a_follower_refuses_what_the_leader_would_and_waits_when_in_doubt() {
    let mut world = LeadershipHarness::follower(QueuePolicy::Reject);
    let Fault::InsufficientMemory(shortage) = refused(&world.arrive("large")).clone() else {
        panic!("it fits nowhere");
    };
    assert!(shortage.permanent);
    world.publish("a", ONE, PublishedEngineState::Awake);
    world.report_use("a", ONE, 1);
    let Fault::InsufficientMemory(shortage) = refused(&world.arrive("b")).clone() else {
        panic!("it has no memory");
    };
    assert!(!shortage.permanent);
    let holders: Vec<_> = shortage.wait.holders.iter().map(|held| held.model.as_str()).collect();
    assert_eq!(holders, ["a"]);
    world.publish("a", ONE, PublishedEngineState::Draining);
    assert_eq!(world.arrive("b"), [], "its memory may be for this one");
    world.publish("b", ONE, PublishedEngineState::Backoff);
    assert_eq!(world.turn(), [], "what becomes of it only the leader knows");
}

#[test]
fn who_waits_at_a_follower_is_told_of_a_start_that_failed_as_at_the_leader() {
    for ahead in [0, 3600] {
        let mut world = LeadershipHarness::follower(QueuePolicy::Wait);
        world.arrive("a");
        let leaders_now = world.now + Millis::secs(ahead);
        assert_eq!(world.publish_failed("a", 1, leaders_now, 0), [], "the leader tries it once more");
        let refusal = refused(&world.publish_failed("a", 2, leaders_now, 4)).to_string();
        assert!(refusal.starts_with("Model 'a' failed to become ready: last start failed at "), "{refusal}");
        assert!(refusal.contains("(exited:3), 2 failures in a row; next attempt at "), "{refusal}");
        assert!(world.reason("a").starts_with("failed"), "{}", world.reason("a"));
        let Fault::ModelNotReady { wait, .. } = refused(&world.after(1).arrive("a")).clone() else {
            panic!("it is left alone");
        };
        assert_eq!(wait.retry_after, Some(Millis::secs(3)), "as long as the leader leaves it alone");
        // It may have been started by now without a report: a new request waits, and gets the known reason.
        world.after(3);
        assert_eq!(world.arrive("a"), []);
        assert!(world.reason("a").contains("exited:3"), "{}", world.reason("a"));
        world.publish("a", Generation(3), PublishedEngineState::Loading);
        assert!(world.fleet.last_failure(&"a".into()).is_some(), "it has not served since");
        assert_eq!(
            world.publish("a", Generation(3), PublishedEngineState::Awake).len(),
            2,
            "open, and granted"
        );
        assert_eq!(world.fleet.last_failure(&"a".into()), None);
    }
}

#[test]
fn what_was_said_of_a_failure_long_ago_refuses_nobody_for_long() {
    let mut world = LeadershipHarness::follower(QueuePolicy::Wait);
    world.after(3600).publish_failed("a", 5, START, 8);
    assert_eq!(world.after(1).arrive("a"), [], "no gateway leads, and the next that does may have more luck");
}

#[test]
fn a_refusal_that_hangs_on_what_is_about_to_be_decided_is_none() {
    let mut world = LeadershipHarness::follower(QueuePolicy::Reject);
    // Each would fit alone, and the leader may have chosen either.
    assert_eq!(world.arrive("a"), []);
    assert_eq!(world.arrive("b"), []);
}

#[test]
fn orders_are_for_the_gateway_that_leads() {
    let mut world = LeadershipHarness::serving(0);
    let forbidden = world.fleet.validate_action(&"a".into(), OperatorAction::Stop).expect_err("it follows");
    assert!(forbidden.contains("another gateway leads"), "{forbidden}");
    world.send(&Event::OperatorRequest {
        operation: OperationId(1),
        model: "b".into(),
        action: OperatorAction::Pin,
    });
    let commands = world.turn();
    assert!(
        matches!(&commands[..], [Command::FinishOperation { outcome: Err(why), .. }] if *why == forbidden)
    );
    world.send(&Event::LeadershipChanged { leads: true });
    world.send(&Event::AdoptionDone);
    assert!(world.turn().iter().all(|c| !matches!(c, Command::Reserve { .. })), "it was never pinned");
}

#[test]
fn a_follower_that_shuts_down_tells_its_own_and_stops_nothing() {
    let mut world = LeadershipHarness::serving(1);
    world.arrive("b");
    world.send(&Event::Shutdown { stop_engines: true });
    let commands = world.turn();
    assert_eq!(closes(&commands), [(ONE, CloseReason::Shutdown, true)]);
    assert!(commands.iter().any(|c| matches!(c, Command::Refuse { fault: Fault::ShuttingDown, .. })));
    assert_eq!(commands.len(), 3, "{commands:?}");
    assert!(!world.fleet.is_finished());
    world.report_use("a", ONE, 0);
    assert_eq!(world.turn(), []);
    assert!(world.fleet.is_finished() && world.of("a").state == LifecycleState::Awake);
}

/// The leader may have reserved its dependencies, or be about to: a follower refuses only what can never fit.
#[test]
fn a_follower_refuses_nobody_for_what_is_needed_and_may_be_coming() {
    let needs_text = |name: &str, other: &str| {
        let mut spec = model(name);
        (spec.memory.awake, spec.dependencies) = (Bytes::gib(8), vec![other.into()]);
        spec
    };
    let mut small = model("small");
    small.memory.awake = Bytes::gib(8);
    let models = vec![model("a"), needs_text("never", "a"), small, needs_text("top", "small")];
    let mut world = LeadershipHarness::of_models(models, QueuePolicy::Reject);
    world.send(&Event::LeadershipChanged { leads: false });
    assert_eq!(world.turn(), []);
    assert_eq!(world.arrive("top"), [], "both could be reserved for");
    for state in
        [PublishedEngineState::Launching, PublishedEngineState::Loading, PublishedEngineState::Failing]
    {
        assert_eq!(world.publish("small", ONE, state), []);
    }
    assert_eq!(world.publish("small", ONE, PublishedEngineState::Backoff), []);
    let Fault::InsufficientMemory(shortage) = refused(&world.arrive("never")).clone() else {
        panic!("it would be served");
    };
    assert!(shortage.permanent, "{shortage:?}");
    assert!(shortage.wait.waited_for.contains("a needs 20Gi on one accelerator"), "{shortage:?}");
}

#[test]
fn a_follower_knows_what_a_sleeper_keeps_as_soon_as_the_leader_has_learned_it() {
    let mut world = LeadershipHarness::follower(QueuePolicy::Wait);
    world.publish("a", ONE, PublishedEngineState::Asleep(SleepLevel::One));
    assert_eq!(world.fleet.reserved_bytes(&engine("a")), Bytes::mib(256), "it is configured like this");
    let learned = LearnedMeasurements { residue: Some(Bytes::gib(3)), ..LearnedMeasurements::default() };
    let (model, variant) = ("a".into(), VariantName::default());
    world.send(&Event::MeasurementsRestored { model, variant, learned });
    assert_eq!(world.turn(), []);
    assert_eq!(world.fleet.reserved_bytes(&engine("a")), Bytes::gib(3));
}

/// A gateway that starts reads the statuses of models while it still composes its first configuration.
#[test]
fn what_a_leader_learned_is_kept_for_the_first_configuration() {
    let learned = LearnedMeasurements { start: Some(Millis(946)), ..LearnedMeasurements::default() };
    let restored = |name: &str| Event::MeasurementsRestored {
        model: name.into(),
        variant: VariantName::default(),
        learned,
    };
    let mut fleet = Fleet::new();
    fleet.on(&Event::LeadershipChanged { leads: false }, START);
    for name in ["a", "gone"] {
        fleet.on(&restored(name), START);
    }
    let configuration = FleetConfig {
        settings: FleetSettings::default(),
        accelerators: vec![Accelerator::new("gpu-0".into(), Bytes::gib(24))],
        models: vec![model("a")],
    };
    fleet.on(&Event::Configured { configuration: Box::new(configuration) }, START);
    assert_eq!(
        fleet.learned(),
        BTreeMap::from([("a".into(), learned)]),
        "and no model that nobody configured"
    );
    // Later on, a model that is not configured is unknown.
    fleet.on(&restored("gone"), START);
    assert_eq!(fleet.learned().len(), 1);
}
