//! Listening sockets.

use std::{io, net::SocketAddr, time::Duration};

use socket2::{Domain, Protocol, Socket, TcpKeepalive, Type};

use super::Error;

/// The most connections that may wait to be accepted, per listener.
const BACKLOG: i32 = 4096;
/// The kernel probes a peer that is silent for this long, a few times. A machine that lost its power sends nothing, and
/// its request would hold an engine until the request is over.
const KEEPALIVE_TIME: Duration = Duration::from_secs(30);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_RETRIES: u32 = 3;

/// The listeners' names in the configuration and on the command line.
const API_LISTENER: &str = "api";
const ADMIN_LISTENER: &str = "admin";

/// Sockets that are bound to one address. Until they listen, the kernel refuses connections to them.
#[derive(Debug)]
pub struct BoundSockets {
    address: SocketAddr,
    sockets: Vec<Socket>,
    listening: bool,
}

/// Binds `count` sockets to one address, one per thread; the kernel spreads connections over them. With port 0, all of
/// them get the same free port.
pub(super) fn bind_shared(address: SocketAddr, count: usize) -> Result<BoundSockets, Error> {
    check_unshared(address)?;
    let mut sockets = Vec::with_capacity(count);
    let mut at = address;
    for _ in 0..count.max(1) {
        let socket = open_socket(at).map_err(|source| Error::Bind { address: at, source })?;
        let failed = |source| Error::Bind { address: at, source };
        socket.set_reuse_port(true).map_err(failed)?;
        bind(&socket, at, API_LISTENER)?;
        at = local_address(&socket).map_err(failed)?;
        sockets.push(socket);
    }
    Ok(BoundSockets { address: at, sockets, listening: false })
}

impl BoundSockets {
    /// Listens, unless the sockets already do. Connections queue from here on.
    ///
    /// # Errors
    /// Another gateway has begun to listen on the port since it was bound here.
    pub fn listen(&mut self) -> Result<(), Error> {
        if self.listening {
            return Ok(());
        }
        let address = self.address;
        check_unshared(address)?;
        for socket in &self.sockets {
            socket.listen(BACKLOG).map_err(|source| bind_error(source, address, API_LISTENER))?;
        }
        self.listening = true;
        Ok(())
    }

    /// Returns the sockets as listeners.
    ///
    /// # Errors
    /// Those of [`Self::listen`].
    pub fn into_listeners(mut self) -> Result<Vec<std::net::TcpListener>, Error> {
        self.listen()?;
        Ok(self.sockets.into_iter().map(std::net::TcpListener::from).collect())
    }
}

/// Checks that no other gateway listens on this port.
///
/// A second gateway of the same user would share the port silently, so this binds the port without sharing. A gateway
/// that is bound and does not listen yet shows only when it listens.
fn check_unshared(address: SocketAddr) -> Result<(), Error> {
    if address.port() == 0 {
        return Ok(());
    }
    let probe = open_socket(address).map_err(|source| Error::Bind { address, source })?;
    bind(&probe, address, API_LISTENER)
}

/// Binds one listener without port sharing.
pub(super) fn bind_one(address: SocketAddr) -> Result<std::net::TcpListener, Error> {
    let failed = |source| Error::Bind { address, source };
    let socket = open_socket(address).map_err(failed)?;
    bind(&socket, address, ADMIN_LISTENER)?;
    socket.listen(BACKLOG).map_err(failed)?;
    Ok(socket.into())
}

/// The errors that a gateway would get if it bound these addresses now.
pub(crate) fn bind_errors(api: SocketAddr, admin: SocketAddr) -> impl Iterator<Item = Error> {
    let wanted =
        [(api, API_LISTENER), (admin, ADMIN_LISTENER)].into_iter().filter(|(address, _)| address.port() != 0);
    wanted.filter_map(|(address, listener)| {
        let socket = open_socket(address).map_err(|source| Error::Bind { address, source });
        socket.and_then(|socket| bind(&socket, address, listener)).err()
    })
}

fn open_socket(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    socket.set_reuse_address(true)?;
    // Accepted connections inherit keepalive from their listener.
    let keepalive = TcpKeepalive::new()
        .with_time(KEEPALIVE_TIME)
        .with_interval(KEEPALIVE_INTERVAL)
        .with_retries(KEEPALIVE_RETRIES);
    socket.set_tcp_keepalive(&keepalive)?;
    Ok(socket)
}

fn bind(socket: &Socket, address: SocketAddr, listener: &'static str) -> Result<(), Error> {
    socket.bind(&address.into()).map_err(|source| bind_error(source, address, listener))
}

fn bind_error(source: io::Error, address: SocketAddr, listener: &'static str) -> Error {
    match source.kind() {
        io::ErrorKind::AddrInUse => Error::InUse { address, listener },
        _ => Error::Bind { address, source },
    }
}

fn local_address(socket: &Socket) -> io::Result<SocketAddr> {
    let address = socket.local_addr()?.as_socket();
    address.ok_or_else(|| io::Error::other("the socket has no IP address"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn connections_are_asked_whether_their_peer_is_there() {
        for listener in [
            bind_one("127.0.0.1:0".parse().unwrap()).unwrap(),
            bind_shared("127.0.0.1:0".parse().unwrap(), 1).unwrap().into_listeners().unwrap().remove(0),
        ] {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            let _client = tokio::net::TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            let (accepted, _) = listener.accept().await.unwrap();
            let accepted = socket2::SockRef::from(&accepted);
            assert!(accepted.keepalive().unwrap());
            assert_eq!(accepted.tcp_keepalive_time().unwrap(), KEEPALIVE_TIME);
            assert_eq!(accepted.tcp_keepalive_interval().unwrap(), KEEPALIVE_INTERVAL);
            assert_eq!(accepted.tcp_keepalive_retries().unwrap(), KEEPALIVE_RETRIES);
        }
    }

    #[test]
    fn listeners_share_one_port_and_a_second_gateway_is_told_that_it_is_taken() {
        let bound = bind_shared("127.0.0.1:0".parse().unwrap(), 3).unwrap();
        let listeners = bound.into_listeners().unwrap();
        let address = listeners[0].local_addr().unwrap();
        assert!(listeners.iter().all(|l| l.local_addr().unwrap() == address));
        let error = bind_shared(address, 1).unwrap_err();
        let told = format!(
            "cannot listen on {address}: address in use by another process, maybe another gateway; find it with \
             `ss -ltnp 'sport = :{}'` and stop it, or set another address with --api ADDR or listen.api",
            address.port()
        );
        assert_eq!(error.to_string(), told);
        let error = bind_one(address).unwrap_err().to_string();
        assert!(error.ends_with("with --admin ADDR or listen.admin"), "{error}");
    }

    /// As in a cluster, where a gateway waits for its models before it listens.
    #[test]
    fn a_bound_port_refuses_connections_until_it_listens_and_two_gateways_never_share_it() {
        let mut first = bind_shared("127.0.0.1:0".parse().unwrap(), 2).unwrap();
        let address = first.address;
        let refused = std::net::TcpStream::connect(address).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        let mut second = bind_shared(address, 2).unwrap();
        first.listen().unwrap();
        std::net::TcpStream::connect(address).unwrap();
        for error in [second.listen().unwrap_err(), bind_shared(address, 2).unwrap_err()] {
            assert!(matches!(error, Error::InUse { listener: API_LISTENER, .. }), "{error}");
        }
        first.listen().unwrap();
        assert_eq!(first.into_listeners().unwrap().len(), 2);
    }
}
