//! What a measurement costs the proxy, and what else went on.

use std::{fs, process, time::Duration};

use tokio::{
    task::{JoinHandle, spawn_blocking},
    time::interval,
};

use crate::{
    measure::{Cpu, Machine, Memory, tree},
    peers::Target,
};

/// Between two looks at how many descriptors a proxy has.
const LOOK: Duration = Duration::from_millis(50);
/// Looks at its memory once all streams are open; the most counts.
const SAMPLES: u32 = 3;
const BETWEEN_SAMPLES: Duration = Duration::from_millis(250);

/// The processes of a proxy. Of Rouse's, engines do not count: the others' engine is not their child either.
pub(crate) struct Watched {
    pub(crate) pids: Vec<u32>,
    cpu: Option<Cpu>,
    engines: Vec<Cpu>,
}

impl Watched {
    pub(crate) fn of(target: Target, root: Option<u32>) -> anyhow::Result<Self> {
        let Some(root) = root else { return Ok(Self { pids: Vec::new(), cpu: None, engines: Vec::new() }) };
        let mut pids = tree(root)?;
        let mut engines = Vec::new();
        if target == Target::Rouse {
            engines = pids.split_off(1).into_iter().map(Cpu::of).collect();
        }
        Ok(Self { pids, cpu: Some(Cpu::of(root)), engines })
    }

    /// CPU time so far.
    pub(crate) fn cpu(&mut self) -> anyhow::Result<Duration> {
        let Some(cpu) = &mut self.cpu else { return Ok(Duration::ZERO) };
        let mut engines = Duration::ZERO;
        for engine in &mut self.engines {
            engines += engine.total()?;
        }
        Ok(cpu.total()?.saturating_sub(engines))
    }

    /// Bytes, as proportional set size.
    pub(crate) fn memory(&self) -> anyhow::Result<u64> {
        Ok(Memory::of(&self.pids)?.pss)
    }

    /// Memory while so many streams are open; ends when it is known.
    pub(crate) fn open_memory(&self, streams: usize) -> JoinHandle<anyhow::Result<u64>> {
        let pids = self.pids.clone();
        tokio::spawn(async move {
            let mut looks = interval(LOOK);
            // A socket to the client and one to the engine for each.
            while descriptors(&pids) < 2 * streams as u64 {
                looks.tick().await;
            }
            let (mut most, mut samples) = (0, interval(BETWEEN_SAMPLES));
            samples.tick().await;
            for _ in 0..SAMPLES {
                samples.tick().await;
                let pids = pids.clone();
                // The kernel walks all pages: not on the thread that reads streams.
                most = most.max(spawn_blocking(move || Memory::of(&pids)).await??.pss);
            }
            Ok(most)
        })
    }
}

/// Of all processes together. Newer kernels tell the number as the folder's size.
fn descriptors(pids: &[u32]) -> u64 {
    let of = |pid: &u32| {
        let path = format!("/proc/{pid}/fd");
        let told = fs::metadata(&path).map_or(0, |data| data.len());
        if told > 0 { told } else { fs::read_dir(&path).map_or(0, |entries| entries.count() as u64) }
    };
    pids.iter().map(of).sum()
}

/// The whole machine since the measurement began.
pub(crate) struct Around {
    own: Cpu,
    used: Duration,
    machine: Machine,
}

impl Around {
    pub(crate) fn begin() -> anyhow::Result<Self> {
        // Everything here is this process or started by it.
        let mut own = Cpu::of(process::id());
        let used = own.total()?;
        Ok(Self { own, used, machine: Machine::now()? })
    }

    /// How many processors others used.
    pub(crate) fn others(&mut self) -> anyhow::Result<f64> {
        let machine = Machine::now()?;
        let own = self.own.total()?.saturating_sub(self.used);
        Ok(machine.others(&self.machine, own))
    }
}
