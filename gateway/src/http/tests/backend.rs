//! Requests for a backend that somebody else runs: by a name of its own, under a path, behind TLS.

use rouse::origin::{Origin, Secure};
use rustls::RootCertStore;

use super::*;
use crate::{http::testing::SOON, trust};

/// The gateway's one model is behind a server that proves this name.
fn behind(name: &str, roots: RootCertStore, take_over: bool) -> Gateway {
    Gateway::start(|config| {
        config.stream.take_over = take_over;
        change_model(config, |model| {
            let tls: Arc<dyn Secure> = Arc::new(trust::Backend::with_roots(name, roots));
            model.origin = Some(Arc::new(Origin::new("there.example:8443", "/team", Some(tls))));
        });
    })
}

#[tokio::test]
async fn requests_and_streams_come_to_it_by_its_name_and_its_path_over_connections_that_are_kept() {
    // Backends are also written down by their addresses.
    let names = ["localhost", "127.0.0.1", "::1"];
    let (server, roots) = trust::testing::server(&names);
    for (name, take_over) in names.into_iter().flat_map(|name| [(name, true), (name, false)]) {
        let gateway = behind(name, roots.clone(), take_over);
        let gate = gateway.open_gate();
        let mut engine = Engine::start_secure(json("{}"), &server).await;
        gateway.route(&[(engine.address, &gate)]);
        let mut client = gateway.connect().await;
        for _ in 0..2 {
            client.send(post(false)).await;
            assert_eq!(client.answer().await.status, 200, "{name}");
            let seen = engine.seen.recv().await.unwrap();
            assert!(seen.starts_with("POST /team/v1/chat/completions HTTP/1.1\r\n"), "{seen}");
            assert!(seen.contains("\r\nhost: there.example:8443\r\n"), "{seen}");
        }
        assert!(engine.closed.try_recv().is_err(), "{name}: its connection is kept");

        let mut engine = Engine::start_secure(events("{\"n\":1}"), &server).await;
        gateway.route(&[(engine.address, &gate)]);
        client.send(post(true)).await;
        client.until(b"data: {\"n\":1}\n\n").await;
        drop(client);
        let left = tokio::time::timeout(SOON, engine.closed.recv()).await;
        assert!(left.is_ok(), "{name}: its client left, and it was not told");
    }
}

#[tokio::test]
async fn nothing_is_sent_to_one_whose_certificate_is_of_nobody_known_or_for_another_name() {
    let (server, roots) = trust::testing::server(&["localhost"]);
    for (name, roots) in [("localhost", RootCertStore::empty()), ("other.example", roots)] {
        let mut gateway = behind(name, roots, true);
        let mut engine = Engine::start_secure(json("{}"), &server).await;
        let (first, second) = (gateway.open_gate(), gateway.open_gate());
        let mut client = gateway.connect().await;
        client.send(post(false)).await;
        let parked = gateway.next_parked().await;
        let grant = gateway.grant(engine.address, &first);
        first.close();
        drop(parked.answer.send(Ok(grant)));
        let parked = gateway.next_parked().await;
        drop(parked.answer.send(Ok(gateway.grant(engine.address, &second))));
        let answer = client.answer().await;
        assert_eq!((answer.status, answer.error()["code"].as_str()), (502, Some("engine_unreachable")));
        assert!(engine.seen.try_recv().is_err(), "{name}: it was sent something");
    }
}
