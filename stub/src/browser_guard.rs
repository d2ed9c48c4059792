//! Refuses requests that a web page sends.
//!
//! A browser that can reach a stub, through a tunnel or on its node, lends that reach to any page its user opens: most
//! requests need no preflight, and CORS only stops the page from reading the response. A page controls neither of two
//! headers. The browser sends the page's `Origin` with every request that changes state and with every cross-origin
//! read. A page whose name was rebound to this address is same-origin, but then the `Host` is that page's name, which
//! belongs to a domain that someone can register; no cluster-internal name does. Controllers, kubelets and Prometheus
//! use addresses and send no `Origin`. No page can present a token, so a caller that presents one may use any name.

use std::net::IpAddr;

use http::{HeaderMap, header, uri::Authority};

const ORIGIN_REFUSAL: &str =
    "the request has an Origin header, so it comes from a web page: controllers must not send one";
const HOST_REFUSAL: &str = "the Host header is a public name, as a web page may have: call the IP address, or \
     start the stub with a token and send it";
/// Suffixes of names that cannot be registered.
const INTERNAL_SUFFIXES: [&str; 3] = [".svc", ".svc.cluster.local", ".localhost"];

/// Returns why this request is refused as a web page's. `token`: this server requires a token.
pub(crate) fn refusal_reason(headers: &HeaderMap, token: bool) -> Option<&'static str> {
    if headers.contains_key(header::ORIGIN) {
        return Some(ORIGIN_REFUSAL);
    }
    let named = headers.get_all(header::HOST).iter().any(|host| is_public_name(host.as_bytes()));
    (named && !token).then_some(HOST_REFUSAL)
}

/// Whether a host is neither an address nor a name of this machine or cluster.
fn is_public_name(host: &[u8]) -> bool {
    let Ok(authority) = Authority::try_from(host) else { return true };
    let host = authority.host().to_ascii_lowercase();
    let plain = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(&host);
    let inside = !plain.contains('.') || INTERNAL_SUFFIXES.iter().any(|end| plain.ends_with(end));
    !inside && plain.parse::<IpAddr>().is_err()
}

#[cfg(test)]
mod tests {
    use http::{HeaderName, HeaderValue};

    use super::*;

    #[test]
    fn a_page_is_known_by_its_origin_and_without_a_token_by_its_name() {
        let of = |fields: &[(HeaderName, &'static str)], token| {
            let fields = fields.iter().map(|(name, value)| (name.clone(), HeaderValue::from_static(value)));
            refusal_reason(&fields.collect(), token)
        };
        for host in [
            "10.1.2.3:8001",
            "10.1.2.3",
            "[fd00::7]:8001",
            "localhost:8081",
            "LOCALHOST",
            "launcher:8001",
            "launcher.team.svc:8001",
            "launcher.team.SVC.cluster.local",
        ] {
            assert_eq!(of(&[(header::HOST, host)], false), None, "{host}");
            for origin in ["https://page.example", "null", "http://10.1.2.3:8001"] {
                let page = [(header::HOST, host), (header::ORIGIN, origin)];
                assert_eq!(of(&page, true), Some(ORIGIN_REFUSAL), "{host} {origin}");
            }
        }
        assert_eq!(of(&[], false), None, "HTTP/1.0");
        for host in [
            "page.example:8001",
            "page.example",
            "localhost.page.example",
            "10.1.2.3.page.example",
            "launcher.team.svc.page.example",
            "svc.example",
            "a b",
            "",
        ] {
            assert_eq!(of(&[(header::HOST, host)], false), Some(HOST_REFUSAL), "{host}");
            assert_eq!(of(&[(header::HOST, host)], true), None, "{host}");
        }
        assert_eq!(
            of(&[(header::HOST, "10.1.2.3"), (header::HOST, "page.example")], false),
            Some(HOST_REFUSAL)
        );
    }
}
