//! Binds listening sockets.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener},
    time::Duration,
};

use socket2::{Domain, Protocol, Socket, TcpKeepalive, Type};

/// How many connections may wait to be accepted.
const BACKLOG: i32 = 4096;
/// A peer silent for this long gets keepalive probes. A machine that lost power sends nothing, and its request would
/// hold the engine.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);

/// A port that cannot be bound.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot listen on the {name} port {address}: {source}; free it, or choose another one with --{name}-port"
)]
pub(crate) struct Error {
    pub(crate) name: &'static str,
    pub(crate) address: SocketAddr,
    pub(crate) source: io::Error,
}

/// Binds one port and logs it. Without a `host` it listens on IPv4 and IPv6.
pub(super) fn bind(name: &'static str, host: Option<IpAddr>, port: u16) -> Result<TcpListener, Error> {
    let any = || bind_socket(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)));
    let (address, bound) = match host {
        Some(host) => (SocketAddr::from((host, port)), bind_socket(SocketAddr::from((host, port)))),
        None => {
            let address = SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
            let bound = match any() {
                // The kernel has no IPv6.
                Err(error) if error.kind() != io::ErrorKind::AddrInUse => bind_socket(address),
                bound => bound,
            };
            (address, bound)
        }
    };
    let failed = |source| Error { name, address, source };
    let listener = bound.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    tracing::info!(port = name, %address, "listening");
    Ok(listener)
}

fn bind_socket(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    // Accepted connections inherit it from the listener.
    socket.set_tcp_keepalive(
        &TcpKeepalive::new().with_time(KEEPALIVE_IDLE).with_interval(KEEPALIVE_IDLE / 3).with_retries(3),
    )?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}
