//! How many connections an address may hold, and how often it may offend before it gets no more.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use pingora_limits::rate::Rate;
use rouse::units::Millis;

use crate::{config::Limits, http::InFlight};

/// Over which time offences are counted.
const OFFENCES: Duration = Duration::from_secs(10);

/// What clients hold and do, by address, over all cores. Asked when a connection comes and goes, not per request.
///
/// Connections are counted exactly. Offences are counted by an estimator of fixed size, which many addresses cannot
/// fill and which may count too much for one of them, never too little. Of IPv6 the first 64 bits are an address: whoever
/// has one such network has all that is in it.
pub(super) struct Addresses {
    open: Mutex<HashMap<IpAddr, Open>>,
    offences: Rate,
}

/// What one address has open.
#[derive(Default)]
struct Open {
    connections: u32,
    /// What their requests hold in bodies. Counted on the way of requests, so each connection brings it along.
    bodies: Arc<InFlight>,
}

/// One connection's place in the count.
pub(super) struct Place {
    address: IpAddr,
    bodies: Arc<InFlight>,
    of: Arc<Addresses>,
}

/// An address whose offences are counted.
#[derive(Clone)]
pub(crate) struct Offender {
    address: IpAddr,
    bodies: Arc<InFlight>,
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
    /// the one before. The machine itself is never refused for offences: behind a local proxy it is everybody.
    pub(super) fn enter(self: &Arc<Self>, address: IpAddr, limits: &Limits) -> Result<Place, Refused> {
        let is_here = address.to_canonical().is_loopback();
        let address = counted(address);
        let most = f64::from(limits.offences_per_address);
        if most > 0.0 && !is_here {
            let now = self.offences.observe(&address, 0) as f64;
            let before = self.offences.rate(&address) * OFFENCES.as_secs_f64();
            if now.max(before) > most {
                return Err(Refused::Offends);
            }
        }
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let open = open.entry(address).or_default();
        if open.connections >= limits.connections_per_address {
            return Err(Refused::TooMany);
        }
        open.connections += 1;
        Ok(Place { address, bodies: Arc::clone(&open.bodies), of: Arc::clone(self) })
    }
}

impl Place {
    pub(super) fn offender(&self) -> Offender {
        Offender { address: self.address, bodies: Arc::clone(&self.bodies), of: Arc::clone(&self.of) }
    }
}

impl Offender {
    pub(super) fn bodies(&self) -> Arc<InFlight> {
        Arc::clone(&self.bodies)
    }

    pub(super) fn offends(&self) {
        self.of.offences.observe(&self.address, 1);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut open = self.of.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(here) = open.get_mut(&self.address) {
            here.connections -= 1;
            if here.connections == 0 {
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
        assert_eq!(Refused::Offends.retry_after(), Millis::secs(10));
        assert!(addresses.enter(here, &limits(9, 0)).is_ok(), "0 switches it off");
        assert!(addresses.enter(there, &limits(9, 3)).is_ok());
    }

    #[test]
    fn the_machine_itself_is_not_refused_for_what_it_passes_on() {
        let addresses = Arc::<Addresses>::default();
        for here in ["127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1"] {
            let here: IpAddr = here.parse().unwrap();
            let place = addresses.enter(here, &limits(9, 1)).unwrap();
            (0..9).for_each(|_| place.offender().offends());
            assert!(addresses.enter(here, &limits(9, 1)).is_ok(), "{here}");
        }
    }
}
