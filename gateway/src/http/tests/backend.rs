//! Tests requests for a backend that another party runs: with a name of its own, under a path, behind TLS.

use rouse_net::backend_origin::{BackendOrigin, BackendTls};
use rouse_platform::upstream_tls;
use rustls::RootCertStore;

use super::*;
use crate::http::testing::PROMPT_TIMEOUT;

/// Starts a gateway whose one model is behind a server that proves this name.
fn behind(name: &str, roots: RootCertStore) -> InProcessGateway {
    InProcessGateway::start(|config| {
        change_model(config, |model| {
            let tls: Arc<dyn BackendTls> = Arc::new(upstream_tls::RootVerifiedTls::with_roots(name, roots));
            model.backend_origin =
                Some(Arc::new(BackendOrigin::new("there.example:8443", "/team", Some(tls))));
        });
    })
}

#[tokio::test]
async fn requests_and_streams_come_to_it_by_its_name_and_its_path_over_connections_that_are_kept() {
    // Configurations also name backends by their addresses.
    let names = ["localhost", "127.0.0.1", "::1"];
    let (server, roots) = rouse_testing::tls::server(&names);
    for name in names {
        let gateway = behind(name, roots.clone());
        let gate = gateway.open_gate();
        let mut engine = CannedEngine::start_tls(json_response("{}"), &server).await;
        gateway.set_endpoints(&[(engine.address, &gate)]);
        let mut client = gateway.connect().await;
        for _ in 0..2 {
            client.send(completion_request(false)).await;
            assert_eq!(client.read_response().await.status, 200, "{name}");
            let seen = engine.requests.recv().await.unwrap();
            assert!(seen.starts_with("POST /team/v1/chat/completions HTTP/1.1\r\n"), "{seen}");
            assert!(seen.contains("\r\nhost: there.example:8443\r\n"), "{seen}");
        }
        assert!(engine.closed_at.try_recv().is_err(), "{name}: its connection is kept");

        let mut engine = CannedEngine::start_tls(sse_response("{\"n\":1}"), &server).await;
        gateway.set_endpoints(&[(engine.address, &gate)]);
        client.send(completion_request(true)).await;
        client.read_until(b"data: {\"n\":1}\n\n").await;
        drop(client);
        let left = tokio::time::timeout(PROMPT_TIMEOUT, engine.closed_at.recv()).await;
        assert!(left.is_ok(), "{name}: its client left, and it was not told");
    }
}

#[tokio::test]
async fn nothing_is_sent_to_one_whose_certificate_is_of_nobody_known_or_for_another_name() {
    let (server, roots) = rouse_testing::tls::server(&["localhost"]);
    for (name, roots) in [("localhost", RootCertStore::empty()), ("other.example", roots)] {
        let mut gateway = behind(name, roots);
        let mut engine = CannedEngine::start_tls(json_response("{}"), &server).await;
        let (first, second) = (gateway.open_gate(), gateway.open_gate());
        let mut client = gateway.connect().await;
        client.send(completion_request(false)).await;
        let parked = gateway.next_parked().await;
        let grant = gateway.grant(engine.address, &first);
        first.close();
        drop(parked.answer.send(Ok(grant)));
        let parked = gateway.next_parked().await;
        drop(parked.answer.send(Ok(gateway.grant(engine.address, &second))));
        let answer = client.read_response().await;
        assert_eq!((answer.status, answer.error()["code"].as_str()), (502, Some("engine_unreachable")));
        assert!(engine.requests.try_recv().is_err(), "{name}: it was sent something");
    }
}
