//! Lists listening sockets with the kernel's socket diagnostics (`sock_diag(7)`).
//!
//! The tables in `/proc/net` have the same data. To print them the kernel walks its whole hash of connections, which
//! takes tens of milliseconds on a machine with much memory. A parked request waits for this answer, so this queries
//! only the listeners, which are few.

use std::{
    io::{self, Read as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use nix::libc::{AF_INET, AF_INET6, AF_NETLINK, IPPROTO_TCP};
use socket2::{Domain, Protocol, Socket, Type};

use super::table::ListeningSocket;

const SOCK_DIAG: i32 = 4;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLM_F_REQUEST_DUMP: u16 = 0x301;
const NLMSG_DONE: u16 = 3;
/// The set of TCP states that has only `LISTEN`.
const TCP_LISTEN_BIT: u32 = 1 << 10;
/// Length of a netlink message header.
const NLMSG_HEADER_BYTES: usize = 16;
/// Length of `inet_diag_req_v2`.
const DIAG_REQUEST_BYTES: usize = 56;
/// Offsets in `inet_diag_msg`.
const PORT: usize = 4;
const ADDRESS: usize = 8;
const INODE: usize = 68;

/// Lists the sockets that listen on this TCP port, in both families.
///
/// # Errors
/// The kernel has no socket diagnostics, or this process may not use them.
pub(super) fn listeners(port: u16) -> io::Result<Vec<ListeningSocket>> {
    let mut found = Vec::new();
    for family in [AF_INET, AF_INET6] {
        dump(family as u8, |answer| found.extend(parse_listener(answer, port)))?;
    }
    Ok(found)
}

fn dump(family: u8, mut each: impl FnMut(&[u8])) -> io::Result<()> {
    let socket = Socket::new(Domain::from(AF_NETLINK), Type::DGRAM, Some(Protocol::from(SOCK_DIAG)))?;
    socket.send(&dump_request(family))?;
    let mut buffer = vec![0; 32 << 10];
    loop {
        let read = (&socket).read(&mut buffer)?;
        let mut rest = buffer.get(..read).unwrap_or_default();
        while let (Some(length), Some(kind)) = (read_native_uint(rest, 0, 4), read_native_uint(rest, 4, 2)) {
            let length = length as usize;
            match kind as u16 {
                SOCK_DIAG_BY_FAMILY => each(rest.get(NLMSG_HEADER_BYTES..length).unwrap_or_default()),
                NLMSG_DONE => return Ok(()),
                _ => return Err(io::Error::other("the kernel rejected the sock_diag request")),
            }
            // Messages are aligned to four bytes.
            rest = rest.get(length.max(NLMSG_HEADER_BYTES).next_multiple_of(4)..).unwrap_or_default();
        }
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
}

fn dump_request(family: u8) -> Vec<u8> {
    let mut text = Vec::with_capacity(NLMSG_HEADER_BYTES + DIAG_REQUEST_BYTES);
    text.extend(((NLMSG_HEADER_BYTES + DIAG_REQUEST_BYTES) as u32).to_ne_bytes());
    text.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    text.extend(NLM_F_REQUEST_DUMP.to_ne_bytes());
    text.resize(NLMSG_HEADER_BYTES, 0);
    text.extend([family, IPPROTO_TCP as u8, 0, 0]);
    text.extend(TCP_LISTEN_BIT.to_ne_bytes());
    text.resize(NLMSG_HEADER_BYTES + DIAG_REQUEST_BYTES, 0);
    text
}

fn parse_listener(answer: &[u8], port: u16) -> Option<ListeningSocket> {
    let at = u16::from_be_bytes(answer.get(PORT..PORT + 2)?.try_into().ok()?);
    let address: [u8; 16] = answer.get(ADDRESS..ADDRESS + 16)?.try_into().ok()?;
    let address = if i32::from(*answer.first()?) == AF_INET {
        let [a, b, c, d, ..] = address;
        IpAddr::V4(Ipv4Addr::new(a, b, c, d))
    } else {
        Ipv6Addr::from(address).to_canonical()
    };
    let inode = read_native_uint(answer, INODE, 4)?;
    (at == port).then_some(ListeningSocket { address, inode: inode.into() })
}

/// Reads an unsigned number of two or four bytes in native byte order.
fn read_native_uint(bytes: &[u8], at: usize, size: usize) -> Option<u32> {
    let bytes = bytes.get(at..at + size)?;
    match size {
        2 => Some(u16::from_ne_bytes(bytes.try_into().ok()?).into()),
        _ => Some(u32::from_ne_bytes(bytes.try_into().ok()?)),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn both_families_are_listed_with_their_addresses() {
        for bind in ["127.0.0.1:0", "0.0.0.0:0", "[::1]:0", "[::]:0"] {
            let Ok(socket) = TcpListener::bind(bind) else {
                continue;
            };
            let at = socket.local_addr().unwrap();
            let found = listeners(at.port()).unwrap();
            assert_eq!(found.iter().map(|l| l.address).collect::<Vec<_>>(), [at.ip()]);
        }
        assert_eq!(listeners(1).unwrap(), []);
    }
}
