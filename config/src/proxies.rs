//! Reads `listen.proxies`: the proxies in front of the inference API, and how they name their clients.
//!
//! Whatever a client sends about its address is worthless, so the gateway believes only peers in networks that the
//! operator lists, and only the one header that the operator names. A proxy that maintains `X-Forwarded-For` passes a
//! forged `Forwarded` through unchanged.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    str::FromStr,
};

use super::reader::{ConfigReader, ConfigSection};

/// The proxies whose word about their clients counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrustedProxies {
    /// The proxies' networks. Without any, every peer is a client of its own.
    pub networks: Vec<IpNetwork>,
    /// Connections from these networks begin with a PROXY protocol v2 header.
    pub proxy_protocol: bool,
    pub header: ForwardedHeader,
}

/// The header in which the proxies name their clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ForwardedHeader {
    #[default]
    XForwardedFor,
    /// The header of RFC 7239.
    Forwarded,
    None,
}

/// A network of addresses, as in `10.0.0.0/8`.
///
/// An IPv4 address that is mapped into IPv6 counts as the IPv4 address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpNetwork {
    first: IpAddr,
    prefix: u32,
}

/// Why a text names no network.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IpNetworkError {
    #[error("'{0}' is not a network: write an address and a prefix length, like 10.0.0.0/8 or 2001:db8::/32")]
    Invalid(String),
    #[error("'{0}' has bits beyond its prefix: write '{1}' for the whole network")]
    HostBits(String, IpNetwork),
    #[error("'{0}' is IPv4 mapped into IPv6: write the IPv4 network")]
    Mapped(String),
}

impl TrustedProxies {
    /// Returns whether this address belongs to a trusted proxy.
    #[inline]
    #[must_use]
    pub fn trusts(&self, address: IpAddr) -> bool {
        self.networks.iter().any(|network| network.contains(address))
    }
}

impl IpNetwork {
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.first, address.to_canonical()) {
            (IpAddr::V4(first), IpAddr::V4(address)) => {
                first.to_bits() == address.to_bits() & mask_v4(self.prefix)
            }
            (IpAddr::V6(first), IpAddr::V6(address)) => {
                first.to_bits() == address.to_bits() & mask_v6(self.prefix)
            }
            _ => false,
        }
    }

    /// Returns whether the network has all addresses of its family.
    #[must_use]
    pub const fn is_everything(&self) -> bool {
        self.prefix == 0
    }
}

impl fmt::Display for IpNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.first, self.prefix)
    }
}

impl FromStr for IpNetwork {
    type Err = IpNetworkError;

    /// Parses `ADDRESS/PREFIX`, or `ADDRESS` for one address.
    fn from_str(text: &str) -> Result<Self, IpNetworkError> {
        let invalid = || IpNetworkError::Invalid(text.to_owned());
        let (address, prefix) = match text.split_once('/') {
            None => (text, None),
            Some((address, prefix)) => (address, Some(prefix)),
        };
        let address: IpAddr = address.parse().map_err(|_| invalid())?;
        let longest = if address.is_ipv4() { u32::BITS } else { u128::BITS };
        let prefix = match prefix {
            None => longest,
            // `u32` accepts a sign.
            Some(digits) if digits.bytes().all(|byte| byte.is_ascii_digit()) => {
                digits.parse().map_err(|_| invalid())?
            }
            Some(_) => return Err(invalid()),
        };
        if prefix > longest {
            return Err(invalid());
        }
        if address.to_canonical() != address {
            return Err(IpNetworkError::Mapped(text.to_owned()));
        }
        let first = match address {
            IpAddr::V4(address) => Ipv4Addr::from_bits(address.to_bits() & mask_v4(prefix)).into(),
            IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & mask_v6(prefix)).into(),
        };
        let network = Self { first, prefix };
        if first == address { Ok(network) } else { Err(IpNetworkError::HostBits(text.to_owned(), network)) }
    }
}

/// The mask of a network. A shift by the whole width has no result, which is the case of the prefix 0.
fn mask_v4(prefix: u32) -> u32 {
    u32::MAX.checked_shl(u32::BITS.saturating_sub(prefix)).unwrap_or(0)
}

fn mask_v6(prefix: u32) -> u128 {
    u128::MAX.checked_shl(u128::BITS.saturating_sub(prefix)).unwrap_or(0)
}

pub(super) fn proxies(reader: &mut ConfigReader, listen: &mut ConfigSection) -> TrustedProxies {
    listen.sub(reader, "proxies", |reader, section| {
        let at = section.at;
        let [protocol_at, header_at] =
            ["proxyProtocol", "header"].map(|key| section.location_of(key).unwrap_or(at));
        let problems = reader.problems.len();
        let networks = section
            .read(reader, "networks", |reader, node| reader.list(node, ConfigReader::parse::<IpNetwork>))
            .unwrap_or_default();
        let has_no_network = networks.is_empty() && reader.problems.len() == problems;
        let proxy_protocol = section.read(reader, "proxyProtocol", ConfigReader::flag).unwrap_or(false);
        let header = section
            .read(reader, "header", |reader, node| {
                reader.choice(
                    node,
                    &[
                        ("x-forwarded-for", ForwardedHeader::XForwardedFor),
                        ("forwarded", ForwardedHeader::Forwarded),
                        ("none", ForwardedHeader::None),
                    ],
                )
            })
            .unwrap_or_default();
        for (set, key, at) in [
            (proxy_protocol, "proxyProtocol", protocol_at),
            (header == ForwardedHeader::Forwarded, "header", header_at),
        ] {
            if set && has_no_network {
                reader.note(
                    at,
                    format_args!(
                        "{key} does nothing without networks: list those of your proxies, like [10.0.0.0/8]"
                    ),
                );
            }
        }
        if !networks.is_empty() && header == ForwardedHeader::None && !proxy_protocol {
            reader.note(
                header_at,
                "with header: none the proxies name no client: set proxyProtocol: true, or name their header",
            );
        }
        TrustedProxies { networks, proxy_protocol, header }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(text: &str) -> IpNetwork {
        text.parse().unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn a_network_contains_the_addresses_of_its_prefix_and_no_other() {
        for (text, inside, outside) in [
            ("10.0.0.0/8", ["10.0.0.0", "10.255.255.255"], ["11.0.0.0", "9.255.255.255"]),
            ("192.0.2.4/30", ["192.0.2.4", "192.0.2.7"], ["192.0.2.3", "192.0.2.8"]),
            ("192.0.2.1", ["192.0.2.1", "::ffff:192.0.2.1"], ["192.0.2.0", "192.0.2.2"]),
            ("10.0.0.0/8", ["::ffff:10.1.2.3", "10.1.2.3"], ["::10.1.2.3", "2001:db8::1"]),
            ("2001:db8::/32", ["2001:db8::", "2001:db8:ffff::1"], ["2001:db9::", "32.1.13.184"]),
            ("2001:db8::1", ["2001:db8::1", "2001:0db8::0001"], ["2001:db8::", "2001:db8::2"]),
            ("0.0.0.0/0", ["0.0.0.0", "255.255.255.255"], ["::", "2001:db8::1"]),
            ("::/0", ["::", "ffff::1"], ["0.0.0.0", "::ffff:0.0.0.0"]),
        ] {
            let network = network(text);
            assert!(inside.iter().all(|address| network.contains(address.parse().unwrap())), "{text}");
            assert!(!outside.iter().any(|address| network.contains(address.parse().unwrap())), "{text}");
            assert_eq!(network.to_string().parse(), Ok(network));
        }
        assert!(network("0.0.0.0/0").is_everything() && !network("0.0.0.0/1").is_everything());
    }

    #[test]
    fn every_prefix_length_masks_as_many_bits() {
        for prefix in 0..=32 {
            assert_eq!(mask_v4(prefix).count_ones(), prefix);
            assert_eq!(mask_v4(prefix).leading_ones(), prefix);
        }
        for prefix in 0..=128 {
            assert_eq!(mask_v6(prefix).count_ones(), prefix);
            assert_eq!(mask_v6(prefix).leading_ones(), prefix);
        }
    }

    #[test]
    fn a_text_that_is_no_network_is_refused_with_what_to_write() {
        for text in
            ["", "/8", "10/8", "10.0.0.0/", "10.0.0.0/33", "10.0.0.0/+8", "10.0.0.0/8/8", "::/129", "lb"]
        {
            assert_eq!(text.parse::<IpNetwork>(), Err(IpNetworkError::Invalid(text.to_owned())));
        }
        let error = |text: &str| text.parse::<IpNetwork>().unwrap_err().to_string();
        assert_eq!(
            error("10.1.0.0/8"),
            "'10.1.0.0/8' has bits beyond its prefix: write '10.0.0.0/8' for the whole network"
        );
        assert_eq!(
            error("::ffff:10.0.0.0/104"),
            "'::ffff:10.0.0.0/104' is IPv4 mapped into IPv6: write the IPv4 network"
        );
    }
}
