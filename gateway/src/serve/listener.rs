//! Sockets that listen.

use std::{io, net::SocketAddr};

use socket2::{Domain, Protocol, Socket, Type};

use super::Error;

/// How many connections may wait to be accepted, per listener.
const BACKLOG: i32 = 4096;

/// Binds `count` listeners to one address, for one thread each; the kernel spreads connections over them. Port 0 gives
/// all of them one free port.
pub(super) fn bind_shared(address: SocketAddr, count: usize) -> Result<Vec<std::net::TcpListener>, Error> {
    // A second gateway of the same user would share the port silently, so the port is first tried without sharing.
    if address.port() != 0 {
        let probe = open(address).map_err(|source| Error::Bind { address, source })?;
        bind(&probe, address)?;
    }
    let mut listeners = Vec::with_capacity(count);
    let mut at = address;
    for _ in 0..count.max(1) {
        let socket = open(at).map_err(|source| Error::Bind { address: at, source })?;
        let failed = |source| Error::Bind { address: at, source };
        socket.set_reuse_port(true).map_err(failed)?;
        bind(&socket, at)?;
        socket.listen(BACKLOG).map_err(failed)?;
        let listener = std::net::TcpListener::from(socket);
        at = listener.local_addr().map_err(failed)?;
        listeners.push(listener);
    }
    Ok(listeners)
}

/// Binds one listener that nobody shares.
pub(super) fn bind_one(address: SocketAddr) -> Result<std::net::TcpListener, Error> {
    let failed = |source| Error::Bind { address, source };
    let socket = open(address).map_err(failed)?;
    bind(&socket, address)?;
    socket.listen(BACKLOG).map_err(failed)?;
    Ok(socket.into())
}

fn open(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    socket.set_reuse_address(true)?;
    Ok(socket)
}

fn bind(socket: &Socket, address: SocketAddr) -> Result<(), Error> {
    socket.bind(&address.into()).map_err(|source| match source.kind() {
        io::ErrorKind::AddrInUse => Error::InUse(address),
        _ => Error::Bind { address, source },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listeners_share_one_port_and_a_second_gateway_is_told_that_it_is_taken() {
        let listeners = bind_shared("127.0.0.1:0".parse().unwrap(), 3).unwrap();
        let address = listeners[0].local_addr().unwrap();
        assert!(listeners.iter().all(|l| l.local_addr().unwrap() == address));
        let error = bind_shared(address, 1).unwrap_err();
        assert!(error.to_string().contains(&format!("address {address} is in use")), "{error}");
        assert!(matches!(bind_one(address), Err(Error::InUse(_))));
    }
}
