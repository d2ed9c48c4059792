//! `node`: the agent that runs on each node of a cluster and offers the slots of its devices.

use std::{net::SocketAddr, path::PathBuf, process::ExitCode, sync::Arc, time::Duration};

use anyhow::Context as _;
use axum::{
    Router,
    extract::State,
    http::{StatusCode, header},
    response::IntoResponse,
    routing::get,
};
use clap::Args;
use prometheus::{Registry, TextEncoder, process_collector::ProcessCollector};
use rouse::units::Bytes;
use rouse_controllers::node_agent::{NodeAgentRuntime, NodeAgentSettings};
use rouse_net::fd_limit;
use rouse_platform::{ReadinessCheck, metric_builder::expect_valid};
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
};

use super::{LogFormat, serve::start_log};
use crate::{app::wall_anchored_clock, metrics::TelemetryDropCounters, serve::AdminServer};

/// Bound on threads for blocking calls: the driver's queries and name look-ups.
const MAX_BLOCKING_THREADS: usize = 32;
/// How long the end waits for blocking calls: a driver may hang for ever.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);

/// Settings of the node agent.
#[derive(Args, Debug)]
pub(super) struct NodeArgs {
    /// Name of this machine's Node.
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    node_name: String,
    /// The kubelet's folder.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet")]
    kubelet_dir: PathBuf,
    /// Socket of the container runtime, for a kubelet that does not list the devices of Pods.
    #[arg(long, value_name = "SOCKET", default_value = "/run/containerd/containerd.sock")]
    container_runtime: PathBuf,
    /// Address of health checks and metrics.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:9808", value_parser = rouse_config::parse_address)]
    admin: SocketAddr,
    /// List of the accelerators, for machines without an NVIDIA driver.
    #[arg(long, value_name = "FILE")]
    accelerators_file: Option<PathBuf>,
    /// Memory of each accelerator that no engine may reserve.
    #[arg(long, value_name = "SIZE", default_value = "1Gi")]
    headroom: Bytes,
    /// Format of the log lines.
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
}

/// What the admin listener shows.
#[derive(Clone)]
struct AgentPages {
    registry: Registry,
    not_ready: Arc<ReadinessCheck>,
}

/// Runs the agent until a signal ends it. Must be called before any thread starts.
pub(super) fn run(args: NodeArgs) -> anyhow::Result<ExitCode> {
    // The log starts a thread, and the descriptor table must grow before any thread exists.
    fd_limit::raise().context("cannot read the open file limit")?;
    let log = start_log(args.log_format, &TelemetryDropCounters::new())?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .max_blocking_threads(MAX_BLOCKING_THREADS)
        .enable_all()
        .build()
        .context("cannot start the async runtime")?;
    let ended = runtime.block_on(serve(args));
    runtime.shutdown_timeout(SHUTDOWN_TIMEOUT);
    // Flushes the log before the caller prints an error.
    log.close();
    ended.map(|()| ExitCode::SUCCESS)
}

async fn serve(args: NodeArgs) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot watch for signals")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot watch for signals")?;
    let listener = TcpListener::from_std(AdminServer::listen(args.admin)?)
        .context("cannot serve health checks and metrics")?;
    let registry = Registry::new();
    expect_valid(registry.register(Box::new(ProcessCollector::for_self())));
    let settings = NodeAgentSettings {
        node: args.node_name,
        kubelet_folder: args.kubelet_dir,
        container_runtime: args.container_runtime,
        accelerators_file: args.accelerators_file,
        headroom: args.headroom,
    };
    let agent = NodeAgentRuntime::start(settings, wall_anchored_clock(), &registry).await?;
    let pages = AgentPages { registry, not_ready: agent.not_ready_reason() };
    let router = Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .with_state(pages);
    let pages = tokio::spawn(axum::serve(listener, router).into_future());
    let stop = async {
        tokio::select! {
            _ = terminate.recv() => tracing::info!("SIGTERM received"),
            _ = interrupt.recv() => tracing::info!("SIGINT received"),
        }
    };
    let ended = agent.run(Box::pin(stop)).await;
    pages.abort();
    ended
}

async fn ready(State(pages): State<AgentPages>) -> (StatusCode, String) {
    match (pages.not_ready)() {
        None => (StatusCode::OK, "ok\n".to_owned()),
        Some(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
    }
}

async fn metrics(State(pages): State<AgentPages>) -> impl IntoResponse {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    (kind, TextEncoder::new().encode_to_string(&pages.registry.gather()).unwrap_or_default())
}
