use std::{
    cell::Cell,
    convert::Infallible,
    future::poll_fn,
    pin::Pin,
    rc::Rc,
    sync::atomic::AtomicUsize,
    task::{Context, Poll},
    time::Duration,
};

use http_body::{Frame, SizeHint};
use rouse_testing::run_queue;
use tokio::{
    task::{LocalSet, spawn_local},
    time::Instant,
};

use super::*;

const MIB: usize = 1 << 20;

/// The body of a client that is as fast as possible: every frame is ready when polled.
struct FastBody {
    left: usize,
    declares: bool,
    given: Rc<Cell<usize>>,
}

impl Body for FastBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let next = self.left.min(64 << 10);
        self.left -= next;
        self.given.set(self.given.get() + next);
        Poll::Ready((next > 0).then(|| Ok(Frame::data(Bytes::from(vec![b' '; next])))))
    }

    fn size_hint(&self) -> SizeHint {
        if self.declares { SizeHint::with_exact(self.left as u64) } else { SizeHint::default() }
    }
}

fn fast(length: usize, declares: bool) -> (FastBody, Rc<Cell<usize>>) {
    let given = Rc::default();
    (FastBody { left: length, declares, given: Rc::clone(&given) }, given)
}

fn payers() -> ChargedBodyCounters {
    ChargedBodyCounters { total: Arc::default(), address: None, key: None }
}

fn limits() -> ApiLimits {
    rouse_config::parse("limits: {body: 1Gi, bodyTotal: 2Gi}", "test").unwrap().limits
}

#[tokio::test]
async fn a_body_arrives_whole_whether_its_length_was_declared_or_not() {
    let limits = limits();
    for length in [0, 1, 64 << 10, 220_000, MIB, MIB + 1, 5 * MIB + 7] {
        for declares in [false, true] {
            let (body, _) = fast(length, declares);
            let (read, charge) = read(body, &limits, payers()).await.unwrap();
            assert_eq!((read.len(), charge.bytes), (length, length as u64));
        }
    }
}

#[tokio::test]
async fn memory_follows_what_is_sent_and_neither_what_is_declared_nor_what_is_allowed() {
    let limits = rouse_config::parse("limits: {body: 1Ti, bodyTotal: 2Ti}", "test").unwrap().limits;
    let resident = || {
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
        pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
    };
    let before = resident();
    let mut whole = BodyBuffer::Empty;
    for _ in 0..64 {
        whole.add(Bytes::from(vec![b' '; 64 << 10]), Some(1 << 40), limits.body).unwrap();
    }
    let (grown, body) = (resident().saturating_sub(before), whole.finish());
    assert_eq!(body.len(), 4 * MIB);
    assert!(grown < 16 * MIB, "{grown} bytes");
}

/// A body of two frames, which fit into its initial buffer, and then nothing more.
struct StuckBody(Vec<Bytes>);

impl Body for StuckBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.pop().map_or(Poll::Pending, |data| Poll::Ready(Some(Ok(Frame::data(data)))))
    }
}

/// Counts the extra threads that a core starts for a body of this size that it abandons.
fn threads_for_a_body_given_up(bytes: usize, limits: &ApiLimits) -> usize {
    let started = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&started);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .on_thread_start(move || {
            count.fetch_add(1, Ordering::Relaxed);
        })
        .build()
        .unwrap();
    runtime.block_on(async {
        let half = Bytes::from(vec![b' '; bytes / 2]);
        let mut reading = pin!(read(StuckBody(vec![half.clone(), half]), limits, payers()));
        // The read yields between two frames, and after the last it waits for data that never comes.
        for _ in 0..4 {
            poll_fn(|cx| {
                drop(reading.as_mut().poll(cx));
                Poll::Ready(())
            })
            .await;
            tokio::task::yield_now().await;
        }
    });
    // Waits for the started threads.
    drop(runtime);
    started.load(Ordering::Relaxed)
}

#[test]
fn what_came_of_a_large_body_that_is_given_up_is_given_back_away_from_the_core() {
    assert_eq!(threads_for_a_body_given_up(4 * MIB, &limits()), 1);
    // Freeing a small body is quick, so no other thread is needed.
    assert_eq!(threads_for_a_body_given_up(MIB / 2, &limits()), 0);
}

#[tokio::test]
async fn no_turn_takes_more_of_a_body_than_the_others_can_wait_for() {
    let limits = limits();
    let (body, given) = fast(64 * MIB, true);
    let mut reading = pin!(read(body, &limits, payers()));
    let mut before = 0;
    let (whole, _) = poll_fn(|cx| {
        let polled = reading.as_mut().poll(cx);
        let taken = given.get() - std::mem::replace(&mut before, given.get());
        assert!(taken <= MAX_BYTES_PER_TURN + (64 << 10), "{taken} bytes in one turn");
        polled
    })
    .await
    .unwrap();
    assert_eq!(whole.len(), 64 * MIB);
}

#[tokio::test]
async fn other_tasks_of_the_core_go_on_while_a_large_body_comes_is_read_and_goes() {
    let limits = limits();
    LocalSet::new()
        .run_until(async {
            let longest = Rc::new(Cell::new(Duration::ZERO));
            let seen = Rc::clone(&longest);
            let ticking = spawn_local(async move {
                let mut last = (Instant::now(), run_queue::current_process_wait());
                loop {
                    tokio::task::yield_now().await;
                    let now = (Instant::now(), run_queue::current_process_wait());
                    let turn = (now.0 - last.0).saturating_sub(now.1.saturating_sub(last.1));
                    seen.set(seen.get().max(turn));
                    last = now;
                }
            });
            let (body, _) = fast(96 * MIB, true);
            let (whole, charge) = read(body, &limits, payers()).await.unwrap();
            let parsed = tokio::task::spawn_blocking({
                let whole = whole.clone();
                move || rouse_net::openai::routing_fields::peek_any(&whole).is_err()
            });
            assert!(parsed.await.unwrap(), "blanks are no document");
            drop((whole, charge));
            tokio::task::yield_now().await;
            ticking.abort();
            // One poll takes some milliseconds even unoptimised, whether it computes or blocks.
            assert!(longest.get() < Duration::from_millis(100), "{:?}", longest.get());
        })
        .await;
}

#[test]
fn a_body_with_broken_framing_is_refused_with_the_reason_and_one_that_ends_early_is_a_disconnect() {
    let fault = |error| body_error_fault(&client_body::Error::Http1(error));
    let broken = fault(RequestBodyError::Malformed("no size"));
    assert!(matches!(&broken, Fault::InvalidRequest { message, .. } if message.ends_with(": no size")));
    let gone = fault(RequestBodyError::Disconnected);
    assert!(matches!(gone, Fault::ClientDisconnected { phase: DisconnectPhase::Connecting }));
}
