//! Reads `X-Forwarded-For` and `Forwarded` (RFC 7239) from the right, where the nearest proxy writes.
//!
//! The left part of such a header comes from a client that may have written anything, an opening quote included. Read
//! from the left, that quote would swallow what the proxies append. So each list is split from its right end.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use http::{HeaderMap, HeaderName, header};
use rouse_config::ForwardedHeader;
use rouse_net::quoted::closing_quote;

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
/// A port has at most five digits.
const MAX_PORT_DIGITS: usize = 5;

/// Reads the address of one element.
type ElementParser = fn(&[u8]) -> Option<IpAddr>;

/// Returns the hops of a request's header from right to left. `None`: the entry is not an address, but hidden,
/// `unknown` or malformed.
pub(super) fn hops(kind: ForwardedHeader, headers: &HeaderMap) -> impl Iterator<Item = Option<IpAddr>> + '_ {
    let read: Option<(HeaderName, ElementParser)> = match kind {
        ForwardedHeader::XForwardedFor => Some((X_FORWARDED_FOR, parse_node)),
        ForwardedHeader::Forwarded => Some((header::FORWARDED, parse_forwarded_element)),
        ForwardedHeader::None => None,
    };
    read.into_iter().flat_map(move |(name, parse)| {
        let values = headers.get_all(name).into_iter().rev();
        values.flat_map(|value| ElementsFromRight(Some(value.as_bytes()))).map(parse)
    })
}

/// The elements of a comma-separated list, from right to left, without empty ones.
struct ElementsFromRight<'a>(Option<&'a [u8]>);

impl<'a> Iterator for ElementsFromRight<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        loop {
            let (element, before) = split_last_element(self.0?);
            self.0 = before;
            let element = element.trim_ascii();
            if !element.is_empty() {
                return Some(element);
            }
        }
    }
}

/// Splits the last element off a list. A comma inside of a quoted string separates nothing.
fn split_last_element(list: &[u8]) -> (&[u8], Option<&[u8]>) {
    let mut is_quoted = false;
    for (at, byte) in list.iter().enumerate().rev() {
        match byte {
            b'"' => is_quoted = !is_quoted || is_escaped(list, at),
            b',' if !is_quoted => return (list.get(at + 1..).unwrap_or_default(), list.get(..at)),
            _ => {}
        }
    }
    (list, None)
}

/// Whether an odd number of backslashes precedes this byte.
fn is_escaped(text: &[u8], at: usize) -> bool {
    let before = text.get(..at).unwrap_or_default();
    before.iter().rev().take_while(|byte| **byte == b'\\').count() % 2 == 1
}

/// Returns the address of an element's `for` parameter.
fn parse_forwarded_element(element: &[u8]) -> Option<IpAddr> {
    let mut node = None;
    let mut rest = element;
    while !rest.is_empty() {
        if let Some(after) = rest.strip_prefix(b";") {
            rest = after.trim_ascii_start();
            continue;
        }
        let (name, value, after) = split_parameter(rest)?;
        // Of two names one is made up, and nothing says which.
        if name.eq_ignore_ascii_case(b"for") && node.replace(value).is_some() {
            return None;
        }
        rest = after;
    }
    parse_node(node?)
}

/// Splits the first parameter off an element: its name, its value without quotes, and what follows, which is nothing or
/// begins with a semicolon.
fn split_parameter(text: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let equals = text.iter().position(|byte| *byte == b'=')?;
    let (name, value) = (text.get(..equals)?, text.get(equals + 1..)?);
    let (value, after) = match value.strip_prefix(b"\"") {
        Some(quoted) => {
            let end = closing_quote(quoted)?;
            (quoted.get(..end)?, quoted.get(end + 1..)?.trim_ascii_start())
        }
        None => {
            let end = value.iter().position(|byte| *byte == b';').unwrap_or(value.len());
            (value.get(..end)?.trim_ascii_end(), value.get(end..)?)
        }
    };
    (after.is_empty() || after.starts_with(b";")).then_some((name, value, after))
}

/// Parses an address with or without a port: `192.0.2.1`, `192.0.2.1:80`, `2001:db8::1`, `[2001:db8::1]`,
/// `[2001:db8::1]:80`.
fn parse_node(node: &[u8]) -> Option<IpAddr> {
    let text = std::str::from_utf8(node).ok()?;
    let address: IpAddr = if let Some(bracketed) = text.strip_prefix('[') {
        let (address, port) = bracketed.split_once(']')?;
        if !port.is_empty() && !is_port(port.strip_prefix(':')?) {
            return None;
        }
        address.parse::<Ipv6Addr>().ok()?.into()
    } else if let Ok(address) = text.parse() {
        address
    } else {
        let (address, port) = text.split_once(':')?;
        if !is_port(port) {
            return None;
        }
        address.parse::<Ipv4Addr>().ok()?.into()
    };
    Some(address.to_canonical())
}

/// Whether this is a port, or the obfuscated name of one, such as `_p1`.
fn is_port(text: &str) -> bool {
    match text.strip_prefix('_') {
        Some(hidden) => {
            let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
            !hidden.is_empty() && hidden.bytes().all(allowed)
        }
        None => (1..=MAX_PORT_DIGITS).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit()),
    }
}

#[cfg(test)]
mod tests;
