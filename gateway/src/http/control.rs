//! What the two APIs need of the driver, so that they can be tested without one.

use std::{pin::Pin, sync::Arc};

use arc_swap::Guard;
use rouse::{
    fault::Fault,
    fleet::{
        event::{Event, OperationId, Order},
        report::{Report, View},
    },
    lease::Clock,
    model::{EngineId, ModelName},
    units::Generation,
};
use tokio::sync::broadcast;

use crate::{
    driver::{Granted, Handle, Operation, Parking, Served},
    routes::Routes,
};

/// An answer that the driver takes its time for.
pub type Asked<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// As the methods of [`Handle`] with the same names, and what it is told by requests.
pub trait Control: Send + Sync {
    fn routes(&self) -> Guard<Arc<Routes>>;
    fn clock(&self) -> Clock;
    fn served(&self) -> &Served;
    /// Waits for a lease. Dropping the future leaves the queue.
    fn park(&self, parking: Parking) -> Asked<'_, Result<Granted, Fault>>;
    /// The stub in front of an engine turned a request away.
    fn gated(&self, engine: EngineId, generation: Generation);
    /// Completes when [`Self::view`] and [`Self::report`] show the present.
    fn refresh(&self) -> Asked<'_, ()>;
    fn view(&self) -> Arc<View>;
    fn report(&self) -> Arc<Report>;
    fn operation(&self, id: OperationId) -> Option<Operation>;
    fn journal(&self) -> broadcast::Receiver<Arc<str>>;
    fn order(&self, model: ModelName, order: Order) -> Asked<'_, Result<OperationId, String>>;
}

impl Control for Handle {
    fn routes(&self) -> Guard<Arc<Routes>> {
        self.routes()
    }

    fn clock(&self) -> Clock {
        self.clock()
    }

    fn served(&self) -> &Served {
        self.served()
    }

    fn park(&self, parking: Parking) -> Asked<'_, Result<Granted, Fault>> {
        Box::pin(self.park(parking))
    }

    fn gated(&self, engine: EngineId, generation: Generation) {
        self.tell(Event::Gated { engine, generation });
    }

    fn refresh(&self) -> Asked<'_, ()> {
        Box::pin(self.refresh())
    }

    fn view(&self) -> Arc<View> {
        self.view()
    }

    fn report(&self) -> Arc<Report> {
        self.report()
    }

    fn operation(&self, id: OperationId) -> Option<Operation> {
        self.operation(id)
    }

    fn journal(&self) -> broadcast::Receiver<Arc<str>> {
        self.journal()
    }

    fn order(&self, model: ModelName, order: Order) -> Asked<'_, Result<OperationId, String>> {
        Box::pin(self.order(model, order))
    }
}
