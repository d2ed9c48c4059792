//! Refuses requests that the connection accepts but that another HTTP parser could read differently.
//!
//! An accepted request cannot be forwarded wrongly, since the gateway writes the engine's request anew, with a length
//! of its own. But a proxy in front of the gateway may have parsed a different request, and a loud error gets that
//! proxy fixed.

use http::{Method, Uri, Version, request, uri::Authority};
use rouse::fault::Fault;

use super::known_headers::{KnownHeader, KnownHeaders};

/// Refuses an ambiguous head. The caller then closes the connection, since parsers may disagree about where its next
/// request begins.
pub(super) fn check(parts: &request::Parts, fields: &KnownHeaders<'_>) -> Result<(), Fault> {
    let because = |why: &str| {
        Err(Fault::InvalidRequest { message: format!("the request's head is ambiguous: {why}"), param: None })
    };
    if !has_plain_transfer_encoding(fields) {
        return because("the only supported Transfer-Encoding is chunked, given once");
    }
    if fields.is_repeated(KnownHeader::Host) {
        return because("there are several Host headers");
    }
    // In HTTP/1 the target overrides Host, so only HTTP/2 compares them: there, no proxy in between has rewritten a
    // target.
    let compared = parts.version >= Version::HTTP_2 && parts.method != Method::CONNECT;
    let named = match fields.first(KnownHeader::Host) {
        None if parts.version == Version::HTTP_11 => return because("the Host header is missing"),
        None => return Ok(()),
        Some(host) if !compared && is_plain_host(host.as_bytes()) => return Ok(()),
        Some(host) => host.to_str().ok().and_then(authority),
    };
    let Some(named) = named else { return because("the Host header is not a valid host") };
    if compared
        && let (Some(named), Some(asked)) = (named, parts.uri.authority())
        && !same_authority(&named, asked, &parts.uri)
    {
        return because("the Host header does not match the request's target");
    }
    Ok(())
}

/// Whether this is a plain name or IPv4 address, with or without a port. Nearly all clients send one, and this check is
/// cheaper than parsing an [`Authority`].
fn is_plain_host(host: &[u8]) -> bool {
    let mut parts = host.splitn(2, |byte| *byte == b':');
    let is_name = |name: &[u8]| {
        !name.is_empty()
            && name.iter().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-'))
    };
    let is_port = |port: &[u8]| (1..=5).contains(&port.len()) && port.iter().all(u8::is_ascii_digit);
    parts.next().is_some_and(is_name) && parts.next().is_none_or(is_port)
}

fn has_plain_transfer_encoding(fields: &KnownHeaders<'_>) -> bool {
    let first = fields.first(KnownHeader::TransferEncoding);
    !fields.is_repeated(KnownHeader::TransferEncoding)
        && first.is_none_or(|coding| coding.as_bytes().eq_ignore_ascii_case(b"chunked"))
}

/// Parses a Host. `Some(None)`: empty, as a client sends it when its target has no authority.
fn authority(host: &str) -> Option<Option<Authority>> {
    if host.is_empty() {
        return Some(None);
    }
    host.parse::<Authority>().ok().filter(|authority| !authority.as_str().contains('@')).map(Some)
}

/// Compares two authorities; a missing port equals the scheme's default port.
fn same_authority(one: &Authority, other: &Authority, uri: &Uri) -> bool {
    let usual = match uri.scheme_str() {
        Some("https") => 443,
        _ => 80,
    };
    let port = |authority: &Authority| authority.port_u16().unwrap_or(usual);
    one.host().eq_ignore_ascii_case(other.host()) && port(one) == port(other)
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn asked(target: &str, headers: &[(&str, &str)]) -> Result<(), Fault> {
        asked_in(Version::HTTP_11, target, headers)
    }

    fn asked_in(version: Version, target: &str, headers: &[(&str, &str)]) -> Result<(), Fault> {
        let request = Request::builder().uri(target).version(version);
        let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        let parts = request.body(()).unwrap().into_parts().0;
        check(&parts, &KnownHeaders::scan(&parts.headers))
    }

    #[test]
    fn one_host_that_says_what_the_target_says() {
        for (target, host) in [
            ("/v1/models", "gateway.example:8080"),
            ("/v1/models", "[::1]:8080"),
            ("/v1/models", ""),
            ("http://gateway.example/v1/models", "GATEWAY.example:80"),
            ("https://gateway.example/v1/models", "gateway.example:443"),
        ] {
            for version in [Version::HTTP_11, Version::HTTP_2] {
                assert!(asked_in(version, target, &[("host", host)]).is_ok(), "{target} {host}");
            }
        }
        for host in ["other.example", "gateway.example:81"] {
            let asked = |version| asked_in(version, "http://gateway.example/", &[("host", host)]);
            assert!(asked(Version::HTTP_11).is_ok() && asked(Version::HTTP_2).is_err(), "{host}");
        }
        for (target, host) in [("/v1/models", "a b"), ("/v1/models", "a/b"), ("/v1/models", "user@a")] {
            assert!(asked(target, &[("host", host)]).is_err(), "{target} {host}");
        }
        assert!(asked("/", &[]).is_err());
        assert!(asked("/", &[("host", "a"), ("host", "a")]).is_err());
    }

    #[test]
    fn chunked_once_and_nothing_else() {
        let with = |codings: &[&str]| {
            let mut headers = vec![("host", "a")];
            headers.extend(codings.iter().map(|coding| ("transfer-encoding", *coding)));
            asked("/", &headers)
        };
        for fine in [&["chunked"][..], &["Chunked"], &[]] {
            assert!(with(fine).is_ok(), "{fine:?}");
        }
        for bad in [&["gzip, chunked"][..], &["chunked", "chunked"], &["identity"], &["chunked,"], &[""]] {
            assert!(with(bad).is_err(), "{bad:?}");
        }
    }
}
