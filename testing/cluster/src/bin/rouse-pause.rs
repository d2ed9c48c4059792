//! Holds a Pod's network namespace while its containers come and go.
//!
//! It sleeps until SIGTERM or SIGINT. In a shared process namespace it is pid 1 and reaps orphans.

use nix::{
    sys::{
        signal::{SigSet, Signal},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};

fn main() -> nix::Result<()> {
    let awaited: SigSet = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGCHLD].into_iter().collect();
    awaited.thread_block()?;
    while awaited.wait()? == Signal::SIGCHLD {
        // One signal may stand for many children. An error means that no child is left.
        while waitpid(None::<Pid>, Some(WaitPidFlag::WNOHANG))
            .is_ok_and(|status| status != WaitStatus::StillAlive)
        {}
    }
    Ok(())
}
