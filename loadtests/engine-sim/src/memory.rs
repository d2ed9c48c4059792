//! The engine's memory by part, allocated and freed like vLLM's.

use std::time::Duration;

use thiserror::Error;
use tokio::time::{Instant, sleep_until};

use crate::{
    accelerator::{self, AcceleratorFile, MemoryAccount, SimAcceleratorUsage},
    args::EngineSimArgs,
};

/// Why the engine fails, in vLLM's words.
#[derive(Debug, Error)]
pub(crate) enum Error {
    #[error(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked:.2} MiB. GPU {accelerator} has a total capacity of {capacity:.2} MiB of which {free:.2} MiB is free."
    )]
    OutOfMemory { accelerator: String, asked: f64, capacity: f64, free: f64 },
    #[error(
        "ValueError: Free memory on device ({free:.2}/{capacity:.2} MiB) on startup is less than desired GPU memory utilization ({share}, {want:.2} MiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
    )]
    ShareNotFree { free: f64, capacity: f64, share: f64, want: f64 },
    #[error(
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine."
    )]
    NoCache,
    #[error(
        "ValueError: To serve at least one request with the model's max seq len, {least:.2} MiB KV cache is needed, which is larger than the available KV cache memory ({cache:.2} MiB)."
    )]
    SmallCache { least: f64, cache: f64 },
    #[error(transparent)]
    Book(accelerator::Error),
}

impl From<accelerator::Error> for Error {
    fn from(error: accelerator::Error) -> Self {
        match error {
            accelerator::Error::OutOfMemory { accelerator, asked, capacity, free } => {
                Self::OutOfMemory { accelerator, asked: mib(asked), capacity: mib(capacity), free: mib(free) }
            }
            other => Self::Book(other),
        }
    }
}

/// The memory of one engine. Without an accelerator file, nothing is accounted and nothing fails.
pub(crate) struct SimMemory {
    account: Option<MemoryAccount>,
    weights: u64,
    cache: u64,
    asleep: u64,
    host: u64,
    share: Option<f64>,
}

impl SimMemory {
    pub(crate) fn new(args: &EngineSimArgs, free_delay: Option<Duration>) -> Result<Self, Error> {
        let label = args.model.first().map_or("", String::as_str);
        let open = |path| AcceleratorFile::open(path)?.holder(&args.accelerators, label, free_delay);
        let holder = args.accelerator_file.as_ref().map(open).transpose()?;
        let weights = args.weights();
        let rest = args.memory_awake - weights;
        Ok(Self {
            weights,
            cache: args.kv_cache_memory_bytes.unwrap_or(rest),
            asleep: args.memory_asleep,
            host: args.memory_host,
            share: args.gpu_memory_utilization.filter(|_| args.kv_cache_memory_bytes.is_none()),
            account: holder,
        })
    }

    /// Size of the KV cache on each accelerator, in bytes.
    pub(crate) fn cache(&self) -> u64 {
        self.cache
    }

    pub(crate) fn set_free_delay(&mut self, free_delay: Option<Duration>) {
        if let Some(holder) = &mut self.account {
            holder.set_free_delay(free_delay);
        }
    }

    /// Checks that vLLM's requested share is free, and loads the weights.
    pub(crate) fn load(&self) -> Result<(), Error> {
        let Some(holder) = &self.account else { return Ok(()) };
        if let Some(share) = self.share {
            for SimAcceleratorUsage { capacity, used_total, .. } in usages(holder)? {
                let (want, free) = (share_of(capacity, share), capacity.saturating_sub(used_total));
                if free < want {
                    let (want, free, capacity) = (mib(want), mib(free), mib(capacity));
                    return Err(Error::ShareNotFree { free, capacity, share, want });
                }
            }
        }
        Ok(holder.resize(self.weights)?)
    }

    /// Profiles until `until` and allocates the KV cache. vLLM measures the whole device, not its own process: memory
    /// that another engine takes meanwhile counts as its own use and makes its cache smaller.
    pub(crate) async fn profile(&mut self, until: Instant) -> Result<(), Error> {
        let Some(holder) = &self.account else {
            sleep_until(until).await;
            return Ok(());
        };
        let Some(share) = self.share else {
            sleep_until(until).await;
            return Ok(holder.resize(self.weights + self.cache)?);
        };
        let before = usages(holder)?;
        sleep_until(until).await;
        // Measured and allocated under one lock: of two concurrent profilers, the second sees the first one's cache.
        let weights = self.weights;
        self.cache = holder.transact(|session| {
            let measured = holder.ids().iter().zip(&before).map(|(id, before)| {
                let foreign = i128::from(session.usage(id).used_total) - i128::from(before.used_total);
                i128::from(share_of(before.capacity, share)) - i128::from(weights) - foreign
            });
            let cache = u64::try_from(measured.min().unwrap_or(0)).unwrap_or(0);
            if cache >= min_cache(weights) {
                holder.ids().iter().try_for_each(|id| session.resize(id, weights + cache))?;
            }
            Ok(cache)
        })?;
        match self.cache {
            0 => Err(Error::NoCache),
            cache if cache < min_cache(weights) => {
                Err(Error::SmallCache { least: mib(min_cache(weights)), cache: mib(cache) })
            }
            _ => Ok(()),
        }
    }

    /// Frees all but the residue. Level 1 keeps the weights in host memory.
    pub(crate) fn sleep(&self, level: u8) -> Result<(), Error> {
        let Some(holder) = &self.account else { return Ok(()) };
        let host = if level == 1 { self.host * holder.ids().len() as u64 } else { 0 };
        holder.resize_host(host)?;
        Ok(holder.resize(self.asleep.min(self.weights + self.cache))?)
    }

    /// Allocates what a wake of these parts needs.
    pub(crate) fn wake(&self, weights: bool, cache: bool) -> Result<(), Error> {
        let Some(holder) = &self.account else { return Ok(()) };
        let all = self.weights + self.cache;
        let bytes = match (weights, cache) {
            (true, true) => all,
            (true, false) => (self.asleep + self.weights).min(all),
            (false, true) => (self.asleep + self.cache).min(all),
            (false, false) => return Ok(()),
        };
        holder.resize(bytes)?;
        if weights {
            holder.resize_host(0)?;
        }
        Ok(())
    }

    /// Frees all memory at the end of the process.
    pub(crate) fn release(&self) -> Result<(), Error> {
        let Some(holder) = &self.account else { return Ok(()) };
        holder.resize_host(0)?;
        Ok(holder.resize(0)?)
    }
}

fn usages(holder: &MemoryAccount) -> Result<Vec<SimAcceleratorUsage>, accelerator::Error> {
    holder.transact(|session| Ok(holder.ids().iter().map(|id| session.usage(id)).collect()))
}

fn share_of(capacity: u64, share: f64) -> u64 {
    (capacity as f64 * share) as u64
}

/// The smallest cache that holds one request of the maximum length.
fn min_cache(weights: u64) -> u64 {
    weights / 8
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
