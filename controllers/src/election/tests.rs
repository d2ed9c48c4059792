//! Simulates many gateways, an API server with unreliable links, and a clock that the tests move: the election task's
//! steps without the waiting.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{sync::watch, time::Instant};

use super::{
    CALL_TIMEOUT, Election, LEASE_DURATION, Leadership, LeaseError, LeaseStore, POLL_INTERVAL,
    RENEW_DEADLINE, RENEW_INTERVAL, pause_after, replace_claim,
    state::{ElectionState, LeaseAction, LeaseRecord, LeaseVersion},
};

/// The part of an API server that a lease needs.
#[derive(Default)]
struct Server {
    lease: Option<(LeaseRecord, u64)>,
    versions: u64,
}

impl Server {
    fn write(&mut self, record: &LeaseRecord, only: Option<&LeaseVersion>) -> Option<LeaseVersion> {
        let there = self.lease.as_ref().map(|(_, number)| version(*number));
        if there.as_ref() != only {
            return None;
        }
        self.versions += 1;
        self.lease = Some((record.clone(), self.versions));
        Some(version(self.versions))
    }
}

/// Builds a version. One uid is enough: the server never reuses a number, even for a recreated lease.
fn version(number: u64) -> LeaseVersion {
    LeaseVersion { object: "lease".to_owned(), number: number.to_string() }
}

/// State of a gateway's link to the server.
#[derive(Clone, Copy, PartialEq)]
enum LinkState {
    Whole,
    /// Requests do not arrive.
    Cut,
    /// Requests arrive, and their responses are lost.
    Mute,
}

struct Gateway {
    state: ElectionState,
    link: LinkState,
    /// Time of its next pass.
    due: Instant,
    /// Suspended as a process: it does nothing and notices later.
    frozen: bool,
}

impl Gateway {
    fn new(name: &str, now: Instant) -> Self {
        Self { state: ElectionState::new(name.to_owned()), link: LinkState::Whole, due: now, frozen: false }
    }

    fn epoch(&self, now: Instant) -> Option<u64> {
        self.state.leadership(now).map(|(epoch, _)| epoch)
    }

    /// Runs one pass like the election task: read if unsure, act, and set the next time from the calls' duration.
    fn step(&mut self, server: &mut Server, now: Instant) {
        let mut spent = Duration::ZERO;
        if self.attempt(server, now, &mut spent) {
            self.attempt(server, now, &mut spent);
        }
        let after = now + spent;
        let pause = pause_after(spent, self.state.leadership(after).is_some());
        self.due = after + self.state.due(after).map_or(pause, |due| due.min(pause));
    }

    /// Returns whether another gateway wrote first.
    fn attempt(&mut self, server: &mut Server, now: Instant, spent: &mut Duration) -> bool {
        if !self.state.is_sure(now) {
            if self.link != LinkState::Whole {
                *spent = CALL_TIMEOUT;
                return false;
            }
            let found = server.lease.clone();
            self.state.observe(found.map(|(record, number)| (record, version(number))), now);
        }
        let (record, before) = match self.state.next_action(now, 1) {
            LeaseAction::Wait => return false,
            LeaseAction::Create(record) => (record, None),
            LeaseAction::Replace(record, version) => (record, Some(version)),
        };
        let written = (self.link != LinkState::Cut).then(|| server.write(&record, before.as_ref())).flatten();
        match written {
            Some(version) if self.link == LinkState::Whole => {
                self.state.record_write(record, version, now);
                false
            }
            _ => {
                self.state.record_failure();
                *spent += if self.link == LinkState::Whole { Duration::ZERO } else { CALL_TIMEOUT };
                self.link == LinkState::Whole
            }
        }
    }
}

struct ElectionWorld {
    server: Server,
    gateways: Vec<Gateway>,
    now: Instant,
}

impl ElectionWorld {
    fn new(gateways: usize) -> Self {
        let now = Instant::now();
        let gateways = (0..gateways).map(|n| Gateway::new(&format!("gateway-{n}"), now)).collect();
        Self { server: Server::default(), gateways, now }
    }

    fn pass(&mut self, span: Duration) {
        let end = self.now + span;
        while self.now < end {
            for gateway in self.gateways.iter_mut().filter(|gateway| !gateway.frozen) {
                if gateway.due <= self.now {
                    gateway.step(&mut self.server, self.now);
                }
            }
            self.now += Duration::from_millis(10);
            self.deciding();
        }
    }

    /// Returns the leader and its epoch, and asserts that there is at most one, suspended gateways included.
    fn deciding(&self) -> Option<(usize, u64)> {
        let who = |(n, gateway): (usize, &Gateway)| Some((n, gateway.epoch(self.now)?));
        let all: Vec<_> = self.gateways.iter().enumerate().filter_map(who).collect();
        assert!(all.len() <= 1, "several decide at once: {all:?}");
        all.first().copied()
    }
}

const fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

#[test]
fn one_of_many_decides_and_goes_on_doing_so() {
    let mut world = ElectionWorld::new(5);
    world.pass(ms(100));
    let first = world.deciding();
    assert!(matches!(first, Some((_, 1))), "{first:?}");
    for _ in 0..600 {
        world.pass(ms(500));
        assert_eq!(world.deciding(), first);
    }
}

#[test]
fn one_that_is_cut_off_or_stopped_gives_up_before_another_begins() {
    for frozen in [false, true] {
        for after in (0..4000).step_by(130) {
            let mut world = ElectionWorld::new(2);
            world.pass(ms(5000 + after));
            assert_eq!(world.deciding(), Some((0, 1)));
            (world.gateways[0].link, world.gateways[0].frozen) = (LinkState::Cut, frozen);
            let cut = world.now;
            while world.deciding().is_some() {
                world.pass(ms(10));
            }
            let lost = world.now - cut;
            while world.deciding().is_none() {
                world.pass(ms(10));
            }
            let taken = world.now - cut;
            assert!(lost <= RENEW_DEADLINE && taken <= LEASE_DURATION + ms(2000), "{lost:?}, {taken:?}");
            assert_eq!(world.deciding(), Some((1, 2)));
            (world.gateways[0].link, world.gateways[0].frozen) = (LinkState::Whole, false);
            world.pass(ms(30_000));
            assert_eq!(world.deciding(), Some((1, 2)), "who was replaced stays so");
        }
    }
}

#[test]
fn a_lease_that_is_given_back_is_taken_at_once() {
    let mut world = ElectionWorld::new(2);
    world.pass(ms(5000));
    let (record, version) = world.gateways[0].state.release_record().unwrap();
    world.server.write(&record, Some(&version)).unwrap();
    world.gateways.remove(0);
    world.pass(POLL_INTERVAL + ms(10));
    assert_eq!(world.deciding(), Some((0, 2)));
}

#[test]
fn renewals_whose_answers_are_lost_keep_nobody_in_office() {
    let mut world = ElectionWorld::new(1);
    world.pass(ms(1000));
    world.gateways[0].link = LinkState::Mute;
    world.pass(RENEW_DEADLINE);
    assert_eq!(world.deciding(), None, "it cannot know that it was renewed");
    world.gateways[0].link = LinkState::Whole;
    world.pass(ms(5000));
    assert_eq!(world.deciding(), Some((0, 2)), "what it ordered before is of another tenure");
}

#[test]
fn a_short_outage_changes_nothing() {
    let mut world = ElectionWorld::new(3);
    world.pass(ms(1000));
    let first = world.deciding();
    for line in [LinkState::Cut, LinkState::Mute].into_iter().cycle().take(40) {
        world.gateways.iter_mut().for_each(|gateway| gateway.link = line);
        world.pass(ms(4000));
        assert_eq!(world.deciding(), first);
        world.gateways.iter_mut().for_each(|gateway| gateway.link = LinkState::Whole);
        world.pass(ms(5000));
    }
    assert_eq!(world.deciding(), first);
}

#[test]
fn epochs_grow_even_when_somebody_deletes_the_lease_and_its_holder_stays() {
    for gateways in [1, 3] {
        let mut world = ElectionWorld::new(gateways);
        world.pass(ms(1300));
        for epoch in 2..7 {
            world.server.lease = None;
            world.pass(ms(10_000));
            assert_eq!(world.deciding(), Some((0, epoch)));
        }
    }
}

#[test]
fn who_never_saw_the_lease_makes_or_takes_one_with_an_epoch_of_its_time() {
    const FLOOR: u64 = 178_000_000;
    let mut race = ElectionState::new("new".to_owned());
    let now = Instant::now();
    race.observe(None, now);
    assert!(matches!(race.next_action(now, FLOOR), LeaseAction::Create(record) if record.epoch == FLOOR));
    // Leases by a writer that knew no earlier epoch, and by one whose clock is ahead.
    for (found, taken) in [(0, FLOOR), (FLOOR + 5, FLOOR + 6)] {
        let mut race = ElectionState::new("new".to_owned());
        race.observe(
            Some((LeaseRecord { holder: None, epoch: found, duration: LEASE_DURATION }, version(1))),
            now,
        );
        assert!(
            matches!(race.next_action(now, FLOOR), LeaseAction::Replace(record, _) if record.epoch == taken)
        );
    }
}

/// A server that loses the responses to writes on demand.
#[derive(Clone)]
struct LossyStore(Arc<Mutex<Server>>, watch::Sender<bool>);

impl LossyStore {
    fn write(&self, record: &LeaseRecord, only: Option<&LeaseVersion>) -> Result<LeaseVersion, LeaseError> {
        let written = self.0.lock().unwrap().write(record, only).ok_or(LeaseError::Conflict);
        if *self.1.borrow() { Err(LeaseError::Timeout) } else { written }
    }
}

impl LeaseStore for LossyStore {
    async fn get(&self) -> Result<Option<(LeaseRecord, LeaseVersion)>, LeaseError> {
        Ok(self.0.lock().unwrap().lease.clone().map(|(record, number)| (record, version(number))))
    }
    async fn create(&self, record: &LeaseRecord) -> Result<LeaseVersion, LeaseError> {
        self.write(record, None)
    }
    async fn replace(&self, record: &LeaseRecord, before: &LeaseVersion) -> Result<LeaseVersion, LeaseError> {
        self.write(record, Some(before))
    }
}

#[tokio::test]
async fn a_lease_is_given_back_also_behind_a_renewal_that_was_never_answered() {
    let store = LossyStore(Arc::default(), watch::Sender::new(false));
    let election = Election::start(store.clone(), "one".to_owned());
    election.leadership().wait_for(Option::is_some).await.unwrap();
    let mut told = election.leadership();
    told.mark_unchanged();
    store.1.send_replace(true);
    // The lost renewal.
    told.changed().await.unwrap();
    store.1.send_replace(false);
    election.release(async {}).await;
    let (record, versions) = store.0.lock().unwrap().lease.clone().unwrap();
    assert_eq!((record.holder, versions), (None, 3));
}

#[test]
fn renewals_keep_their_rhythm_while_the_api_server_is_slow() {
    for pass in [Duration::ZERO, Duration::from_millis(700), RENEW_INTERVAL] {
        assert_eq!(pass + pause_after(pass, true), RENEW_INTERVAL);
    }
    assert_eq!(pause_after(2 * CALL_TIMEOUT, true), Duration::ZERO, "it is late already");
    assert_eq!(pause_after(CALL_TIMEOUT, false), POLL_INTERVAL);
}

#[test]
fn a_claim_that_expired_before_its_renewal_was_answered_begins_no_second_term_of_its_epoch() {
    let aged = |epoch, seconds| Some(Leadership::aged(epoch, Duration::from_secs(seconds)));
    let published = watch::Sender::new(aged(7, 9));
    let renew = |claim| replace_claim(&published, claim).1.map(|claim| claim.epoch);
    assert_eq!(renew(aged(7, 1)), Some(7), "late, but in time");
    published.send_replace(aged(7, 10));
    assert_eq!(renew(aged(7, 1)), None, "a reader may have ended its term");
    assert_eq!(*published.borrow(), None);
    assert_eq!(renew(aged(8, 0)), Some(8));
    published.send_replace(aged(8, 10));
    assert_eq!(renew(aged(9, 0)), Some(9), "another term");

    let now = Instant::now();
    let mut state = ElectionState::new("one".to_owned());
    state.observe(None, now);
    let LeaseAction::Create(record) = state.next_action(now, 7) else { panic!("it waits") };
    state.record_write(record, version(1), now);
    assert!(matches!(state.next_action(now, 7), LeaseAction::Replace(record, _) if record.epoch == 7));
    state.end_claim();
    assert!(matches!(state.next_action(now, 7), LeaseAction::Replace(record, _) if record.epoch == 8));
}

/// Cuts and restores links and suspends processes at random: there are never two leaders, and one in the end.
#[test]
fn whatever_happens_to_the_lines_never_two_decide() {
    let mut luck = 0x9e37_79b9_7f4a_7c15_u64;
    let mut roll = move |sides: u64| {
        luck ^= luck << 13;
        luck ^= luck >> 7;
        luck ^= luck << 17;
        luck % sides
    };
    let mut world = ElectionWorld::new(4);
    world.pass(ms(1000));
    let (mut highest, mut changes) = (0, 0);
    for _ in 0..20_000 {
        let which = usize::try_from(roll(4)).unwrap();
        let which = &mut world.gateways[which];
        match roll(40) {
            0 | 1 => which.link = LinkState::Cut,
            2 => which.link = LinkState::Mute,
            3 => which.frozen = true,
            9 if roll(10) == 0 => world.server.lease = None,
            4..=8 => (which.link, which.frozen) = (LinkState::Whole, false),
            _ => {}
        }
        world.pass(ms(10 * (10 + roll(30))));
        if let Some((_, epoch)) = world.deciding() {
            assert!(epoch >= highest, "{epoch} after {highest}");
            changes += u32::from(epoch > highest);
            highest = epoch;
        }
    }
    assert!(changes > 50, "only {changes} changes of office: this tests nothing");
    world.gateways.iter_mut().for_each(|gateway| (gateway.link, gateway.frozen) = (LinkState::Whole, false));
    world.pass(LEASE_DURATION + ms(2000));
    assert!(world.deciding().is_some());
}
