//! The condition of an AcceleratorNode. The rest of its status is what a stub found on the node.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use rouse::units::Tick;

use crate::controllers::{
    condition::{READY, condition},
    index::NodePlace,
};

/// The condition Ready of the node's object. `None`: the node is of no pool's selector, or is not there.
#[must_use]
pub fn node_condition(
    place: Option<&NodePlace>,
    generation: Option<i64>,
    before: &[Condition],
    now: Tick,
) -> Condition {
    let doubt = place.and_then(|place| place.doubt.as_deref());
    let said =
        |text: &str| doubt.map_or_else(|| text.to_owned(), |doubt| format!("{text}. Left out: {doubt}"));
    let (ready, reason, message) = match place {
        Some(NodePlace { pool: Some(pool), accelerators, .. }) if *accelerators > 0 => {
            (true, "Ready", said(&format!("{accelerators} accelerators for the pool '{pool}'")))
        }
        Some(NodePlace { pool: Some(_), .. }) => (false, "NoAccelerators", said("it has nothing to grant")),
        _ => (false, "NoPool", said("it is in no AcceleratorPool")),
    };
    condition(READY, ready, reason, &message, generation, before, now)
}
