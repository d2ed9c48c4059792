//! Queries the process table. Recorded pids are checked against it before use, because pids are reused.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use super::sock_diag;

/// One process. A zombie counts as dead: where no parent reaps (containers), it stays in its group forever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessStat {
    pub parent: i32,
    pub group: i32,
    /// When it started, in clock ticks since boot. Together with the pid this identifies the process.
    pub start: u64,
    pub zombie: bool,
}

/// A listening TCP socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListeningSocket {
    pub address: IpAddr,
    pub inode: u64,
}

/// Identifies this boot. In another boot, the same pid with the same start time was a different process.
pub fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").map(|id| id.trim().to_owned()).unwrap_or_default()
}

pub fn stat(pid: i32) -> Option<ProcessStat> {
    parse_stat(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Parses `/proc/PID/stat`. The command's name is in parentheses and may contain some, so the fields start after the
/// last one.
fn parse_stat(text: &str) -> Option<ProcessStat> {
    let fields: Vec<&str> = text.rsplit_once(") ")?.1.split(' ').collect();
    Some(ProcessStat {
        zombie: matches!(*fields.first()?, "Z" | "X"),
        parent: fields.get(1)?.parse().ok()?,
        group: fields.get(2)?.parse().ok()?,
        start: fields.get(19)?.parse().ok()?,
    })
}

/// Lists the live processes of `group`, if given, and all others whose environment contains `mark`: an engine's worker
/// may have left the group.
pub fn members(group: Option<i32>, mark: &str) -> Vec<i32> {
    pids()
        .filter(|&pid| {
            stat(pid)
                .is_some_and(|stat| !stat.zombie && (Some(stat.group) == group || has_env_entry(pid, mark)))
        })
        .collect()
}

/// Children of this process, including zombies.
pub fn children() -> Vec<i32> {
    let me = i32::try_from(std::process::id()).ok();
    pids().filter(|&pid| stat(pid).is_some_and(|stat| Some(stat.parent) == me)).collect()
}

/// Reads the value of `variable` from a process's environment.
pub fn env_value(pid: i32, variable: &str) -> Option<String> {
    let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
    environment.split(|&b| b == 0).find_map(|entry| {
        let (name, value) = std::str::from_utf8(entry).ok()?.split_once('=')?;
        (name == variable).then(|| value.to_owned())
    })
}

fn has_env_entry(pid: i32, mark: &str) -> bool {
    fs::read(format!("/proc/{pid}/environ"))
        .is_ok_and(|environment| environment.split(|&b| b == 0).any(|entry| entry == mark.as_bytes()))
}

pub fn pids() -> impl Iterator<Item = i32> {
    fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Lists every socket that listens on `port`, of any process.
pub fn listeners(port: u16) -> Vec<ListeningSocket> {
    sock_diag::listeners(port).unwrap_or_else(|_| listeners_from_proc(port))
}

/// Fallback where socket diagnostics are not available.
fn listeners_from_proc(port: u16) -> Vec<ListeningSocket> {
    ["/proc/net/tcp", "/proc/net/tcp6"]
        .into_iter()
        .filter_map(|path| fs::read_to_string(path).ok())
        .flat_map(|table| parse_listeners(&table, port))
        .collect()
}

fn parse_listeners(table: &str, port: u16) -> Vec<ListeningSocket> {
    const LISTEN: &str = "0A";
    let row = |line: &str| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let (address, at) = fields.get(1)?.split_once(':')?;
        if *fields.get(3)? != LISTEN || u16::from_str_radix(at, 16).ok()? != port {
            return None;
        }
        Some(ListeningSocket { address: parse_address(address)?, inode: fields.get(9)?.parse().ok()? })
    };
    table.lines().skip(1).filter_map(row).collect()
}

/// The kernel prints each 32-bit word in native byte order.
fn parse_address(hex: &str) -> Option<IpAddr> {
    let word = |at: usize| {
        let digits = hex.get(at * 8..at * 8 + 8)?;
        Some(u32::from_str_radix(digits, 16).ok()?.to_ne_bytes())
    };
    if hex.len() == 8 {
        return Some(Ipv4Addr::from(word(0)?).into());
    }
    let bytes = [word(0)?, word(1)?, word(2)?, word(3)?].concat();
    let address = Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?);
    Some(address.to_canonical())
}

/// Those `listeners` that one of `pids` holds open.
pub fn owned_by(listeners: &[ListeningSocket], pids: &[i32]) -> Vec<ListeningSocket> {
    let inodes: Vec<u64> = pids.iter().flat_map(|&pid| sockets(pid)).collect();
    let owned = listeners.iter().filter(|listener| inodes.contains(&listener.inode));
    owned.copied().collect()
}

fn sockets(pid: i32) -> Vec<u64> {
    let inode = |entry: fs::DirEntry| {
        let target = fs::read_link(entry.path()).ok()?;
        let text = target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?;
        text.parse().ok()
    };
    let open = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    open.filter_map(inode).collect()
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_process_is_read_also_when_its_name_holds_parentheses() {
        let text = "7 (a) Z (b) S 1 42 42 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 987654 0 0";
        let stat = parse_stat(text).unwrap();
        assert_eq!((stat.parent, stat.group, stat.start, stat.zombie), (1, 42, 987_654, false));
    }

    #[test]
    fn a_listening_socket_is_found_with_its_address_and_its_owner() {
        let me = i32::try_from(std::process::id()).unwrap();
        for bind in ["127.0.0.1:0", "0.0.0.0:0"] {
            let socket = TcpListener::bind(bind).unwrap();
            let at = socket.local_addr().unwrap();
            let found = listeners(at.port());
            assert_eq!(found.iter().map(|l| l.address).collect::<Vec<_>>(), [at.ip()]);
            assert_eq!(listeners_from_proc(at.port()), found);
            assert_eq!(owned_by(&found, &[me]), found);
            assert_eq!(owned_by(&found, &[1]), []);
        }
    }

    #[test]
    fn mapped_and_plain_version_6_addresses_are_told_apart() {
        assert!(parse_address("00000000000000000000000001000000").unwrap().is_loopback());
        assert!(parse_address("0000000000000000FFFF00000100007F").unwrap().is_loopback());
        assert!(parse_address("00000000000000000000000000000000").unwrap().is_unspecified());
    }
}
