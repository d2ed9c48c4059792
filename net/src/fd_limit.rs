//! Raises the limit of file descriptors, and grows the descriptor table before any thread exists.
//!
//! Each stream holds two descriptors, so the usual soft limit of 1024 allows 500 streams. The table matters too: the
//! kernel doubles it as needed. In a process with threads it waits for an RCU grace period each time, and every thread
//! that opens a descriptor stalls for tens of milliseconds. Growing the table once, before the first thread, costs
//! nothing.

use std::{fs::File, os::fd::RawFd};

use nix::{
    fcntl::{FcntlArg, fcntl},
    sys::resource::{Resource, getrlimit, setrlimit},
    unistd::close,
};

/// Some systems set a hard limit of a billion. Engines would inherit it and may loop over all of it.
const MAX_DESCRIPTORS: u64 = 1 << 20;

/// Largest table that is grown in advance. An entry takes 8 bytes, and no single machine uses more at once.
const MAX_TABLE_DESCRIPTORS: u64 = 1 << 18;

/// Raises the soft limit to the hard one (2^20 at most) and grows the table. Returns the limit. Call it before the
/// first thread starts. Errors: the limit cannot be read.
pub fn raise() -> nix::Result<u64> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let wanted = hard.min(MAX_DESCRIPTORS).max(soft);
    let raised = setrlimit(Resource::RLIMIT_NOFILE, wanted, hard).is_ok();
    let limit = if raised { wanted } else { soft };
    // Failing to grow the table is harmless: the kernel then grows it on demand.
    if let Ok(last) = RawFd::try_from(limit.min(MAX_TABLE_DESCRIPTORS).saturating_sub(1)) {
        grow_table(last).unwrap_or_default();
    }
    Ok(limit)
}

/// Returns how many descriptors this process may have open. Errors: the limit cannot be read.
pub fn soft_limit() -> nix::Result<u64> {
    getrlimit(Resource::RLIMIT_NOFILE).map(|(soft, _)| soft)
}

fn grow_table(last: RawFd) -> nix::Result<()> {
    let Ok(null) = File::open("/dev/null") else {
        return Ok(());
    };
    let high = fcntl(&null, FcntlArg::F_DUPFD_CLOEXEC(last))?;
    close(high)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_becomes_the_hard_one() {
        let limit = raise().unwrap();
        let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        assert_eq!((soft, soft_limit()), (limit, Ok(limit)));
        assert!(soft == hard || soft >= MAX_DESCRIPTORS, "{soft} of {hard}");
    }
}
