//! What became of an engine is a line of the log, with why and how long, as the driver writes one of engines that are its own. The
//! steps in between are for those who look for a fault.

use std::time::Duration;

use rouse::{
    pairing::command::{Command, Farewell, OfRequester, Order, Step},
    units::Millis,
};
use tracing::Level;

use crate::pairing::{job::Job, tidings::is_failure};

/// The order of this job was carried out.
pub(super) fn carried_out(job: &Job, took: Duration) {
    let (Command { node, order, .. }, took) = (&job.command, Millis::from(took));
    match level(order) {
        Level::WARN => tracing::warn!(%node, %order, %took, "an order was carried out"),
        Level::INFO => tracing::info!(%node, %order, %took, "an order was carried out"),
        _ => tracing::debug!(%node, %order, %took, "an order was carried out"),
    }
}

/// Deaths are warnings.
const fn level(order: &Order) -> Level {
    match order {
        Order::Engine { step: Step::End { why }, .. } if is_failure(*why) => Level::WARN,
        Order::Requester {
            step:
                OfRequester::Delete {
                    why: Farewell::EngineGone | Farewell::NodeGone | Farewell::AcceleratorFaulty,
                },
            ..
        } => Level::WARN,
        Order::Engine {
            step:
                Step::Create { .. } | Step::Launch | Step::Wake { .. } | Step::Sleep { .. } | Step::End { .. },
            ..
        }
        | Order::Requester { step: OfRequester::Delete { .. }, .. }
        | Order::Provider { .. } => Level::INFO,
        Order::Engine { .. } | Order::Requester { .. } => Level::DEBUG,
    }
}
