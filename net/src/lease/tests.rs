use std::{
    future::Future,
    pin::pin,
    task::{Context, Waker},
    time::Duration,
};

use super::*;

struct Fixture {
    gate: Arc<Gate>,
    driver: Arc<Notify>,
}

fn gate(limit: Option<u32>) -> Fixture {
    let driver = Arc::new(Notify::new());
    let clock = TickClock::new(Instant::now(), Tick(1000));
    let gate = Gate::new(limit.and_then(NonZeroU32::new), clock, Arc::clone(&driver));
    Fixture { gate, driver }
}

impl Fixture {
    /// Whether the driver was woken since the last check.
    fn woken(&self) -> bool {
        let notified = pin!(self.driver.notified());
        notified.poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }
}

fn fault() -> Fault {
    Fault::TurnEnded { model: "m".into() }
}

#[tokio::test]
async fn a_closed_gate_gives_no_lease_and_its_drain_wakes_the_driver_once() {
    let f = gate(None);
    assert!(f.gate.take().is_none() && f.gate.take_queued().is_none());
    f.gate.open();
    let (one, two) = (f.gate.take().unwrap(), f.gate.take_queued().unwrap());
    assert_eq!((f.gate.leases(), f.gate.close()), (2, 2));
    assert!(f.gate.take().is_none());
    drop(one);
    assert!(!f.woken(), "a lease is still out");
    drop(two);
    assert!(f.woken());
    assert!(!f.woken());
}

#[tokio::test]
async fn an_empty_gate_is_drained_by_being_closed() {
    let f = gate(None);
    f.gate.open();
    assert!(!f.woken());
    assert_eq!(f.gate.close(), 0);
    assert!(f.woken());
}

#[tokio::test]
async fn a_lease_that_ends_wakes_the_driver_only_when_somebody_queues() {
    let f = gate(Some(1));
    f.gate.open();
    drop(f.gate.take().unwrap());
    assert!(!f.woken());
    let held = f.gate.take().unwrap();
    assert!(f.gate.take().is_none(), "full");
    f.gate.set_queued(true);
    assert!(f.gate.take_queued().is_none(), "full for those who queue as well");
    drop(held);
    assert!(f.woken());
    assert!(f.gate.take().is_none(), "newcomers do not overtake");
    assert!(f.gate.take_queued().is_some());
}

#[tokio::test]
async fn a_revocation_reaches_those_who_wait_and_those_who_look_later() {
    let f = gate(None);
    f.gate.open();
    let (waits, looks, registers_late) =
        (f.gate.take().unwrap(), f.gate.take().unwrap(), f.gate.take().unwrap());
    assert_eq!(waits.revoked(), None);
    let waiting = tokio::spawn(async move {
        let mut told = pin!(waits.on_revoke());
        assert!(!told.as_mut().enable());
        told.await;
        waits.revoked().cloned()
    });
    // Created, but not polled before the revocation.
    let told = registers_late.on_revoke();
    tokio::task::yield_now().await;
    f.gate.close();
    f.gate.revoke(fault());
    f.gate.revoke(Fault::Internal);
    assert_eq!(waiting.await.unwrap(), Some(fault()));
    told.await;
    assert_eq!(looks.revoked(), Some(&fault()), "the first reason stands");
    assert!(!f.woken());
    drop((looks, registers_late));
    assert!(f.woken(), "the revoked gate is drained when its holders let go");
}

#[tokio::test]
async fn the_idle_clock_starts_when_a_lease_ends() {
    let f = gate(None);
    f.gate.open();
    let lease = f.gate.take().unwrap();
    assert_eq!((f.gate.last_end(), f.gate.last_byte()), (Tick(0), Tick(0)));
    tokio::time::sleep(Duration::from_millis(5)).await;
    lease.progress(Instant::now());
    let byte = f.gate.last_byte();
    assert!(byte >= Tick(1005));
    tokio::time::sleep(Duration::from_millis(5)).await;
    drop(lease);
    let end = f.gate.last_end();
    assert!(end >= byte + Millis(5));
    tokio::time::sleep(Duration::from_millis(5)).await;
    let looks = f.gate.take().unwrap().without_marking_use();
    assert_eq!(f.gate.leases(), 1);
    drop(looks);
    assert_eq!((f.gate.leases(), f.gate.last_end()), (0, end), "one that only looks does not restart it");
    assert_eq!(f.gate.ended(), 1);
}

#[tokio::test]
async fn a_gate_knows_whose_leases_it_gave_until_it_is_closed() {
    let f = gate(None);
    f.gate.open();
    let lease = f.gate.take().unwrap();
    assert!(f.gate.clients().is_empty(), "nobody said whose it is");
    let now = Instant::now();
    lease.record_client(0, now);
    assert!(f.gate.clients().is_empty(), "as little as one who is not known");
    lease.record_client(7, now);
    lease.record_client(7, now);
    f.gate.take().unwrap().record_client(8, now);
    let clients = f.gate.clients();
    assert!(
        clients.has_client_not_waiting(|client| client == 7)
            && !clients.has_client_not_waiting(|client| client == 7 || client == 8)
    );
    assert_eq!(f.gate.pause(), None, "it was in use all the time");
    drop(lease);
    let again = Instant::now() + Duration::from_millis(200);
    let pause = f.gate.clock.tick_at(again).since(f.gate.last_end());
    assert!(pause >= Millis(200));
    f.gate.take().unwrap().record_client(7, again);
    assert_eq!(f.gate.pause(), Some(pause));
    f.gate.close();
    assert!(f.gate.clients().is_empty());
}
