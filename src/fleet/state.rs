//! What the decisions know: engines, the memory ledger, dependencies, and what other gateways have reported.
//!
//! [`apply`] is the only writer of commands into it, and [`invariants`] checks it after every plan in tests and debug builds.

pub(in crate::fleet) mod apply;
pub(in crate::fleet) mod dependencies;
pub(in crate::fleet) mod due_index;
pub(in crate::fleet) mod engines;
pub(in crate::fleet) mod invariants;
pub(in crate::fleet) mod ledger;
pub(in crate::fleet) mod remote_demand;
