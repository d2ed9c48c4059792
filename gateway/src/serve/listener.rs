//! Sockets that listen, and how many connections an address may hold.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
};

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

/// Connections by client address, over all cores. Asked when a connection comes and goes, not per request.
#[derive(Debug, Default)]
pub(super) struct Addresses {
    open: Mutex<HashMap<IpAddr, u32>>,
}

/// One connection's place in the count.
#[derive(Debug)]
pub(super) struct Place {
    address: IpAddr,
    of: Arc<Addresses>,
}

impl Addresses {
    /// `None` when the address already holds `most`, or more.
    pub(super) fn enter(self: &Arc<Self>, address: IpAddr, most: u32) -> Option<Place> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let count = open.entry(address).or_default();
        if *count >= most {
            return None;
        }
        *count += 1;
        Some(Place { address, of: Arc::clone(self) })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut open = self.of.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = open.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.address);
            }
        }
    }
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

    #[test]
    fn an_address_gets_its_place_back() {
        let addresses = Arc::<Addresses>::default();
        let here: IpAddr = "10.0.0.1".parse().unwrap();
        let place = addresses.enter(here, 1).unwrap();
        assert!(addresses.enter(here, 1).is_none());
        assert!(addresses.enter(here, 2).is_some(), "a limit that was raised holds at once");
        assert!(addresses.enter("10.0.0.2".parse().unwrap(), 1).is_some());
        drop(place);
        assert!(addresses.enter(here, 1).is_some());
    }
}
