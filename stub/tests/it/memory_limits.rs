//! Memory limits of the stub: it runs beside each engine's requester, so it must stay small.

use std::{fs, path::PathBuf};

use crate::support::{StubProcess, TestExchange, client::chat, engine::sim, stub, stub_before, until};

/// Limits in KiB.
const IDLE: u64 = 15 << 10;
const BUSY: u64 = 64 << 10;
/// A requester's memory limit in the documentation's example, in KiB.
const EXAMPLE: u64 = 250 << 10;

fn streams(stub: &StubProcess, count: usize) -> Vec<TestExchange> {
    let relay = stub.relay();
    let asked = relay.request("POST", "/v1/chat/completions", "", &chat(1_000_000));
    let mut open: Vec<TestExchange> = (0..count).map(|_| relay.open(&asked)).collect();
    open.iter_mut().for_each(|open| open.until("data: "));
    open
}

#[test]
fn an_idle_stub_is_small() {
    let stub = stub(&[]);
    stub.gate();
    let rss = stub.memory("Rss");
    eprintln!("idle: {rss} KiB");
    assert!(rss <= IDLE, "{rss} KiB");
}

#[test]
fn a_thousand_open_streams_are_small_too() {
    rouse_net::fd_limit::raise().unwrap();
    let engine = sim("--ttft 1ms --itl 500ms");
    let stub = stub_before(engine.address, &[]);
    let mut open = streams(&stub, 1000);
    assert_eq!(stub.leases(), 1000);
    // Each stream has relayed something since.
    open.iter_mut().for_each(|open| assert!(open.more()));
    let rss = stub.memory("Rss");
    eprintln!("a thousand streams: {rss} KiB");
    assert!(rss <= BUSY, "{rss} KiB");
    drop(open);
    until("all of them have left", || stub.leases() == 0);
}

/// Creates a memory cgroup with this limit in bytes. Errors: this machine does not allow it.
fn cgroup(limit: u64) -> Result<PathBuf, String> {
    let own = fs::read_to_string("/proc/self/cgroup").map_err(|error| error.to_string())?;
    let at = |mark: &str| {
        own.lines().find_map(|line| line.split_once(mark)).map(|(_, at)| at.trim_start_matches('/'))
    };
    let (parent, limits) = match at(":memory:") {
        Some(at) => (PathBuf::from("/sys/fs/cgroup/memory").join(at), "memory.limit_in_bytes"),
        None => {
            (PathBuf::from("/sys/fs/cgroup").join(at("0::").ok_or("there are no cgroups")?), "memory.max")
        }
    };
    let made = parent.join(format!("rouse-stub-test-{}", std::process::id()));
    fs::create_dir(&made).map_err(|error| format!("{}: {error}", made.display()))?;
    // Opened without creating it, in case the folder is not a cgroup.
    let limited = fs::OpenOptions::new().write(true).open(made.join(limits));
    let limited =
        limited.and_then(|mut file| std::io::Write::write_all(&mut file, limit.to_string().as_bytes()));
    limited.map(|()| made.clone()).map_err(|error| {
        fs::remove_dir(&made).ok();
        format!("no memory cgroup can be made and limited here: {error}")
    })
}

/// Where this machine lets the test make a memory cgroup, the kernel enforces the example's limit. On every machine the
/// stub's peak resident memory must stay within that limit.
#[test]
fn in_the_memory_of_the_example_two_thousand_streams_do_not_kill_it() {
    rouse_net::fd_limit::raise().unwrap();
    let engine = sim("--ttft 1ms --itl 500ms");
    let mut stub = stub_before(engine.address, &[]);
    let group = cgroup(EXAMPLE << 10);
    match &group {
        Ok(group) => fs::write(group.join("cgroup.procs"), stub.pid().to_string()).unwrap(),
        Err(why) => eprintln!("without a limit: {why}"),
    }
    let mut open = streams(&stub, 2000);
    open.iter_mut().for_each(|open| assert!(open.more()));
    let peak = peak(&stub);
    eprintln!("two thousand streams: {peak} KiB at most");
    assert!(peak <= EXAMPLE, "{peak} KiB");
    assert!(stub.is_running());
    assert_eq!(stub.leases(), 2000);
    drop((open, stub));
    if let Ok(group) = group {
        until("the group is empty", || fs::remove_dir(&group).is_ok());
    }
}

/// The stub's peak resident memory so far, in KiB.
fn peak(stub: &StubProcess) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", stub.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}
