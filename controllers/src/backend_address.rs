//! Parses backend URLs and refuses forbidden addresses.
//!
//! An author of an InferenceModel could otherwise make the gateway send requests, and return the responses, from inside
//! its own Pod: to its admin port, to the node, or to a cloud's metadata service. This module refuses such an address
//! if the URL spells it, and [`forbidden`] checks each address again after name resolution.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use rouse_net::backend_origin::{BackendOrigin, BackendTls};

use rouse_platform::upstream_tls;

/// Where requests for a model of mode external go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendAddress {
    pub tls: bool,
    pub host: BackendHost,
    pub port: u16,
    /// Prefix of each request's path: empty, or starts with `/` and does not end with one.
    pub path: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BackendHost {
    /// A host name to resolve; the caller then checks each address with [`forbidden`]. A Service's name includes its
    /// namespace.
    Name(String),
    Address(IpAddr),
}

impl BackendAddress {
    /// Builds the origin that requests for this backend use.
    #[must_use]
    pub fn origin(&self) -> BackendOrigin {
        let name = match &self.host {
            BackendHost::Name(name) => name.clone(),
            BackendHost::Address(address) => address.to_string(),
        };
        let bare = if name.contains(':') { format!("[{name}]") } else { name.clone() };
        let usual = if self.tls { 443 } else { 80 };
        let host = if self.port == usual { bare } else { format!("{bare}:{}", self.port) };
        // Request paths already start with `/v1`, and users often configure the base URL that clients use.
        let path = self.path.strip_suffix("/v1").unwrap_or(&self.path);
        let tls = self.tls.then(|| Arc::new(upstream_tls::RootVerifiedTls::new(name)) as Arc<dyn BackendTls>);
        BackendOrigin::new(&host, path, tls)
    }
}

/// Why a backend is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error(
        "backendUrl '{0}' is not a valid http or https URL: set it to http://SERVICE:PORT, without user, query or \
         fragment"
    )]
    InvalidUrl(String),
    #[error(
        "backendUrl points to '{host}', which is {what}: the gateway never connects to such addresses. Use a Service \
         instead"
    )]
    Forbidden { host: String, what: &'static str },
    #[error(
        "backendUrl points to '{host}', which is not a Service of the namespace '{namespace}': use such a Service, or \
         have the gateway allow other backends (kubernetes.anyBackend)"
    )]
    OtherNamespace { host: String, namespace: String },
}

/// Parses the backend URL of a model in `namespace`. `anywhere` allows hosts that are not Services of that namespace.
///
/// # Errors
/// The text is not a backend URL, or the URL's host is forbidden or in another namespace.
pub fn parse_backend(url: &str, namespace: &str, anywhere: bool) -> Result<BackendAddress, Error> {
    let spelling = || Error::InvalidUrl(url.chars().take(256).collect());
    let uri: http::Uri = url.parse().map_err(|_| spelling())?;
    let tls = match uri.scheme_str() {
        Some("http") => false,
        Some("https") => true,
        _ => return Err(spelling()),
    };
    let authority = uri.authority().ok_or_else(spelling)?;
    // `parse` drops a fragment silently, so the check for `#` reads the text. The parsed parts show everything else.
    if authority.as_str().contains('@') || uri.query().is_some() || url.contains('#') {
        return Err(spelling());
    }
    let rest = authority.as_str().strip_prefix(authority.host()).ok_or_else(spelling)?;
    let port = match rest.strip_prefix(':') {
        None if rest.is_empty() => {
            if tls {
                443
            } else {
                80
            }
        }
        Some(port) => port.parse().ok().filter(|port| *port != 0).ok_or_else(spelling)?,
        None => return Err(spelling()),
    };
    let host = host(authority.host(), namespace, anywhere, &spelling)?;
    let path = uri.path().trim_end_matches('/').to_owned();
    Ok(BackendAddress { tls, host, port, path })
}

fn host(
    text: &str,
    namespace: &str,
    anywhere: bool,
    spelling: &dyn Fn() -> Error,
) -> Result<BackendHost, Error> {
    let refused = |what| Error::Forbidden { host: text.to_owned(), what };
    let foreign = || Error::OtherNamespace { host: text.to_owned(), namespace: namespace.to_owned() };
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
    let address = match bare {
        Some(bare) => Some(IpAddr::V6(bare.parse().map_err(|_| spelling())?)),
        None => text.parse().ok().map(IpAddr::V4),
    };
    if let Some(address) = address {
        return match forbidden(address) {
            Some(what) => Err(refused(what)),
            None if anywhere => Ok(BackendHost::Address(address)),
            None => Err(foreign()),
        };
    }
    let name = text.strip_suffix('.').unwrap_or(text).to_ascii_lowercase();
    if !is_name(&name) {
        return Err(spelling());
    }
    let labels: Vec<&str> = name.split('.').collect();
    // Resolvers read names such as 127.1, 0x7f000001 and 2130706433 as addresses.
    if labels.last().is_some_and(|last| last.starts_with(|c: char| c.is_ascii_digit())) {
        return Err(refused("an IP address in an unusual notation"));
    }
    if labels.last() == Some(&"localhost") {
        return Err(refused("the gateway itself"));
    }
    match labels.as_slice() {
        // A bare name would resolve in the gateway's own namespace.
        [service] => Ok(BackendHost::Name(format!("{service}.{namespace}.svc"))),
        [_, of] | [_, of, "svc"] | [_, of, "svc", "cluster", "local"] if *of == namespace => {
            Ok(BackendHost::Name(name))
        }
        _ if anywhere => Ok(BackendHost::Name(name)),
        _ => Err(foreign()),
    }
}

fn is_name(name: &str) -> bool {
    let label = |label: &str| {
        let bytes = label.as_bytes();
        let inside = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        (1..=63).contains(&bytes.len())
            && bytes.iter().all(inside)
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    name.len() <= 253 && name.split('.').all(label)
}

/// Returns the kind of address that no backend may have, or `None` for an allowed address.
#[must_use]
pub fn forbidden(address: IpAddr) -> Option<&'static str> {
    match address {
        IpAddr::V4(address) => forbidden_v4(address),
        IpAddr::V6(address) => match embedded_ipv4(address) {
            Some(inner) => forbidden_v4(inner).or_else(|| forbidden_v6(address)),
            None => forbidden_v6(address),
        },
    }
}

fn forbidden_v4(address: Ipv4Addr) -> Option<&'static str> {
    // Metadata services of Alibaba, Azure and Oracle, which are not at a link-local address.
    const METADATA: [[u8; 4]; 3] = [[100, 100, 100, 200], [168, 63, 129, 16], [192, 0, 0, 192]];
    let octets = address.octets();
    if address.is_loopback() {
        Some("a loopback address")
    } else if octets == [169, 254, 169, 254] || METADATA.contains(&octets) {
        Some("a metadata service's address")
    } else if address.is_link_local() {
        Some("a link-local address")
    } else if octets[0] == 0 {
        Some("the gateway itself")
    } else if octets[0] >= 224 {
        Some("a multicast or reserved address")
    } else {
        None
    }
}

fn forbidden_v6(address: Ipv6Addr) -> Option<&'static str> {
    // Metadata services of Amazon and Google.
    const METADATA: [[u16; 8]; 2] =
        [[0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254], [0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254]];
    if address.is_loopback() {
        Some("a loopback address")
    } else if METADATA.contains(&address.segments()) {
        Some("a metadata service's address")
    } else if address.segments()[0] & 0xffc0 == 0xfe80 {
        Some("a link-local address")
    } else if address.is_unspecified() {
        Some("the gateway itself")
    } else if address.is_multicast() {
        Some("a multicast address")
    } else {
        None
    }
}

/// Extracts the IPv4 address inside an IPv6 address: mapped, compatible, translated (NAT64) or tunnelled (6to4).
fn embedded_ipv4(address: Ipv6Addr) -> Option<Ipv4Addr> {
    let v4 = |high: u16, low: u16| {
        let ([a, b], [c, d]) = (high.to_be_bytes(), low.to_be_bytes());
        Ipv4Addr::new(a, b, c, d)
    };
    match address.segments() {
        // `::` and `::1` have their own meaning in IPv6.
        [0, 0, 0, 0, 0, 0, 0, 0 | 1] => None,
        [0, 0, 0, 0, 0, 0 | 0xffff, high, low] | [0x64, 0xff9b, 0, 0, 0, 0, high, low] => Some(v4(high, low)),
        [0x2002, high, low, ..] => Some(v4(high, low)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn there(url: &str) -> Result<BackendAddress, Error> {
        parse_backend(url, "team-a", true)
    }

    #[test]
    fn a_service_of_the_namespace_is_found_from_any_namespace() {
        let named = |url: &str| match parse_backend(url, "team-a", false).unwrap().host {
            BackendHost::Name(name) => name,
            BackendHost::Address(address) => panic!("{address}"),
        };
        assert_eq!(named("http://vllm:8000"), "vllm.team-a.svc");
        for name in ["vllm.team-a", "vllm.team-a.svc", "vllm.team-a.svc.cluster.local"] {
            assert_eq!(named(&format!("http://{name}/v1")), name);
        }
        assert_eq!(named("http://VLLM.team-a.SVC.:80"), "vllm.team-a.svc");
        for url in [
            "http://vllm.team-b",
            "http://vllm.team-b.svc",
            "http://example.com",
            "http://10.0.0.1",
            "http://vllm.team-a.svc.example.com",
            "http://vllm.team-a.example",
            "http://[2001:db8::1]",
        ] {
            assert!(
                matches!(parse_backend(url, "team-a", false), Err(Error::OtherNamespace { .. })),
                "{url}"
            );
            assert!(there(url).is_ok(), "{url}");
        }
    }

    #[test]
    fn a_url_is_taken_apart() {
        let host = || BackendHost::Name("api.example.com".into());
        let plain = BackendAddress { tls: false, host: host(), port: 80, path: String::new() };
        assert_eq!(there("http://api.example.com"), Ok(plain.clone()));
        assert_eq!(there("http://api.example.com/"), Ok(plain));
        let said = |url: &str| {
            let origin = there(url).unwrap().origin();
            (origin.host.to_string(), origin.path.to_string(), origin.tls.is_some())
        };
        let named = |host: &str, path: &str, tls| (host.to_owned(), path.to_owned(), tls);
        assert_eq!(said("http://api.example.com"), named("api.example.com", "", false));
        assert_eq!(
            said("https://api.example.com:8443/team/v1/"),
            named("api.example.com:8443", "/team", true)
        );
        assert_eq!(said("https://[2001:db8::1]/v1"), named("[2001:db8::1]", "", true));
        let tls = BackendAddress { tls: true, host: host(), port: 443, path: "/openai".into() };
        assert_eq!(there("https://api.example.com/openai/"), Ok(tls));
        assert_eq!(there("http://[2001:db8::1]:81/x").map(|backend| backend.port), Ok(81));
        for url in [
            "",
            "vllm",
            "vllm:8000",
            "/v1",
            "ftp://vllm",
            "http://",
            "http://:80",
            "http://a:0",
            "http://a:65536",
            "http://a:",
            "http://a:b",
            "http://user@a",
            "http://u:p@a/",
            "http://a/?x=1",
            "http://a/#f",
            "http://-a",
            "http://a..b",
            "http://a b",
            "http://[::1",
            "http://[v1.x]",
            "http://é",
        ] {
            assert!(matches!(there(url), Err(Error::InvalidUrl(_))), "{url}: {:?}", there(url));
        }
    }

    #[test]
    fn the_gateway_itself_its_node_and_metadata_services_are_refused_however_they_are_spelled() {
        for host in [
            "127.0.0.1",
            "127.255.0.1",
            "0.0.0.0",
            "0.1.2.3",
            "169.254.169.254",
            "169.254.0.1",
            "100.100.100.200",
            "168.63.129.16",
            "192.0.0.192",
            "224.0.0.1",
            "255.255.255.255",
            "[::1]",
            "[::]",
            "[fe80::1]",
            "[febf::1]",
            "[ff02::1]",
            "[fd00:ec2::254]",
            "[fd20:ce::254]",
            "[::ffff:127.0.0.1]",
            "[::ffff:169.254.169.254]",
            "[::ffff:0.0.0.0]",
            "[::ffff:0.0.0.1]",
            "[::127.0.0.1]",
            "[64:ff9b::169.254.169.254]",
            "[2002:7f00:1::]",
            "localhost",
            "LOCALHOST.",
            "a.localhost",
            "127.1",
            "2130706433",
            "0x7f000001",
            "0177.0.0.1",
            "1.2.3",
            "0x7f.1",
        ] {
            for anywhere in [false, true] {
                let found = parse_backend(&format!("http://{host}:8080/x"), "team-a", anywhere);
                assert!(matches!(found, Err(Error::Forbidden { .. })), "{host}: {found:?}");
            }
        }
        for address in ["10.0.0.1", "192.168.0.1", "2001:db8::1", "fd12::1", "::ffff:10.0.0.1"] {
            assert_eq!(forbidden(address.parse().unwrap()), None, "{address}");
        }
    }
}
