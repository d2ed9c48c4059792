//! Tests which address a request counts against.

use http::{HeaderName, HeaderValue};
use rouse_config::ForwardedHeader;
use rouse_testing::random::TestRng;

use super::*;

fn proxies(header: ForwardedHeader) -> TrustedProxies {
    let networks = ["10.0.0.0/8", "2001:db8::/32"].map(|network| network.parse().unwrap()).to_vec();
    TrustedProxies { networks, proxy_protocol: false, header }
}

/// The client of a request that came from `peer` with these headers, in their order.
fn client(header: ForwardedHeader, peer: &str, headers: &[(&'static str, &str)]) -> String {
    let headers: HeaderMap = headers
        .iter()
        .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_str(value).unwrap()))
        .collect();
    rightmost_client(&proxies(header), peer.parse().unwrap(), &headers).to_string()
}

fn by_list(peer: &str, list: &str) -> String {
    client(ForwardedHeader::XForwardedFor, peer, &[("x-forwarded-for", list)])
}

fn by_forwarded(peer: &str, list: &str) -> String {
    client(ForwardedHeader::Forwarded, peer, &[("forwarded", list)])
}

#[test]
fn the_client_is_the_rightmost_address_that_is_no_proxy() {
    for (list, expected) in [
        ("203.0.113.9", "203.0.113.9"),
        ("198.51.100.1, 203.0.113.9", "203.0.113.9"),
        ("198.51.100.1, 203.0.113.9, 10.0.0.2", "203.0.113.9"),
        ("203.0.113.9:1234,10.0.0.2:80 , [2001:db8::7]:443", "203.0.113.9"),
        ("2001:4860::1, 2001:db8::7", "2001:4860::1"),
        ("::ffff:203.0.113.9, ::ffff:10.0.0.2", "203.0.113.9"),
        // All of them are proxies: the first is the client, such as a Pod of the proxies' own network.
        ("10.0.0.3, 10.0.0.2", "10.0.0.3"),
    ] {
        assert_eq!(by_list("10.0.0.1", list), expected, "{list}");
    }
}

#[test]
fn the_walk_ends_at_the_last_trusted_hop_before_what_is_no_address() {
    for (list, expected) in [
        ("203.0.113.9, unknown", "10.0.0.1"),
        ("203.0.113.9, unknown, 10.0.0.2", "10.0.0.2"),
        ("203.0.113.9, 10.0.0.300, 10.0.0.2", "10.0.0.2"),
        ("203.0.113.9, _hidden, 10.0.0.3, 10.0.0.2", "10.0.0.3"),
        ("", "10.0.0.1"),
        (" , ,", "10.0.0.1"),
    ] {
        assert_eq!(by_list("10.0.0.1", list), expected, "{list}");
    }
    for (list, expected) in [
        ("for=203.0.113.9, for=_hidden, for=10.0.0.2", "10.0.0.2"),
        ("for=203.0.113.9, for=unknown", "10.0.0.1"),
        ("for=203.0.113.9, by=10.0.0.2;proto=https", "10.0.0.1"),
        ("for=203.0.113.9, for=10.0.0.2;for=203.0.113.8", "10.0.0.1"),
    ] {
        assert_eq!(by_forwarded("10.0.0.1", list), expected, "{list}");
    }
}

#[test]
fn headers_of_an_untrusted_peer_and_of_another_name_change_nothing() {
    assert_eq!(by_list("192.0.2.1", "203.0.113.9"), "192.0.2.1");
    assert_eq!(by_list("::ffff:192.0.2.1", "10.0.0.2, 203.0.113.9"), "192.0.2.1");
    assert_eq!(by_forwarded("192.0.2.1", "for=203.0.113.9"), "192.0.2.1");
    // The proxy maintains one header only, and passes a forged other one through.
    let both = [("forwarded", "for=198.51.100.1"), ("x-forwarded-for", "203.0.113.9")];
    assert_eq!(client(ForwardedHeader::XForwardedFor, "10.0.0.1", &both), "203.0.113.9");
    assert_eq!(client(ForwardedHeader::Forwarded, "10.0.0.1", &both), "198.51.100.1");
    assert_eq!(client(ForwardedHeader::None, "10.0.0.1", &both), "10.0.0.1");
    assert_eq!(
        client(ForwardedHeader::XForwardedFor, "10.0.0.1", &[("x-real-ip", "203.0.113.9")]),
        "10.0.0.1"
    );
}

#[test]
fn several_lines_of_a_header_are_one_list() {
    let lines = [("x-forwarded-for", "198.51.100.1"), ("x-forwarded-for", "203.0.113.9, 10.0.0.3")];
    assert_eq!(client(ForwardedHeader::XForwardedFor, "10.0.0.1", &lines), "203.0.113.9");
    let lines = [("forwarded", "for=\"[2001:4860::1]:9\""), ("forwarded", "for=10.0.0.3")];
    assert_eq!(client(ForwardedHeader::Forwarded, "10.0.0.1", &lines), "2001:4860::1");
}

#[test]
fn a_row_of_proxies_without_end_is_not_walked() {
    let mut list = "203.0.113.9".to_owned();
    (0..MAX_HOPS).for_each(|_| list.push_str(", 10.0.0.2"));
    assert_eq!(by_list("10.0.0.1", &list), "10.0.0.2");
    assert_eq!(by_list("10.0.0.1", list.strip_suffix(", 10.0.0.2").unwrap()), "203.0.113.9");
}

/// Whatever the client sends, the proxy appends the client's address, and that one counts.
#[test]
fn nothing_that_a_client_sends_hides_its_address() {
    let pieces = [
        ",",
        ";",
        "=",
        "\"",
        "\\",
        " ",
        "for=",
        "for=\"",
        "10.0.0.9",
        "198.51.100.7",
        "[2001:db8::1]",
        "_x",
        "unknown",
        "proto=https",
        "\t",
    ];
    for seed in 0..20_000 {
        let mut random = TestRng(seed);
        let mut forged = String::new();
        for _ in 0..random.below(12) {
            forged.push_str(pieces[random.below(pieces.len() as u64) as usize]);
        }
        assert_eq!(by_list("10.0.0.1", &format!("{forged}, 203.0.113.9")), "203.0.113.9", "{forged}");
        for appended in
            ["for=203.0.113.9", "For=\"203.0.113.9:80\";proto=https", "by=\"a,\\\"b\";for=203.0.113.9"]
        {
            let list = format!("{forged}, {appended}");
            assert_eq!(by_forwarded("10.0.0.1", &list), "203.0.113.9", "{list}");
            let row = format!("{list}, for=10.0.0.2;by=x");
            assert_eq!(by_forwarded("10.0.0.1", &row), "203.0.113.9", "{row}");
        }
    }
}
