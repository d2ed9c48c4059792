//! The share of the machine's cores that other programs take: how much the programs of a test can do depends on it.

use std::{collections::BTreeMap, fs, process};

use rouse_net::process::table;

/// A smaller share is not that of a program: the kernel's threads take it, or its counters differ that much.
const NEGLIGIBLE: f64 = 0.05;

/// CPU time until one moment, in ticks of the kernel.
pub(crate) struct CoresReading {
    /// Of all cores, also while they were idle.
    total: u64,
    /// While programs ran, or another machine had the core. Interrupts do not count: they may serve this test.
    busy: u64,
    /// Of this process and its descendants. The gateways and the servers of its cluster are its children.
    own: u64,
}

impl CoresReading {
    pub(crate) fn now() -> Self {
        let stat = fs::read_to_string("/proc/stat").unwrap();
        let line = stat.lines().next().unwrap();
        // In proc(5): user, nice, system, idle, iowait, irq, softirq, steal. Those of guests count in the first two.
        let ticks: Vec<u64> =
            line.split_whitespace().skip(1).take(8).map(|field| field.parse().unwrap()).collect();
        let [user, nice, system, _, _, _, _, steal] = ticks[..] else {
            panic!("/proc/stat begins with another line: {line}")
        };
        Self { total: ticks.iter().sum(), busy: user + nice + system + steal, own: own_time() }
    }

    /// The share of all cores that other programs have taken since then. Zero if it is negligible.
    pub(crate) fn others_since(&self) -> f64 {
        let now = Self::now();
        // The kernel's counters of idle time may go back a little.
        let total = now.total.saturating_sub(self.total).max(1);
        let busy = now.busy.saturating_sub(self.busy);
        let others = busy.saturating_sub(now.own.saturating_sub(self.own));
        let share = others as f64 / total as f64;
        if share < NEGLIGIBLE { 0.0 } else { share.min(1.0) }
    }
}

/// The fields of `/proc/PID/stat` behind the name: the first is field 3 of proc(5). `None` for an ended process.
pub(crate) fn stat_fields(pid: i32) -> Option<Vec<String>> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    Some(stat.rsplit_once(") ")?.1.split(' ').map(str::to_owned).collect())
}

/// The parent of a process, and its time in ticks.
type ProcessTime = (i32, u64);

fn own_time() -> u64 {
    let all: BTreeMap<i32, ProcessTime> =
        table::pids().filter_map(|pid| Some((pid, process_time(pid)?))).collect();
    let me = i32::try_from(process::id()).unwrap();
    all.iter().filter(|(pid, _)| descends_from(me, **pid, &all)).map(|(_, (_, ticks))| *ticks).sum()
}

/// In user and kernel mode, with the time of ended children: that of a killed gateway is not lost.
fn process_time(pid: i32) -> Option<ProcessTime> {
    let fields = stat_fields(pid)?;
    let ticks: u64 = fields[11..15].iter().map(|field| field.parse::<u64>().unwrap()).sum();
    Some((fields[1].parse().unwrap(), ticks))
}

/// Whether this process is `ancestor` or one of its descendants.
fn descends_from(ancestor: i32, mut pid: i32, all: &BTreeMap<i32, ProcessTime>) -> bool {
    while pid != ancestor {
        let Some((parent, _)) = all.get(&pid) else { return false };
        pid = *parent;
    }
    true
}
