//! Sockets that listen, and how many connections an address may hold.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use pingora_limits::rate::Rate;
use rouse::units::Millis;
use socket2::{Domain, Protocol, Socket, Type};

use super::Error;
use crate::config::Limits;

/// How many connections may wait to be accepted, per listener.
const BACKLOG: i32 = 4096;
/// Over which time offences are counted.
const OFFENCES: Duration = Duration::from_secs(10);

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

/// What clients hold and do, by address, over all cores. Asked when a connection comes and goes, not per request.
///
/// Connections are counted exactly. Offences are counted by an estimator of fixed size, which many addresses cannot
/// fill and which may count too much for one of them, never too little. Of IPv6 the first 64 bits are an address: whoever
/// has one such network has all that is in it.
pub(super) struct Addresses {
    open: Mutex<HashMap<IpAddr, u32>>,
    offences: Rate,
}

/// One connection's place in the count.
pub(super) struct Place {
    address: IpAddr,
    of: Arc<Addresses>,
}

/// An address whose offences are counted.
#[derive(Clone)]
pub(crate) struct Offender {
    address: IpAddr,
    of: Arc<Addresses>,
}

/// Why an address gets no further connection now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refused {
    #[error("this address holds as many connections as limits.connectionsPerAddress allows")]
    TooMany,
    #[error("this address sent too much that is no request (limits.offencesPerAddress)")]
    Offends,
}

impl Refused {
    /// When trying again makes sense.
    pub(super) const fn retry_after(self) -> Millis {
        match self {
            Self::TooMany => Millis::secs(1),
            Self::Offends => Millis(OFFENCES.as_millis() as u64),
        }
    }
}

impl Default for Addresses {
    fn default() -> Self {
        Self { open: Mutex::default(), offences: Rate::new(OFFENCES) }
    }
}

impl Addresses {
    /// Refuses an address that holds as many connections as it may, or that offended too often in the present span or
    /// the one before.
    pub(super) fn enter(self: &Arc<Self>, address: IpAddr, limits: &Limits) -> Result<Place, Refused> {
        let address = counted(address);
        let most = f64::from(limits.offences_per_address);
        if most > 0.0 {
            let now = self.offences.observe(&address, 0) as f64;
            let before = self.offences.rate(&address) * OFFENCES.as_secs_f64();
            if now.max(before) > most {
                return Err(Refused::Offends);
            }
        }
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let count = open.entry(address).or_default();
        if *count >= limits.connections_per_address {
            return Err(Refused::TooMany);
        }
        *count += 1;
        Ok(Place { address, of: Arc::clone(self) })
    }
}

impl Place {
    pub(super) fn offender(&self) -> Offender {
        Offender { address: self.address, of: Arc::clone(&self.of) }
    }
}

impl Offender {
    pub(super) fn offends(&self) {
        self.of.offences.observe(&self.address, 1);
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

fn counted(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => address.into(),
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & (!0 << 64)).into(),
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

    fn limits(connections: u32, offences: u32) -> Limits {
        let config = crate::config::parse("", "test").unwrap();
        Limits { connections_per_address: connections, offences_per_address: offences, ..config.limits }
    }

    #[test]
    fn an_address_gets_its_place_back() {
        let addresses = Arc::<Addresses>::default();
        let here: IpAddr = "10.0.0.1".parse().unwrap();
        let place = addresses.enter(here, &limits(1, 0)).unwrap();
        assert_eq!(addresses.enter(here, &limits(1, 0)).err(), Some(Refused::TooMany));
        assert!(addresses.enter(here, &limits(2, 0)).is_ok(), "a limit that was raised holds at once");
        assert!(addresses.enter("10.0.0.2".parse().unwrap(), &limits(1, 0)).is_ok());
        drop(place);
        assert!(addresses.enter(here, &limits(1, 0)).is_ok());
    }

    #[test]
    fn a_network_of_ipv6_is_one_address() {
        let addresses = Arc::<Addresses>::default();
        let enter = |text: &str| addresses.enter(text.parse().unwrap(), &limits(1, 0));
        let _place = enter("2001:db8::1").unwrap();
        assert!(enter("2001:db8::ffff").is_err());
        assert!(enter("2001:db8:0:1::1").is_ok());
        let _mapped = enter("::ffff:10.0.0.1").unwrap();
        assert!(enter("10.0.0.1").is_err());
    }

    #[test]
    fn an_address_that_offends_too_often_gets_no_connection_and_others_do() {
        let addresses = Arc::<Addresses>::default();
        let (here, there) = ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
        let place = addresses.enter(here, &limits(9, 3)).unwrap();
        for _ in 0..4 {
            assert!(addresses.enter(here, &limits(9, 3)).is_ok());
            place.offender().offends();
        }
        assert_eq!(addresses.enter(here, &limits(9, 3)).err(), Some(Refused::Offends));
        assert!(addresses.enter(here, &limits(9, 0)).is_ok(), "0 switches it off");
        assert!(addresses.enter(there, &limits(9, 3)).is_ok());
    }
}
