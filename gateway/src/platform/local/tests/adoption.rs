//! Tests of what a gateway adopts when it starts.

use rouse::{
    engine::last_outcome::{FailureRecord, FailureStage},
    fleet::event::AdoptedEngine,
    model::VariantName,
};

use super::*;

fn found(event: &Event) -> &AdoptedEngine {
    match event {
        Event::Adopted { generation: FIRST, found, .. } => found,
        other => panic!("not adopted: {other:?}"),
    }
}

#[tokio::test]
async fn an_engine_outlives_its_gateway_and_is_adopted_with_its_idle_clock() {
    let mut harness = LocalPlatformHarness::new(vec![sim("m", "")]);
    harness.adopted().await;
    harness.run("m").await;
    let pid = harness.pid("m");
    let last_end = Tick(1_234_567);
    harness.local.note_idle(&engine("m"), FIRST, last_end);
    let learned = LearnedMeasurements { wake: Some(Millis(50)), ..LearnedMeasurements::default() };
    harness.local.save_learned(BTreeMap::from([("m".into(), learned)]));

    let mut harness = harness.restart(vec![sim("m", "")]).await;
    let began = time::Instant::now();
    let events = harness.adopted().await;
    assert!(time::Instant::now() - began < Duration::from_secs(2));
    let variant = VariantName::default();
    assert_eq!(events[0], Event::MeasurementsRestored { model: "m".into(), variant, learned });
    let adopted = found(&events[1]);
    assert_eq!(
        (adopted.ready, adopted.asleep, adopted.last_lease_end, adopted.fingerprint),
        (true, None, last_end, 7)
    );
    assert_eq!(harness.pid("m"), pid);

    harness.stop("m", Millis::secs(5));
    assert_eq!(harness.gone("m").await, FailureCause::Stopped);
    assert_eq!(harness.restart(Vec::new()).await.adopted().await.len(), 1);
}

#[tokio::test]
async fn a_sleeper_is_adopted_asleep_and_a_starting_engine_becomes_ready() {
    let models = || vec![sim("asleep", ""), sim("slow", "--start-time 1500ms")];
    let mut harness = LocalPlatformHarness::new(models());
    harness.adopted().await;
    harness.run("asleep").await;
    let (id, generation) = (engine("asleep"), FIRST);
    harness.local.submit(Command::Sleep { engine: id, generation, level: SleepLevel::Two });
    assert!(matches!(harness.next().await, Event::Slept { .. }));
    harness.launch("slow");
    assert!(matches!(harness.next().await, Event::Started { .. }));

    let mut harness = harness.restart(models()).await;
    let mut seen = BTreeMap::new();
    for event in harness.adopted().await {
        let Event::Adopted { engine, found, .. } = event else { panic!("{event:?}") };
        seen.insert(engine.model.to_string(), (found.asleep, found.ready));
    }
    assert_eq!(seen["asleep"], (Some(SleepLevel::Two), true));
    assert_eq!(seen["slow"], (None, false));
    while !matches!(harness.next().await, Event::Ready { .. }) {}
    for model in ["asleep", "slow"] {
        harness.stop(model, Millis::secs(5));
        harness.gone(model).await;
    }
}

#[tokio::test]
async fn a_failure_is_restored_before_the_adoption_is_done() {
    let mut world = LocalPlatformHarness::new(Vec::new());
    world.adopted().await;
    let (stage, cause) = (FailureStage::Starting, FailureCause::Exited(3));
    let stored = StoredFailure { at: Tick(9), stage, cause: cause.clone(), count: 2, fingerprint: 7 };
    world.local.shared.store.set_failures(|_| true, BTreeMap::from([(engine("m"), stored)]));
    let mut world = world.restart(vec![sim("m", "")]).await;
    let failure = FailureRecord { stage, cause, count: 2, diagnostics: EngineDiagnostics::default() };
    let restored = Event::FailureRestored { engine: engine("m"), fingerprint: 7, at: Tick(9), failure };
    assert_eq!(world.adopted().await, [restored]);
}

#[tokio::test]
async fn an_adopted_engine_that_dies_is_noticed() {
    let mut harness = LocalPlatformHarness::new(vec![sim("m", "")]);
    harness.adopted().await;
    harness.run("m").await;
    let pid = nix::unistd::Pid::from_raw(harness.pid("m"));
    let mut harness = harness.restart(vec![sim("m", "")]).await;
    found(&harness.adopted().await[0]);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
    harness.gone("m").await;
}

#[tokio::test]
async fn an_engine_of_a_model_that_is_no_longer_configured_is_ended() {
    let mut harness = LocalPlatformHarness::new(vec![sim("m", "")]);
    harness.adopted().await;
    harness.run("m").await;
    let pid = harness.pid("m");
    let mut world = harness.restart(Vec::new()).await;
    assert_eq!(world.adopted().await, []);
    assert!(table::stat(pid).is_none_or(|stat| stat.zombie));
}

/// The recorded pid belongs to another program by now: the gateway neither adopts nor harms it.
#[tokio::test]
async fn a_stranger_with_a_recorded_pid_is_left_alone() {
    let mut harness = LocalPlatformHarness::new(vec![sim("m", "")]);
    harness.adopted().await;
    harness.run("m").await;
    let mut stranger = tokio::process::Command::new("sleep").arg("1000").process_group(0).spawn().unwrap();
    let pid = i32::try_from(stranger.id().unwrap()).unwrap();
    let mut entry = harness.local.shared.store.engines()[&engine("m")].clone();
    let real = entry.pid;
    entry.pid = pid;
    harness.local.shared.store.add(engine("m"), entry).await;

    let mut world = harness.restart(vec![sim("m", "")]).await;
    assert_eq!(world.adopted().await, []);
    assert!(table::stat(pid).is_some_and(|stat| !stat.zombie));
    // The mark finds the process of that name, whatever the file says.
    assert!(table::stat(real).is_none_or(|stat| stat.zombie));
    stranger.kill().await.unwrap();
}

#[tokio::test]
async fn a_process_that_was_started_but_never_recorded_is_ended() {
    let mut harness = LocalPlatformHarness::new(vec![sim("m", "")]);
    harness.adopted().await;
    harness.run("m").await;
    let pid = harness.pid("m");
    let folder = harness.local.shared.store.folder().to_owned();
    harness.local.close().await;
    fs::remove_file(folder.join("engines.json")).unwrap();
    (harness.local, harness.events) = start(&harness.config);
    assert_eq!(harness.adopted().await, []);
    assert!(table::stat(pid).is_none_or(|stat| stat.zombie));
}

/// The engine's process lives, but another program listens on its port and would get its requests.
#[tokio::test]
async fn an_engine_whose_port_belongs_to_somebody_else_is_ended() {
    let models = || vec![script("m", &["sleep", "1000"])];
    let mut harness = LocalPlatformHarness::new(models());
    harness.adopted().await;
    harness.launch("m");
    let Event::Started { address, .. } = harness.next().await else { panic!("not started") };
    let pid = harness.pid("m");
    let _somebody = std::net::TcpListener::bind(address).unwrap();
    let mut world = harness.restart(models()).await;
    assert_eq!(world.adopted().await, []);
    assert!(table::stat(pid).is_none_or(|stat| stat.zombie));
}

#[tokio::test]
async fn nothing_that_matters_is_lost_when_the_gateway_does_not_end_in_order() {
    let mut harness = LocalPlatformHarness::new(vec![sim("m", "")]);
    harness.adopted().await;
    harness.run("m").await;
    let (pid, last_end) = (harness.pid("m"), Tick(1_234_567));
    harness.local.note_idle(&engine("m"), FIRST, last_end);
    let file = harness.local.shared.store.folder().join("engines.json");
    let noted = time::timeout(Duration::from_secs(5), async {
        while !fs::read_to_string(&file).is_ok_and(|text| text.contains("1234567")) {
            time::sleep(Duration::from_millis(10)).await;
        }
    });
    noted.await.expect("the idle clock is on disk within seconds");
    let mut harness = harness.crash();
    let events = harness.adopted().await;
    assert_eq!((found(&events[0]).ready, found(&events[0]).last_lease_end), (true, last_end));
    assert_eq!((events.len(), harness.pid("m")), (1, pid));
    harness.stop("m", Millis::secs(5));
    assert_eq!(harness.gone("m").await, FailureCause::Stopped);
}
