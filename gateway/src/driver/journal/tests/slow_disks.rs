//! The time of a wake while the journal's disk is full or stands still, beside the time without a journal.
//!
//! The gateway opens regular files alone, so these files are given to the journal itself.

use rouse::{
    fleet::{command::Command, event::CanaryVerdict},
    model::{EngineMemory, SleepLevel},
    sim::simulated_model,
    units::Bytes,
};
use rouse_net::lease::TickClock;
use rouse_platform::Platform;
use tokio::{sync::mpsc::Sender, time::Instant};

use super::*;
use crate::{
    driver::{
        DriverHandle,
        tests::{START, adopted_in, configured_with, name, park_request},
    },
    metrics::Metrics,
};

const MODELS: usize = 25;
/// A wait for the disk would hold up each wake for ever. Two medians differ by far less.
const MAX_DELAY: Duration = Duration::from_millis(20);
/// Lines of configurations that precede the wakes: more than a pipe holds.
const RELOADS: usize = 60;

/// Engines that wake at once.
struct InstantPlatform(Sender<Event>);

impl Platform for InstantPlatform {
    fn submit(&self, command: Command) {
        let event = match command {
            Command::Reserve { engine, generation, accelerators, .. } => {
                Event::Placed { engine, generation, accelerators }
            }
            Command::Wake { engine, generation, .. } => Event::Ready { engine, generation },
            _ => return,
        };
        self.0.try_send(event).unwrap();
    }
}

fn configured() -> Event {
    let memory = EngineMemory { awake: Bytes::gib(20), asleep: Bytes::gib(1), host: Bytes::ZERO };
    configured_with((0..MODELS).map(|n| simulated_model(name(n), memory)).collect(), MODELS)
}

/// Returns the median time from a request's arrival to its lease, over one wake of each model.
async fn median_wake(journal: Option<JournalFile>) -> Duration {
    let (events_tx, events) = tokio::sync::mpsc::channel(1024);
    let platform = Arc::new(InstantPlatform(events_tx.clone()));
    let clock = TickClock::new(Instant::now(), START);
    let (handle, driver) =
        DriverHandle::new(platform, events, Journal::default(), Arc::new(Metrics::new()), clock);
    let measure = async {
        handle.send_event(configured());
        handle.refresh().await;
        let asleep = (0..MODELS).map(|n| adopted_in(n, Some(SleepLevel::One)));
        for event in asleep.chain([Event::AdoptionDone]) {
            events_tx.send(event).await.unwrap();
        }
        for _ in 0..RELOADS {
            handle.send_event(configured());
            handle.refresh().await;
        }
        let mut wakes = Vec::new();
        for n in 0..MODELS {
            let began = Instant::now();
            wakes.push(wake(&handle, n).await.duration_since(began));
        }
        wakes.sort_unstable();
        wakes[MODELS / 2]
    };
    tokio::select! {
        () = driver.run(journal) => unreachable!("nothing shuts the driver down"),
        wake = measure => wake,
    }
}

/// Waits for a lease on an engine that sleeps. Returns when it was granted.
async fn wake(handle: &DriverHandle, n: usize) -> Instant {
    let request = park_request(n, handle.clock().now());
    let mut granted = handle.park(request).await.unwrap();
    let at = Instant::now();
    granted.canary.take().expect("the first request proves the engine").report(CanaryVerdict::Passed);
    at
}

#[tokio::test]
async fn a_journal_on_a_full_or_stalled_disk_delays_no_wake() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
    let journal_on = |path: &Path, lost: &TelemetryDropCounters| {
        // A pipe that is also open for reading opens at once. Its writer waits once it is full, since no process reads.
        let file = OpenOptions::new().read(path == pipe).write(true).open(path).unwrap();
        JournalFile::with_output(path, Box::new(file), lost).unwrap()
    };
    let without = median_wake(None).await;

    let lost = TelemetryDropCounters::new();
    let full = median_wake(Some(journal_on(Path::new("/dev/full"), &lost))).await;
    assert!(lost.journal_failed.get() > 0, "the disk is not full");

    let file = journal_on(&pipe, &TelemetryDropCounters::new());
    let queued_bytes = Arc::clone(&file.queued_bytes);
    let stalled = median_wake(Some(file)).await;
    assert!(queued_bytes.load(Ordering::Relaxed) > 0, "the disk does not stand still");

    println!(
        "medians of {MODELS} wakes: {without:.1?} without a journal, {full:.1?} full, {stalled:.1?} stalled"
    );
    for (disk, wake) in [("full", full), ("stalled", stalled)] {
        let delay = wake.saturating_sub(without);
        assert!(delay <= MAX_DELAY, "a {disk} disk delays a wake by {delay:.1?}");
    }
}
