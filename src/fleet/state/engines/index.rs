//! What the indexes of the engines depend on, and how they follow a change of one engine.

use std::{collections::BTreeSet, mem::Discriminant, net::SocketAddr, sync::Arc};

use crate::{
    engine::{Admission, Engine, state::LifecycleState},
    model::{AcceleratorId, EngineId, ModelName},
    shared_map::{SharedMap, SharedSet},
    units::{Generation, Tick},
};

pub(super) type EnginesByAccelerator = SharedMap<AcceleratorId, SharedSet<EngineId>>;
pub(super) type EnginesByTime = SharedSet<(Tick, EngineId)>;

/// The values of an engine that the indexes depend on.
#[derive(Default, PartialEq, Eq)]
pub(super) struct IndexKeys {
    /// Those that the engine holds, then those of a pending reservation.
    accelerators: AcceleratorList,
    held_count: usize,
    winds_down: bool,
    moves: bool,
    pub(super) awaiting_probe: bool,
    pub(super) backoff_until: Option<Tick>,
    pub(super) recovers_at: Option<Tick>,
    pub(super) leased: bool,
    pub(super) yielded: bool,
    pub(super) occupied: bool,
    pub(super) routing: Option<RoutingKey>,
}

/// The values of an engine that affect request routing.
pub(super) type RoutingKey = (Generation, Discriminant<LifecycleState>, Admission, Option<SocketAddr>, u64);

/// Accelerators of an engine. Nearly every engine has one, and every change of an engine makes two lists.
#[derive(Default, PartialEq, Eq)]
enum AcceleratorList {
    #[default]
    Empty,
    One(AcceleratorId),
    Several(Vec<AcceleratorId>),
}

impl AcceleratorList {
    fn new(held: &[AcceleratorId], reserved: &[AcceleratorId]) -> Self {
        match (held, reserved) {
            ([], []) => Self::Empty,
            ([one], []) | ([], [one]) => Self::One(one.clone()),
            _ => Self::Several([held, reserved].concat()),
        }
    }

    fn as_slice(&self) -> &[AcceleratorId] {
        match self {
            Self::Empty => &[],
            Self::One(one) => std::slice::from_ref(one),
            Self::Several(several) => several,
        }
    }
}

impl IndexKeys {
    pub(super) fn of(engine: &Engine) -> Self {
        let reserved: &[AcceleratorId] =
            engine.pending_reservation.as_ref().map_or(&[], |placing| &placing.accelerators);
        let moves = engine.pending_reservation.is_some()
            || engine.releasing_since.is_some()
            || !matches!(
                engine.state,
                LifecycleState::Cold
                    | LifecycleState::Awake
                    | LifecycleState::Draining { .. }
                    | LifecycleState::Asleep { .. }
                    | LifecycleState::Backoff { .. }
            );
        let leaves = engine.state.is_winding_down()
            || (matches!(engine.state, LifecycleState::Asleep { .. }) && engine.releasing_since.is_some());
        Self {
            accelerators: AcceleratorList::new(&engine.accelerators, reserved),
            held_count: engine.accelerators.len(),
            winds_down: leaves,
            moves,
            awaiting_probe: engine.needs_probe(),
            backoff_until: match engine.state {
                LifecycleState::Backoff { until, .. } => Some(until),
                _ => None,
            },
            recovers_at: engine.recovers_at(),
            leased: engine.leases > 0,
            yielded: engine.yielded_to.is_some(),
            occupied: engine.state.has_process()
                || engine.unclosed_gate.is_some()
                || engine.pending_reservation.is_some(),
            routing: Some((
                engine.generation,
                std::mem::discriminant(&engine.state),
                engine.admission,
                engine.address,
                engine.fingerprint,
            )),
        }
    }

    /// Accelerators that the engine holds, or will once its reservation is confirmed.
    pub(super) fn accelerators(&self) -> &[AcceleratorId] {
        self.accelerators.as_slice()
    }

    /// Accelerators on which the engine will release memory without any further decision.
    pub(super) fn winding_down(&self) -> &[AcceleratorId] {
        let held = if self.winds_down { self.held_count } else { 0 };
        self.accelerators().get(..held).unwrap_or_default()
    }

    /// Accelerators on which the engine moves memory, is about to, or fails.
    pub(super) fn moving(&self) -> &[AcceleratorId] {
        if self.moves { self.accelerators() } else { &[] }
    }
}

pub(super) fn move_in_index(
    index: &mut EnginesByAccelerator,
    id: &EngineId,
    before: &[AcceleratorId],
    after: &[AcceleratorId],
) {
    if before == after {
        return;
    }
    for accelerator in before {
        if let Some(engines) = index.get_mut(accelerator) {
            engines.remove(id);
        }
    }
    for accelerator in after {
        if let Some(engines) = index.get_mut(accelerator) {
            engines.insert(id.clone());
        } else {
            index.insert(accelerator.clone(), SharedSet::from_iter([id.clone()]));
        }
    }
}

pub(super) fn move_in_time(
    index: &mut EnginesByTime,
    id: &EngineId,
    before: Option<Tick>,
    after: Option<Tick>,
) {
    if before == after {
        return;
    }
    if let Some(at) = before {
        index.remove(&(at, id.clone()));
    }
    if let Some(at) = after {
        index.insert((at, id.clone()));
    }
}

pub(super) fn set_in_index<K: Ord + Clone>(index: &mut SharedSet<K>, key: &K, before: bool, after: bool) {
    if before == after {
        return;
    }
    if after {
        index.insert(key.clone());
    } else {
        index.remove(key);
    }
}

/// Takes the models out of a set that is empty after most turns.
pub(in crate::fleet) fn take_models(models: &mut Arc<BTreeSet<ModelName>>) -> BTreeSet<ModelName> {
    if models.is_empty() { BTreeSet::new() } else { std::mem::take(Arc::make_mut(models)) }
}

pub(super) fn due_by(index: &EnginesByTime, now: Tick) -> Vec<EngineId> {
    index.iter().take_while(|(at, _)| *at <= now).map(|(_, id)| id.clone()).collect()
}
