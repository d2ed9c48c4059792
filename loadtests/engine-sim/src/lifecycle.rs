//! The engine's life: start, sleep, wake. One task owns it, so that a sleep and a wake that arrive together happen one
//! after the other; the rest of the engine sees a [`View`].
//!
//! Level 2 is modelled for the mistakes it invites: the weights are discarded, so that a plain wake gives an engine that is
//! healthy and talks garbage until it was told to reload them and to forget its prefix cache.

use std::{sync::Arc, sync::atomic::Ordering::Relaxed};

use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Instant, sleep, sleep_until},
};

use crate::{
    clock,
    engine::Shared,
    faults::Fault,
    log,
    memory::{self, Memory},
};

/// What the rest of the engine knows of its life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct View {
    pub(crate) listening: bool,
    pub(crate) ready: bool,
    /// What `/is_sleeping` says.
    pub(crate) sleeping: bool,
    /// No sleep or wake is under way or has left parts asleep.
    pub(crate) awake: bool,
    pub(crate) corrupt: bool,
    pub(crate) cache_bytes: u64,
}

#[derive(Debug)]
pub(crate) enum Order {
    Sleep {
        level: u8,
        wait: bool,
    },
    /// Which parts; vLLM's tags.
    Wake {
        weights: bool,
        cache: bool,
    },
    ReloadWeights,
    ResetPrefixCache,
}

/// An order that was not carried out.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) message: String,
    /// The process dies of it, once this was told.
    pub(crate) fatal: bool,
}

pub(crate) type Outcome = Result<(), Refusal>;
pub(crate) type Orders = mpsc::Receiver<(Order, oneshot::Sender<Outcome>)>;

pub(crate) struct Life {
    shared: Arc<Shared>,
    view: watch::Sender<View>,
    /// Counts the times that running requests were aborted.
    abort: watch::Sender<u64>,
    asleep: Parts,
    /// What a level-2 sleep discarded and nobody has made good.
    stale: Parts,
    /// Damaged for good by a fault.
    damaged: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Parts {
    weights: bool,
    cache: bool,
}

impl Parts {
    const ALL: Self = Self { weights: true, cache: true };

    fn any(self) -> bool {
        self.weights || self.cache
    }
}

impl Life {
    pub(crate) fn new(shared: Arc<Shared>, view: watch::Sender<View>, abort: watch::Sender<u64>) -> Self {
        Self { shared, view, abort, asleep: Parts::default(), stale: Parts::default(), damaged: false }
    }

    /// Starts the engine and obeys `orders`; returns when it cannot start, or when nobody can give orders any more.
    pub(crate) async fn run(mut self, mut orders: Orders) {
        let mut memory = match self.start().await {
            Ok(memory) => memory,
            Err(error) => {
                log::error(&error.to_string());
                self.shared.fatal.die(1);
                return;
            }
        };
        while let Some((order, told)) = orders.recv().await {
            memory.set_late(self.shared.faults.time(Fault::LateMemory));
            let outcome = self.obey(order, &memory).await;
            self.publish(&memory);
            // Whoever asked may have left; the order is carried out all the same.
            told.send(outcome).ok();
        }
    }

    async fn start(&self) -> Result<Memory, memory::Error> {
        let Shared { args, faults, fatal, .. } = &*self.shared;
        let began = Instant::now();
        let slow = faults.time(Fault::SlowStart);
        if let Some(code) = faults.count(Fault::ExitAtStart) {
            sleep_until(began + slow.unwrap_or_default()).await;
            log::error("RuntimeError: Engine core initialization failed. See root cause above.");
            fatal.die(code as u8);
            return std::future::pending().await;
        }
        let ready_at = began + args.start_time + slow.unwrap_or_default();
        let listen_at = ready_at.checked_sub(args.load_time).unwrap_or(began);
        let profile_at = ready_at.checked_sub(args.profile_time).unwrap_or(began);
        let mut memory = Memory::new(args, faults.time(Fault::LateMemory))?;
        memory.load()?;
        let load = async {
            sleep_until(profile_at).await;
            if faults.on(Fault::OomAtStart) {
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
            *view = View { listening: true, ready: true, awake: true, cache_bytes, ..*view };
        });
        log::info("Application startup complete.");
        Ok(memory)
    }

    async fn obey(&mut self, order: Order, memory: &Memory) -> Outcome {
        match order {
            Order::Sleep { level, wait } => self.sleep(level, wait, memory).await,
            Order::Wake { weights, cache } => self.wake(weights, cache, memory).await,
            Order::ReloadWeights if self.asleep.weights => Err(Refusal::plain(
                "CUDA error: an illegal memory access was encountered (the weights are asleep)",
            )),
            Order::ReloadWeights => {
                self.stale.weights = false;
                Ok(())
            }
            Order::ResetPrefixCache => {
                // What is asleep cannot be reset: the stale prefixes come back with the cache.
                self.stale.cache &= self.asleep.cache;
                Ok(())
            }
        }
    }

    async fn sleep(&mut self, level: u8, wait: bool, memory: &Memory) -> Outcome {
        let Shared { args, faults, counters, .. } = &*self.shared;
        if faults.on(Fault::RefuseSleep) {
            return Err(Refusal::plain("sleep failed"));
        }
        faults.cleared(&[Fault::HangSleep]).await;
        if faults.on(Fault::IgnoreSleep) {
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
        counters.empty().await;
        sleep(args.sleep_time).await;
        memory.sleep(level).map_err(|error| Refusal::fatal(&error))?;
        self.asleep = Parts::ALL;
        if level == 2 {
            self.stale = Parts::ALL;
        }
        counters.sleeps.fetch_add(1, Relaxed);
        Ok(())
    }

    async fn wake(&mut self, weights: bool, cache: bool, memory: &Memory) -> Outcome {
        let Shared { args, faults, counters, .. } = &*self.shared;
        if faults.on(Fault::RefuseWake) {
            return Err(Refusal::plain("wake_up failed"));
        }
        faults.cleared(&[Fault::HangWake]).await;
        let parts = u32::from(weights && self.asleep.weights) + u32::from(cache && self.asleep.cache);
        if parts == 0 {
            log::info("Executor is not sleeping.");
            return Ok(());
        }
        let asleep = Parts { weights: self.asleep.weights && !weights, cache: self.asleep.cache && !cache };
        memory.wake(!asleep.weights, !asleep.cache).map_err(|error| Refusal::fatal(&error))?;
        sleep(args.wake_time * parts / 2).await;
        self.asleep = asleep;
        self.damaged |= faults.on(Fault::CorruptAfterWake);
        counters.wakes.fetch_add(u64::from(!self.asleep.any()), Relaxed);
        counters.last_wake_unix_us.store(clock::wall_us(), Relaxed);
        Ok(())
    }

    fn publish(&self, memory: &Memory) {
        let asleep = self.asleep.any();
        self.view.send_modify(|view| {
            view.sleeping = asleep;
            view.awake = !asleep;
            view.corrupt = self.stale.any() || self.damaged;
            view.cache_bytes = memory.cache();
        });
    }
}

impl Refusal {
    fn plain(message: &str) -> Self {
        Self { message: message.to_owned(), fatal: false }
    }

    fn fatal(error: &memory::Error) -> Self {
        Self { message: error.to_string(), fatal: true }
    }
}
