//! A gateway begins or ceases to lead: what it adopts, what it gives up, and what it may not know yet.
//!
//! Apart from the follower's own tests, because each of these is about the change.

use rouse::{
    engine::{Admission, state::LifecycleState},
    fault::{FailureCause, Fault},
    fleet::{
        command::{CloseReason, Command},
        event::{
            CanaryVerdict, Event, OperationId, OperatorAction, PublishedEngine, PublishedEngineState,
            WaiterId,
        },
    },
    journal,
    model::{AcceleratorRequirement, ModelSpec, QueuePolicy, SleepLevel},
    units::{Bytes, Generation, Millis},
};

use crate::harness::{
    LeadershipHarness, ONE, START, TWO, address, closes, engine, grants, model, opens, refused,
};

#[test]
fn who_comes_to_lead_goes_on_serving_and_decides_once_it_knows_what_runs() {
    let mut world = LeadershipHarness::serving(2);
    let (turn, last_end) = (world.of("a").turn_start, world.of("a").last_lease_end);
    world.after(10).send(&Event::LeadershipChanged { leads: true });
    assert_eq!(world.turn(), []);
    assert_eq!(world.arrive("a"), [grants(1, "a", ONE)], "without a gap");
    assert_eq!(world.arrive("b"), []);
    assert!(world.fleet.is_ready() && world.fleet.leads());
    world.publish("a", TWO, PublishedEngineState::Stopping);
    assert_eq!(world.of("a").generation, ONE, "nobody else is listened to");
    world.adopt("a", ONE, None, true);
    assert_eq!(world.turn(), []);
    let a = world.of("a");
    assert_eq!(
        (a.admission, a.leases, a.turn_start, a.last_lease_end),
        (Admission::Public, 3, turn, last_end)
    );
    world.send(&Event::AdoptionDone);
    assert_eq!(world.turn(), []);
    world.after(300);
    assert_eq!(closes(&world.turn()), [(ONE, CloseReason::Turn, false)], "its turn is over, and it decides");
}

#[test]
fn what_is_not_found_running_is_gone() {
    let mut world = LeadershipHarness::serving(1);
    world.send(&Event::LeadershipChanged { leads: true });
    world.send(&Event::AdoptionDone);
    assert_eq!(closes(&world.turn()), [(ONE, CloseReason::Fault, true)]);
    assert_eq!(world.of("a").state, LifecycleState::Cold);
    let commands = world.arrive("a");
    assert!(matches!(commands[..], [Command::Reserve { generation: TWO, .. }]), "{commands:?}");
}

#[test]
fn what_is_found_asleep_is_shut_and_whoever_is_in_it_is_told() {
    let mut world = LeadershipHarness::serving(1);
    world.send(&Event::LeadershipChanged { leads: true });
    world.adopt("a", ONE, Some(SleepLevel::One), true);
    world.send(&Event::AdoptionDone);
    world.report_use("a", ONE, 1);
    assert_eq!(closes(&world.turn()), [(ONE, CloseReason::Fault, true)]);
    let commands = world.arrive("a");
    assert!(matches!(commands[..], [Command::Reserve { generation: ONE, .. }]), "{commands:?}");
}

/// Nothing says how much memory such an engine uses.
#[test]
fn nothing_starts_beside_an_engine_of_a_former_model_before_it_is_gone() {
    let mut world = LeadershipHarness::follower(QueuePolicy::Wait);
    world.publish("former", ONE, PublishedEngineState::Awake);
    world.send(&Event::LeadershipChanged { leads: true });
    world.adopt("former", ONE, None, true);
    assert_eq!(world.arrive("a"), []);
    world.send(&Event::AdoptionDone);
    assert_eq!(closes(&world.turn()), [(ONE, CloseReason::Outdated, false)]);
    world.send(&Event::Drained { engine: engine("former"), generation: ONE });
    let commands = world.turn();
    assert!(matches!(commands[..], [Command::Stop { .. }]), "{commands:?}");
    world.send(&Event::Gone { engine: engine("former"), generation: ONE, cause: FailureCause::Stopped });
    let commands = world.turn();
    assert!(matches!(commands[..], [Command::Reserve { .. }]), "{commands:?}");
}

/// A gateway without a configuration for `a` finds it, or with one that says `before`; then `a` and `b` have 10Gi each.
fn asked_beside_a_found_engine(before: Option<Bytes>) -> Vec<Command> {
    let with_memory = |name: &str, awake: Bytes| {
        let mut spec = model(name);
        spec.memory.awake = awake;
        spec
    };
    let small = |name: &str| with_memory(name, Bytes::gib(10));
    let mut world = LeadershipHarness::starting();
    let found = before.map(|awake| with_memory("a", awake));
    world.configure(found.into_iter().chain([small("b")]).collect(), QueuePolicy::Wait);
    world.adopt("a", ONE, None, true);
    world.configure(vec![small("a"), small("b")], QueuePolicy::Wait);
    world.send(&Event::AdoptionDone);
    world.turn();
    world.arrive("b")
}

#[test]
fn an_engine_whose_model_a_reload_restores_during_adoption_has_the_memory_of_its_model() {
    let commands = asked_beside_a_found_engine(None);
    assert!(matches!(commands[..], [Command::Reserve { .. }]), "there is room beside a: {commands:?}");
}

/// Its process was started with the former configuration.
#[test]
fn an_engine_keeps_the_memory_that_it_was_found_with_when_a_reload_says_less_during_adoption() {
    let commands = asked_beside_a_found_engine(Some(Bytes::gib(20)));
    assert_eq!(closes(&commands), [(ONE, CloseReason::Turn, false)], "a has 20 of 24Gi: {commands:?}");
}

/// The former leader had reloaded earlier. This holds alone, and for a gateway that takes over.
#[test]
fn an_engine_found_on_an_accelerator_that_a_reload_brings_has_its_memory_there() {
    let fixed = |name: &str, gpu: &str| ModelSpec {
        accelerators: AcceleratorRequirement::Ids(vec![gpu.into()]),
        ..model(name)
    };
    for takes_over in [false, true] {
        let mut world = LeadershipHarness::starting();
        world.configure(vec![fixed("a", "gpu-1"), fixed("b", "gpu-1")], QueuePolicy::Wait);
        if takes_over {
            world.send(&Event::AdoptionDone);
            world.send(&Event::LeadershipChanged { leads: false });
            world.send(&Event::LeadershipChanged { leads: true });
        }
        world.adopt_on("gpu-1", "a", ONE, None, true);
        let models = vec![fixed("a", "gpu-1"), fixed("b", "gpu-1")];
        world.configure_on(&["gpu-0", "gpu-1"], models, QueuePolicy::Wait);
        world.send(&Event::AdoptionDone);
        world.turn();
        let commands = world.arrive("b");
        assert_eq!(closes(&commands), [(ONE, CloseReason::Turn, false)], "{takes_over}: {commands:?}");
    }
}

/// The previous leader ordered the sleep and may not have received its outcome.
#[test]
fn what_was_told_to_sleep_has_all_its_memory_until_it_says_that_it_sleeps() {
    let taken_over = || {
        let mut world = LeadershipHarness::serving(1);
        world.send(&Event::LeadershipChanged { leads: true });
        world.adopt("a", ONE, Some(SleepLevel::One), false);
        world.send(&Event::AdoptionDone);
        assert_eq!(closes(&world.turn()), [(ONE, CloseReason::Fault, true)]);
        assert_eq!(world.of("a").state, LifecycleState::FallingAsleep { level: SleepLevel::One });
        for model in ["a", "b"] {
            assert_eq!(world.arrive(model), [], "nothing is known of it yet");
        }
        world
    };
    let (engine, generation, level) = (engine("a"), ONE, SleepLevel::One);
    let mut world = taken_over();
    world.send(&Event::Slept { engine: engine.clone(), generation, level });
    let commands = world.turn();
    assert!(
        matches!(commands[..], [Command::Shrink { .. }, Command::Reserve { generation: ONE, .. }]),
        "{commands:?}"
    );

    let mut world = taken_over();
    world.send(&Event::SleepFailed { engine: engine.clone(), generation, cause: FailureCause::SleepDenied });
    assert_eq!(world.turn(), [opens("a", ONE), grants(1, "a", ONE)]);

    // Refused, or unanswered until the timeout.
    let mut refused = taken_over();
    refused.send(&Event::SleepFailed { engine, generation, cause: FailureCause::Refused });
    let mut silent = taken_over();
    silent.after(30 + 20);
    for mut world in [refused, silent] {
        let commands = world.turn();
        assert!(matches!(commands[..], [Command::Stop { generation: ONE, .. }]), "{commands:?}");
    }
}

#[test]
fn one_that_does_not_answer_for_a_moment_keeps_its_requests_and_is_watched() {
    let mut world = LeadershipHarness::serving(1);
    world.send(&Event::LeadershipChanged { leads: true });
    world.adopt("a", ONE, None, false);
    world.send(&Event::AdoptionDone);
    assert_eq!(world.turn(), []);
    assert_eq!((world.of("a").admission, world.of("a").leases), (Admission::Public, 1));
    world.after(11);
    assert_eq!(closes(&world.turn()), [(ONE, CloseReason::Fault, true)], "it hangs");
}

#[test]
fn who_no_longer_leads_gives_up_what_it_had_begun() {
    let mut world = LeadershipHarness::leader(QueuePolicy::Wait);
    world.send(&Event::OperatorRequest {
        operation: OperationId(1),
        model: "a".into(),
        action: OperatorAction::Wake,
    });
    assert!(matches!(world.turn()[..], [Command::Reserve { .. }]));
    world.send(&Event::LeadershipChanged { leads: false });
    let commands = world.turn();
    assert!(
        matches!(&commands[..], [Command::FinishOperation { outcome: Err(why), .. }] if why.contains("another gateway"))
    );
    world.send(&Event::Placed { engine: engine("a"), generation: ONE, accelerators: vec!["gpu-0".into()] });
    assert_eq!(world.turn(), []);
    assert!(world.of("a").pending_reservation.is_none());
}

#[test]
fn a_start_under_way_stays_as_it_is_until_it_is_published() {
    let mut world = LeadershipHarness::leader(QueuePolicy::Wait);
    world.arrive("a");
    world.send(&Event::Placed { engine: engine("a"), generation: ONE, accelerators: vec!["gpu-0".into()] });
    assert!(matches!(world.turn()[..], [Command::Launch { .. }]));
    world.send(&Event::Started { engine: engine("a"), generation: ONE, address: address() });
    world.send(&Event::Ready { engine: engine("a"), generation: ONE });
    let commands = world.turn();
    assert!(matches!(
        commands[..],
        [Command::OpenGate { public: false, .. }, Command::Grant { canary: true, .. }]
    ));
    world.send(&Event::LeadershipChanged { leads: false });
    assert_eq!(world.turn(), []);
    assert_eq!(world.arrive("a"), [], "no second one is sent to prove it");
    let verdict = CanaryVerdict::Failed(FailureCause::Unhealthy);
    world.send(&Event::Canary { engine: engine("a"), generation: ONE, verdict });
    world.after(3600);
    assert!(matches!(refused(&world.turn()), Fault::ModelNotReady { cause: FailureCause::Deadline, .. }));
    assert_eq!(world.of("a").state, LifecycleState::Loading);
    assert_eq!(world.publish("a", ONE, PublishedEngineState::Awake), [opens("a", ONE)]);
}

#[test]
fn what_is_ready_when_this_gateway_no_longer_leads_is_for_another_to_prove() {
    let mut world = LeadershipHarness::leader(QueuePolicy::Wait);
    world.arrive("a");
    world.send(&Event::Placed { engine: engine("a"), generation: ONE, accelerators: vec!["gpu-0".into()] });
    world.turn();
    world.send(&Event::Started { engine: engine("a"), generation: ONE, address: address() });
    world.send(&Event::Ready { engine: engine("a"), generation: ONE });
    world.send(&Event::LeadershipChanged { leads: false });
    assert_eq!(world.turn(), [], "neither by the request that waits");
    world.send(&Event::Left { waiter: WaiterId(1) });
    assert_eq!(world.turn(), [], "nor by a probe");
}

#[test]
fn a_role_survives_in_a_journal_and_older_journals_do_without() {
    let mut world = LeadershipHarness::serving(1);
    world.arrive("b");
    let mut text = journal::write(&journal::JournalLine::header("0", world.now)).expect("a line");
    text = text + "\n" + &journal::write_turn(world.now, &world.fleet.snapshot()).expect("a line") + "\n";
    let draining = PublishedEngine {
        state: PublishedEngineState::Draining,
        ..PublishedEngine::of(world.of("a")).expect("it runs")
    };
    let events = [Event::Published { engine: engine("a"), generation: ONE, published: Some(draining) }];
    text = text + &journal::write_turn(world.now, &events).expect("a line") + "\n";
    let mut plans = Vec::new();
    journal::replay(&journal::read(&text).expect("a journal"), |_, _, plan, _| {
        plans.push(plan.commands.clone())
    });
    assert_eq!(plans[0], []);
    assert_eq!(closes(&plans[1]), [(ONE, CloseReason::PublishedNotAwake, false)]);

    let alone = LeadershipHarness::leader(QueuePolicy::Wait);
    let text = journal::write_turn(START, &alone.fleet.snapshot()).expect("a line");
    assert!(!text.contains("role") && !text.contains("unfound") && !text.contains("forsaken"), "{text}");
}

/// A new leader has not seen every earlier generation, and other gateways have. So it numbers its engines' generations
/// above all of them.
#[test]
fn lives_under_a_new_leader_are_later_than_any_before() {
    let mut world = LeadershipHarness::follower(QueuePolicy::Wait);
    world.send(&Event::LeadershipChanged { leads: true });
    let from = Generation(7 << 16);
    world.send(&Event::GenerationFloor { generation: from });
    world.send(&Event::AdoptionDone);
    let generation = |world: &LeadershipHarness| world.fleet.engine(&engine("a")).unwrap().generation;
    assert_eq!(generation(&world), from);
    world.send(&Event::GenerationFloor { generation: ONE });
    assert_eq!(generation(&world), from, "never back");
}

/// A running engine has a generation of a previous leader, which this leader may not know.
#[test]
fn an_engine_of_which_nobody_told_is_adopted_in_the_life_that_it_has() {
    let mut world = LeadershipHarness::follower(QueuePolicy::Wait);
    world.send(&Event::LeadershipChanged { leads: true });
    world.send(&Event::GenerationFloor { generation: Generation(7 << 16) });
    world.adopt("a", ONE, None, true);
    world.send(&Event::AdoptionDone);
    let e = world.of("a");
    assert_eq!((e.generation, &e.state), (ONE, &LifecycleState::Awake));
}

/// A cold model cannot start, and its waiters get that reason. Awake models are not affected.
#[test]
fn who_waits_while_the_clusters_api_is_silent_is_told_so_by_whoever_decides() {
    for mut world in [LeadershipHarness::leader(QueuePolicy::Wait), LeadershipHarness::serving(1)] {
        world.arrive("b");
        world.send(&Event::ApiServerChanged { answers: false });
        let reason = world.after(5).reason("b");
        assert!(reason.contains("the cluster's API server has not answered since"), "{reason}");
        let reason = world.reason("large");
        assert!(reason.contains("the cluster's API server"), "nobody waits for it: {reason}");
        let reason = world.reason("a");
        assert_eq!(reason.contains("API server"), !world.of("a").serves(), "{reason}");
        world.send(&Event::ApiServerChanged { answers: true });
        let told = world.reason("b");
        assert!(!told.contains("API server"), "{told}");
    }
}

/// Other gateways may use the engine and could not report it yet.
#[test]
fn nothing_is_put_away_as_idle_before_every_other_gateway_could_be_heard() {
    let idle = |commands: &[Command]| closes(commands).iter().any(|(_, why, _)| *why == CloseReason::Idle);
    let mut world = LeadershipHarness::serving(0);
    world.after(600).send(&Event::LeadershipChanged { leads: true });
    world.adopt("a", ONE, None, true);
    world.send(&Event::AdoptionDone);
    assert!(!idle(&world.turn()) && !idle(&world.after(14).turn()));
    assert!(world.fleet.next_deadline().is_some_and(|at| at <= world.now + Millis::secs(1)));
    assert!(idle(&world.after(1).turn()), "it has been unused for ten minutes");

    let mut world = LeadershipHarness::serving(0);
    world.send(&Event::LeadershipChanged { leads: true });
    world.adopt("a", ONE, None, true);
    world.send(&Event::AdoptionDone);
    world.turn();
    world.after(30).send(&Event::ApiServerChanged { answers: false });
    assert!(!idle(&world.after(600).turn()), "nobody can say anything");
    world.send(&Event::ApiServerChanged { answers: true });
    assert!(!idle(&world.turn()) && !idle(&world.after(14).turn()));
    assert!(idle(&world.after(1).turn()));
}
