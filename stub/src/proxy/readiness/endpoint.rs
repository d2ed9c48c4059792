//! Validates the URLs that may be polled: `http://` and an IP address.
//!
//! A caller of the admin port can make the stub send requests into the cluster. The caller learns only one bit from
//! them, and the targets are limited to possible Pod addresses: a numeric unicast address, because a name could resolve
//! differently each time. Link-local addresses belong to no Pod, and clouds serve credentials there.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    str::FromStr,
};

use axum::http::{
    Uri,
    uri::{PathAndQuery, Scheme},
};

/// An endpoint that reports readiness.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PolledEndpoint {
    pub(super) address: SocketAddr,
    pub(super) path: PathAndQuery,
}

/// Why a URL is refused, worded as the end of a sentence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Error {
    #[error("is malformed")]
    Malformed,
    #[error("must begin with http://")]
    Scheme,
    #[error("must not contain a user name")]
    User,
    #[error("must have an IP address as its host, not a name")]
    Name,
    #[error("must have a unicast address that a Pod can have: {0} is not one")]
    Address(IpAddr),
    #[error("must have a port from 1 to 65535, or no port for 80")]
    Port,
}

impl FromStr for PolledEndpoint {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let uri: Uri = text.parse().map_err(|_| Error::Malformed)?;
        if uri.scheme() != Some(&Scheme::HTTP) {
            return Err(Error::Scheme);
        }
        let authority = uri.authority().ok_or(Error::Malformed)?;
        if authority.as_str().contains('@') {
            return Err(Error::User);
        }
        let host = authority.host();
        let ip: IpAddr = host
            .strip_prefix('[')
            .and_then(|host| host.strip_suffix(']'))
            .unwrap_or(host)
            .parse()
            .map_err(|_| Error::Name)?;
        let ip = ip.to_canonical();
        if !is_possible_pod_ip(ip) {
            return Err(Error::Address(ip));
        }
        let port = match (authority.port_u16(), authority.as_str().rsplit_once(host)) {
            (Some(port), _) => port,
            (None, Some((_, ""))) => 80,
            (None, _) => return Err(Error::Port),
        };
        if port == 0 {
            return Err(Error::Port);
        }
        let path = uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
        Ok(Self { address: SocketAddr::new(ip, port), path })
    }
}

impl fmt::Display for PolledEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}{}", self.address, self.path)
    }
}

/// Whether a Pod can have this address. Loopback passes, because an engine may run beside the stub.
pub(crate) fn is_possible_pod_ip(ip: IpAddr) -> bool {
    let of_one = !ip.is_unspecified() && !ip.is_multicast();
    of_one
        && match ip {
            IpAddr::V4(ip) => !ip.is_broadcast() && !ip.is_link_local() && ip.octets()[0] != 0,
            IpAddr::V6(ip) => !ip.is_unicast_link_local(),
        }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_one_host_are_places() {
        for (url, address, path) in [
            ("http://10.1.2.3:8000/health", "10.1.2.3:8000", "/health"),
            ("http://127.0.0.1/health?deep=1", "127.0.0.1:80", "/health?deep=1"),
            ("http://[2001:db8::5]:8000/", "[2001:db8::5]:8000", "/"),
            ("http://[::1]", "[::1]:80", "/"),
            ("HTTP://10.1.2.3:8000", "10.1.2.3:8000", "/"),
            ("http://[::ffff:10.1.2.3]:8000/health", "10.1.2.3:8000", "/health"),
        ] {
            let place: PolledEndpoint = url.parse().unwrap();
            assert_eq!((place.address.to_string(), place.path.as_str()), (address.to_owned(), path), "{url}");
        }
    }

    #[test]
    fn everything_else_is_refused_with_the_reason() {
        let address = |ip: &str| Error::Address(ip.parse().unwrap());
        for (url, error) in [
            ("", Error::Malformed),
            ("http://", Error::Malformed),
            ("http://10.0.0.1:99999/", Error::Port),
            ("/health", Error::Scheme),
            ("https://10.0.0.1/", Error::Scheme),
            ("file:///etc/passwd", Error::Malformed),
            ("http://me@10.0.0.1/", Error::User),
            ("http://me:secret@10.0.0.1:80/", Error::User),
            ("http://kubernetes.default.svc/", Error::Name),
            ("http://localhost:8000/health", Error::Name),
            ("http://0x7f000001/", Error::Name),
            ("http://2130706433/", Error::Name),
            ("http://127.1/", Error::Name),
            ("http://0.0.0.0/", address("0.0.0.0")),
            ("http://0.1.2.3/", address("0.1.2.3")),
            ("http://[::]/", address("::")),
            ("http://255.255.255.255/", address("255.255.255.255")),
            ("http://224.0.0.1/", address("224.0.0.1")),
            ("http://[ff02::1]/", address("ff02::1")),
            ("http://169.254.169.254/latest/meta-data", address("169.254.169.254")),
            ("http://[::ffff:169.254.169.254]/", address("169.254.169.254")),
            ("http://[fe80::1]/", address("fe80::1")),
            ("http://10.0.0.1:0/", Error::Port),
        ] {
            assert_eq!(url.parse::<PolledEndpoint>(), Err(error), "{url}");
        }
    }
}
