//! A core without a listener, whose clients come through pipes in memory.

use std::{net::SocketAddr, rc::Rc, sync::Arc};

use tokio::{
    io::{DuplexStream, duplex},
    sync::watch,
};

use super::Connections;
use crate::{
    http::{Core, Shared},
    serve::{Stage, balance::Loads},
};

/// One core. To be used on a local runtime, which runs what serves its clients.
pub struct Here(Rc<Connections>);

impl Here {
    #[must_use]
    pub fn new(shared: Arc<Shared>, stage: watch::Receiver<Stage>) -> Self {
        let core = Core::new(shared, stage);
        let pool = core.pool.clone();
        tokio::task::spawn_local(async move { pool.expire().await });
        Self(Connections::new(core, Arc::default(), None, Loads::new(1), 0))
    }

    /// A client's end of a new connection; `None` when its address gets no more of them.
    #[must_use]
    pub fn connect(&self, peer: SocketAddr) -> Option<DuplexStream> {
        let limits = self.0.core.shared.config.load().limits;
        let place = self.0.addresses.enter(peer.ip(), &limits).ok()?;
        let (near, far) = duplex(rouse::tcp::pipe::ROOM);
        let seat = self.0.loads.seat(0);
        self.0.serve(near, peer, (place, seat), Stage::Serving);
        Some(far)
    }
}
