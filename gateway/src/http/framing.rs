//! What hyper takes and we do not: requests that another reader could understand as a different one.
//!
//! What passes here cannot be forwarded wrong in any case, since an engine's request is written anew from what was
//! understood, with a length of its own. But a proxy before us may have understood something else, and one that is told
//! so loudly is one that gets mended.

use http::{HeaderMap, Method, Uri, Version, header, request, uri::Authority};
use rouse::fault::Fault;

/// Refuses what is ambiguous. The connection is then to be closed: where its next request begins is a matter of opinion.
pub(super) fn check(parts: &request::Parts) -> Result<(), Fault> {
    let because = |why: &str| {
        Err(Fault::InvalidRequest { message: format!("the request's head is ambiguous: {why}"), param: None })
    };
    if !coded_plainly(&parts.headers) {
        return because("the only Transfer-Encoding understood is chunked, once");
    }
    let mut hosts = parts.headers.get_all(header::HOST).iter();
    let (host, more) = (hosts.next(), hosts.next());
    if more.is_some() {
        return because("there are several Host fields");
    }
    let named = match host.map(|host| host.to_str().ok().and_then(authority)) {
        None if parts.version == Version::HTTP_11 => return because("there is no Host"),
        Some(None) => return because("Host is no host"),
        None => None,
        Some(Some(host)) => Some(host),
    };
    // In HTTP/1 the target goes before Host; in HTTP/2 there is no target to have been rewritten by a proxy in between.
    if parts.version < Version::HTTP_2 || parts.method == Method::CONNECT {
        return Ok(());
    }
    if let (Some(named), Some(asked)) = (named.flatten(), parts.uri.authority())
        && !same(&named, asked, &parts.uri)
    {
        return because("Host is not what the request's target names");
    }
    Ok(())
}

fn coded_plainly(headers: &HeaderMap) -> bool {
    let mut codings = headers.get_all(header::TRANSFER_ENCODING).iter();
    let first = codings.next();
    codings.next().is_none() && first.is_none_or(|coding| coding.as_bytes().eq_ignore_ascii_case(b"chunked"))
}

/// `Some(None)` for an empty one, which a client sends when its target has none.
fn authority(host: &str) -> Option<Option<Authority>> {
    if host.is_empty() {
        return Some(None);
    }
    host.parse::<Authority>().ok().filter(|authority| !authority.as_str().contains('@')).map(Some)
}

/// A port that goes without saying may be said.
fn same(one: &Authority, other: &Authority, uri: &Uri) -> bool {
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
        check(&request.body(()).unwrap().into_parts().0)
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
