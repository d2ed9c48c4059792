//! Accelerator memory as the ledger has it: capacities, and what is free, reserved, or freed by a sleep.

use super::{Fleet, state::ledger::pool_accelerators::PoolAccelerators};
use crate::{
    model::{AcceleratorId, AcceleratorRequirement, EngineId},
    units::Bytes,
};

/// Capacity of an accelerator, or of a pool of accelerators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AcceleratorCapacity {
    pub capacity: Bytes,
    /// Of a pool its accelerators or slots, of an accelerator in a pool its slots, if they are counted.
    pub units: Option<u32>,
}

impl Fleet {
    /// Returns the capacity of an accelerator, or of a pool.
    ///
    /// For a pool whose accelerators have slots, this is the sum over its accelerators.
    #[must_use]
    pub fn accelerator_capacity(&self, accelerator: &AcceleratorId) -> Option<AcceleratorCapacity> {
        let accounts = &self.planner.ledger.accelerators;
        if let Some(account) = accounts.get(accelerator) {
            return Some(AcceleratorCapacity { capacity: account.capacity, units: account.units });
        }
        let pool = accounts.pool(accelerator)?;
        Some(AcceleratorCapacity { capacity: pool.capacity(), units: Some(pool.units()) })
    }

    /// Memory that may still be reserved where engines with this requirement may run, over all these accelerators.
    #[must_use]
    pub fn free_memory(&self, requirement: &AcceleratorRequirement) -> Bytes {
        let accounts = &self.planner.ledger.accelerators;
        let free = |id: &AcceleratorId| accounts.get(id).map(|account| account.free()).unwrap_or_default();
        match requirement {
            AcceleratorRequirement::InPool { pool, .. } => free(pool),
            AcceleratorRequirement::Slots { pool, .. } => {
                accounts.pool(pool).map_or(Bytes::ZERO, PoolAccelerators::free)
            }
            AcceleratorRequirement::Ids(ids) => ids.iter().map(free).sum(),
            AcceleratorRequirement::Count(_) => accounts.iter().map(|(_, account)| account.free()).sum(),
        }
    }

    /// Memory reserved for the engine, over all its accelerators.
    #[must_use]
    pub fn reserved_bytes(&self, engine: &EngineId) -> Bytes {
        let accounts = self.planner.ledger.accelerators.accounts_of(engine);
        accounts.map(|(_, account)| account.booked_by(engine)).sum()
    }

    /// Memory that the engine would free if it slept, over all its accelerators.
    #[must_use]
    pub fn freed_by_sleep(&self, engine: &EngineId) -> Bytes {
        let residue = self.planner.residue_of(engine);
        let accounts = self.planner.ledger.accelerators.accounts_of(engine);
        accounts.map(|(_, account)| account.booked_by(engine).saturating_sub(residue)).sum()
    }
}
