//! Chooses ports for processes that listen later.
//!
//! Engines bind minutes after we pick a port, because they load first, so avoid the ephemeral range. The kernel gives a
//! port of that range to any connection meanwhile, and this machine's busiest program opens many. A port below that
//! range stays free unless a process binds that very number.

use std::{
    fs,
    hash::{BuildHasher as _, RandomState},
    io,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    ops::Range,
    sync::{
        LazyLock,
        atomic::{AtomicU16, Ordering},
    },
};

/// Below Linux's usual ephemeral range (32768 and up) and the node ports of Kubernetes (30000 and up).
const CANDIDATE_PORTS: Range<u16> = 20_000..30_000;

/// Offset of the next candidate. It starts at a random number, so that programs that start together try different
/// ports.
static NEXT: LazyLock<AtomicU16> = LazyLock::new(|| {
    let anywhere = RandomState::new().hash_one(std::process::id());
    AtomicU16::new(u16::try_from(anywhere % 10_000).unwrap_or_default())
});

/// Returns a free loopback port outside the ephemeral range. If the kernel's ephemeral range overlaps the candidates,
/// or none of them is free, the kernel picks a port that is free at this moment.
///
/// # Errors
/// There is no free port, or no permission to listen.
pub fn free() -> io::Result<u16> {
    let given = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let tried = if lowest_ephemeral_port(&given).is_some_and(|lowest| lowest >= CANDIDATE_PORTS.end) {
        CANDIDATE_PORTS.len()
    } else {
        0
    };
    let mut chosen = (0..tried).map(|_| {
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        CANDIDATE_PORTS.start + next % (CANDIDATE_PORTS.end - CANDIDATE_PORTS.start)
    });
    match chosen.find(|port| bind_once(*port).is_ok()) {
        Some(port) => Ok(port),
        None => bind_once(0),
    }
}

/// Parses the lowest ephemeral port from `32768\t60999`.
fn lowest_ephemeral_port(range: &str) -> Option<u16> {
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
        let first = free().unwrap();
        let _taken = TcpListener::bind((Ipv4Addr::LOCALHOST, first)).unwrap();
        let others: Vec<u16> = (0..100).map(|_| free().unwrap()).collect();
        assert!(!others.contains(&first), "{first} {others:?}");
    }

    #[test]
    fn no_connection_is_given_one() {
        let Some(lowest) = lowest_ephemeral_port(
            &fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default(),
        ) else {
            return;
        };
        if lowest >= CANDIDATE_PORTS.end {
            assert!(CANDIDATE_PORTS.contains(&free().unwrap()));
        }
    }

    #[test]
    fn the_kernels_range_is_read() {
        assert_eq!(lowest_ephemeral_port("32768\t60999\n"), Some(32768));
        assert_eq!(lowest_ephemeral_port(""), None);
        assert_eq!(lowest_ephemeral_port("many few"), None);
    }
}
