//! Who may use the operators' API.
//!
//! With a token: whoever brings it. Without one: only processes of this machine, and no web page that a person of this
//! machine happens to look at. A page of a stranger can send requests to loopback; it cannot choose the `Host` that its
//! browser sends (which ends rebinding of names), and its writes carry its `Origin`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use axum::response::{IntoResponse, Response};
use http::{Method, Request, StatusCode, header, uri::Authority};

use crate::config::Admin;

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    NoToken,
    NotLocal,
    ForeignHost,
    ForeignOrigin,
}

pub(super) fn check<B>(admin: &Admin, request: &Request<B>, peer: SocketAddr) -> Result<(), Refusal> {
    match request.uri().path() {
        "/healthz" | "/readyz" => return Ok(()),
        "/metrics" if admin.metrics_open => return Ok(()),
        _ => {}
    }
    if let Some(token) = &admin.token {
        return if bearer(request).is_some_and(|sent| same(sent, token.as_bytes())) {
            Ok(())
        } else {
            Err(Refusal::NoToken)
        };
    }
    if !peer.ip().to_canonical().is_loopback() {
        return Err(Refusal::NotLocal);
    }
    let host = text(request, &header::HOST)
        .or_else(|| request.uri().authority().map(Authority::as_str))
        .unwrap_or_default();
    if !is_loopback(host) {
        return Err(Refusal::ForeignHost);
    }
    let writes = !matches!(*request.method(), Method::GET | Method::HEAD);
    if writes && request.headers().contains_key(header::ORIGIN) {
        let origin = text(request, &header::ORIGIN).unwrap_or_default();
        let host = origin.split_once("://").map_or("", |(_, host)| host);
        if !is_loopback(host) {
            return Err(Refusal::ForeignOrigin);
        }
    }
    Ok(())
}

/// The field's value, when it is there once; of several that would be a guess.
fn text<'a, B>(request: &'a Request<B>, name: &header::HeaderName) -> Option<&'a str> {
    let mut values = request.headers().get_all(name).iter();
    let value = values.next()?.to_str().ok();
    if values.next().is_some() { Some("") } else { value }
}

fn bearer<B>(request: &Request<B>) -> Option<&[u8]> {
    let value = request.headers().get(header::AUTHORIZATION)?.as_bytes();
    let (scheme, token) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| token.trim_ascii())
}

/// Compares in a time that depends on the length of what was sent and on nothing of the token but its length.
fn same(sent: &[u8], token: &[u8]) -> bool {
    let mut difference = sent.len() ^ token.len();
    for (at, byte) in sent.iter().enumerate() {
        let expected = token.get(at % token.len().max(1)).copied().unwrap_or(0);
        difference |= usize::from(std::hint::black_box(byte ^ expected));
    }
    difference == 0 && !token.is_empty()
}

fn is_loopback(authority: &str) -> bool {
    let Ok(authority) = authority.parse::<Authority>() else {
        return false;
    };
    // What is left of an authority beside its host is a port, or not one that a browser would send.
    let (host, rest) = authority.as_str().split_at(authority.host().len().min(authority.as_str().len()));
    if host != authority.host() || !(rest.is_empty() || authority.port_u16().is_some()) {
        return false;
    }
    let address = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(inner) => inner.parse::<Ipv6Addr>().map(IpAddr::from),
        None => host.parse::<Ipv4Addr>().map(IpAddr::from),
    };
    host.eq_ignore_ascii_case("localhost")
        || address.is_ok_and(|address| address.to_canonical().is_loopback())
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let (status, code, message) = match self {
            Self::NoToken => (StatusCode::UNAUTHORIZED, "invalid_token", "a valid bearer token is needed"),
            Self::NotLocal => {
                (StatusCode::FORBIDDEN, "not_local", "without admin.token only this machine may ask")
            }
            Self::ForeignHost => {
                (StatusCode::FORBIDDEN, "foreign_host", "without admin.token the Host must be a loopback one")
            }
            Self::ForeignOrigin => (
                StatusCode::FORBIDDEN,
                "foreign_origin",
                "without admin.token a web page of another origin may not give orders",
            ),
        };
        let mut response = super::error(status, code, message);
        if self == Self::NoToken {
            response
                .headers_mut()
                .insert(header::WWW_AUTHENTICATE, http::HeaderValue::from_static("Bearer realm=\"admin\""));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admin(token: Option<&str>, metrics_open: bool) -> Admin {
        Admin { address: "127.0.0.1:0".parse().unwrap(), token: token.map(str::to_owned), metrics_open }
    }

    fn ask(method: &str, path: &str, headers: &[(&str, &str)]) -> Request<()> {
        let request = Request::builder().method(method).uri(path);
        headers.iter().fold(request, |request, (name, value)| request.header(*name, *value)).body(()).unwrap()
    }

    const HERE: &str = "127.0.0.1:5000";

    #[test]
    fn a_token_is_asked_for_everywhere_but_where_probes_and_scrapers_go() {
        let admin = admin(Some("secret"), true);
        let peer = "10.1.2.3:9".parse().unwrap();
        for open in ["/healthz", "/readyz", "/metrics"] {
            assert_eq!(check(&admin, &ask("GET", open, &[]), peer), Ok(()));
        }
        for wrong in ["", "Bearer ", "Bearer secre", "Bearer secret2", "Basic secret", "Bearer secretsecret"]
        {
            let request = ask("GET", "/admin/v1/fleet", &[("authorization", wrong)]);
            assert_eq!(check(&admin, &request, peer), Err(Refusal::NoToken), "{wrong}");
        }
        let right = ask("POST", "/admin/v1/models/m/wake", &[("authorization", "bearer secret")]);
        assert_eq!(check(&admin, &right, peer), Ok(()));
    }

    #[test]
    fn metrics_need_the_token_when_configured_so() {
        let peer = HERE.parse().unwrap();
        let request = ask("GET", "/metrics", &[("host", "localhost")]);
        assert_eq!(check(&admin(Some("t"), false), &request, peer), Err(Refusal::NoToken));
        assert_eq!(check(&admin(None, false), &request, peer), Ok(()));
    }

    #[test]
    fn without_a_token_only_this_machine_asks_under_a_loopback_name() {
        let admin = admin(None, true);
        let fleet = |host| ask("GET", "/admin/v1/fleet", &[("host", host)]);
        for host in ["localhost:9090", "127.0.0.1", "[::1]:9090", "LOCALHOST"] {
            assert_eq!(check(&admin, &fleet(host), HERE.parse().unwrap()), Ok(()), "{host}");
        }
        for host in ["evil.example", "127.0.0.1.evil.example", "", "10.0.0.1"] {
            assert_eq!(
                check(&admin, &fleet(host), HERE.parse().unwrap()),
                Err(Refusal::ForeignHost),
                "{host}"
            );
        }
        let far = "192.0.2.1:1".parse().unwrap();
        assert_eq!(check(&admin, &fleet("localhost"), far), Err(Refusal::NotLocal));
    }

    /// What a name that was rebound to this machine would be sent with, and what a person types.
    #[test]
    fn hosts_by_spelling() {
        let admin = admin(None, true);
        let ask =
            |host| check(&admin, &ask("GET", "/admin/v1/fleet", &[("host", host)]), HERE.parse().unwrap());
        for host in [
            "localhost",
            "LocalHost:9090",
            "localhost:1",
            "127.0.0.1:9090",
            "127.1.2.3",
            "[::1]",
            "[::1]:9090",
            "[::ffff:127.0.0.1]:9090",
            "[0:0:0:0:0:0:0:1]",
        ] {
            assert_eq!(ask(host), Ok(()), "{host}");
        }
        for host in [
            "rebound.example",
            "rebound.example:9090",
            "localhost.rebound.example",
            "localhost.",
            "127.0.0.1.",
            "127.0.0.1.nip.example",
            "127-0-0-1.rebound.example",
            "localhost@rebound.example",
            "rebound.example@localhost",
            "localhost:9090@rebound.example",
            "localhost:9090:9090",
            "localhost:",
            "localhost:port",
            "localhost/rebound.example",
            "localhost#rebound.example",
            "localhost rebound.example",
            "localhost,rebound.example",
            "xlocalhost",
            "localhostx",
            "0.0.0.0:9090",
            "[::]:9090",
            "2130706433",
            "0x7f000001",
            "0177.0.0.1",
            "127.1",
            "::1",
            "[::1",
            "::1]",
            "[[::1]]",
            "[127.0.0.1]",
            "[localhost]",
            "[::1%25lo]",
            "[fe80::1]",
            "192.168.0.1",
            "169.254.169.254",
            "",
            " ",
        ] {
            assert_eq!(ask(host), Err(Refusal::ForeignHost), "{host}");
        }
    }

    #[test]
    fn two_hosts_are_none() {
        let admin = admin(None, true);
        let request = ask("GET", "/admin/v1/fleet", &[("host", "localhost"), ("host", "rebound.example")]);
        assert_eq!(check(&admin, &request, HERE.parse().unwrap()), Err(Refusal::ForeignHost));
    }

    #[test]
    fn origins_by_spelling() {
        let admin = admin(None, true);
        let order = |method, origin| {
            let request =
                ask(method, "/admin/v1/models/m/wake", &[("host", "localhost:9090"), ("origin", origin)]);
            check(&admin, &request, HERE.parse().unwrap())
        };
        for origin in
            ["http://localhost:9090", "http://LOCALHOST", "http://127.0.0.1:3000", "https://[::1]:9090"]
        {
            assert_eq!(order("POST", origin), Ok(()), "{origin}");
        }
        for origin in [
            "null",
            "",
            "http://",
            "localhost",
            "http://localhost.",
            "http://localhost.rebound.example",
            "http://rebound.example",
            "http://localhost@rebound.example",
            "http://rebound.example@localhost",
            "http://localhost http://rebound.example",
            "http://0.0.0.0:9090",
            "file://",
        ] {
            for method in ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"] {
                assert_eq!(order(method, origin), Err(Refusal::ForeignOrigin), "{method} {origin}");
            }
            assert_eq!(order("GET", origin), Ok(()), "{origin}: reading is no order, and no page reads it");
        }
    }

    #[test]
    fn without_a_token_a_foreign_page_gives_no_orders() {
        let admin = admin(None, true);
        let wake =
            |origin| ask("POST", "/admin/v1/models/m/wake", &[("host", "localhost"), ("origin", origin)]);
        let peer = HERE.parse().unwrap();
        assert_eq!(check(&admin, &wake("http://localhost:9090"), peer), Ok(()));
        for origin in ["https://evil.example", "null", "http://127.0.0.1.evil.example"] {
            assert_eq!(check(&admin, &wake(origin), peer), Err(Refusal::ForeignOrigin), "{origin}");
        }
    }
}
