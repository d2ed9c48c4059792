//! The driver's interface for both APIs, so that tests can replace the driver.

use std::{pin::Pin, sync::Arc};

use arc_swap::Guard;
use rouse::{
    fault::Fault,
    fleet::{
        event::{Event, OperationId, OperatorAction},
        quote::WaitRange,
        report::{FleetView, Report},
    },
    model::{EngineId, ModelName},
    units::Generation,
};
use rouse_net::lease::TickClock;
use tokio::sync::broadcast;

use crate::{
    driver::{
        DriverHandle, GrantedLease, LiveView, OperationStatus, ParkRequest, ServedTokens, Timeline,
        WaitForecasts,
    },
    routing::RouteTable,
};

/// Boxed driver reply.
pub type DriverFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The methods of [`DriverHandle`] with the same names, and the events that requests send to it.
pub trait DriverApi: Send + Sync {
    fn routes(&self) -> Guard<Arc<RouteTable>>;
    fn clock(&self) -> TickClock;
    fn served_tokens(&self) -> &ServedTokens;
    /// Waits for a lease. Dropping the future leaves the queue.
    fn park(&self, request: ParkRequest) -> DriverFuture<'_, Result<GrantedLease, Fault>>;
    fn expected_wait(&self, model: &ModelName) -> Option<WaitRange>;
    fn expected_waits(&self) -> DriverFuture<'_, Arc<WaitForecasts>>;
    /// Reports that the stub in front of an engine rejected a request.
    fn report_gated(&self, engine: EngineId, generation: Generation);
    /// Completes when [`Self::view`] and [`Self::report`] are up to date.
    fn refresh(&self) -> DriverFuture<'_, ()>;
    fn view(&self) -> Arc<FleetView>;
    fn report(&self) -> Arc<Report>;
    /// Returns the state as of the last turn, without a new one.
    fn live_view(&self) -> DriverFuture<'_, LiveView>;
    fn turns(&self) -> u64;
    fn timeline(&self) -> Arc<Timeline>;
    fn operation(&self, id: OperationId) -> Option<OperationStatus>;
    fn journal(&self) -> broadcast::Receiver<Arc<str>>;
    fn submit_order(
        &self,
        model: ModelName,
        action: OperatorAction,
    ) -> DriverFuture<'_, Result<OperationId, String>>;
}

impl DriverApi for DriverHandle {
    fn routes(&self) -> Guard<Arc<RouteTable>> {
        self.routes()
    }

    fn clock(&self) -> TickClock {
        self.clock()
    }

    fn served_tokens(&self) -> &ServedTokens {
        self.served_tokens()
    }

    fn park(&self, request: ParkRequest) -> DriverFuture<'_, Result<GrantedLease, Fault>> {
        Box::pin(self.park(request))
    }

    fn expected_wait(&self, model: &ModelName) -> Option<WaitRange> {
        self.expected_wait(model)
    }

    fn expected_waits(&self) -> DriverFuture<'_, Arc<WaitForecasts>> {
        Box::pin(self.expected_waits())
    }

    fn report_gated(&self, engine: EngineId, generation: Generation) {
        self.send_event(Event::StubGateClosed { engine, generation });
    }

    fn refresh(&self) -> DriverFuture<'_, ()> {
        Box::pin(self.refresh())
    }

    fn view(&self) -> Arc<FleetView> {
        self.view()
    }

    fn report(&self) -> Arc<Report> {
        self.report()
    }

    fn live_view(&self) -> DriverFuture<'_, LiveView> {
        Box::pin(self.live_view())
    }

    fn turns(&self) -> u64 {
        self.turns()
    }

    fn timeline(&self) -> Arc<Timeline> {
        Arc::clone(self.timeline())
    }

    fn operation(&self, id: OperationId) -> Option<OperationStatus> {
        self.operation(id)
    }

    fn journal(&self) -> broadcast::Receiver<Arc<str>> {
        self.journal()
    }

    fn submit_order(
        &self,
        model: ModelName,
        action: OperatorAction,
    ) -> DriverFuture<'_, Result<OperationId, String>> {
        Box::pin(self.submit_order(model, action))
    }
}
