//! Precise waits. The runtime's timers have millisecond resolution, and a proxy adds less than that to a response.

use std::{io, os::fd::OwnedFd, time::Duration};

use nix::sys::{
    time::TimeSpec,
    timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags},
};
use tokio::io::unix::AsyncFd;

/// Ends `wait` from now, at most some tens of microseconds late on an idle machine. It costs a descriptor and a few
/// system calls, so it suits slow responses, not events.
///
/// Errors: no descriptor is free.
pub(super) async fn wait(wait: Duration) -> io::Result<()> {
    if wait.is_zero() {
        return Ok(());
    }
    let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC)?;
    timer.set(Expiration::OneShot(TimeSpec::from_duration(wait)), TimerSetTimeFlags::empty())?;
    async_fd(timer.into())?.readable().await?.retain_ready();
    Ok(())
}

#[expect(
    deprecated,
    reason = "the successor is an unsafe function; the descriptor is owned and stays the same"
)]
fn async_fd(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::new(descriptor)
}

#[cfg(test)]
mod tests {
    use super::{super::wire::monotonic_ns, *};

    #[tokio::test]
    async fn a_wait_is_never_too_short() {
        let began = monotonic_ns();
        wait(Duration::from_micros(2300)).await.unwrap();
        let waited = monotonic_ns() - began;
        assert!((2_300_000..1_000_000_000).contains(&waited), "{waited}");
    }
}
