//! Access control of the admin API.
//!
//! With a token configured, the API accepts any request that carries the token. Without a token, it accepts only
//! processes of this machine, and rejects web pages opened in a browser on it. A foreign page can send requests to
//! loopback, but it cannot choose the `Host` that its browser sends (which defeats DNS rebinding), and its writes carry
//! its `Origin`.
//!
//! The page's own files hold no data. They need no token, because the page is where a person enters it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use axum::response::{IntoResponse, Response};
use http::{Method, Request, StatusCode, header, uri::Authority};

use rouse_config::AdminConfig;

use super::page;

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AdminRejection {
    NoToken,
    NotLocal,
    ForeignHost,
    ForeignOrigin,
}

pub(super) fn check<B>(
    admin: &AdminConfig,
    request: &Request<B>,
    peer: SocketAddr,
) -> Result<(), AdminRejection> {
    match request.uri().path() {
        "/healthz" | "/readyz" => return Ok(()),
        "/metrics" if admin.metrics_open => return Ok(()),
        _ => {}
    }
    if let Some(token) = &admin.token {
        if page::is_page_path(request.uri().path()) {
            return Ok(());
        }
        return if bearer(request).is_some_and(|sent| constant_time_eq(sent, token.as_bytes())) {
            Ok(())
        } else {
            Err(AdminRejection::NoToken)
        };
    }
    if !peer.ip().to_canonical().is_loopback() {
        return Err(AdminRejection::NotLocal);
    }
    let host = single_header(request, &header::HOST)
        .or_else(|| request.uri().authority().map(Authority::as_str))
        .unwrap_or_default();
    if !is_loopback(host) {
        return Err(AdminRejection::ForeignHost);
    }
    let writes = !matches!(*request.method(), Method::GET | Method::HEAD);
    if writes && request.headers().contains_key(header::ORIGIN) {
        let origin = single_header(request, &header::ORIGIN).unwrap_or_default();
        if !is_loopback_origin(origin) {
            return Err(AdminRejection::ForeignOrigin);
        }
    }
    Ok(())
}

/// The header's value if it occurs once. A repeated header yields `""`, since either value would be a guess.
fn single_header<'a, B>(request: &'a Request<B>, name: &header::HeaderName) -> Option<&'a str> {
    let mut values = request.headers().get_all(name).iter();
    let value = values.next()?.to_str().ok();
    if values.next().is_some() { Some("") } else { value }
}

fn bearer<B>(request: &Request<B>) -> Option<&[u8]> {
    let value = request.headers().get(header::AUTHORIZATION)?.as_bytes();
    let (scheme, token) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| token.trim_ascii())
}

/// Compares in time that depends only on the two lengths.
fn constant_time_eq(sent: &[u8], token: &[u8]) -> bool {
    let mut difference = sent.len() ^ token.len();
    for (at, byte) in sent.iter().enumerate() {
        let expected = token.get(at % token.len().max(1)).copied().unwrap_or(0);
        difference |= usize::from(std::hint::black_box(byte ^ expected));
    }
    difference == 0 && !token.is_empty()
}

/// Whether this is the origin of a page served by this machine.
pub(in crate::http) fn is_loopback_origin(origin: &str) -> bool {
    origin.split_once("://").is_some_and(|(_, host)| is_loopback(host))
}

fn is_loopback(authority: &str) -> bool {
    let Ok(authority) = authority.parse::<Authority>() else {
        return false;
    };
    // The rest of an authority after its host must be a port: a browser sends nothing else.
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

impl IntoResponse for AdminRejection {
    fn into_response(self) -> Response {
        let (status, code, message) = match self {
            Self::NoToken => (StatusCode::UNAUTHORIZED, "invalid_token", "a valid bearer token is required"),
            Self::NotLocal => (
                StatusCode::FORBIDDEN,
                "not_local",
                "without admin.token, the admin API accepts requests only from this machine",
            ),
            Self::ForeignHost => (
                StatusCode::FORBIDDEN,
                "foreign_host",
                "without admin.token, the Host header must be a loopback address or localhost",
            ),
            Self::ForeignOrigin => (
                StatusCode::FORBIDDEN,
                "foreign_origin",
                "without admin.token, the admin API rejects orders from a web page of another origin",
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
mod tests;
