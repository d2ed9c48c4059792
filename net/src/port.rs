//! Chooses ports for processes that listen later.
//!
//! Engines bind minutes after we pick a port, because they load first, so avoid the ephemeral range. The kernel gives a
//! port of that range to any connection meanwhile, and this machine's busiest program opens many. A port below that
//! range stays free unless a process binds that very number.
//!
//! Until an engine binds its port, no other gateway may choose it, nor bind it for a moment to see whether it is free. A
//! claim on the port is a Unix socket with an abstract name, which only one process can hold. Such names belong to a
//! network namespace, as ports do, and end with the process.

use std::{
    fs,
    hash::{BuildHasher as _, RandomState},
    io, mem,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    ops::Range,
    os::{
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr as UnixSocketAddr, UnixDatagram},
    },
    sync::{
        LazyLock,
        atomic::{AtomicU16, Ordering},
    },
};

/// Below Linux's usual ephemeral range (32768 and up) and the node ports of Kubernetes (30000 and up).
pub const CANDIDATE_PORTS: Range<u16> = 20_000..30_000;

/// Offset of the next candidate. It starts at a random number, so that programs that start together try different
/// ports.
static NEXT: LazyLock<AtomicU16> = LazyLock::new(|| {
    let anywhere = RandomState::new().hash_one(std::process::id());
    AtomicU16::new(u16::try_from(anywhere % 10_000).unwrap_or_default())
});

/// A loopback port that no other call of [`claim`] returns while this value lives.
#[derive(Debug)]
pub struct ClaimedPort {
    number: u16,
    /// `None` if the system refuses such sockets.
    _claim: Option<UnixDatagram>,
}

impl ClaimedPort {
    #[must_use]
    pub const fn number(&self) -> u16 {
        self.number
    }
}

/// Claims a free loopback port for the rest of this process's life. Each call keeps a descriptor open.
///
/// # Errors
/// There is no free port, or no permission to listen.
pub fn claim_for_process() -> io::Result<u16> {
    let claimed = claim()?;
    let number = claimed.number;
    mem::forget(claimed);
    Ok(number)
}

/// Claims a free loopback port outside the ephemeral range. If the kernel's ephemeral range overlaps the candidates, or
/// none of them is free, the kernel picks a port that is free at this moment.
///
/// # Errors
/// There is no free port, or no permission to listen.
pub fn claim() -> io::Result<ClaimedPort> {
    let given = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let tried = if lowest_ephemeral_port(&given).is_some_and(|lowest| lowest >= CANDIDATE_PORTS.end) {
        CANDIDATE_PORTS.len()
    } else {
        0
    };
    let mut candidates = (0..tried).map(|_| {
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        CANDIDATE_PORTS.start + next % (CANDIDATE_PORTS.end - CANDIDATE_PORTS.start)
    });
    let chosen = candidates.find_map(|port| {
        let claimed = claim_number(port)?;
        bind_once(port).is_ok().then_some(claimed)
    });
    if let Some(claimed) = chosen {
        return Ok(claimed);
    }
    loop {
        if let Some(claimed) = claim_number(bind_once(0)?) {
            return Ok(claimed);
        }
    }
}

/// Claims this port. `None`: it has a claim already.
#[must_use]
pub fn claim_number(port: u16) -> Option<ClaimedPort> {
    match bind_claim(port) {
        Ok(claim) => Some(ClaimedPort { number: port, _claim: Some(claim) }),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => None,
        Err(_) => Some(ClaimedPort { number: port, _claim: None }),
    }
}

fn bind_claim(port: u16) -> io::Result<UnixDatagram> {
    UnixDatagram::bind_addr(&UnixSocketAddr::from_abstract_name(format!("rouse-port-{port}"))?)
}

/// Parses the lowest ephemeral port from `32768\t60999`.
#[must_use]
pub fn lowest_ephemeral_port(range: &str) -> Option<u16> {
    range.split_whitespace().next()?.parse().ok()
}

fn bind_once(port: u16) -> io::Result<u16> {
    TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port)))?
        .local_addr()
        .map(|address| address.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_in_a_row_are_two_and_a_taken_one_is_passed_over() {
        let first = claim_for_process().unwrap();
        let _taken = TcpListener::bind((Ipv4Addr::LOCALHOST, first)).unwrap();
        let others: Vec<u16> = (0..100).map(|_| claim_for_process().unwrap()).collect();
        assert!(!others.contains(&first), "{first} {others:?}");
    }

    #[test]
    fn a_claimed_port_is_passed_over_although_no_process_has_bound_it() {
        let claimed = claim().unwrap();
        assert_eq!(bind_claim(claimed.number()).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        NEXT.store(claimed.number().wrapping_sub(CANDIDATE_PORTS.start), Ordering::Relaxed);
        assert_ne!(claim_for_process().unwrap(), claimed.number());
    }

    #[test]
    fn no_connection_is_given_one() {
        let Some(lowest) = lowest_ephemeral_port(
            &fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default(),
        ) else {
            return;
        };
        if lowest >= CANDIDATE_PORTS.end {
            assert!(CANDIDATE_PORTS.contains(&claim_for_process().unwrap()));
        }
    }

    #[test]
    fn the_kernels_range_is_read() {
        assert_eq!(lowest_ephemeral_port("32768\t60999\n"), Some(32768));
        assert_eq!(lowest_ephemeral_port(""), None);
        assert_eq!(lowest_ephemeral_port("many few"), None);
    }
}
