//! Resolves, probes and watches a backend that Rouse does not manage; it never starts or stops the backend.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use rouse::{fault::FailureCause, fleet::event::Event, model::EngineId, units::Generation};
use rouse_config::EngineConfig;
use rouse_platform::{
    engine_client::{EngineClient, PlatformContext},
    health::{self as health, InitialHealth},
    readiness,
};
use tokio::{net, sync::mpsc, time};

use super::{
    context::report_failure,
    engine_manager::ManagerRequest,
    engine_task::{EngineTaskCommand, RetryBackoff},
};
use crate::{
    backend_address::{self, BackendAddress, BackendHost},
    status_inputs::StatusInputs,
};

/// Timeout of a name lookup.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(5);

/// How requests reach a model of mode external.
#[derive(Clone, Debug, PartialEq)]
pub struct ExternalBackend {
    pub engine: Arc<EngineConfig>,
    pub backend: BackendAddress,
}

/// One gateway's use of a backend, as an engine generation.
pub(super) struct ExternalEngineTask {
    pub(super) common: Arc<PlatformContext>,
    pub(super) status_inputs: Arc<StatusInputs>,
    pub(super) id: EngineId,
    pub(super) generation: Generation,
    pub(super) external: Arc<ExternalBackend>,
    pub(super) requests: mpsc::Sender<ManagerRequest>,
}

impl ExternalEngineTask {
    /// Runs until it is stopped. `known`: the backend's address, if it already serves.
    pub(super) async fn run(
        self,
        mut commands: mpsc::Receiver<EngineTaskCommand>,
        known: Option<SocketAddr>,
    ) {
        let stopped = async {
            while let Some(command) = commands.recv().await {
                match command {
                    EngineTaskCommand::Stop => return,
                    // There is no stub: each gateway has its own gate, and requests under way end by themselves.
                    EngineTaskCommand::CloseGate | EngineTaskCommand::Revoke => {
                        let (engine, generation) = (self.id.clone(), self.generation);
                        self.common.send_event(Event::Drained { engine, generation }).await;
                    }
                    EngineTaskCommand::Probe => {
                        if let Ok(address) = self.address().await {
                            health::run_canary(&self.contact(address)).await;
                        }
                    }
                    EngineTaskCommand::Hold
                    | EngineTaskCommand::OpenGate
                    | EngineTaskCommand::Sleep(_)
                    | EngineTaskCommand::Wake(_) => {}
                }
            }
            std::future::pending().await
        };
        tokio::select! {
            () = stopped => {}
            () = self.serve(known) => {}
        }
        let (engine, generation) = (self.id.clone(), self.generation);
        // Without a manager this gateway is ending, and its tasks with it.
        let ended = ManagerRequest::Ended { engine: engine.clone(), generation };
        self.requests.send(ended).await.unwrap_or_default();
        self.common.send_event(Event::Gone { engine, generation, cause: FailureCause::Stopped }).await;
    }

    async fn serve(&self, known: Option<SocketAddr>) {
        let mut pauses = RetryBackoff::new();
        let mut reported = None;
        let address = loop {
            let found = match known {
                Some(address) => Ok(address),
                None => self.address().await,
            };
            match found {
                Ok(address) => break address,
                Err(reason) if reported.as_ref() == Some(&reason) => pauses.pause().await,
                Err(reason) => {
                    tracing::warn!(engine = %self.id, reason, "cannot find the backend, retrying");
                    report_failure(&self.common, &self.status_inputs, &self.id, self.generation, &reason)
                        .await;
                    reported = Some(reason);
                }
            }
        };
        if reported.is_some() {
            self.status_inputs.clear_failure(&self.id.model);
        }
        let client = self.contact(address);
        if known.is_none() {
            let (engine, generation) = (self.id.clone(), self.generation);
            self.common.send_event(Event::Started { engine: engine.clone(), generation, address }).await;
            self.wait_ready(&client).await;
            self.common.send_event(Event::Ready { engine, generation }).await;
        }
        health::watch_health(&client, InitialHealth::Healthy).await;
    }

    /// Waits until the backend serves. Reports each failed probe as the model's failure: Rouse cannot inspect the
    /// backend.
    async fn wait_ready(&self, client: &EngineClient) {
        let mut wait = readiness::ReadinessWait::begin(client, None);
        let mut reported = false;
        while let Err(probe) = wait.next_change(client).await {
            let reason = format!("the backend is not ready: {probe}");
            tracing::warn!(engine = %self.id, probe, "backend not ready");
            report_failure(&self.common, &self.status_inputs, &self.id, self.generation, &reason).await;
            reported = true;
        }
        if reported {
            self.status_inputs.clear_failure(&self.id.model);
        }
    }

    fn contact(&self, address: SocketAddr) -> EngineClient {
        let engine = Arc::clone(&self.external.engine);
        EngineClient::new(&self.common, self.id.clone(), self.generation, address, engine)
    }

    /// Resolves the backend's address, or returns why that fails.
    ///
    /// A resolved address obeys the same rules as a literal one.
    async fn address(&self) -> Result<SocketAddr, String> {
        let BackendAddress { host, port, .. } = &self.external.backend;
        let name = match host {
            BackendHost::Address(ip) => return Ok(SocketAddr::new(*ip, *port)),
            BackendHost::Name(name) => name,
        };
        let mut found = time::timeout(LOOKUP_TIMEOUT, net::lookup_host((name.as_str(), *port)))
            .await
            .map_err(|_| {
                format!("no name server answered within {LOOKUP_TIMEOUT:?} for the backend's name '{name}'")
            })?
            .map_err(|error| format!("cannot resolve the backend's name '{name}': {error}"))?;
        found.find(|address| backend_address::forbidden(address.ip()).is_none()).ok_or_else(|| {
            format!(
                "the backend's name '{name}' resolves only to addresses that the gateway never connects to"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use rouse::{engine::last_outcome::EngineDiagnostics, fleet::event::CanaryVerdict, units::Tick};
    use rouse_net::{
        backend_origin::{BackendOrigin, BackendTls},
        lease::TickClock,
    };
    use rustls::{RootCertStore, ServerConfig};
    use serde_json::json;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
        task::JoinHandle,
        time::{Instant, timeout},
    };
    use tokio_rustls::TlsAcceptor;

    use super::*;
    use crate::{
        convert::{ConversionPolicy, ModelHosting, convert},
        crd::InferenceModel,
    };
    use rouse_platform::upstream_tls;

    const LONG: Duration = Duration::from_secs(20);

    /// A task for a backend on this machine, with both of its ends.
    struct ExternalFixture {
        task: JoinHandle<()>,
        commands: mpsc::Sender<EngineTaskCommand>,
        events: mpsc::Receiver<Event>,
        /// The server name of each request's TLS handshake, and its head.
        requests: mpsc::Receiver<(Option<String>, String)>,
        backend: JoinHandle<()>,
    }

    impl ExternalFixture {
        /// Uses this server name and trusts these roots.
        async fn begin(name: &str, server: Arc<ServerConfig>, roots: RootCertStore) -> Self {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let external = Arc::new(external(listener.local_addr().unwrap().port(), name, roots));
            let (requests_tx, requests_rx) = mpsc::channel(64);
            let backend = tokio::spawn(answers(listener, TlsAcceptor::from(server), requests_tx));
            let (events_tx, events) = mpsc::channel(16);
            let config = Arc::new(rouse_config::parse("", "test").unwrap());
            let common = PlatformContext::new(config, events_tx, TickClock::new(Instant::now(), Tick(1)));
            let (requests, _over) = mpsc::channel(1);
            let (commands, commands_rx) = mpsc::channel(8);
            let (id, generation) = (EngineId::new("m".into(), 0), Generation(1));
            let external_task = ExternalEngineTask {
                common,
                status_inputs: Arc::default(),
                id,
                generation,
                external,
                requests,
            };
            let task = tokio::spawn(external_task.run(commands_rx, None));
            Self { task, commands, events, requests: requests_rx, backend }
        }

        async fn next(&mut self) -> Event {
            timeout(LONG, self.events.recv()).await.expect("an event").unwrap()
        }

        async fn stop(mut self) {
            self.commands.send(EngineTaskCommand::Stop).await.unwrap();
            assert!(matches!(self.next().await, Event::Gone { .. }));
            self.task.await.unwrap();
            self.backend.abort();
        }
    }

    /// Answers every request and reports what it received.
    async fn answers(
        listener: TcpListener,
        tls: TlsAcceptor,
        requests: mpsc::Sender<(Option<String>, String)>,
    ) {
        while let Ok((stream, _)) = listener.accept().await {
            let Ok(mut stream) = tls.accept(stream).await else { continue };
            let name = stream.get_ref().1.server_name().map(str::to_owned);
            let mut head = Vec::new();
            while !head.windows(4).any(|end| end == b"\r\n\r\n") {
                if stream.read_buf(&mut head).await.map_or(true, |read| read == 0) {
                    break;
                }
            }
            // A client that does not trust the server leaves after the handshake, which this side may have completed.
            if head.is_empty() {
                continue;
            }
            requests.send((name, String::from_utf8_lossy(&head).into_owned())).await.unwrap();
            let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}";
            stream.write_all(answer).await.unwrap();
            stream.shutdown().await.unwrap_or_default();
        }
    }

    /// Builds a backend from an object, except for its address: it is on this machine, which no object may name.
    fn external(port: u16, name: &str, roots: RootCertStore) -> ExternalBackend {
        let object: InferenceModel = serde_json::from_value(json!({
            "apiVersion": "rouse.dev/v1alpha1", "kind": "InferenceModel",
            "metadata": {"name": "m", "namespace": "chat"},
            "spec": {"modelName": "m", "mode": "external", "backendUrl": "https://there.example/team/v1"},
        }))
        .unwrap();
        let model = convert(&object, ConversionPolicy { any_backend: true, dual_pods: None }).unwrap();
        let ModelHosting::External(backend) = model.hosting else { panic!("{:?}", model.hosting) };
        let origin = model.engine.backend_origin.as_ref().unwrap();
        assert!(origin.tls.is_some());
        let tls: Arc<dyn BackendTls> = Arc::new(upstream_tls::RootVerifiedTls::with_roots(name, roots));
        let origin = Some(Arc::new(BackendOrigin::new(name, &origin.path, Some(tls))));
        let engine = Arc::new(EngineConfig { backend_origin: origin, ..(*model.engine).clone() });
        ExternalBackend {
            engine,
            backend: BackendAddress { host: BackendHost::Address([127, 0, 0, 1].into()), port, ..backend },
        }
    }

    #[tokio::test]
    async fn a_backend_behind_tls_and_a_path_is_asked_whether_it_serves_and_proves_it() {
        let (server, roots) = rouse_testing::tls::server(&["localhost"]);
        let mut visited = ExternalFixture::begin("localhost", server, roots).await;
        assert!(matches!(visited.next().await, Event::Started { .. }));
        assert!(matches!(visited.next().await, Event::Ready { .. }));
        visited.commands.send(EngineTaskCommand::Probe).await.unwrap();
        assert!(matches!(visited.next().await, Event::Canary { verdict: CanaryVerdict::Passed, .. }));
        let (name, health) = visited.requests.recv().await.unwrap();
        assert_eq!(name.as_deref(), Some("localhost"), "a server of several names is told which is meant");
        assert!(health.starts_with("GET /team/health HTTP/1.1\r\n"), "{health}");
        assert!(health.contains("host: localhost\r\n"), "{health}");
        let (_, probe) = visited.requests.recv().await.unwrap();
        assert!(probe.starts_with("POST /team/v1/chat/completions HTTP/1.1\r\n"), "{probe}");
        visited.stop().await;
    }

    #[tokio::test]
    async fn a_backend_with_a_certificate_that_is_not_trusted_is_asked_nothing_and_its_model_says_why() {
        let (server, roots) = rouse_testing::tls::server(&["localhost"]);
        for (name, roots, why) in [
            (
                "localhost",
                RootCertStore::empty(),
                "UnknownIssuer; the gateway trusts the roots in SSL_CERT_FILE",
            ),
            ("other.example", roots, "not valid for name"),
        ] {
            let mut visited = ExternalFixture::begin(name, Arc::clone(&server), roots).await;
            assert!(matches!(visited.next().await, Event::Started { .. }));
            let shown = visited.next().await;
            let Event::Diagnostics { diagnostics: EngineDiagnostics { system: Some(words), .. }, .. } =
                &shown
            else {
                panic!("{shown:?}")
            };
            assert!(words.starts_with("the backend is not ready: GET /health: TLS failed: "), "{words}");
            assert!(words.contains(why), "{words}");
            assert!(visited.requests.try_recv().is_err(), "it was asked");
            visited.stop().await;
        }
    }
}
