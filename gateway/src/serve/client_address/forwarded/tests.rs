//! Tests the lists that proxies write, and those that clients forge.

use http::HeaderValue;
use rouse_testing::random::TestRng;

use super::*;

fn address(text: &str) -> Option<String> {
    parse_node(text.as_bytes()).map(|address| address.to_string())
}

#[test]
fn a_node_is_an_address_with_or_without_a_port() {
    for (text, expected) in [
        ("192.0.2.1", "192.0.2.1"),
        ("192.0.2.1:80", "192.0.2.1"),
        ("192.0.2.1:_p-1", "192.0.2.1"),
        ("2001:db8::1", "2001:db8::1"),
        ("[2001:db8::1]", "2001:db8::1"),
        ("[2001:db8::1]:65535", "2001:db8::1"),
        ("[::ffff:192.0.2.1]:1", "192.0.2.1"),
    ] {
        assert_eq!(address(text).as_deref(), Some(expected), "{text}");
    }
    for text in [
        "",
        "unknown",
        "_hidden",
        "192.0.2",
        "192.0.2.1:",
        "192.0.2.1:123456",
        "192.0.2.1:8x",
        "192.0.2.1:_",
        "192.0.2.01",
        "[192.0.2.1]",
        "[2001:db8::1",
        "[2001:db8::1]80",
        "[2001:db8::1]:",
        "2001:db8::1]",
        "fe80::1%eth0",
        "192.0.2.1 ",
        "\"192.0.2.1\"",
    ] {
        assert_eq!(address(text), None, "{text}");
    }
}

#[test]
fn an_element_names_its_client_in_one_for() {
    for (element, expected) in [
        ("for=192.0.2.43", Some("192.0.2.43")),
        ("For=192.0.2.43", Some("192.0.2.43")),
        ("for=\"192.0.2.43:47011\"", Some("192.0.2.43")),
        ("for=\"[2001:db8:cafe::17]:4711\"", Some("2001:db8:cafe::17")),
        ("for=192.0.2.60;proto=http;by=203.0.113.43", Some("192.0.2.60")),
        ("by=203.0.113.43; proto=http ;for=192.0.2.60", Some("192.0.2.60")),
        (";;for=192.0.2.60;", Some("192.0.2.60")),
        ("host=\"a;for=198.51.100.1\";for=192.0.2.60", Some("192.0.2.60")),
        ("host=\"a\\\";for=198.51.100.1\";for=192.0.2.60", Some("192.0.2.60")),
        ("for=unknown", None),
        ("for=_mdn", None),
        ("for=\"_SEVKISEK\"", None),
        ("for=", None),
        ("for=\"\"", None),
        ("for", None),
        ("proto=https", None),
        ("for=192.0.2.60;for=192.0.2.61", None),
        ("for=\"192.0.2.60", None),
        ("for=\"192.0.2.60\"x", None),
        ("for=\"192.0.2.6\\0\"", None),
        ("192.0.2.60", None),
        ("for =192.0.2.60", None),
    ] {
        let found = parse_forwarded_element(element.as_bytes()).map(|address| address.to_string());
        assert_eq!(found.as_deref(), expected, "{element}");
    }
}

#[test]
fn a_list_is_split_at_the_commas_outside_of_quotes() {
    let elements = |list: &'static str| {
        ElementsFromRight(Some(list.as_bytes()))
            .map(|element| std::str::from_utf8(element).unwrap())
            .collect::<Vec<_>>()
    };
    assert_eq!(elements("a, b ,\tc"), ["c", "b", "a"]);
    assert_eq!(elements("a,\"b,c\",d"), ["d", "\"b,c\"", "a"]);
    assert_eq!(elements("a,\"b\\\",c\",d"), ["d", "\"b\\\",c\"", "a"]);
    assert_eq!(elements("a,\"b\\\\\",c"), ["c", "\"b\\\\\"", "a"]);
    assert_eq!(elements(",, ,"), [""; 0]);
    assert_eq!(elements(""), [""; 0]);
    // The quote of a client does not swallow what a proxy appended.
    assert_eq!(elements("for=\", for=b, for=c")[..2], ["for=c", "for=b"]);
}

/// Every byte that a header may have, in lists of every shape: the parsers end, and give only what was there.
#[test]
fn any_text_is_read_without_a_panic_and_no_address_is_invented() {
    let alphabet = b",;=\"\\ \t[]:._-%for192unknown\xff";
    let mut addresses = 0;
    for seed in 0..50_000 {
        let mut random = TestRng(seed);
        let length = random.below(40);
        let mut bytes: Vec<u8> =
            (0..length).map(|_| alphabet[random.below(alphabet.len() as u64) as usize]).collect();
        if random.below(2) == 0 {
            bytes.extend_from_slice(b"for=192.0.2.1");
        }
        let Ok(value) = HeaderValue::from_bytes(&bytes) else { continue };
        let headers = HeaderMap::from_iter([(X_FORWARDED_FOR, value.clone()), (header::FORWARDED, value)]);
        for kind in [ForwardedHeader::XForwardedFor, ForwardedHeader::Forwarded] {
            for address in hops(kind, &headers).flatten() {
                let text = address.to_string();
                let is_there = bytes.windows(text.len()).any(|window| window == text.as_bytes());
                assert!(is_there || address.is_ipv6(), "{text} in {:?}", String::from_utf8_lossy(&bytes));
                addresses += 1;
            }
        }
    }
    assert!(addresses > 500, "{addresses}");
}
