//! A backend that somebody else runs: it is looked for, asked whether it serves, and watched; never started or stopped.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use rouse::{fault::Cause, fleet::event::Event, model::EngineId, units::Generation};
use tokio::{net, sync::mpsc, time};

use super::{
    fails,
    life::{Order, Pauses},
    steward::Request,
};
use crate::{
    config::Model,
    controllers::{
        address::{self, Backend, Host},
        told::Told,
    },
    platform::{
        contact::{Common, Contact},
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
    pub(super) common: Arc<Common>,
    pub(super) told: Arc<Told>,
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
                        self.common.tell(Event::Drained { engine, generation }).await;
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
        self.common.tell(Event::Gone { engine, generation, cause: Cause::Stopped }).await;
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
                    fails(&self.common, &self.told, &self.id, self.generation, &why).await;
                    told = Some(why);
                }
            }
        };
        if told.is_some() {
            self.told.recovers(&self.id.model);
        }
        let contact = self.contact(address);
        if known.is_none() {
            let (engine, generation) = (self.id.clone(), self.generation);
            self.common.tell(Event::Started { engine: engine.clone(), generation, address }).await;
            ready::up(&contact, None).await;
            self.common.tell(Event::Ready { engine, generation }).await;
        }
        health::watch(&contact, Known::Well).await;
    }

    fn contact(&self, address: SocketAddr) -> Contact {
        let engine = Arc::clone(&self.external.engine);
        Contact::new(&self.common, self.id.clone(), self.generation, address, engine)
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

#[cfg(test)]
mod tests {
    use rouse::{
        fleet::event::Verdict,
        lease::Clock,
        origin::{Origin, Secure},
        units::Tick,
    };
    use serde_json::json;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
        time::{Instant, timeout},
    };
    use tokio_rustls::TlsAcceptor;

    use super::*;
    use crate::{
        config,
        controllers::{
            convert::{Policy, Run, convert},
            crd::InferenceModel,
        },
        trust,
    };

    const LONG: Duration = Duration::from_secs(20);

    /// Answers whatever it is asked; what that was.
    async fn answers(listener: TcpListener, tls: TlsAcceptor, asked: mpsc::UnboundedSender<String>) {
        while let Ok((stream, _)) = listener.accept().await {
            let Ok(mut stream) = tls.accept(stream).await else { continue };
            let mut head = Vec::new();
            while !head.windows(4).any(|end| end == b"\r\n\r\n") {
                if stream.read_buf(&mut head).await.is_ok_and(|read| read == 0) {
                    break;
                }
            }
            asked.send(String::from_utf8_lossy(&head).into_owned()).unwrap();
            let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}";
            stream.write_all(answer).await.unwrap();
            stream.shutdown().await.unwrap_or_default();
        }
    }

    /// As an object has it, but for where it is: that must be on this machine here, which no object may say.
    fn external(port: u16, roots: rustls::RootCertStore) -> External {
        let object: InferenceModel = serde_json::from_value(json!({
            "apiVersion": "rouse.dev/v1alpha1", "kind": "InferenceModel",
            "metadata": {"name": "m", "namespace": "chat"},
            "spec": {"modelName": "m", "mode": "external", "backendUrl": "https://there.example/team/v1"},
        }))
        .unwrap();
        let model = convert(&object, Policy { any_backend: true, dual_pods: None }).unwrap();
        let Run::External(backend) = model.run else { panic!("{:?}", model.run) };
        let origin = model.engine.origin.as_ref().unwrap();
        assert!(origin.tls.is_some());
        let tls: Arc<dyn Secure> = Arc::new(trust::Backend::with_roots("localhost", roots));
        let origin = Some(Arc::new(Origin::new("localhost", &origin.path, Some(tls))));
        let engine = Arc::new(Model { origin, ..(*model.engine).clone() });
        External { engine, backend: Backend { host: Host::Address([127, 0, 0, 1].into()), port, ..backend } }
    }

    #[tokio::test]
    async fn a_backend_behind_tls_and_a_path_is_asked_whether_it_serves_and_proves_it() {
        let (server, roots) = trust::testing::server();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let external = Arc::new(external(listener.local_addr().unwrap().port(), roots));
        let (ask, mut asked) = mpsc::unbounded_channel();
        let backend = tokio::spawn(answers(listener, TlsAcceptor::from(server), ask));
        let (tell, mut told) = mpsc::channel(16);
        let config = Arc::new(config::parse("", "test").unwrap());
        let common = Common::new(config, tell, Clock::new(Instant::now(), Tick(1)));
        let (requests, _over) = mpsc::unbounded_channel();
        let (order, orders) = mpsc::unbounded_channel();
        let (id, generation) = (EngineId::new("m".into(), 0), Generation(1));
        let visit = Visit { common, told: Arc::default(), id, generation, external, requests };
        let life = tokio::spawn(visit.live(orders, None));
        let mut next = async || timeout(LONG, told.recv()).await.expect("an event").unwrap();
        assert!(matches!(next().await, Event::Started { .. }));
        assert!(matches!(next().await, Event::Ready { .. }));
        order.send(Order::Probe).unwrap();
        assert!(matches!(next().await, Event::Canary { verdict: Verdict::Passed, .. }));
        let health = asked.recv().await.unwrap();
        assert!(health.starts_with("GET /team/health HTTP/1.1\r\n"), "{health}");
        assert!(health.contains("host: localhost\r\n"), "{health}");
        let probe = asked.recv().await.unwrap();
        assert!(probe.starts_with("POST /team/v1/chat/completions HTTP/1.1\r\n"), "{probe}");
        order.send(Order::Stop).unwrap();
        assert!(matches!(next().await, Event::Gone { .. }));
        life.await.unwrap();
        backend.abort();
    }
}
