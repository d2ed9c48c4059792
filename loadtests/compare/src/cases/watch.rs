//! What a measurement costs the proxy, and what else went on.

use std::{fs, process, time::Duration};

use tokio::{
    sync::watch,
    task::{JoinHandle, spawn_blocking},
    time::{Instant, interval},
};

use crate::{
    measure::{CpuMeter, MachineTicks, ProcessMemory, tree},
    peers::ComparedProxy,
};

/// Between two looks at how many descriptors a proxy has.
const DESCRIPTOR_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Between two looks at its memory once all streams are open.
const MEMORY_SAMPLE_INTERVAL: Duration = Duration::from_millis(250);
/// On a machine this busy not all will ever be open together: memory is then looked at while they come.
const MAX_OPENING_TIME: Duration = Duration::from_secs(5);

/// What a proxy held when the most streams were open.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OpenStreamsMemory {
    /// By descriptors: a socket to the client and one to the engine for each.
    pub(crate) streams: usize,
    pub(crate) bytes: u64,
}

/// The processes of a proxy. Of Rouse's, engines do not count: the others' engine is not their child either.
pub(crate) struct ProxyProcesses {
    pub(crate) pids: Vec<u32>,
    cpu: Option<CpuMeter>,
    engines: Vec<CpuMeter>,
}

impl ProxyProcesses {
    pub(crate) fn of(target: ComparedProxy, root: Option<u32>) -> anyhow::Result<Self> {
        let Some(root) = root else { return Ok(Self { pids: Vec::new(), cpu: None, engines: Vec::new() }) };
        let mut pids = tree(root)?;
        let mut engines = Vec::new();
        if target == ComparedProxy::Rouse {
            engines = pids.split_off(1).into_iter().map(CpuMeter::new).collect();
        }
        Ok(Self { pids, cpu: Some(CpuMeter::new(root)), engines })
    }

    /// A gateway's own engines; nothing where the engine is not its child.
    pub(crate) fn engines(&self) -> Option<Vec<u32>> {
        (!self.engines.is_empty()).then(|| self.engines.iter().map(CpuMeter::root).collect())
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
        Ok(ProcessMemory::of(&self.pids)?.pss)
    }

    /// Follows the memory while so many streams are opened and open; aborted when they end.
    pub(crate) fn open_memory(
        &self,
        streams: usize,
    ) -> (JoinHandle<anyhow::Result<()>>, watch::Receiver<OpenStreamsMemory>) {
        let pids = self.pids.clone();
        let (tell, told) = watch::channel(OpenStreamsMemory::default());
        let following = tokio::spawn(async move {
            let (mut looks, slow) = (interval(DESCRIPTOR_POLL_INTERVAL), Instant::now() + MAX_OPENING_TIME);
            // The kernel walks all pages for the figure, which the first events must not wait for.
            while descriptors(&pids) < 2 * streams as u64 && Instant::now() < slow {
                looks.tick().await;
            }
            let mut samples = interval(MEMORY_SAMPLE_INTERVAL);
            loop {
                samples.tick().await;
                let (of, open) = (pids.clone(), descriptors(&pids) / 2);
                let bytes = spawn_blocking(move || ProcessMemory::of(&of)).await??.pss;
                let sample = OpenStreamsMemory { streams: streams.min(usize::try_from(open)?), bytes };
                tell.send_if_modified(|most| {
                    let more = (sample.streams, sample.bytes) > (most.streams, most.bytes);
                    if more {
                        *most = sample;
                    }
                    more
                });
            }
        });
        (following, told)
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
pub(crate) struct MachineLoad {
    own: CpuMeter,
    used: Duration,
    machine: MachineTicks,
}

impl MachineLoad {
    pub(crate) fn start() -> anyhow::Result<Self> {
        // Everything here is this process or started by it.
        let mut own = CpuMeter::new(process::id());
        let used = own.total()?;
        Ok(Self { own, used, machine: MachineTicks::now()? })
    }

    /// How many processors others used.
    pub(crate) fn cores_used_by_others(&mut self) -> anyhow::Result<f64> {
        let machine = MachineTicks::now()?;
        let own = self.own.total()?.saturating_sub(self.used);
        Ok(machine.cores_used_by_others(&self.machine, own))
    }
}
