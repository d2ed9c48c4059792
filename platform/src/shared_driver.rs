//! A driver's handle behind a pointer.

use std::{
    collections::{BTreeMap, BTreeSet},
    pin::Pin,
    sync::Arc,
};

use rouse::{
    fleet::{
        Fleet, Plan,
        event::{Event, GatewayDemand},
    },
    model::ModelName,
};
use rouse_net::lease::TickClock;
use tokio::sync::oneshot;

use crate::DriverClient;

type DriverReply<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;
type FleetRead = Box<dyn FnOnce(&Fleet, &Plan) + Send>;

/// A handle of any driver, as one type.
///
/// Code that takes this type is compiled in its own crate, for size. Code that takes any [`DriverClient`] would be
/// compiled in the gateway, for speed (ADR 18).
#[derive(Clone)]
pub struct SharedDriver(Arc<dyn DriverCalls>);

/// The methods of [`DriverClient`] without type parameters.
trait DriverCalls: Send + Sync {
    fn send(&self, event: Event);
    fn tick_clock(&self) -> TickClock;
    /// `None` if the driver has ended.
    fn run_read(&self, read: FleetRead) -> DriverReply<'_, Option<()>>;
    fn demand_of(
        &self,
        models: Option<BTreeSet<ModelName>>,
    ) -> DriverReply<'_, BTreeMap<ModelName, GatewayDemand>>;
}

impl<D: DriverClient> DriverCalls for D {
    fn send(&self, event: Event) {
        self.send_event(event);
    }

    fn tick_clock(&self) -> TickClock {
        self.clock()
    }

    fn run_read(&self, read: FleetRead) -> DriverReply<'_, Option<()>> {
        Box::pin(self.read_fleet(read))
    }

    fn demand_of(
        &self,
        models: Option<BTreeSet<ModelName>>,
    ) -> DriverReply<'_, BTreeMap<ModelName, GatewayDemand>> {
        Box::pin(self.demand(models))
    }
}

impl SharedDriver {
    #[must_use]
    pub fn new(driver: impl DriverClient) -> Self {
        Self(Arc::new(driver))
    }
}

impl DriverClient for SharedDriver {
    fn send_event(&self, event: Event) {
        self.0.send(event);
    }

    fn clock(&self) -> TickClock {
        self.0.tick_clock()
    }

    async fn read_fleet<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Fleet, &Plan) -> T + Send + 'static,
    ) -> Option<T> {
        let (value_tx, value) = oneshot::channel();
        // An error means that the reader no longer waits.
        let read: FleetRead = Box::new(move |fleet, plan| drop(value_tx.send(read(fleet, plan))));
        self.0.run_read(read).await?;
        value.await.ok()
    }

    async fn demand(&self, models: Option<BTreeSet<ModelName>>) -> BTreeMap<ModelName, GatewayDemand> {
        self.0.demand_of(models).await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use rouse::units::Tick;
    use tokio::time::Instant;

    use super::*;

    /// Has an empty fleet, and records the events that it is sent.
    #[derive(Clone)]
    struct RecordingDriver {
        ended: bool,
        events: Arc<Mutex<Vec<Event>>>,
    }

    impl DriverClient for RecordingDriver {
        fn send_event(&self, event: Event) {
            self.events.lock().unwrap().push(event);
        }

        fn clock(&self) -> TickClock {
            TickClock::new(Instant::now(), Tick(7))
        }

        async fn read_fleet<T: Send + 'static>(
            &self,
            read: impl FnOnce(&Fleet, &Plan) -> T + Send + 'static,
        ) -> Option<T> {
            (!self.ended).then(|| read(&Fleet::new(), &Plan::default()))
        }

        async fn demand(&self, models: Option<BTreeSet<ModelName>>) -> BTreeMap<ModelName, GatewayDemand> {
            models.into_iter().flatten().map(|model| (model, GatewayDemand::default())).collect()
        }
    }

    #[tokio::test]
    async fn a_shared_driver_passes_on_every_call_and_returns_every_answer() {
        let events = Arc::default();
        let shared = SharedDriver::new(RecordingDriver { ended: false, events: Arc::clone(&events) });
        shared.clone().send_event(Event::AdoptionDone);
        assert_eq!(*events.lock().unwrap(), [Event::AdoptionDone]);
        assert!(shared.clock().now() >= Tick(7));
        assert_eq!(shared.read_fleet(|fleet, _| fleet.demand().len()).await, Some(0));
        let model = ModelName::from("tiny");
        let asked = BTreeSet::from([model.clone()]);
        assert_eq!(shared.demand(Some(asked)).await.into_keys().collect::<Vec<_>>(), [model]);
        assert_eq!(shared.demand(None).await.len(), 0);
    }

    #[tokio::test]
    async fn a_driver_that_has_ended_reads_nothing() {
        let shared = SharedDriver::new(RecordingDriver { ended: true, events: Arc::default() });
        assert_eq!(shared.read_fleet(|_, _| 1).await, None);
    }
}
