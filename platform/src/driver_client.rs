//! What controllers ask of the driver.

use std::collections::BTreeMap;

use rouse::{
    fleet::event::{Event, GatewayDemand},
    model::ModelName,
};
use rouse_net::lease::TickClock;

/// A handle of the driver, which runs the fleet.
pub trait DriverClient: Clone + Send + Sync + 'static {
    /// Sends an event that no platform observes. Lost if the driver has ended.
    fn send_event(&self, event: Event);

    fn clock(&self) -> TickClock;

    /// Returns this gateway's demand for each model: waiters as of the last turn, leases as of now.
    fn demand(&self) -> impl Future<Output = BTreeMap<ModelName, GatewayDemand>> + Send;
}
