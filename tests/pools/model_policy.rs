//! A model's own policy, where other models have another.

use rouse::{
    fault::{BlockingModel, Fault},
    fleet::event::{Event, OperationId, OperatorAction},
    model::{EvictionPolicy, ModelSpec, QueueOverrides, QueuePolicy},
    units::{Bytes, Millis},
};

use crate::harness::{PoolHarness, engine, gpu, model};

const COOLDOWN: Millis = Millis::secs(600);

/// Two models, of which 128 GiB hold only one. The model of 80 GiB is evicted only after its cooldown. Requests for the
/// model of 60 GiB do not wait for that.
fn seed() -> PoolHarness {
    let mut first = ModelSpec { eviction: Some(EvictionPolicy::Cooldown), ..model("first", 80) };
    first.idle.sleep_after = Some(COOLDOWN);
    let queue = QueueOverrides { policy: Some(QueuePolicy::Reject), ..QueueOverrides::default() };
    let second = ModelSpec { queue, ..model("second", 60) };
    let mut world = PoolHarness::new(vec![gpu(128)], vec![first, second]);
    let asked = world.ask("first");
    assert_eq!(world.served, [asked]);
    world.finish_requests(engine("first"));
    world
}

#[test]
fn who_does_not_wait_is_told_who_is_in_the_way_and_until_when() {
    let mut world = seed();
    let idle = Millis::secs(60);
    world.advance(idle);
    let refused = world.ask("second");
    let Fault::InsufficientMemory(shortage) = &world.refused[&refused] else { panic!("{:?}", world.refused) };
    let first = BlockingModel {
        model: "first".into(),
        memory: Bytes::gib(80),
        idle_for: idle,
        leases: 0,
        pinned: false,
    };
    assert_eq!(shortage.wait.holders, [first]);
    assert_eq!(
        (shortage.memory, shortage.available, shortage.permanent),
        (Bytes::gib(60), Bytes::gib(48), false)
    );
    assert_eq!(shortage.wait.retry_after, Some(Millis(COOLDOWN.0 - idle.0)));
    let unused = world.fleet.engine(&engine("first")).unwrap().last_lease_end;
    let words = format!("held by first, 0 leases, idle since {unused}, evictable at {}", unused + COOLDOWN);
    assert!(shortage.wait.waited_for.ends_with(&words), "{}", shortage.wait.waited_for);
    assert_eq!(world.state(&engine("first")), "Awake");
}

#[test]
fn once_the_cooldown_is_over_the_other_starts() {
    let mut world = seed();
    world.advance(COOLDOWN);
    let asked = world.ask("second");
    assert_eq!((world.served.last(), world.refused.len()), (Some(&asked), 0));
    assert_eq!(world.state(&engine("first")), "Asleep(1)");
}

/// `own_policy` occupies what `theirs` needs. A model's own policy overrides the settings.
fn both(settings: EvictionPolicy, own_policy: Option<EvictionPolicy>) -> PoolHarness {
    let own_model = ModelSpec { eviction: own_policy, ..model("mine", 80) };
    let mut world = PoolHarness::new(vec![gpu(100)], vec![own_model, model("theirs", 60)]);
    world.configure(|configuration| configuration.settings.eviction = settings);
    world.ask("mine");
    world.finish_requests(engine("mine"));
    world.advance(Millis::secs(3600 * 2));
    world
}

#[test]
fn whether_an_engine_may_go_is_for_its_own_model_to_say() {
    use EvictionPolicy::{Never, Residency};
    for (settings, mine, goes) in [
        (Residency, None, true),
        (Residency, Some(Never), false),
        (Never, None, false),
        (Never, Some(Residency), true),
        // A model that never sleeps by idleness has no cooldown that could end.
        (Residency, Some(EvictionPolicy::Cooldown), false),
    ] {
        let mut world = both(settings, mine);
        let asked = world.ask("theirs");
        assert_eq!(world.served.contains(&asked), goes, "{settings:?}, {mine:?}");
        if !goes {
            let reason = world.reason("theirs");
            assert!(reason.contains("held by mine, 0 leases, never evicted"), "{reason}");
        }
    }
}

/// A reason is part of a model's status, which must not grow with the pool.
#[test]
fn a_reason_names_a_few_of_those_in_the_way_and_counts_the_others() {
    let names: Vec<String> = (0..7).map(|number| format!("small-{number}")).collect();
    let small = |name: &String| ModelSpec { eviction: Some(EvictionPolicy::Never), ..model(name, 10) };
    let models = names.iter().map(small).chain([model("large", 60)]).collect();
    let mut world = PoolHarness::new(vec![gpu(80)], models);
    for name in &names {
        world.ask(name);
        world.finish_requests(engine(name));
    }
    world.ask("large");
    let reason = world.reason("large");
    assert_eq!(reason.matches("held by small-").count(), 4, "{reason}");
    assert!(reason.contains("held by small-3, 0 leases, never evicted; and by 3 other engines"), "{reason}");
}

/// Each client that waits in vain gets a refusal, which must not grow with the pool either.
#[test]
fn a_refusal_lists_the_largest_of_those_in_the_way_and_counts_the_others() {
    let name = |gib: u64| format!("holds-{gib:02}");
    let holds = |gib| ModelSpec { eviction: Some(EvictionPolicy::Never), ..model(&name(gib), gib) };
    let queue = QueueOverrides { policy: Some(QueuePolicy::Reject), ..QueueOverrides::default() };
    let models = (2..=21).map(holds).chain([ModelSpec { queue, ..model("refused", 60) }]).collect();
    let mut world = PoolHarness::new(vec![gpu(231)], models);
    for gib in 2..=21 {
        world.ask(&name(gib));
        world.finish_requests(engine(&name(gib)));
    }
    let refused = world.ask("refused");
    let Fault::InsufficientMemory(shortage) = &world.refused[&refused] else { panic!("{:?}", world.refused) };
    let sizes: Vec<Bytes> = shortage.wait.holders.iter().map(|holder| holder.memory).collect();
    assert_eq!(sizes, (6..=21).rev().map(Bytes::gib).collect::<Vec<_>>());
    assert_eq!(shortage.wait.unlisted_holders, 4);
}

#[test]
fn whether_requests_wait_is_for_the_model_to_say_that_they_ask_for() {
    use QueuePolicy::{Reject, Wait};
    for (settings, own, waits) in
        [(Wait, None, true), (Wait, Some(Reject), false), (Reject, None, false), (Reject, Some(Wait), true)]
    {
        let mut world = both(EvictionPolicy::Never, None);
        world.configure(|configuration| {
            configuration.settings.queue.policy = settings;
            configuration.models[1].queue.policy = own;
        });
        let asked = world.ask("theirs");
        assert_eq!(world.refused.contains_key(&asked), !waits, "{settings:?}, {own:?}");
    }
}

#[test]
fn a_model_with_a_short_queue_refuses_its_own_newest_and_nobody_elses() {
    let mut world = both(EvictionPolicy::Never, None);
    world.configure(|configuration| {
        configuration.models[1].queue.max_waiting = Some(2);
        configuration.settings.queue.max_waiting = 5;
        configuration.models.push(model("others", 60));
    });
    let own_waiters: Vec<_> = (0..4).map(|_| world.ask("theirs")).collect();
    let other_waiters: Vec<_> = (0..4).map(|_| world.ask("others")).collect();
    assert_eq!(
        world.refused.keys().collect::<Vec<_>>(),
        [&own_waiters[2], &own_waiters[3], &other_waiters[3]]
    );
    let message = |waiter| match &world.refused[waiter] {
        Fault::QueueFull { message, wait } => (message.as_str(), wait.position),
        fault => panic!("{fault:?}"),
    };
    assert_eq!(
        message(&own_waiters[3]),
        ("too many requests wait for 'theirs' (the model's queue.maxWaiting)", 3)
    );
    assert_eq!(message(&other_waiters[3]), ("too many requests wait (queue.maxWaiting)", 4));
}

#[test]
fn an_order_waits_as_long_as_a_request_for_that_model_would() {
    let mut world = both(EvictionPolicy::Never, None);
    world.configure(|configuration| configuration.models[1].queue.max_wait = Some(Millis::secs(5)));
    let operation = OperationId(1);
    world.send(Event::OperatorRequest { operation, model: "theirs".into(), action: OperatorAction::Wake });
    world.advance(Millis(4999));
    let finished = |world: &PoolHarness| {
        let finish = |command: &_| matches!(command, rouse::fleet::command::Command::FinishOperation { .. });
        world.ordered.iter().any(finish)
    };
    assert!(!finished(&world));
    world.advance(Millis(1));
    assert!(finished(&world));
}
