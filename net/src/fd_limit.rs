//! File descriptors: as many as allowed, and the table grown before there are threads.
//!
//! Each stream holds two descriptors, and the usual soft limit of 1024 is 500 streams. The table matters as well: the
//! kernel doubles it as needed and, in a process with threads, waits for an RCU grace period each time, which holds up
//! every thread that opens something for tens of milliseconds. Grown once, before the first thread, it costs nothing.

use std::{fs::File, os::fd::RawFd};

use nix::{
    fcntl::{FcntlArg, fcntl},
    sys::resource::{Resource, getrlimit, setrlimit},
    unistd::close,
};

/// Some systems set a hard limit of a thousand millions, which engines would inherit and may loop over.
const MAX_DESCRIPTORS: u64 = 1 << 20;

/// The table is grown to at most this many: 8 bytes each, and more than any one machine will use at once.
const MAX_TABLE_DESCRIPTORS: u64 = 1 << 18;

/// Raises the soft limit to the hard one (2^20 at most) and grows the table. Returns the limit. Call it before the
/// first thread is started. Errors: the limit cannot be read.
pub fn raise() -> nix::Result<u64> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let wanted = hard.min(MAX_DESCRIPTORS).max(soft);
    let raised = setrlimit(Resource::RLIMIT_NOFILE, wanted, hard).is_ok();
    let limit = if raised { wanted } else { soft };
    // Less is no failure: the table then grows by itself.
    if let Ok(last) = RawFd::try_from(limit.min(MAX_TABLE_DESCRIPTORS).saturating_sub(1)) {
        grow_table(last).unwrap_or_default();
    }
    Ok(limit)
}

/// How many descriptors this process may have open. Errors: the limit cannot be read.
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
