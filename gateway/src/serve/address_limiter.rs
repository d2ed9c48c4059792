//! Limits the connections of a client address and the offences that it may commit.

use std::{
    cell::Cell,
    collections::HashMap,
    net::{IpAddr, Ipv6Addr},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use pingora_limits::rate::Rate;
use rouse::{
    fault::{Fault, WaitDetails},
    units::Millis,
};
use rouse_config::ApiLimits;

use crate::http::BodyByteCounter;

/// The period over which offences are counted.
const OFFENCE_WINDOW: Duration = Duration::from_secs(10);

/// The connections and offences of client addresses, over all cores. Checked when a connection opens or closes, and per
/// request only behind a trusted proxy, whose connections carry the requests of many clients.
///
/// Connections are counted exactly. Offences are counted by an estimator of fixed size, which many addresses cannot
/// fill. It may count too many for an address, never too few. The first 64 bits of an IPv6 address identify a client,
/// because the owner of such a network owns all addresses in it.
pub(crate) struct AddressLimiter {
    open: Mutex<HashMap<IpAddr, AddressUsage>>,
    offences: Rate,
}

/// The open resources of one address.
#[derive(Default)]
struct AddressUsage {
    connections: u32,
    /// The body bytes of the address's requests. Requests count here, so each connection carries the counter.
    body_bytes: Arc<BodyByteCounter>,
}

/// One connection's permit, counted until its release or its drop.
pub(super) struct ConnectionPermit {
    address: IpAddr,
    is_released: Cell<bool>,
    body_bytes: Arc<BodyByteCounter>,
    limiter: Arc<AddressLimiter>,
}

/// The permit of one request that a trusted proxy sent, counted as a connection of its client until its drop.
pub(crate) struct RequestPermit(ConnectionPermit);

/// What an address has too many of, so that it gets no further connection now, or no further request through a proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ConnectionRefusal {
    #[error("too many connections from this address (limits.connectionsPerAddress)")]
    Connections,
    #[error(
        "too many requests at a time from this address, each of which counts as a connection \
         (limits.connectionsPerAddress)"
    )]
    Requests,
    #[error("too many invalid requests or handshakes from this address (limits.offencesPerAddress)")]
    Offences,
}

impl ConnectionRefusal {
    /// The error that the client gets.
    pub(crate) fn fault(self) -> Fault {
        let wait = WaitDetails {
            waited_for: self.to_string(),
            retry_after: Some(self.retry_after()),
            ..WaitDetails::default()
        };
        Fault::QueueFull { message: self.to_string(), wait }
    }

    /// When a retry makes sense.
    const fn retry_after(self) -> Millis {
        match self {
            Self::Connections | Self::Requests => Millis::secs(1),
            Self::Offences => Millis(OFFENCE_WINDOW.as_millis() as u64),
        }
    }
}

impl Default for AddressLimiter {
    fn default() -> Self {
        Self { open: Mutex::default(), offences: Rate::new(OFFENCE_WINDOW) }
    }
}

impl AddressLimiter {
    /// Refuses an address over its connection limit or its offence limit. Offences of the current and the previous
    /// window count. Loopback is never refused for offences: behind a local proxy, all clients share it.
    pub(super) fn admit(
        self: &Arc<Self>,
        address: IpAddr,
        limits: &ApiLimits,
    ) -> Result<ConnectionPermit, ConnectionRefusal> {
        let is_here = address.to_canonical().is_loopback();
        let address = limiter_key(address);
        let most = f64::from(limits.offences_per_address);
        if most > 0.0 && !is_here {
            let now = self.offences.observe(&address, 0) as f64;
            let before = self.offences.rate(&address) * OFFENCE_WINDOW.as_secs_f64();
            if now.max(before) > most {
                return Err(ConnectionRefusal::Offences);
            }
        }
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let open = open.entry(address).or_default();
        if open.connections >= limits.connections_per_address {
            return Err(ConnectionRefusal::Connections);
        }
        open.connections += 1;
        Ok(ConnectionPermit {
            address,
            is_released: Cell::new(false),
            body_bytes: Arc::clone(&open.body_bytes),
            limiter: Arc::clone(self),
        })
    }

    /// Counts a request of this client as one of its connections. The limits are those of connections.
    pub(crate) fn admit_request(
        self: &Arc<Self>,
        client: IpAddr,
        limits: &ApiLimits,
    ) -> Result<RequestPermit, ConnectionRefusal> {
        self.admit(client, limits).map(RequestPermit).map_err(|refusal| match refusal {
            ConnectionRefusal::Connections => ConnectionRefusal::Requests,
            other => other,
        })
    }
}

impl RequestPermit {
    /// The address that stands for the client ([`limiter_key`]).
    pub(crate) const fn address(&self) -> IpAddr {
        self.0.address
    }

    /// The body bytes held by the client's address.
    pub(crate) fn body_bytes(&self) -> Arc<BodyByteCounter> {
        self.0.body_bytes()
    }

    pub(crate) fn record_offence(&self) {
        self.0.record_offence();
    }
}

impl ConnectionPermit {
    /// The body bytes held by the address.
    pub(super) fn body_bytes(&self) -> Arc<BodyByteCounter> {
        Arc::clone(&self.body_bytes)
    }

    pub(super) fn record_offence(&self) {
        self.limiter.offences.observe(&self.address, 1);
    }

    /// Stops counting the connection. Later calls have no effect.
    pub(super) fn release(&self) {
        if self.is_released.replace(true) {
            return;
        }
        let mut open = self.limiter.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(usage) = open.get_mut(&self.address) {
            usage.connections -= 1;
            if usage.connections == 0 {
                open.remove(&self.address);
            }
        }
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.release();
    }
}

/// The address that stands for a client: its IPv4 address, or the first 64 bits of its IPv6 address.
pub(crate) fn limiter_key(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => address.into(),
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & (!0 << 64)).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(connections: u32, offences: u32) -> ApiLimits {
        let config = rouse_config::parse("", "test").unwrap();
        ApiLimits { connections_per_address: connections, offences_per_address: offences, ..config.limits }
    }

    #[test]
    fn an_address_gets_its_place_back() {
        let addresses = Arc::<AddressLimiter>::default();
        let here: IpAddr = "10.0.0.1".parse().unwrap();
        let place = addresses.admit(here, &limits(1, 0)).unwrap();
        assert_eq!(addresses.admit(here, &limits(1, 0)).err(), Some(ConnectionRefusal::Connections));
        assert!(addresses.admit(here, &limits(2, 0)).is_ok(), "a limit that was raised holds at once");
        assert!(addresses.admit("10.0.0.2".parse().unwrap(), &limits(1, 0)).is_ok());
        place.release();
        let next = addresses.admit(here, &limits(1, 0)).unwrap();
        drop(place);
        assert!(addresses.admit(here, &limits(1, 0)).is_err(), "a place is given back once");
        drop(next);
        assert!(addresses.admit(here, &limits(1, 0)).is_ok());
    }

    #[test]
    fn a_request_through_a_proxy_counts_as_a_connection_of_its_client() {
        let addresses = Arc::<AddressLimiter>::default();
        let (here, there) = ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
        let connection = addresses.admit(here, &limits(2, 0)).unwrap();
        let request = addresses.admit_request(here, &limits(2, 0)).unwrap();
        assert!(Arc::ptr_eq(&request.body_bytes(), &connection.body_bytes()));
        let refusal = addresses.admit_request(here, &limits(2, 0)).err();
        assert_eq!(refusal, Some(ConnectionRefusal::Requests));
        assert!(addresses.admit_request(there, &limits(2, 0)).is_ok());
        drop(request);
        let request = addresses.admit_request(here, &limits(2, 2)).unwrap();
        (0..3).for_each(|_| request.record_offence());
        let refusal = addresses.admit_request(here, &limits(9, 2)).err();
        assert_eq!(refusal, Some(ConnectionRefusal::Offences));
        assert!(addresses.admit_request(there, &limits(2, 2)).is_ok());
    }

    #[test]
    fn a_network_of_ipv6_is_one_address() {
        let addresses = Arc::<AddressLimiter>::default();
        let enter = |text: &str| addresses.admit(text.parse().unwrap(), &limits(1, 0));
        let _place = enter("2001:db8::1").unwrap();
        assert!(enter("2001:db8::ffff").is_err());
        assert!(enter("2001:db8:0:1::1").is_ok());
        let _mapped = enter("::ffff:10.0.0.1").unwrap();
        assert!(enter("10.0.0.1").is_err());
    }

    #[test]
    fn an_address_that_offends_too_often_gets_no_connection_and_others_do() {
        let addresses = Arc::<AddressLimiter>::default();
        let (here, there) = ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
        let place = addresses.admit(here, &limits(9, 3)).unwrap();
        for _ in 0..4 {
            assert!(addresses.admit(here, &limits(9, 3)).is_ok());
            place.record_offence();
        }
        assert_eq!(addresses.admit(here, &limits(9, 3)).err(), Some(ConnectionRefusal::Offences));
        assert_eq!(ConnectionRefusal::Offences.retry_after(), Millis::secs(10));
        assert!(addresses.admit(here, &limits(9, 0)).is_ok(), "0 switches it off");
        assert!(addresses.admit(there, &limits(9, 3)).is_ok());
    }

    #[test]
    fn the_machine_itself_is_not_refused_for_what_it_passes_on() {
        let addresses = Arc::<AddressLimiter>::default();
        for here in ["127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1"] {
            let here: IpAddr = here.parse().unwrap();
            let place = addresses.admit(here, &limits(9, 1)).unwrap();
            (0..9).for_each(|_| place.record_offence());
            assert!(addresses.admit(here, &limits(9, 1)).is_ok(), "{here}");
        }
    }
}
