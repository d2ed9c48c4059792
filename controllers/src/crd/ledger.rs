//! The ledger of a pool: every reservation, in one object, so that booking is one compare-and-set.
//!
//! An API server keeps an object in one entry of its store, and refuses more than 1.5 MiB. Written out, a reservation is
//! some 270 bytes; a large pool has tens of thousands. So the object holds them packed (`packed`): once per group what
//! a model's engines have in common, once per node its accelerators, and a dozen characters for each engine. Code never
//! sees that form: reading an object unpacks it, and what cannot be unpacked is an unreadable object, never half a
//! ledger.

mod digits;
mod packed;
#[cfg(test)]
mod tests;

use std::borrow::Cow;

use rouse::{
    model::{AcceleratorId, VariantName},
    units::{Bytes, Tick},
};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};

use packed::PackedLedger;

pub use packed::Error;

/// Reservations in the order of their ids.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "PackedLedger", into = "PackedLedger")]
pub struct Ledger {
    /// The id of the next reservation: ids are never used twice.
    pub next: u64,
    pub reservations: Vec<Reservation>,
}

/// Memory that is booked for one engine, on each of so many accelerators of one node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reservation {
    pub id: u64,
    /// The InferenceModel's namespace and name.
    pub model: ObjectName,
    pub variant: VariantName,
    /// Number of the engine among the variant's engines, from 0.
    pub replica: u32,
    /// Accelerators that it takes.
    pub count: u32,
    /// On each of them.
    pub bytes: Bytes,
    /// RAM of its node.
    pub host_bytes: Bytes,
    /// Where it is, once that is known.
    pub node: Option<String>,
    /// On which accelerators, once that is known.
    pub accelerators: Vec<AcceleratorId>,
    pub state: ReservationState,
    /// Since when it is in this state, to the second.
    pub since: Tick,
}

/// The engine that a reservation is for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ReservationOwner {
    /// The InferenceModel's namespace and name.
    pub model: ObjectName,
    pub variant: VariantName,
    /// Number of the engine among the variant's engines, from 0.
    pub replica: u32,
}

/// An object of a namespace.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectName {
    pub namespace: String,
    pub name: String,
}

/// State of a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum ReservationState {
    /// Reserved in the pool; the node is not known yet.
    Reserved,
    /// Placed on a node and its accelerators.
    Placed,
    /// Memory that an asleep engine keeps.
    Asleep,
    /// The engine was ordered to stop, and its memory has not been seen free yet.
    Releasing,
}

impl Ledger {
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.reservations.is_empty() && self.next == 0
    }
}

impl Reservation {
    /// On all of its accelerators together.
    #[must_use]
    pub const fn sum(&self) -> Bytes {
        Bytes(self.bytes.0.saturating_mul(self.count as u64))
    }

    /// Whether it is this engine's.
    #[must_use]
    pub fn is_of(&self, owner: &ReservationOwner) -> bool {
        self.replica == owner.replica && self.variant == owner.variant && self.model == owner.model
    }

    /// Returns the engine that it is for.
    #[must_use]
    pub fn owner(&self) -> ReservationOwner {
        ReservationOwner { model: self.model.clone(), variant: self.variant.clone(), replica: self.replica }
    }
}

impl ObjectName {
    #[must_use]
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }
}

impl std::fmt::Display for ObjectName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

impl JsonSchema for Ledger {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> Cow<'static, str> {
        "Ledger".into()
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        PackedLedger::json_schema(generator)
    }
}
