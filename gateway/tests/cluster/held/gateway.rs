//! A process whose writes are held on their way, such as a gateway's until another gateway has led and written.
//!
//! A link would hold everything that the process sends, its Lease too. So a proxy reads the requests, and holds those
//! that a test names. It has them all when the process is suspended or killed, and sends them to the API server later.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
};

use axum::{
    Router,
    body::{Body, to_bytes},
    extract::Request,
    response::{IntoResponse as _, Response},
};
use bytes::Bytes;
use http::{Method, StatusCode, request::Parts};
use k8s_openapi::api::coordination::v1::Lease;
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
    client,
};
use nix::sys::signal::Signal;
use rouse_cluster::{ClusterUser, TestCluster, wait::WAIT_TIMEOUT};
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::watch, task::JoinSet, time::timeout};

use crate::{
    installation::{ClusterGateway, Installation},
    runner::TestPrograms,
    site::{GatewayNamespace, LEASE_NAME},
};

/// A gateway that led, and was suspended when its writes were on their way. Its Lease is free.
pub(super) struct HeldGateway {
    /// The drop kills it.
    _process: ClusterGateway,
    writes: HeldWrites,
}

/// A proxy of the API server that holds writes.
pub(super) struct HeldWrites {
    hold: Arc<WriteHold>,
    kubeconfig: PathBuf,
    /// Ends with this.
    _proxy: JoinSet<()>,
}

/// The way of a process to the API server.
struct WriteHold {
    client: Client,
    /// The writes to hold: `METHOD END`, the end of the path with the name of the object.
    writes: &'static [&'static str],
    state: watch::Sender<WriteHoldState>,
}

/// What became of the writes. One that was given up and tried again is there twice.
#[derive(Debug, Default)]
struct WriteHoldState {
    arrived: Vec<&'static str>,
    is_over: bool,
    answers: Vec<(&'static str, StatusCode)>,
}

/// An installation without nodes, where nobody runs Pods.
pub(super) async fn world<'a>(cluster: &'a TestCluster, name: &str) -> Installation<'a, ()> {
    let site = GatewayNamespace::new(cluster, name).await;
    Installation {
        watched: site.namespace.name().to_owned(),
        site,
        runner: (),
        dir: tempfile::tempdir().unwrap(),
        program: TestPrograms::from_cargo().gateway,
        stub_image: "registry.example.com/stub:1".to_owned(),
    }
}

impl HeldGateway {
    /// Starts a gateway with more in its section `kubernetes`. Suspends it once each of these writes is held, and frees
    /// its Lease.
    pub(super) async fn start(
        world: &Installation<'_, ()>,
        kubernetes: &str,
        writes: &'static [&'static str],
    ) -> Self {
        let held = HeldWrites::start(world, &world.site.account, writes).await;
        let file = world.file("gateway-0", kubernetes, "");
        let process = ClusterGateway::start(&file, held.kubeconfig(), &[]);
        held.until_all_arrived().await;
        process.signal(Signal::SIGSTOP);
        let leases: Api<Lease> = world.site.namespace.api();
        let free = Patch::Merge(json!({"spec": {"holderIdentity": ""}}));
        leases.patch(LEASE_NAME, &PatchParams::default(), &free).await.unwrap();
        Self { _process: process, writes: held }
    }

    /// Lets the writes arrive, and asserts that the API server refuses each of them.
    pub(super) async fn deliver(&self) {
        for (write, answer) in self.writes.deliver().await {
            // A test in a JSON Patch that fails is the latter.
            let is_refused = [StatusCode::CONFLICT, StatusCode::UNPROCESSABLE_ENTITY].contains(&answer);
            assert!(is_refused, "{write}: {answer}");
        }
    }
}

impl HeldWrites {
    /// Starts the proxy for processes with this account.
    pub(super) async fn start(
        world: &Installation<'_, ()>,
        account: &ClusterUser,
        writes: &'static [&'static str],
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let kubeconfig = kubeconfig(world, account, listener.local_addr().unwrap());
        let client = world.site.cluster.client_as(account).await.unwrap();
        let state = watch::Sender::new(WriteHoldState::default());
        let hold = Arc::new(WriteHold { client, writes, state });
        let router = Arc::clone(&hold).router();
        let mut proxy = JoinSet::new();
        proxy.spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { hold, kubeconfig, _proxy: proxy }
    }

    /// The file with which a process gets to the proxy.
    pub(super) fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// Waits until each of the writes is held.
    pub(super) async fn until_all_arrived(&self) {
        self.hold.until_all_arrived().await;
    }

    /// Lets the writes arrive, and returns the answer of the API server to each of them.
    pub(super) async fn deliver(&self) -> Vec<(&'static str, StatusCode)> {
        let mut state = self.hold.state.subscribe();
        self.hold.state.send_modify(|state| state.is_over = true);
        let answered = state.wait_for(|state| state.answers.len() == state.arrived.len());
        timeout(WAIT_TIMEOUT, answered).await.expect("a write has no answer").unwrap().answers.clone()
    }
}

/// Writes a kubeconfig of an account by the proxy, which speaks plain HTTP.
fn kubeconfig(world: &Installation<'_, ()>, account: &ClusterUser, proxy: SocketAddr) -> PathBuf {
    let direct = world.site.cluster.kubeconfig(account).unwrap();
    let mut kubeconfig: Value = serde_json::from_str(&fs::read_to_string(direct).unwrap()).unwrap();
    kubeconfig["clusters"][0]["cluster"]["server"] = json!(format!("http://{proxy}"));
    let path = world.dir.path().join("held.kubeconfig");
    fs::write(&path, kubeconfig.to_string()).unwrap();
    path
}

impl WriteHold {
    fn router(self: Arc<Self>) -> Router {
        Router::new().fallback(move |request: Request| {
            let hold = Arc::clone(&self);
            // In a task of its own: a request that was sent arrives, even if its sender gives it up.
            async move { tokio::spawn(hold.pass(request)).await.unwrap() }
        })
    }

    /// Waits until each of the writes is held.
    async fn until_all_arrived(&self) {
        let mut state = self.state.subscribe();
        let all = state.wait_for(|state| self.writes.iter().all(|write| state.arrived.contains(write)));
        let in_time = timeout(WAIT_TIMEOUT, all).await.is_ok();
        assert!(in_time, "of {:?} only these were sent: {:?}", self.writes, self.state.borrow().arrived);
    }

    /// Sends a request to the API server: one to hold only once the hold is over.
    async fn pass(self: Arc<Self>, request: Request) -> Response {
        let (parts, body) = request.into_parts();
        let Ok(body) = to_bytes(body, usize::MAX).await else {
            return StatusCode::BAD_REQUEST.into_response();
        };
        let write = self.write_to_hold(&parts, &body);
        if let Some(write) = write {
            let mut state = self.state.subscribe();
            self.state.send_modify(|state| state.arrived.push(write));
            drop(state.wait_for(|state| state.is_over).await.unwrap());
        }
        let request = Request::from_parts(parts, client::Body::from(body));
        let answer = match self.client.send(request).await {
            Ok(answer) => answer.map(Body::new),
            Err(_) => StatusCode::BAD_GATEWAY.into_response(),
        };
        if let Some(write) = write {
            self.state.send_modify(|state| state.answers.push((write, answer.status())));
        }
        answer
    }

    fn write_to_hold(&self, parts: &Parts, body: &Bytes) -> Option<&'static str> {
        let mut path = parts.uri.path().to_owned();
        if parts.method == Method::POST {
            // The path of a creation has no name.
            let object: Value = serde_json::from_slice(body).unwrap_or_default();
            path = format!("{path}/{}", object["metadata"]["name"].as_str().unwrap_or_default());
        }
        self.writes.iter().copied().find(|write| {
            let (method, end) = write.split_once(' ').unwrap();
            parts.method == method && path.ends_with(end)
        })
    }
}
