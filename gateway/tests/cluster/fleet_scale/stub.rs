//! One process as the stubs and engines of all Pods: each Pod's address has listeners at the stub's ports.
//!
//! A stub here has the gate of a real one (orders close and open it, a drain waits for its requests), and an engine
//! answers chats. Neither fences by epoch nor checks tokens: other tests do.

use std::{
    fmt::Write as _,
    io,
    net::Ipv4Addr,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use rouse::units::Generation;
use rouse_controllers::workload::{PROXY_PORT, SPI_PORT};
use rouse_net::stub_api::{CloseGateRequest, EpochAnnouncement, GateStatus, OpenGateRequest};
use serde_json::{Value, json};
use tokio::{
    net::TcpListener,
    sync::{mpsc, watch},
    task::{JoinHandle, JoinSet},
    time::sleep,
};

use super::wire::{StubConnection, StubRequest, TOKEN_TIME};

/// What the kubelet's probe of a Pod's stub finds from now on: the Pod's name, and whether it is ready.
pub(super) type PodReadiness = (String, bool);

/// Whether engines have metrics. Most checks are of a fleet without any.
static HAS_METRICS: AtomicBool = AtomicBool::new(false);

/// A page as large as one of vLLM.
static METRICS: LazyLock<String> = LazyLock::new(|| {
    let mut page = "vllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.4\n".to_owned();
    for bucket in 0..400 {
        let labels = format!("engine=\"0\",le=\"{bucket}.0\",model_name=\"organisation/model\"");
        writeln!(page, "vllm:e2e_request_latency_seconds_bucket{{{labels}}} {bucket}").unwrap();
    }
    page
});

/// From now on all engines have metrics.
pub(super) fn serve_metrics() {
    HAS_METRICS.store(true, Relaxed);
}

/// The stub and the engine of one Pod.
struct Stub {
    pod: String,
    accelerator: String,
    /// Its leases are the requests in flight.
    gate: watch::Sender<GateStatus>,
    readiness: mpsc::UnboundedSender<PodReadiness>,
}

/// The listeners of one Pod. The drop closes them and cuts their connections.
pub(super) struct StubServer(JoinHandle<()>);

impl Drop for StubServer {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl StubServer {
    /// Listens at this address, and returns once both ports take connections.
    pub(super) async fn start(
        address: Ipv4Addr,
        pod: String,
        accelerator: String,
        readiness: mpsc::UnboundedSender<PodReadiness>,
    ) -> io::Result<Self> {
        let spi = TcpListener::bind((address, SPI_PORT)).await?;
        let proxy = TcpListener::bind((address, PROXY_PORT)).await?;
        let closed = GateStatus {
            gated: true,
            epoch: 0,
            generation: Generation(0),
            leases: 0,
            deadline: None,
            cut: None,
        };
        let stub = Arc::new(Stub { pod, accelerator, gate: watch::Sender::new(closed), readiness });
        Ok(Self(tokio::spawn(serve(stub, spi, proxy))))
    }
}

async fn serve(stub: Arc<Stub>, spi: TcpListener, proxy: TcpListener) {
    let mut connections = JoinSet::new();
    loop {
        let (accepted, is_spi) = tokio::select! {
            accepted = spi.accept() => (accepted, true),
            accepted = proxy.accept() => (accepted, false),
            Some(_) = connections.join_next() => continue,
        };
        let (stream, _) = accepted.expect("a listener accepts while descriptors last");
        // An answer leaves at once. An error means that the peer is gone.
        stream.set_nodelay(true).ok();
        let stub = Arc::clone(&stub);
        connections.spawn(async move {
            let mut connection = StubConnection::new(stream);
            while let Some(request) = connection.next().await {
                let replied = if is_spi {
                    stub.obey(&mut connection, &request).await
                } else {
                    stub.forward(&mut connection, &request).await
                };
                if replied.is_none() || request.closes {
                    return;
                }
            }
        });
    }
}

impl Stub {
    /// Answers a call of the leader.
    async fn obey(&self, connection: &mut StubConnection, request: &StubRequest) -> Option<()> {
        match (&*request.method, &*request.path) {
            ("GET", "/v1/dual-pods/accelerators") => {
                return connection.reply(200, &json!([self.accelerator])).await;
            }
            ("PUT", "/v1/proxy/config") => return connection.reply(200, &json!({})).await,
            ("POST", "/v1/become-ready" | "/v1/become-unready") => {
                let ready = request.path == "/v1/become-ready";
                // The receiver lives as long as the runner of all Pods.
                self.readiness.send((self.pod.clone(), ready)).ok();
                return connection.reply(200, &json!({})).await;
            }
            ("GET", "/v1/gate") => {}
            ("POST", "/v1/epoch") => {
                let EpochAnnouncement { epoch } = serde_json::from_slice(&request.body).ok()?;
                self.gate.send_modify(|gate| gate.epoch = gate.epoch.max(epoch));
            }
            ("DELETE", "/v1/gate") => {
                let OpenGateRequest { epoch, generation } = serde_json::from_slice(&request.body).ok()?;
                self.set_gate(false, epoch, generation);
            }
            ("POST", "/v1/gate") => {
                let CloseGateRequest { epoch, generation, .. } =
                    serde_json::from_slice(&request.body).ok()?;
                self.set_gate(true, epoch, generation);
                if request.query.contains("wait=true") {
                    let mut gate = self.gate.subscribe();
                    gate.wait_for(|gate| gate.leases == 0 || !gate.gated).await.ok()?;
                }
            }
            // Without a driver it does not know how much memory is in use.
            _ => return connection.reply(500, &json!({"error": "no such call"})).await,
        }
        let gate = *self.gate.borrow();
        connection.reply(200, &serde_json::to_value(gate).ok()?).await
    }

    fn set_gate(&self, gated: bool, epoch: u64, generation: Generation) {
        self.gate.send_modify(|gate| *gate = GateStatus { gated, epoch, generation, ..*gate });
    }

    /// Answers a request to the engine, unless the gate is closed.
    async fn forward(&self, connection: &mut StubConnection, request: &StubRequest) -> Option<()> {
        let Some(_lease) = StubLease::of(&self.gate) else { return connection.reply_gated().await };
        match (&*request.method, &*request.path) {
            ("GET", "/health") => connection.reply(200, &json!({})).await,
            ("GET", "/metrics") if HAS_METRICS.load(Relaxed) => connection.reply_text(&METRICS).await,
            ("POST", "/v1/chat/completions") => {
                let body: Value = serde_json::from_slice(&request.body).ok()?;
                let tokens = body["max_tokens"].as_u64().unwrap_or(1);
                if body["stream"] == true {
                    return connection.stream_tokens(tokens).await;
                }
                sleep(TOKEN_TIME * u32::try_from(tokens).ok()?).await;
                connection.reply(200, &whole_answer(&body["model"], tokens)).await
            }
            _ => connection.reply(404, &json!({"error": "no such path"})).await,
        }
    }
}

fn whole_answer(model: &Value, tokens: u64) -> Value {
    json!({
        "id": "c",
        "object": "chat.completion",
        "model": model,
        "choices": [{
            "index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop",
        }],
        "usage": {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1},
    })
}

/// A request in flight to the engine.
struct StubLease<'a>(&'a watch::Sender<GateStatus>);

impl<'a> StubLease<'a> {
    /// `None`: the gate is closed.
    fn of(gate: &'a watch::Sender<GateStatus>) -> Option<Self> {
        let open = gate.send_if_modified(|gate| {
            gate.leases += u32::from(!gate.gated);
            !gate.gated
        });
        open.then(|| Self(gate))
    }
}

impl Drop for StubLease<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|gate| gate.leases -= 1);
    }
}
