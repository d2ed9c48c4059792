//! The minimum rate of a request's body.
//!
//! A body that trickles in holds memory at the gateway, and a lease and a connection to the engine at the stub. A
//! limit on each pause does not bound that time, since a byte now and then suffices. A limit on the whole would cut a
//! large upload over a slow line. So a body must arrive at a rate, in each window of its time.

use std::{
    future::poll_fn,
    pin::{Pin, pin},
    task::{Context, Poll},
    time::Duration,
};

use rouse::units::Bytes;
use tokio::time::{Instant, Sleep, sleep_until};

/// The usual window over which a body must keep up with its minimum rate.
pub const RATE_WINDOW: Duration = Duration::from_secs(5);
/// The fraction of its held bytes by which a body must grow each second, on top of the minimum rate.
const HELD_BYTES_RATE_DIVISOR: u64 = 1000;

/// Fails a body that arrives too slowly.
///
/// A fast start earns no credit, or one burst would buy hours. The timer exists only once a body has made its reader
/// wait.
#[derive(Debug)]
pub struct MinRateTimer {
    /// Bytes a second; 0 disables the check.
    min_rate: u64,
    window: Duration,
    /// When the current window began, later by the time that [`Self::pause`] took out of it. The first window begins
    /// with the first wait.
    window_start: Option<Instant>,
    bytes_at_window_start: u64,
    paused_since: Option<Instant>,
    timer: Option<Pin<Box<Sleep>>>,
}

/// A body arrived at less than its minimum rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the body arrives too slowly")]
pub struct BodyTooSlow;

impl MinRateTimer {
    /// `min_rate`: the bytes that must arrive in a second. `window`: see [`RATE_WINDOW`]. 0 for either
    /// disables the check.
    #[must_use]
    pub const fn new(min_rate: Bytes, window: Duration) -> Self {
        Self {
            min_rate: min_rate.0,
            window,
            window_start: None,
            bytes_at_window_start: 0,
            paused_since: None,
            timer: None,
        }
    }

    /// Waits for the next frame of a body that is held as it arrives. `received`: its bytes so far.
    ///
    /// # Errors
    /// The body is too slow. The more bytes a body holds, the faster it must arrive.
    pub async fn next<F: Future>(&mut self, frame: F, received: u64) -> Result<F::Output, BodyTooSlow> {
        let mut frame = pin!(frame);
        poll_fn(|cx| match frame.as_mut().poll(cx) {
            Poll::Ready(frame) => Poll::Ready(Ok(frame)),
            Poll::Pending => self.poll_wait(received, received, cx).map(Err),
        })
        .await
    }

    /// Call this when a body's next frame is not ready. Ready if the body is too slow.
    ///
    /// `received`: the body's bytes so far. `held`: those of them that the server still holds.
    pub fn poll_wait(&mut self, received: u64, held: u64, cx: &mut Context<'_>) -> Poll<BodyTooSlow> {
        if self.min_rate == 0 || self.window.is_zero() {
            return Poll::Pending;
        }
        let mut start = match (self.window_start, self.paused_since.take()) {
            (None, _) => Instant::now(),
            (Some(start), None) => start,
            (Some(start), Some(paused)) => start + (Instant::now() - paused),
        };
        let window = self.window;
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(start + window)));
        while timer.as_mut().poll(cx).is_ready() {
            let now = Instant::now();
            // The timer does not follow the pauses.
            if now >= start + window {
                let least = self.min_rate + held / HELD_BYTES_RATE_DIVISOR;
                let wanted = (now - start).as_millis() * u128::from(least) / 1000;
                if u128::from(received.saturating_sub(self.bytes_at_window_start)) < wanted {
                    return Poll::Ready(BodyTooSlow);
                }
                (start, self.bytes_at_window_start) = (now, received);
            }
            timer.as_mut().reset(start + window);
        }
        self.window_start = Some(start);
        Poll::Pending
    }

    /// Stops the clock until the next wait. For a reader that is busy meanwhile, or waits for an engine that does not
    /// take the body: that time is not the client's.
    pub fn pause(&mut self) {
        if self.window_start.is_some() {
            self.paused_since.get_or_insert_with(Instant::now);
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::{sleep, timeout};

    use super::*;

    const WINDOW: Duration = Duration::from_millis(100);
    const WAIT: Duration = Duration::from_millis(20);

    fn timer() -> MinRateTimer {
        MinRateTimer::new(Bytes(1000), WINDOW)
    }

    #[tokio::test]
    async fn a_burst_is_no_credit_for_dribs_after_it() {
        let mut rate = timer();
        let mut received = 1_000_000;
        // Fast enough, so allowed for any time.
        for _ in 0..20 {
            assert!(rate.next(sleep(WAIT), received).await.is_ok());
            received += 1000;
        }
        let slow = async {
            while rate.next(sleep(WAIT), received).await.is_ok() {
                received += 1;
            }
        };
        timeout(Duration::from_secs(2), slow).await.expect("still read");
    }

    #[tokio::test]
    async fn a_body_that_holds_much_must_come_faster() {
        let mut rate = timer();
        let mut received = 100 << 20;
        let slow = async {
            // Fifty times the minimum rate.
            while rate.next(sleep(WAIT), received).await.is_ok() {
                received += 1000;
            }
        };
        timeout(Duration::from_secs(2), slow).await.expect("still read");
    }

    /// Waits for a frame as a reader does that passes the body on. Returns whether the body was fast enough.
    async fn wait(rate: &mut MinRateTimer, received: u64) -> bool {
        let mut frame = pin!(sleep(WAIT));
        poll_fn(|cx| match frame.as_mut().poll(cx) {
            Poll::Ready(()) => {
                rate.pause();
                Poll::Ready(true)
            }
            Poll::Pending => rate.poll_wait(received, 0, cx).map(|BodyTooSlow| false),
        })
        .await
    }

    #[tokio::test]
    async fn time_in_which_no_reader_waits_does_not_count() {
        let mut rate = timer();
        let mut received = 0;
        for _ in 0..15 {
            assert!(wait(&mut rate, received).await, "{received}");
            received += 1000;
            // As if the reader had been busy for a minute since then, in which a body has to bring 60,000 bytes.
            let minute = Duration::from_secs(60);
            rate.window_start = rate.window_start.map(|at| at - minute);
            rate.paused_since = rate.paused_since.map(|at| at - minute);
        }
        let mut waits = 0;
        while wait(&mut rate, received).await {
            waits += 1;
            assert!(waits < 20, "two windows have passed without a byte");
        }
    }

    #[tokio::test]
    async fn a_rate_of_zero_allows_any() {
        let mut rate = MinRateTimer::new(Bytes(0), WINDOW);
        assert!(rate.next(sleep(WINDOW * 3), 100 << 20).await.is_ok());
    }
}
