//! A backend that somebody else runs: it is looked for, asked whether it serves, and watched; never started or stopped.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use rouse::{fault::Cause, fleet::event::Event, model::EngineId, units::Generation};
use tokio::{net, sync::mpsc, time};

use super::{
    Shared,
    life::{Order, Pauses},
    steward::Request,
};
use crate::{
    config::Model,
    controllers::address::{self, Backend, Host},
    platform::{
        contact::Contact,
        ready,
        watch::{self as health, Known},
    },
};

/// A name server that takes longer has no answer.
const LOOKUP: Duration = Duration::from_secs(5);

/// How requests for a model of mode external get there.
#[derive(Clone, Debug, PartialEq)]
pub struct External {
    pub engine: Arc<Model>,
    pub backend: Backend,
}

/// One gateway's dealings with a backend, as a life of an engine.
pub(super) struct Visit {
    pub(super) shared: Arc<Shared>,
    pub(super) id: EngineId,
    pub(super) generation: Generation,
    pub(super) external: Arc<External>,
    pub(super) requests: mpsc::UnboundedSender<Request>,
}

impl Visit {
    /// Until it is told to stop. `known`: where it is, when it serves already.
    pub(super) async fn live(self, mut orders: mpsc::UnboundedReceiver<Order>, known: Option<SocketAddr>) {
        let stopped = async {
            while let Some(order) = orders.recv().await {
                match order {
                    Order::Stop => return,
                    // There is no stub: a gate is each gateway's own, and what is under way there ends by itself.
                    Order::Close | Order::Cut => {
                        let (engine, generation) = (self.id.clone(), self.generation);
                        self.shared.common.tell(Event::Drained { engine, generation }).await;
                    }
                    Order::Probe => {
                        if let Ok(address) = self.address().await {
                            health::probe(&self.contact(address)).await;
                        }
                    }
                    Order::Hold | Order::Open | Order::Sleep(_) | Order::Wake(_) => {}
                }
            }
            std::future::pending().await
        };
        tokio::select! {
            () = stopped => {}
            () = self.serve(known) => {}
        }
        let (engine, generation) = (self.id.clone(), self.generation);
        drop(self.requests.send(Request::Over { engine: engine.clone(), generation }));
        self.shared.common.tell(Event::Gone { engine, generation, cause: Cause::Stopped }).await;
    }

    async fn serve(&self, known: Option<SocketAddr>) {
        let mut pauses = Pauses::new();
        let mut told = None;
        let address = loop {
            let found = match known {
                Some(address) => Ok(address),
                None => self.address().await,
            };
            match found {
                Ok(address) => break address,
                Err(why) if told.as_ref() == Some(&why) => pauses.pause().await,
                Err(why) => {
                    tracing::warn!(engine = %self.id, why, "the backend is not found");
                    self.shared.fails(&self.id, self.generation, &why).await;
                    told = Some(why);
                }
            }
        };
        if told.is_some() {
            self.shared.told.recovers(&self.id.model);
        }
        let contact = self.contact(address);
        if known.is_none() {
            let (engine, generation) = (self.id.clone(), self.generation);
            self.shared.common.tell(Event::Started { engine: engine.clone(), generation, address }).await;
            ready::up(&contact, None).await;
            self.shared.common.tell(Event::Ready { engine, generation }).await;
        }
        health::watch(&contact, Known::Well).await;
    }

    fn contact(&self, address: SocketAddr) -> Contact {
        let engine = Arc::clone(&self.external.engine);
        Contact::new(&self.shared.common, self.id.clone(), self.generation, address, engine)
    }

    /// Where it is now; or why it is not found. What its name leads to is held to the same rules as an address that is
    /// written down.
    async fn address(&self) -> Result<SocketAddr, String> {
        let Backend { host, port, .. } = &self.external.backend;
        let name = match host {
            Host::Address(ip) => return Ok(SocketAddr::new(*ip, *port)),
            Host::Name(name) => name,
        };
        let mut found = time::timeout(LOOKUP, net::lookup_host((name.as_str(), *port)))
            .await
            .map_err(|_| format!("no name server answers within {LOOKUP:?} where '{name}' is"))?
            .map_err(|error| format!("the backend's name '{name}' leads nowhere: {error}"))?;
        found.find(|address| address::forbidden(address.ip()).is_none()).ok_or_else(|| {
            format!("the backend's name '{name}' leads only to addresses that are never asked")
        })
    }
}
