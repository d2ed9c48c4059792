//! State of the decisions: engines, the memory ledger, dependencies, and demand of other gateways.
//!
//! [`apply`] is the only writer of commands into it, and [`invariants`] checks it after every plan in tests and debug
//! builds.

pub(in crate::fleet) mod apply;
pub(in crate::fleet) mod dependencies;
pub(in crate::fleet) mod due_index;
pub(in crate::fleet) mod engines;
pub(in crate::fleet) mod invariants;
pub(in crate::fleet) mod ledger;
pub(in crate::fleet) mod remote_demand;
pub(in crate::fleet) mod variant_specs;
