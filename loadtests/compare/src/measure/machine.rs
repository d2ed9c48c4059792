//! Measures the whole machine's load: a cell is only as reliable as the machine was quiet.

use std::{fs, io, time::Duration};

use nix::unistd::{SysconfVar, sysconf};

/// Each core's busy and total time since boot, in the kernel's ticks of some milliseconds.
#[derive(Clone, Debug)]
pub(crate) struct MachineTicks {
    cores: Vec<CoreTicks>,
    tick: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CoreTicks {
    busy: u64,
    /// Busy, idle, or stolen by the hypervisor.
    all: u64,
    stolen: u64,
}

impl MachineTicks {
    /// Reads the counters.
    ///
    /// Errors: the kernel's statistics cannot be read.
    pub(crate) fn now() -> io::Result<Self> {
        let ticks = sysconf(SysconfVar::CLK_TCK)?.and_then(|ticks| u32::try_from(ticks).ok()).unwrap_or(100);
        let cores = cores(&fs::read_to_string("/proc/stat")?);
        Ok(Self { cores, tick: Duration::from_secs(1) / ticks.max(1) })
    }

    /// Fraction of the time since `earlier` in which a core was busy, 0 to 1. `None` if there is no such core or no
    /// time has passed.
    pub(crate) fn busy(&self, earlier: &Self, core: usize) -> Option<f64> {
        let (now, before) = (self.cores.get(core)?, earlier.cores.get(core)?);
        let all = now.all.checked_sub(before.all).filter(|all| *all > 0)?;
        Some(now.busy.saturating_sub(before.busy) as f64 / all as f64)
    }

    /// Cores that other work kept busy since `earlier`, steal included. `own_time` is the CPU time of the measurement's
    /// processes meanwhile, over all cores.
    pub(crate) fn cores_used_by_others(&self, earlier: &Self, own_time: Duration) -> f64 {
        let sum = |machine: &Self, of: fn(&CoreTicks) -> u64| machine.cores.iter().map(of).sum::<u64>();
        let passed = |of| sum(self, of).saturating_sub(sum(earlier, of)) as f64 * self.tick.as_secs_f64();
        let (busy, all) = (passed(|core| core.busy + core.stolen), passed(|core| core.all));
        let wall = all / self.cores.len().max(1) as f64;
        if wall == 0.0 { 0.0 } else { ((busy - own_time.as_secs_f64()) / wall).max(0.0) }
    }
}

/// The fields are user, nice, system, idle, iowait, irq, softirq and steal. User includes guest time.
fn cores(stat: &str) -> Vec<CoreTicks> {
    let lines = stat.lines().filter(|line| line.starts_with("cpu") && !line.starts_with("cpu "));
    let core = |line: &str| {
        let times: Vec<u64> = line.split_ascii_whitespace().skip(1).take(8).flat_map(str::parse).collect();
        let at = |nth: usize| times.get(nth).copied().unwrap_or(0);
        let (idle, stolen, all) = (at(3) + at(4), at(7), times.iter().sum::<u64>());
        CoreTicks { busy: all - idle - stolen, all, stolen }
    };
    lines.map(core).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(stat: &str) -> MachineTicks {
        MachineTicks { cores: cores(stat), tick: Duration::from_millis(10) }
    }

    #[test]
    fn shares_and_the_load_of_others_follow_from_the_counts() {
        let earlier = at("cpu  9 9 9 9\ncpu0 10 0 10 100 0 0 0 0 0 0\ncpu1 0 0 0 100 0 0 0 0 0 0\nintr 5\n");
        let later = at("cpu  9 9 9 9\ncpu0 60 0 40 120 0 0 0 0 50 0\ncpu1 0 0 0 180 0 5 5 10 0 0\nintr 5\n");
        assert_eq!(later.busy(&earlier, 0), Some(0.8));
        assert_eq!(later.busy(&earlier, 1), Some(0.1));
        assert_eq!(later.busy(&earlier, 2), None);
        assert_eq!(later.busy(&later, 0), None);
        // 0.9 s busy and 0.1 s stolen in one second, of which 0.7 s were our own.
        assert!((later.cores_used_by_others(&earlier, Duration::from_millis(700)) - 0.3).abs() < 1e-9);
        assert_eq!(later.cores_used_by_others(&earlier, Duration::from_secs(5)), 0.0);
    }

    #[test]
    fn this_machine_can_be_read() {
        assert!(!MachineTicks::now().unwrap().cores.is_empty());
    }
}
