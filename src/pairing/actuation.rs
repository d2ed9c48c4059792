//! Engines that sleep and wake while their requesters stay.
//!
//! With slots several requesters share an accelerator, and the gateway's fleet decides whose engine is awake. It sends
//! a [`PairingEvent::Want`] for a requester, and this module keeps the newest of each. A drained engine that falls
//! asleep for a want stays bound to its requester: it holds its residue, is not evicted, and does not expire. The next
//! want wakes it as soon as its memory is free. So between two wants every engine stays as it is, and a leader that has
//! received no want yet leaves each engine as it finds it. A requester without an engine gets one only by a want, too:
//! a ReplicaSet may make a requester for which the fleet has reserved no memory. Nor is anything started or woken for
//! a requester that the fleet is about to delete, whose want it withdraws.
//!
//! [`PairingEvent::Want`]: super::event::PairingEvent::Want

use super::{
    Pairing,
    command::EngineStopReason,
    event::WantedState,
    ids::{NodeName, RequesterId},
    node::{PairingEngine, PairingEngineState, PairingNode, PairingRequester},
};
use crate::{
    model::SleepLevel,
    units::{Bytes, Tick},
};

/// What the gateway wants of a requester's engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineWant {
    pub state: WantedState,
    /// When the want arrived. A repeated want keeps its time, so it loses no place in the queue.
    pub since: Tick,
}

/// What became of a want: the state of a requester's engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineReport {
    /// It is created or loads, and has never served.
    Starting,
    /// It serves: its gate is open.
    Awake,
    /// It sleeps bound to its requester, and keeps this much of each of its accelerators: as declared, or as measured
    /// if that is more.
    Asleep { level: SleepLevel, residue: Bytes },
    /// It drains, falls asleep, wakes, or has not been queried yet.
    Moving,
    /// It is being stopped or gone. A start that follows for the same requester is [`Self::Starting`].
    Failed { reason: EngineStopReason },
    /// It waits for memory, for its launcher, or for the first want.
    Waiting,
}

impl Pairing {
    /// The state of this requester's engine; `None` while the requester is unknown.
    #[must_use]
    pub fn engine_report(&self, node: &NodeName, requester: &RequesterId) -> Option<EngineReport> {
        self.node(node)?.engine_report(requester)
    }

    /// Records a want. A repeated one changes nothing and plans nothing.
    pub(super) fn record_want(
        &mut self,
        node: &NodeName,
        requester: &RequesterId,
        wanted: WantedState,
        now: Tick,
    ) {
        let known = self.node(node).and_then(|pairing_node| pairing_node.wants.get(requester));
        if known.is_none_or(|want| want.state != wanted) {
            self.mark_dirty(node).record_want(requester, wanted, now);
        }
    }

    /// Forgets that the engine is wanted awake: one that waits for memory gets none any more.
    ///
    /// A want for sleep stays. Without it, a drain for that sleep would end in nothing.
    pub(super) fn withdraw_want(&mut self, node: &NodeName, requester: &RequesterId) {
        let known = self.node(node).and_then(|pairing_node| pairing_node.wants.get(requester));
        if known.is_some_and(|want| want.state == WantedState::Awake) {
            self.mark_dirty(node).withdraw_want(requester);
        }
    }
}

impl PairingNode {
    fn record_want(&mut self, id: &RequesterId, wanted: WantedState, now: Tick) {
        self.wants.insert(id.clone(), EngineWant { state: wanted, since: now });
        let Some(engine) = self.actuated_engine(id) else { return };
        match (engine.state, wanted) {
            (PairingEngineState::Draining { .. }, WantedState::Awake) => engine.cancel_drain(now),
            // The engine was about to be woken.
            (PairingEngineState::Asleep { .. }, WantedState::Asleep { .. }) => engine.await_want(),
            _ => {}
        }
    }

    fn withdraw_want(&mut self, id: &RequesterId) {
        self.wants.remove(id);
        // The engine was about to be woken.
        if let Some(engine) = self.actuated_engine(id)
            && matches!(engine.state, PairingEngineState::Asleep { .. })
        {
            engine.await_want();
        }
    }

    /// The engine of this requester, if the gateway decides when it sleeps.
    fn actuated_engine(&mut self, id: &RequesterId) -> Option<&mut PairingEngine> {
        let engine = self.engine_of(id).filter(|engine| self.is_actuated(engine))?.id.clone();
        self.engines.get_mut(&engine)
    }

    /// What the gateway wants of the engine of this requester; `None` before a want, or if the gateway does not actuate
    /// it.
    #[must_use]
    pub fn wanted_state(&self, requester: &RequesterId) -> Option<WantedState> {
        let actuated = self.requesters.get(requester).is_some_and(|known| known.observed.actuated);
        self.wants.get(requester).filter(|_| actuated).map(|want| want.state)
    }

    pub(super) fn wants_asleep(&self, requester: &RequesterId) -> bool {
        matches!(self.wanted_state(requester), Some(WantedState::Asleep { .. }))
    }

    /// The level at which this engine must sleep although its requester stays.
    pub(super) fn sleep_order(&self, engine: &PairingEngine) -> Option<SleepLevel> {
        self.staying_requester(engine)?;
        match self.wanted_state(engine.requester()?)? {
            WantedState::Asleep { level } => Some(level),
            WantedState::Awake => None,
        }
    }

    /// Whether this requester may get memory for its engine, by a start or a wake: the gateway wants the engine awake,
    /// or does not decide about it.
    pub(super) fn may_take_memory(&self, id: &RequesterId, requester: &PairingRequester) -> bool {
        !requester.observed.actuated || self.wanted_state(id) == Some(WantedState::Awake)
    }

    /// Whether the gateway decides when this engine sleeps: its requester stays and is actuated.
    pub(super) fn is_actuated(&self, engine: &PairingEngine) -> bool {
        self.staying_requester(engine).is_some_and(|requester| requester.observed.actuated)
    }

    /// Whether the gateway counts on this sleeper for a later wake. Its loss costs the requester, so that the gateway
    /// learns of it. A sleeper that is wanted awake is replaced by a start instead.
    pub(super) fn is_relied_on(&self, engine: &PairingEngine) -> bool {
        let wanted = engine.requester().and_then(|requester| self.wanted_state(requester));
        match engine.state {
            PairingEngineState::Asleep { .. } => engine.awaits_want && wanted != Some(WantedState::Awake),
            PairingEngineState::FallingAsleep { .. } => self.is_actuated(engine),
            _ => false,
        }
    }

    /// Since when this requester waits for an engine. Requesters are served in this order.
    pub(super) fn waiting_since(&self, id: &RequesterId, requester: &PairingRequester) -> Tick {
        let want = self.wants.get(id).filter(|_| requester.observed.actuated);
        let wanted = want.filter(|want| want.state == WantedState::Awake);
        wanted.map_or(requester.observed.created, |want| want.since.max(requester.observed.created))
    }

    fn engine_report(&self, id: &RequesterId) -> Option<EngineReport> {
        let requester = self.requesters.get(id)?;
        let Some(engine) = self.engine_of(id) else {
            let ended = requester.engine_ended;
            return Some(ended.map_or(EngineReport::Waiting, |reason| EngineReport::Failed { reason }));
        };
        let has_open_gate =
            engine.opened_stub.is_some() && engine.opened_stub == requester.observed.stub_container;
        Some(match engine.state {
            PairingEngineState::Creating | PairingEngineState::Starting => EngineReport::Starting,
            PairingEngineState::Awake if has_open_gate => EngineReport::Awake,
            PairingEngineState::Asleep { .. }
                if engine.awaits_want && self.may_take_memory(id, requester) =>
            {
                EngineReport::Waiting
            }
            PairingEngineState::Asleep { level } if engine.awaits_want => {
                EngineReport::Asleep { level, residue: engine.residue() }
            }
            PairingEngineState::Stopping { reason, .. } => EngineReport::Failed { reason },
            PairingEngineState::Gone => {
                EngineReport::Failed { reason: requester.engine_ended.unwrap_or(EngineStopReason::Lost) }
            }
            PairingEngineState::Unknown
            | PairingEngineState::Awake
            | PairingEngineState::Draining { .. }
            | PairingEngineState::FallingAsleep { .. }
            | PairingEngineState::Asleep { .. }
            | PairingEngineState::Waking => EngineReport::Moving,
        })
    }
}
