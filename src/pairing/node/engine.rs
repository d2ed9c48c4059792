//! One engine of a node: its state, its reservation and its binding.
//!
//! Apart from the node, because these rules need nothing but the engine itself.

use super::{PendingCommand, PendingCommandKind, RetryState};
use crate::{
    model::{AcceleratorId, SleepLevel, SleepLevelPolicy},
    pairing::{
        command::EngineStopReason,
        event::{EngineRecord, MemorySizes},
        ids::{PairingEngineId, ProviderId, RequesterId, Uid},
    },
    units::{Bytes, Generation, Millis, Tick},
};

#[derive(Clone, Debug)]
pub struct PairingEngine {
    pub id: PairingEngineId,
    pub generation: Generation,
    pub provider: ProviderId,
    pub sizes: MemorySizes,
    pub level: SleepLevelPolicy,
    /// How long the engine may sleep before it is stopped.
    pub stop_after: Option<Millis>,
    pub state: PairingEngineState,
    /// When the state was entered.
    pub since: Tick,
    /// Memory reserved on each of its accelerators.
    pub reserved: Bytes,
    pub reserved_host: Bytes,
    pub binding: Option<Binding>,
    /// The engine sleeps bound to a requester that stays, and only a want wakes it.
    pub awaits_want: bool,
    pub last_used: Tick,
    /// The engine answers; a canary may be sent.
    pub ready: bool,
    /// The engine is woken for a want. The gateway proves it by its own first request, so pairing sends no canary.
    pub proven_by_gateway: bool,
    /// The stub container whose gate this controller opened to the engine.
    pub opened_stub: Option<Uid>,
    /// A `CloseGate` that was given up because the engine is wanted awake again. It may still arrive, so the gate is
    /// opened once more after its outcome, or once it has none in time.
    pub cancelled_close: Option<PendingCommand>,
    /// A step failed in a way that ends this generation.
    pub failure: Option<EngineStopReason>,
    /// The stop command was accepted.
    pub stop_accepted: bool,
    /// A start command that was given up can still arrive until then. The engine is not believed gone before.
    pub may_start_until: Tick,
    /// The engine was ordered to start more than once: a report of its death may be about the earlier process.
    pub relaunched: bool,
    pub pending: Option<PendingCommand>,
    pub retry: RetryState,
}

impl PairingEngine {
    /// Creates the engine of a record. Reserves its full awake memory; in state `Unknown` also its host RAM.
    pub(in crate::pairing) fn from_record(
        record: &EngineRecord,
        provider: ProviderId,
        state: PairingEngineState,
        now: Tick,
    ) -> Self {
        let binding = record.requester.clone().map(|requester| Binding { requester, written: true });
        Self {
            id: record.engine.clone(),
            generation: record.generation,
            provider,
            sizes: record.sizes,
            level: record.level,
            stop_after: record.stop_after,
            state,
            since: now,
            reserved: record.sizes.awake,
            reserved_host: if state == PairingEngineState::Unknown { record.sizes.host } else { Bytes::ZERO },
            binding,
            awaits_want: false,
            last_used: record.last_used,
            ready: false,
            proven_by_gateway: false,
            opened_stub: None,
            cancelled_close: None,
            failure: None,
            stop_accepted: false,
            may_start_until: Tick(0),
            relaunched: false,
            pending: None,
            retry: RetryState::default(),
        }
    }

    #[must_use]
    pub fn uses(&self, accelerator: &AcceleratorId) -> bool {
        self.id.accelerators.contains(accelerator)
    }

    #[must_use]
    pub fn requester(&self) -> Option<&RequesterId> {
        self.binding.as_ref().map(|binding| &binding.requester)
    }

    /// Whether the engine may hold its full awake memory: it is, was or will be awake, or its state is unknown.
    #[must_use]
    pub fn may_hold_full_memory(&self) -> bool {
        match self.state {
            // A sleeper that is about to be woken has its full memory reserved.
            PairingEngineState::Asleep { .. } => self.reserved > self.residue(),
            PairingEngineState::Stopping { asleep, .. } => !asleep,
            PairingEngineState::Gone => false,
            _ => true,
        }
    }

    /// Whether the engine may be taking its memory for the first time. A launching engine measures the free memory, and
    /// is done when it answers.
    #[must_use]
    pub const fn is_launching(&self) -> bool {
        match self.state {
            PairingEngineState::Unknown | PairingEngineState::Creating => true,
            PairingEngineState::Starting => !self.ready,
            _ => false,
        }
    }

    /// Whether the engine is returning memory or taking it back.
    #[must_use]
    pub const fn is_moving_memory(&self) -> bool {
        match self.state {
            PairingEngineState::FallingAsleep { .. } => true,
            PairingEngineState::Waking => !self.ready,
            _ => false,
        }
    }

    /// Whether a command's outcome is awaited.
    #[must_use]
    pub fn is_busy(&self, now: Tick) -> bool {
        self.pending.as_ref().is_some_and(|call| call.until > now)
    }

    /// Whether the engine sleeps unbound with no command pending. A bound sleeper stays with its requester.
    #[must_use]
    pub fn is_evictable(&self) -> bool {
        matches!(self.state, PairingEngineState::Asleep { .. })
            && self.binding.is_none()
            && self.pending.is_none()
    }

    /// Whether the engine sleeps at level 2. A wake from there reads only the model's own weights again.
    #[must_use]
    pub fn is_at_level_2(&self) -> bool {
        self.state == PairingEngineState::Asleep { level: SleepLevel::Two }
    }

    /// Whether the engine sleeps at a level from which a wake does not restore its LoRA adapters.
    #[must_use]
    pub fn has_lost_adapters(&self) -> bool {
        self.level == SleepLevelPolicy::OneOrStop && self.is_at_level_2()
    }

    /// When an unbound sleeper reaches its sleep limit `stop_after`.
    #[must_use]
    pub fn stops_at(&self) -> Option<Tick> {
        let is_unbound_sleeper =
            matches!(self.state, PairingEngineState::Asleep { .. }) && self.binding.is_none();
        self.stop_after.filter(|_| is_unbound_sleeper).map(|after| self.last_used + after)
    }

    /// The memory that it keeps on each accelerator while asleep.
    #[must_use]
    pub fn residue(&self) -> Bytes {
        self.sizes.asleep.min(self.sizes.awake)
    }

    /// The memory that this engine is about to release.
    #[must_use]
    pub fn pending_release(&self) -> Bytes {
        match self.state {
            PairingEngineState::Stopping { .. } => self.reserved,
            PairingEngineState::Draining { .. } | PairingEngineState::FallingAsleep { .. } => {
                self.reserved.saturating_sub(self.residue())
            }
            _ => Bytes::ZERO,
        }
    }

    pub(in crate::pairing) fn enter(&mut self, state: PairingEngineState, now: Tick) {
        self.state = state;
        self.since = now;
        self.retry = RetryState::default();
        self.awaits_want = false;
        self.cancelled_close = None;
    }

    /// Keeps a sleeper that is not wanted awake with its requester: it holds its residue until a want wakes it.
    pub(in crate::pairing) fn await_want(&mut self) {
        self.awaits_want = true;
        self.reserved = self.residue();
    }

    /// Ends a drain because the engine is wanted awake again. The next plan opens its gate.
    pub(in crate::pairing) fn cancel_drain(&mut self, now: Tick) {
        let close = self.pending.take();
        self.enter(PairingEngineState::Awake, now);
        self.opened_stub = None;
        self.cancelled_close = close;
    }

    /// Has the gate opened once more, because a cancelled `CloseGate` may have closed it.
    pub(in crate::pairing) fn reopen_gate(&mut self) {
        self.cancelled_close = None;
        self.opened_stub = None;
        // An `OpenGate` under way may have arrived before the close, so its outcome confirms nothing.
        if let Some(call) = self.pending.as_mut().filter(|call| call.kind == PendingCommandKind::OpenGate) {
            call.stub_container = None;
        }
    }

    /// Whether its gate is confirmed open in this stub container, and no cancelled `CloseGate` is overdue.
    pub(in crate::pairing) fn has_open_gate(&self, stub_container: Option<&Uid>, now: Tick) -> bool {
        let may_have_closed = self.cancelled_close.as_ref().is_some_and(|call| call.until <= now);
        self.opened_stub.is_some() && self.opened_stub.as_ref() == stub_container && !may_have_closed
    }

    pub(in crate::pairing) fn record(&self, last_used: Tick) -> EngineRecord {
        EngineRecord {
            engine: self.id.clone(),
            generation: self.generation,
            sizes: self.sizes,
            level: self.level,
            stop_after: self.stop_after,
            requester: self.requester().cloned(),
            last_used,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binding {
    pub requester: RequesterId,
    /// The binding is written on the provider.
    pub written: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairingEngineState {
    /// Observed after a restart, and not yet queried.
    Unknown,
    Creating,
    Starting,
    Awake,
    Draining {
        until: Tick,
        drained: bool,
    },
    FallingAsleep {
        level: SleepLevel,
    },
    Asleep {
        level: SleepLevel,
    },
    Waking,
    /// Ordered to stop. `asleep`: it stops from sleep and holds no more than its residue.
    Stopping {
        asleep: bool,
        reason: EngineStopReason,
    },
    /// Its process is seen gone; its record or Pod still exists.
    Gone,
}

impl PairingEngineState {
    /// Whether the process is about to end or gone.
    #[must_use]
    pub const fn is_stopping_or_gone(self) -> bool {
        matches!(self, Self::Stopping { .. } | Self::Gone)
    }
}

impl std::fmt::Display for PairingEngineState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Unknown => "not known yet",
            Self::Creating => "being created",
            Self::Starting => "starting",
            Self::Awake => "awake",
            Self::Draining { .. } => "draining",
            Self::FallingAsleep { .. } => "falling asleep",
            Self::Asleep { .. } => "asleep",
            Self::Waking => "waking",
            Self::Stopping { .. } => "being stopped",
            Self::Gone => "gone",
        })
    }
}
