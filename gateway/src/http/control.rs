//! What the inference API needs of the driver: three questions, so that it can be tested without one.

use std::{pin::Pin, sync::Arc};

use arc_swap::Guard;
use rouse::{fault::Fault, lease::Clock};

use crate::{
    driver::{Granted, Handle, Parking},
    routes::Routes,
};

/// The end of a wait.
pub type Wait<'a> = Pin<Box<dyn Future<Output = Result<Granted, Fault>> + Send + 'a>>;

pub trait Control: Send + Sync {
    fn routes(&self) -> Guard<Arc<Routes>>;
    fn clock(&self) -> Clock;
    /// Waits for a lease. Dropping the future leaves the queue.
    fn park(&self, parking: Parking) -> Wait<'_>;
}

impl Control for Handle {
    fn routes(&self) -> Guard<Arc<Routes>> {
        self.routes()
    }

    fn clock(&self) -> Clock {
        self.clock()
    }

    fn park(&self, parking: Parking) -> Wait<'_> {
        Box::pin(self.park(parking))
    }
}
