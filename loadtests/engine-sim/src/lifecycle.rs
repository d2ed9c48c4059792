//! The engine's lifecycle: start, sleep, wake. One task owns it, so concurrent sleeps and wakes run one after the
//! other. The rest of the engine sees a [`LifecycleView`].
//!
//! Level 2 models the mistakes that it invites: it discards the weights, so after a plain wake the engine is healthy
//! but generates garbage, until it reloads its weights and resets its prefix cache.
//!
//! The first level-1 sleep of a process also pins the host memory that takes the weights, and is slow for it. Later
//! sleeps reuse that memory.

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Instant, sleep, sleep_until},
};

use crate::{
    clock,
    engine::EngineShared,
    faults::SimFault,
    log,
    memory::{self, SimMemory},
};

/// The lifecycle state that the rest of the engine sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LifecycleView {
    pub(crate) listening: bool,
    pub(crate) ready: bool,
    /// What `/is_sleeping` reports.
    pub(crate) sleeping: bool,
    /// No sleep or wake is in progress, and no part is asleep.
    pub(crate) awake: bool,
    pub(crate) corrupt: bool,
    pub(crate) cache_bytes: u64,
}

#[derive(Debug)]
pub(crate) enum LifecycleCommand {
    Sleep {
        level: u8,
        wait: bool,
    },
    /// The parts to wake, by vLLM's tags.
    Wake {
        weights: bool,
        cache: bool,
    },
    ReloadWeights,
    ResetPrefixCache,
}

/// Why an order failed.
#[derive(Debug)]
pub(crate) struct LifecycleError {
    pub(crate) message: String,
    /// The process exits after this error is reported.
    pub(crate) fatal: bool,
}

pub(crate) type LifecycleResult = Result<(), LifecycleError>;
pub(crate) type LifecycleReceiver = mpsc::Receiver<(LifecycleCommand, oneshot::Sender<LifecycleResult>)>;

pub(crate) struct EngineLifecycle {
    engine: Arc<EngineShared>,
    view: watch::Sender<LifecycleView>,
    /// Counts the times that running requests were aborted.
    abort: watch::Sender<u64>,
    asleep: MemoryParts,
    /// Parts that a level-2 sleep discarded and that are not restored yet.
    stale: MemoryParts,
    /// Permanently damaged by a fault.
    damaged: bool,
    /// The host memory of level-1 sleeps is pinned, which lasts as long as the process.
    pinned: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct MemoryParts {
    weights: bool,
    cache: bool,
}

impl MemoryParts {
    const ALL: Self = Self { weights: true, cache: true };

    fn any(self) -> bool {
        self.weights || self.cache
    }
}

impl EngineLifecycle {
    pub(crate) fn new(
        shared: Arc<EngineShared>,
        view: watch::Sender<LifecycleView>,
        abort: watch::Sender<u64>,
    ) -> Self {
        Self {
            engine: shared,
            view,
            abort,
            asleep: MemoryParts::default(),
            stale: MemoryParts::default(),
            damaged: false,
            pinned: false,
        }
    }

    /// Starts the engine and executes `orders`. Returns if the start fails or all order senders are dropped.
    pub(crate) async fn run(mut self, mut orders: LifecycleReceiver) {
        let mut memory = match self.start().await {
            Ok(memory) => memory,
            Err(error) => {
                log::error(&error.to_string());
                self.engine.fatal.exit(1);
                return;
            }
        };
        while let Some((order, outcome_tx)) = orders.recv().await {
            memory.set_free_delay(self.engine.faults.time(SimFault::LateMemory));
            let outcome = self.execute(order, &memory).await;
            self.publish(&memory);
            // The caller may have disconnected; the order was executed anyway.
            outcome_tx.send(outcome).ok();
        }
    }

    async fn start(&self) -> Result<SimMemory, memory::Error> {
        let EngineShared { args, faults, fatal, .. } = &*self.engine;
        let began = Instant::now();
        let slow = faults.time(SimFault::SlowStart);
        if let Some(code) = faults.count(SimFault::ExitAtStart) {
            sleep_until(began + slow.unwrap_or_default()).await;
            log::error("RuntimeError: Engine core initialization failed. See root cause above.");
            fatal.exit(code as u8);
            return std::future::pending().await;
        }
        let ready_at = began + args.start_time + slow.unwrap_or_default();
        let listen_at = ready_at.checked_sub(args.load_time).unwrap_or(began);
        let profile_at = ready_at.checked_sub(args.profile_time).unwrap_or(began);
        let mut memory = SimMemory::new(args, faults.time(SimFault::LateMemory))?;
        memory.load()?;
        let load = async {
            sleep_until(profile_at).await;
            if faults.is_on(SimFault::OomAtStart) {
                return Err(memory::Error::OutOfMemory {
                    accelerator: "0".to_owned(),
                    asked: 512.0,
                    capacity: 1024.0,
                    free: 0.0,
                });
            }
            memory.profile(ready_at).await
        };
        let listen = async {
            sleep_until(listen_at).await;
            if listen_at < ready_at {
                self.view.send_modify(|view| view.listening = true);
            }
            Ok(())
        };
        tokio::try_join!(load, listen)?;
        self.view.send_modify(|view| {
            let cache_bytes = memory.cache();
            *view = LifecycleView { listening: true, ready: true, awake: true, cache_bytes, ..*view };
        });
        log::info("Application startup complete.");
        Ok(memory)
    }

    async fn execute(&mut self, order: LifecycleCommand, memory: &SimMemory) -> LifecycleResult {
        match order {
            LifecycleCommand::Sleep { level, wait } => self.sleep(level, wait, memory).await,
            LifecycleCommand::Wake { weights, cache } => self.wake(weights, cache, memory).await,
            LifecycleCommand::ReloadWeights if self.asleep.weights => Err(LifecycleError::recoverable(
                "CUDA error: an illegal memory access was encountered (the weights are asleep)",
            )),
            LifecycleCommand::ReloadWeights => {
                self.stale.weights = false;
                Ok(())
            }
            LifecycleCommand::ResetPrefixCache => {
                // A sleeping cache cannot be reset: its stale prefixes return with it.
                self.stale.cache &= self.asleep.cache;
                Ok(())
            }
        }
    }

    async fn sleep(&mut self, level: u8, wait: bool, memory: &SimMemory) -> LifecycleResult {
        let EngineShared { args, faults, counters, .. } = &*self.engine;
        if faults.is_on(SimFault::RefuseSleep) {
            return Err(LifecycleError::recoverable("sleep failed"));
        }
        faults.wait_until_cleared(&[SimFault::HangSleep]).await;
        if faults.is_on(SimFault::IgnoreSleep) {
            return Ok(());
        }
        if self.asleep.any() {
            log::info("Executor is already sleeping.");
            return Ok(());
        }
        self.view.send_modify(|view| view.awake = false);
        if !wait {
            self.abort.send_modify(|aborts| *aborts += 1);
        }
        counters.wait_until_idle().await;
        let pins = level == 1 && !self.pinned;
        sleep(args.sleep_time + if pins { args.pin_time() } else { Duration::ZERO }).await;
        self.pinned |= pins;
        memory.sleep(level).map_err(|error| LifecycleError::fatal(&error))?;
        self.asleep = MemoryParts::ALL;
        if level == 2 {
            self.stale = MemoryParts::ALL;
        }
        counters.sleeps.fetch_add(1, Relaxed);
        Ok(())
    }

    async fn wake(&mut self, weights: bool, cache: bool, memory: &SimMemory) -> LifecycleResult {
        let EngineShared { args, faults, counters, .. } = &*self.engine;
        if faults.is_on(SimFault::RefuseWake) {
            return Err(LifecycleError::recoverable("wake_up failed"));
        }
        faults.wait_until_cleared(&[SimFault::HangWake]).await;
        let parts = u32::from(weights && self.asleep.weights) + u32::from(cache && self.asleep.cache);
        if parts == 0 {
            log::info("Executor is not sleeping.");
            return Ok(());
        }
        let asleep =
            MemoryParts { weights: self.asleep.weights && !weights, cache: self.asleep.cache && !cache };
        memory.wake(!asleep.weights, !asleep.cache).map_err(|error| LifecycleError::fatal(&error))?;
        sleep(args.wake_time * parts / 2).await;
        self.asleep = asleep;
        self.damaged |= faults.is_on(SimFault::CorruptAfterWake);
        counters.wakes.fetch_add(u64::from(!self.asleep.any()), Relaxed);
        counters.last_wake_unix_us.store(clock::wall_us(), Relaxed);
        Ok(())
    }

    fn publish(&self, memory: &SimMemory) {
        let asleep = self.asleep.any();
        self.view.send_modify(|view| {
            view.sleeping = asleep;
            view.awake = !asleep;
            view.corrupt = self.stale.any() || self.damaged;
            view.cache_bytes = memory.cache();
        });
    }
}

impl LifecycleError {
    fn recoverable(message: &str) -> Self {
        Self { message: message.to_owned(), fatal: false }
    }

    fn fatal(error: &memory::Error) -> Self {
        Self { message: error.to_string(), fatal: true }
    }
}
