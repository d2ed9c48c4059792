//! Tests whether an order is the newest.
//!
//! An order is fenced by (epoch, generation), compared in that order, because the current leader knows best which
//! generation it means. Among the orders of one leader about one generation, a number shows which came later: an order
//! that was delayed on its way must not undo a later one.

use std::cmp::Ordering;

use rouse::units::Generation;
use rouse_net::stub_api::{self, Epoch};

use super::GateState;
use crate::epoch::{EpochTooFarAhead, check_plausible};

/// Why an order was refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GateRejection {
    #[error("the order is stale: the stub has already accepted epoch {} and generation {}", .0.epoch, .0.generation.0)]
    Stale(stub_api::GateStatus),
    #[error("a later order of the same leader has arrived before this one")]
    Overtaken(stub_api::GateStatus),
    #[error("{1}")]
    OpenBlocked(stub_api::GateStatus, &'static str),
    #[error("{1}")]
    EpochTooFarAhead(stub_api::GateStatus, EpochTooFarAhead),
}

impl GateState {
    /// Tests an order without recording it. Returns whether the same leader has already sent an order for this
    /// generation.
    pub(super) fn fence(
        &self,
        epoch: Epoch,
        generation: Generation,
        sequence: Option<u64>,
    ) -> Result<bool, GateRejection> {
        match (epoch, generation).cmp(&(self.epoch, self.generation)) {
            Ordering::Less => Err(GateRejection::Stale(self.view())),
            Ordering::Equal if sequence.is_some_and(|sequence| sequence < self.sequence) => {
                Err(GateRejection::Overtaken(self.view()))
            }
            order => match check_plausible(epoch, self.epoch) {
                Ok(()) => Ok(order.is_eq()),
                Err(far) => Err(GateRejection::EpochTooFarAhead(self.view(), far)),
            },
        }
    }

    /// Records an order. Returns what [`Self::fence`] does.
    pub(super) fn accept(
        &mut self,
        epoch: Epoch,
        generation: Generation,
        sequence: Option<u64>,
    ) -> Result<bool, GateRejection> {
        let again = self.fence(epoch, generation, sequence)?;
        (self.epoch, self.generation) = (epoch, generation);
        self.sequence = sequence.unwrap_or(if again { self.sequence } else { 0 });
        Ok(again)
    }
}
