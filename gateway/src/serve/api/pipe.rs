//! A core without a listener, whose clients connect through in-memory pipes.

use std::{net::SocketAddr, rc::Rc, sync::Arc};

use tokio::{
    io::{DuplexStream, duplex},
    sync::watch,
};

use super::connections::WorkerConnections;
use crate::{
    http::{ServerContext, WorkerContext},
    serve::{ShutdownStage, balance::CoreLoads, client_address::ConnectionSource},
};

/// One core. Use it on a local runtime, which runs the tasks that serve its clients.
pub struct PipeServer(Rc<WorkerConnections>);

impl PipeServer {
    #[must_use]
    pub fn new(shared: Arc<ServerContext>, stage: watch::Receiver<ShutdownStage>) -> Self {
        let core = WorkerContext::new(shared, stage);
        let pool = core.pool.clone();
        tokio::task::spawn_local(async move { pool.expire().await });
        Self(WorkerConnections::new(core, Arc::default(), None, CoreLoads::new(1), 0))
    }

    /// Opens a connection and returns the client's end. `None`: the client's address gets no further connection.
    #[must_use]
    pub fn connect(&self, peer: SocketAddr) -> Option<DuplexStream> {
        let config = self.0.worker.server.config.load();
        let source = ConnectionSource::accepted(peer, &config, &self.0.address_limiter).ok()?;
        let (near, far) = duplex(rouse_net::tcp::pipe::PIPE_CAPACITY_BYTES);
        let guard = self.0.loads.add_connection(0);
        self.0.serve(near, peer, (source, guard), ShutdownStage::Serving);
        Some(far)
    }
}
