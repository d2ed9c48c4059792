//! Tests which client a request counts for. Turns protect an idle model only for clients that do not wait for another
//! one.

use std::collections::BTreeSet;

use rouse::fault::Fault;

use crate::{
    http::testing::{InProcessGateway, MODEL, RawHttpClient, raw_request},
    keys,
};

/// The client hash that the gateway assigns to such a request from this address.
async fn client(gateway: &mut InProcessGateway, from: &str, headers: &str, fields: &str) -> u64 {
    let mut client = RawHttpClient::connect_from(from, gateway.address).await;
    let body = format!("{{\"model\":\"{MODEL}\"{fields}}}");
    client.send(raw_request("POST /v1/chat/completions", headers, &body)).await;
    let parked = gateway.next_parked().await;
    drop(parked.answer.send(Err(Fault::ShuttingDown)));
    client.read_response().await;
    parked.parking.client
}

const HERE: &str = "127.0.0.1:0";
const THERE: &str = "127.0.0.2:0";

#[tokio::test]
async fn a_client_without_a_key_is_the_user_or_session_that_it_names_else_its_address() {
    let mut gateway = InProcessGateway::start(|config| {
        config.proxies.networks = vec!["127.0.0.0/8".parse().unwrap()];
    });
    let gateway = &mut gateway;
    let mut told_apart = BTreeSet::new();
    for same in [
        // The named user wins over every other hint and address.
        [(HERE, "x-session-id: s\r\n", r#","user":"ann""#), (THERE, "", r#","safety_identifier":"ann""#)],
        [(HERE, "", r#","user":"bob""#), (HERE, "x-forwarded-for: 10.0.0.1\r\n", r#","user":"bob""#)],
        [(HERE, "x-session-id: one\r\n", r#","prompt_cache_key":"x""#), (THERE, "x-session-id: one\r\n", "")],
        [
            (HERE, "", r#","prompt_cache_key":"two""#),
            (THERE, "x-forwarded-for: 10.0.0.1\r\n", r#","prompt_cache_key":"two""#),
        ],
        [(HERE, "x-forwarded-for: 10.0.0.1\r\n", ""), (THERE, "x-forwarded-for: 10.0.0.1\r\n", "")],
        [(HERE, "x-forwarded-for: 2001:db8::1\r\n", ""), (THERE, "x-forwarded-for: 2001:db8::2\r\n", "")],
        [(HERE, "", ""), (HERE, "", r#","n":1"#)],
        [(THERE, "", ""), (THERE, "", r#","n":1"#)],
    ] {
        let [first, second] = same;
        let known = client(gateway, first.0, first.1, first.2).await;
        assert_eq!(known, client(gateway, second.0, second.1, second.2).await, "{same:?}");
        assert!(told_apart.insert(known), "as somebody else before: {same:?}");
    }
}

#[tokio::test]
async fn a_client_that_is_no_proxy_is_its_own_address_whatever_it_forwards() {
    let mut gateway = InProcessGateway::start(|_| {});
    let gateway = &mut gateway;
    let own = client(gateway, HERE, "", "").await;
    for header in ["x-forwarded-for: 10.0.0.1\r\n", "forwarded: for=10.0.0.1\r\n", "x-real-ip: 10.0.0.1\r\n"]
    {
        assert_eq!(client(gateway, HERE, header, "").await, own, "{header}");
    }
    assert_ne!(client(gateway, THERE, "", "").await, own);
}

#[tokio::test]
async fn a_client_with_a_key_is_that_key() {
    let file = format!("keys: [{{name: one, sha256: {}}}]", "0".repeat(64));
    let any = rouse_config::parse(&file, "test").unwrap().keys[0].clone();
    let key = |name: &str| rouse_config::KeyConfig {
        name: name.into(),
        hash: keys::sha256(name.as_bytes()),
        ..any.clone()
    };
    let mut gateway = InProcessGateway::start(|config| config.keys = vec![key("one"), key("two")].into());
    let gateway = &mut gateway;
    let one = client(gateway, HERE, "authorization: Bearer one\r\n", "").await;
    let user = client(gateway, THERE, "authorization: Bearer one\r\n", r#","user":"ann""#).await;
    let two = client(gateway, HERE, "authorization: Bearer two\r\n", "").await;
    assert_eq!(one, user);
    assert_ne!(one, two);
}
