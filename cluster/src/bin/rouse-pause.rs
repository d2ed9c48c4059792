//! What holds a Pod's network while its containers come and go: it sleeps until it is told to end. Where containers share
//! their processes it is the first of them all, and reaps what others leave behind.

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
        // One signal may stand for many children; an error says that there is none.
        while waitpid(None::<Pid>, Some(WaitPidFlag::WNOHANG))
            .is_ok_and(|status| status != WaitStatus::StillAlive)
        {}
    }
    Ok(())
}
