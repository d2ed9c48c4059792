//! Finds the address that a connection and its requests count against.
//!
//! Behind a load balancer every connection comes from the balancer's address. If that address had the limits of one
//! client, one abuser would use up everybody's share. So the gateway believes the proxies in `listen.proxies.networks`
//! about their clients. A peer outside of these networks is its own client, whatever it sends.
//!
//! A trusted proxy names its client in two ways. A PROXY protocol header precedes the first byte of a connection, TLS
//! included, and holds for the whole connection ([`proxy_protocol`]). `X-Forwarded-For` or `Forwarded` holds for one
//! request ([`forwarded`]), since a proxy sends the requests of many clients over one connection. Proxies also stand in
//! a row, so the client is the rightmost address that belongs to no trusted proxy. Every address further left was sent
//! by that client, which may have made it up.
//!
//! A connection of a client counts as a connection. A proxy's connections do not count, and each of its requests counts
//! as a connection of its client instead.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use http::HeaderMap;
use rouse_config::{Config, TrustedProxies};
use tokio::io::AsyncRead;

use super::{
    ShutdownStage,
    address_limiter::{AddressLimiter, ConnectionPermit, ConnectionRefusal},
    socket::ClientSocket,
    stream::ClientStream,
};
use crate::http::WorkerContext;

mod forwarded;
mod proxy_protocol;

use proxy_protocol::ProxyHeaderError;

/// The most proxies in a row. Whatever stands beyond them is not read.
const MAX_HOPS: usize = 64;
/// How long a proxy may still take for its header once the gateway drains.
const HEADER_TIMEOUT_WHILE_DRAINING: Duration = Duration::from_secs(1);

/// What a connection counts against.
pub(super) enum ConnectionSource {
    /// The connection of one client.
    Client(ConnectionPermit),
    /// The connection of a trusted proxy, whose requests count against their own clients.
    Proxy { sends_header: bool },
}

/// Why a connection ended before its client was known.
pub(super) enum UnknownSource {
    /// The client that the proxy named gets no further connection.
    Refused(ConnectionRefusal),
    /// The header is missing, invalid or late, and the log has the reason; or the gateway drains.
    NoHeader,
}

impl ConnectionSource {
    /// The source of a connection that was just accepted.
    ///
    /// # Errors
    /// The peer is a client that gets no further connection.
    pub(super) fn accepted(
        peer: SocketAddr,
        config: &Config,
        limiter: &Arc<AddressLimiter>,
    ) -> Result<Self, ConnectionRefusal> {
        if config.proxies.trusts(peer.ip()) {
            return Ok(Self::Proxy { sends_header: config.proxies.proxy_protocol });
        }
        limiter.admit(peer.ip(), &config.limits).map(Self::Client)
    }

    /// Records on the socket what its requests count against. Returns whether a header that is still to be read decides
    /// that instead: call [`resolve_proxy_header`] then.
    pub(super) fn register(self, socket: &ClientSocket, limiter: &Arc<AddressLimiter>) -> bool {
        match self {
            Self::Client(permit) => socket.set_permit(permit),
            Self::Proxy { sends_header: false } => socket.set_proxy_limiter(Arc::clone(limiter)),
            Self::Proxy { sends_header: true } => return true,
        }
        false
    }
}

/// Reads the header that begins a proxy's connection, and records what the connection's requests count against.
/// Afterwards the socket's peer is the address that the header names.
pub(super) async fn resolve_proxy_header(
    worker: &WorkerContext,
    limiter: &Arc<AddressLimiter>,
    socket: &ClientSocket,
) -> Result<(), UnknownSource> {
    let client = receive_header(worker, socket).await?;
    let config = worker.server.config.load();
    let source = match client {
        Some(client) => {
            socket.set_peer(client);
            match ConnectionSource::accepted(client, &config, limiter).map_err(UnknownSource::Refused)? {
                ConnectionSource::Proxy { .. } => ConnectionSource::Proxy { sends_header: false },
                known @ ConnectionSource::Client(_) => known,
            }
        }
        None => ConnectionSource::Proxy { sends_header: false },
    };
    source.register(socket, limiter);
    Ok(())
}

/// Reads the PROXY protocol header. `None`: the header names no client, so the proxy itself is.
async fn receive_header(
    worker: &WorkerContext,
    socket: &ClientSocket,
) -> Result<Option<SocketAddr>, UnknownSource> {
    let Some(mut wire) = socket.take_wire() else { return Err(UnknownSource::NoHeader) };
    let limit = worker.server.config.load().limits.header_read.duration();
    let read = tokio::select! {
        biased;
        read = read_within(limit, &mut wire) => read,
        () = drains(socket) => return Err(UnknownSource::NoHeader),
    };
    match read {
        Ok(client) => {
            socket.put_stream(ClientStream::Plain(wire));
            Ok(client)
        }
        Err(error) => {
            let peer = socket.peer().map(tracing::field::display);
            if let Some(status) = error.status() {
                worker.server.metrics_sink().connection_rejected(status);
                tracing::warn!(peer, "connection closed: {error}");
            } else {
                tracing::debug!(peer, "connection closed: {error}");
            }
            Err(UnknownSource::NoHeader)
        }
    }
}

async fn read_within(
    limit: Duration,
    wire: &mut (impl AsyncRead + Unpin),
) -> Result<Option<SocketAddr>, ProxyHeaderError> {
    let read = tokio::time::timeout(limit, proxy_protocol::read_header(wire)).await;
    read.unwrap_or(Err(ProxyHeaderError::Slow))
}

/// Completes when the gateway drains and no longer waits for a header.
async fn drains(socket: &ClientSocket) {
    socket.wait_for_stage(ShutdownStage::Draining).await;
    tokio::time::sleep(HEADER_TIMEOUT_WHILE_DRAINING).await;
}

/// Finds the client of a request. `None`: the request came through the admin API.
pub(crate) fn client_of_request(
    proxies: &TrustedProxies,
    socket: &ClientSocket,
    headers: &HeaderMap,
) -> Option<IpAddr> {
    let peer = socket.peer()?.ip();
    Some(match socket.proxy_limiter() {
        Some(_) => rightmost_client(proxies, peer, headers),
        None => peer,
    })
}

/// Returns the rightmost address of the header that is not a trusted proxy's.
///
/// The walk ends early at an entry that is no address: what is left of it came through a hop of which nothing is known.
/// The last trusted hop is then the client, which is `peer` itself if it named no other.
fn rightmost_client(proxies: &TrustedProxies, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
    let mut client = peer.to_canonical();
    for hop in forwarded::hops(proxies.header, headers).take(MAX_HOPS) {
        if !proxies.trusts(client) {
            break;
        }
        let Some(address) = hop else { break };
        client = address;
    }
    client
}

#[cfg(test)]
mod tests;
