//! What controllers ask of the driver.

use std::collections::{BTreeMap, BTreeSet};

use rouse::{
    fleet::{
        Fleet, Plan,
        event::{Event, GatewayDemand},
    },
    model::ModelName,
};
use rouse_net::lease::TickClock;

/// A handle of the driver, which runs the fleet.
pub trait DriverClient: Clone + Send + Sync + 'static {
    /// Sends an event that no platform observes. Lost if the driver has ended.
    ///
    /// Never waits. Until the driver takes it, a later event on the same subject replaces it.
    fn send_event(&self, event: Event);

    fn clock(&self) -> TickClock;

    /// Reads the fleet and its last plan, once all events sent before have been taken; `None` if the driver has ended.
    ///
    /// The driver runs `read` between two turns, so it must be short.
    fn read_fleet<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Fleet, &Plan) -> T + Send + 'static,
    ) -> impl Future<Output = Option<T>> + Send;

    /// Returns this gateway's demand for these models, or for all without any: waiters as of the last turn, leases as
    /// of now. A model without demand has no entry.
    fn demand(
        &self,
        models: Option<BTreeSet<ModelName>>,
    ) -> impl Future<Output = BTreeMap<ModelName, GatewayDemand>> + Send;
}
