//! Measures the proxy's cost and the machine's other work.

use std::{fs, process, time::Duration};

use tokio::{
    sync::watch,
    task::{JoinHandle, spawn_blocking},
    time::{Instant, interval},
};

use crate::{
    measure::{CpuMeter, MachineTicks, ProcessMemory, ended_children, tree},
    peers::ComparedProxy,
};

/// Interval between counts of a proxy's descriptors.
const DESCRIPTOR_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Interval between memory samples once all streams are open.
const MEMORY_SAMPLE_INTERVAL: Duration = Duration::from_millis(250);
/// On a machine this busy the streams may never all be open together; memory is then sampled while they open.
const MAX_OPENING_TIME: Duration = Duration::from_secs(5);

/// A proxy's memory when the most streams were open.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OpenStreamsMemory {
    /// From the descriptor count: each stream has a socket to the client and one to the engine.
    pub(crate) streams: usize,
    pub(crate) bytes: u64,
}

/// The processes of a proxy. Rouse's engines are excluded, because the other targets' engine is not their child either.
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

    /// A gateway's own engines; `None` if the engine is not its child.
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

    /// Proportional set size in bytes.
    pub(crate) fn memory(&self) -> anyhow::Result<u64> {
        Ok(ProcessMemory::of(&self.pids)?.pss)
    }

    /// Samples the memory while this many streams open and stay open. Abort the task when they end.
    pub(crate) fn open_memory(
        &self,
        streams: usize,
    ) -> (JoinHandle<anyhow::Result<()>>, watch::Receiver<OpenStreamsMemory>) {
        let pids = self.pids.clone();
        let (memory_tx, memory_rx) = watch::channel(OpenStreamsMemory::default());
        let following = tokio::spawn(async move {
            let (mut looks, slow) = (interval(DESCRIPTOR_POLL_INTERVAL), Instant::now() + MAX_OPENING_TIME);
            // The kernel walks all pages for a memory sample, which must not delay the first events.
            while descriptors(&pids) < 2 * streams as u64 && Instant::now() < slow {
                looks.tick().await;
            }
            let mut samples = interval(MEMORY_SAMPLE_INTERVAL);
            loop {
                samples.tick().await;
                let (of, open) = (pids.clone(), descriptors(&pids) / 2);
                let bytes = spawn_blocking(move || ProcessMemory::of(&of)).await??.pss;
                let sample = OpenStreamsMemory { streams: streams.min(usize::try_from(open)?), bytes };
                memory_tx.send_if_modified(|most| {
                    let more = (sample.streams, sample.bytes) > (most.streams, most.bytes);
                    if more {
                        *most = sample;
                    }
                    more
                });
            }
        });
        (following, memory_rx)
    }
}

/// Descriptors of all processes together. Newer kernels report the number as the folder's size.
fn descriptors(pids: &[u32]) -> u64 {
    let of = |pid: &u32| {
        let path = format!("/proc/{pid}/fd");
        let log_length = fs::metadata(&path).map_or(0, |data| data.len());
        if log_length > 0 {
            log_length
        } else {
            fs::read_dir(&path).map_or(0, |entries| entries.count() as u64)
        }
    };
    pids.iter().map(of).sum()
}

/// The whole machine's load since the measurement began.
pub(crate) struct MachineLoad {
    own: CpuMeter,
    used: Duration,
    machine: MachineTicks,
}

impl MachineLoad {
    pub(crate) fn start() -> anyhow::Result<Self> {
        // All our processes are this process and its descendants. The meter sees those that exist at a reading; the
        // others have begun and ended between two of them.
        let mut own = CpuMeter::new(process::id());
        let used = own.total()? + ended_children()?;
        Ok(Self { own, used, machine: MachineTicks::now()? })
    }

    /// Cores that other work used.
    pub(crate) fn cores_used_by_others(&mut self) -> anyhow::Result<f64> {
        let machine = MachineTicks::now()?;
        let own = (self.own.total()? + ended_children()?).saturating_sub(self.used);
        Ok(machine.cores_used_by_others(&self.machine, own))
    }
}
