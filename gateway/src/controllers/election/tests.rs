//! Many gateways, a store that can be slow, deaf or forgetful, and a clock that tests move.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{sync::watch, time};

use super::*;

/// The API server as far as a lease needs it.
#[derive(Clone, Default)]
struct Server(Arc<State>);

#[derive(Default)]
struct State {
    lease: Mutex<Option<(Record, u64)>>,
    versions: AtomicU64,
}

/// One gateway's way to it.
#[derive(Clone)]
struct Line {
    server: Server,
    /// Calls never end.
    cut: Arc<AtomicBool>,
    /// Writes arrive, and their answers do not.
    mute: Arc<AtomicBool>,
}

impl Line {
    fn to(server: &Server) -> Self {
        Self { server: server.clone(), cut: Arc::default(), mute: Arc::default() }
    }

    async fn pass(&self) {
        if self.cut.load(Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
    }

    async fn answer<T>(&self, answer: T) -> T {
        if self.mute.load(Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
        answer
    }

    fn write(&self, record: &Record, only: impl FnOnce(Option<u64>) -> bool) -> Result<Version, Trouble> {
        let mut lease = self.server.0.lease.lock().unwrap();
        if !only(lease.as_ref().map(|(_, version)| *version)) {
            return Err(Trouble::Conflict);
        }
        let version = self.server.0.versions.fetch_add(1, Ordering::SeqCst) + 1;
        *lease = Some((record.clone(), version));
        Ok(Version(version.to_string()))
    }
}

impl Store for Line {
    async fn get(&self) -> Result<Option<(Record, Version)>, Trouble> {
        self.pass().await;
        let lease = self.server.0.lease.lock().unwrap().clone();
        Ok(lease.map(|(record, version)| (record, Version(version.to_string()))))
    }

    async fn create(&self, record: &Record) -> Result<Version, Trouble> {
        self.pass().await;
        let written = self.write(record, |before| before.is_none());
        self.answer(written).await
    }

    async fn replace(&self, record: &Record, version: &Version) -> Result<Version, Trouble> {
        self.pass().await;
        let written = self.write(record, |before| before.is_some_and(|before| before.to_string() == version.0));
        self.answer(written).await
    }
}

struct Gateway {
    line: Line,
    election: Election,
    claim: watch::Receiver<Option<Claim>>,
}

impl Gateway {
    fn start(server: &Server, name: &str) -> Self {
        let line = Line::to(server);
        let election = Election::start(line.clone(), name.to_owned());
        Self { line, claim: election.claim(), election }
    }

    /// The epoch in which it may decide at this moment.
    fn epoch(&self) -> Option<u64> {
        self.claim.borrow().filter(Claim::holds).map(|claim| claim.epoch)
    }

    async fn until_it_leads(&mut self, within: Duration) -> Claim {
        let led = self.claim.wait_for(|claim| claim.is_some_and(|claim| claim.holds()));
        let claim = time::timeout(within, led).await.expect("it leads in time").unwrap();
        claim.expect("just seen")
    }
}

/// The epochs in which anybody decides now: at most one gateway does.
fn deciding(gateways: &[&Gateway]) -> Vec<u64> {
    let epochs: Vec<u64> = gateways.iter().filter_map(|gateway| gateway.epoch()).collect();
    assert!(epochs.len() <= 1, "two decide at once, in the epochs {epochs:?}");
    epochs
}

#[tokio::test(start_paused = true)]
async fn one_of_many_decides_and_goes_on_doing_so() {
    let server = Server::default();
    let gateways: Vec<Gateway> = (0..5).map(|n| Gateway::start(&server, &format!("gateway-{n}"))).collect();
    time::sleep(Duration::from_secs(3)).await;
    let all: Vec<&Gateway> = gateways.iter().collect();
    for _ in 0..600 {
        assert_eq!(deciding(&all), [1]);
        time::sleep(Duration::from_millis(500)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn one_that_is_cut_off_gives_up_before_another_begins() {
    let server = Server::default();
    let mut first = Gateway::start(&server, "first");
    first.until_it_leads(Duration::from_secs(1)).await;
    let second = Gateway::start(&server, "second");
    time::sleep(Duration::from_millis(1_300)).await;
    first.line.cut.store(true, Ordering::SeqCst);
    let cut = time::Instant::now();
    let (mut lost, mut taken) = (None, None);
    while taken.is_none() {
        let epochs = deciding(&[&first, &second]);
        let since = cut.elapsed();
        lost = lost.or_else(|| epochs.is_empty().then_some(since));
        taken = (epochs == [2]).then_some(since);
        assert!(since < Duration::from_secs(30), "nobody took it");
        time::sleep(Duration::from_millis(10)).await;
    }
    let (lost, taken) = (lost.expect("there was a gap"), taken.expect("just seen"));
    assert!(lost < RENEW_DEADLINE && taken > lost, "lost after {lost:?}, taken after {taken:?}");
    assert!(taken <= DURATION + Duration::from_secs(2), "{taken:?}");
    first.line.cut.store(false, Ordering::SeqCst);
    time::sleep(Duration::from_secs(5)).await;
    assert_eq!(deciding(&[&first, &second]), [2], "who was replaced stays so");
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_is_given_back_is_taken_at_once() {
    let server = Server::default();
    let mut first = Gateway::start(&server, "first");
    first.until_it_leads(Duration::from_secs(1)).await;
    let mut second = Gateway::start(&server, "second");
    time::sleep(Duration::from_secs(5)).await;
    first.election.release().await;
    assert_eq!(*first.claim.borrow(), None);
    let claim = second.until_it_leads(Duration::from_secs(1)).await;
    assert_eq!(claim.epoch, 2);
}

#[tokio::test(start_paused = true)]
async fn renewals_whose_answers_are_lost_keep_nobody_in_office() {
    let server = Server::default();
    let mut first = Gateway::start(&server, "first");
    first.until_it_leads(Duration::from_secs(1)).await;
    first.line.mute.store(true, Ordering::SeqCst);
    time::sleep(RENEW_DEADLINE).await;
    assert_eq!(first.epoch(), None, "it cannot know that it was renewed");
    first.line.mute.store(false, Ordering::SeqCst);
    let again = first.until_it_leads(Duration::from_secs(5)).await;
    assert!(again.epoch > 1, "what it ordered before is of another tenure");
}

#[tokio::test(start_paused = true)]
async fn a_short_outage_changes_nothing() {
    let server = Server::default();
    let mut first = Gateway::start(&server, "first");
    first.until_it_leads(Duration::from_secs(1)).await;
    for _ in 0..20 {
        first.line.cut.store(true, Ordering::SeqCst);
        time::sleep(Duration::from_secs(4)).await;
        assert_eq!(first.epoch(), Some(1));
        first.line.cut.store(false, Ordering::SeqCst);
        time::sleep(Duration::from_secs(5)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn epochs_grow_even_when_somebody_deletes_the_lease() {
    let server = Server::default();
    let mut first = Gateway::start(&server, "first");
    first.until_it_leads(Duration::from_secs(1)).await;
    let mut epoch = 1;
    for _ in 0..5 {
        *server.0.lease.lock().unwrap() = None;
        time::sleep(Duration::from_secs(10)).await;
        let now = first.until_it_leads(Duration::from_secs(1)).await.epoch;
        assert!(now > epoch, "{now} after {epoch}");
        epoch = now;
    }
}

/// Lines that are cut and mended at random, processes that stop and go on: never two, and always one in the end.
#[tokio::test(start_paused = true)]
async fn whatever_happens_to_the_lines_never_two_decide() {
    let mut luck = 0x9e37_79b9_7f4a_7c15_u64;
    let mut roll = move |sides: u64| {
        luck ^= luck << 13;
        luck ^= luck >> 7;
        luck ^= luck << 17;
        luck % sides
    };
    let server = Server::default();
    let gateways: Vec<Gateway> = (0..4).map(|n| Gateway::start(&server, &format!("gateway-{n}"))).collect();
    let all: Vec<&Gateway> = gateways.iter().collect();
    let (mut highest, mut changes) = (0, 0);
    for _ in 0..20_000 {
        let which = usize::try_from(roll(4)).unwrap();
        match roll(40) {
            0 | 1 => gateways[which].line.cut.store(true, Ordering::SeqCst),
            2 => gateways[which].line.mute.store(true, Ordering::SeqCst),
            3..=8 => {
                gateways[which].line.cut.store(false, Ordering::SeqCst);
                gateways[which].line.mute.store(false, Ordering::SeqCst);
            }
            _ => {}
        }
        if let [epoch] = deciding(&all)[..] {
            assert!(epoch >= highest, "{epoch} after {highest}");
            changes += u32::from(epoch > highest);
            highest = epoch;
        }
        time::sleep(Duration::from_millis(100 + roll(300))).await;
    }
    assert!(changes > 50, "only {changes} changes of office: this tests nothing");
    for gateway in &gateways {
        gateway.line.cut.store(false, Ordering::SeqCst);
        gateway.line.mute.store(false, Ordering::SeqCst);
    }
    time::sleep(DURATION + Duration::from_secs(2)).await;
    assert_eq!(deciding(&all).len(), 1);
}
