use std::{fs, time::Duration};

use rcgen::KeyPair;
use rouse::fault::DisconnectPhase;
use rouse_net::server::StallTrackingTcp;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::Instant,
};
use tokio_rustls::{TlsConnector, client::TlsStream as Client};

use super::*;
use crate::{
    http::testing::{
        CannedEngine, PROMPT_TIMEOUT, TestCertificateAuthority, completion_request, connect_tls,
        json_response, raw_request, sse_response, wait_until_no_leases,
    },
    serve::ShutdownStage,
};

async fn until(client: &mut Client<TcpStream>, mark: &str) -> String {
    let mut seen = String::new();
    while !seen.contains(mark) {
        let mut room = [0; 4096];
        let n = client.read(&mut room).await.unwrap();
        assert!(n > 0, "ended after {seen:?}");
        seen += &String::from_utf8_lossy(&room[..n]);
    }
    seen
}

async fn ask(client: &mut Client<TcpStream>, path: &str) -> String {
    client.write_all(raw_request(&format!("GET {path}"), "", "").as_bytes()).await.unwrap();
    until(client, "\r\n\r\n").await
}

/// Ways to disconnect: with a TLS close_notify, with a plain close, with a reset, and by closing the sending half
/// alone.
const WAYS: [&str; 4] = ["notify", "close", "reset", "half"];

async fn leave(mut client: Client<TcpStream>, way: &str) -> Option<Client<TcpStream>> {
    match way {
        "notify" => client.shutdown().await.unwrap(),
        "reset" => client.get_ref().0.set_zero_linger().unwrap(),
        "half" => {
            client.get_mut().0.shutdown().await.unwrap();
            return Some(client);
        }
        _ => {}
    }
    None
}

#[tokio::test]
async fn a_client_that_leaves_is_noticed_in_every_phase_however_it_leaves() {
    let authority = TestCertificateAuthority::new();
    let mut gateway = authority.gateway("", |_| {});
    for way in WAYS {
        for stray in ["", "\r\n"] {
            let mut client = authority.connect(gateway.address).await;
            client.write_all((completion_request(false) + stray).as_bytes()).await.unwrap();
            let mut parked = gateway.next_parked().await;
            let _rest = leave(client, way).await;
            tokio::time::timeout(PROMPT_TIMEOUT, parked.answer.closed()).await.expect("still parked");
            assert_eq!(
                gateway.next_ended().await.left_in_phase,
                Some(DisconnectPhase::Parked),
                "{way} {stray:?}"
            );
        }
    }
    let mut engine = CannedEngine::start(sse_response("{}")).await;
    let gate = gateway.open_gate();
    gateway.set_endpoints(&[(engine.address, &gate)]);
    for way in WAYS {
        let mut client = authority.connect(gateway.address).await;
        client.write_all((completion_request(true) + "\r\n").as_bytes()).await.unwrap();
        until(&mut client, "data: {}").await;
        let left = Instant::now();
        let _rest = leave(client, way).await;
        let closed = engine.closed_at.recv().await.unwrap();
        assert!(closed - left < PROMPT_TIMEOUT, "{way}: {:?}", closed - left);
        assert_eq!(gateway.next_ended().await.left_in_phase, Some(DisconnectPhase::Streaming), "{way}");
        wait_until_no_leases(&gate).await;
    }
}

#[tokio::test]
async fn a_client_that_takes_nothing_is_cut() {
    let authority = TestCertificateAuthority::new();
    let mut gateway = authority.gateway("", |_| {});
    let chunk = "z".repeat(1 << 20);
    let mut endless = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n".to_owned();
    for _ in 0..32 {
        endless += &format!("{:x}\r\n{chunk}\r\n", chunk.len());
    }
    let mut engine = CannedEngine::start(endless).await;
    let gate = gateway.open_gate();
    gateway.set_endpoints(&[(engine.address, &gate)]);
    let mut client = authority.connect(gateway.address).await;
    client.write_all(completion_request(true).as_bytes()).await.unwrap();
    let closed = tokio::time::timeout(Duration::from_secs(6), engine.closed_at.recv()).await;
    closed.expect("the engine still sends");
    wait_until_no_leases(&gate).await;
    assert_eq!(gateway.next_ended().await.code, Some("client_stalled"));
    // The client's partial response must not end like a complete one.
    let error = client.read_to_end(&mut Vec::new()).await.unwrap_err();
    assert!(matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset), "{error}");
}

#[tokio::test]
async fn a_whole_answer_ends_with_a_word_and_a_broken_one_without() {
    let authority = TestCertificateAuthority::new();
    let gateway = authority.gateway("", |_| {});
    let engine = CannedEngine::start(json_response("{\"a\":1}")).await;
    let gate = gateway.open_gate();
    gateway.set_endpoints(&[(engine.address, &gate)]);
    let mut client = authority.connect(gateway.address).await;
    let request = completion_request(false).replacen("\r\n", "\r\nconnection: close\r\n", 1);
    client.write_all(request.as_bytes()).await.unwrap();
    let mut all = Vec::new();
    client.read_to_end(&mut all).await.expect("no close_notify");
    assert!(String::from_utf8_lossy(&all).ends_with("{\"a\":1}"));
    // A connection that times out idle also gets a close_notify.
    let mut idle = authority.connect(gateway.address).await;
    ask(&mut idle, "/healthz").await;
    idle.read_to_end(&mut Vec::new()).await.expect("no close_notify");
    // An engine breaks off a body that only the connection's end delimits for the client.
    let engine = CannedEngine::start(sse_response("{}")).await;
    gateway.set_endpoints(&[(engine.address, &gate)]);
    let mut client = authority.connect(gateway.address).await;
    client.write_all(completion_request(true).replace("HTTP/1.1", "HTTP/1.0").as_bytes()).await.unwrap();
    until(&mut client, "data: {}").await;
    gate.close();
    gate.revoke(rouse::fault::Fault::ShuttingDown);
    let mut rest = Vec::new();
    let error = client.read_to_end(&mut rest).await.expect_err("half an answer passed for a whole one");
    assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    assert!(String::from_utf8_lossy(&rest).contains("shutting_down"), "{rest:?}");
}

#[tokio::test]
async fn http2_is_spoken_when_agreed_on_and_http1_otherwise() {
    let authority = TestCertificateAuthority::new();
    let gateway = authority.gateway("", |_| {});
    for (offered, agreed) in
        [(&["h2", "http/1.1"][..], Some("h2")), (&["http/1.1"], Some("http/1.1")), (&[], None)]
    {
        let mut client = authority.client_config().with_no_client_auth();
        client.alpn_protocols = offered.iter().map(|name| name.as_bytes().to_vec()).collect();
        let mut client = connect_tls(gateway.address, client).await.unwrap();
        assert_eq!(client.get_ref().1.alpn_protocol(), agreed.map(str::as_bytes));
        if agreed == Some("h2") {
            let io = hyper_util::rt::TokioIo::new(client);
            let executor = hyper_util::rt::TokioExecutor::new();
            let (mut sender, connection) =
                hyper::client::conn::http2::handshake::<_, _, http_body_util::Empty<&[u8]>>(executor, io)
                    .await
                    .unwrap();
            let driven = tokio::spawn(connection);
            let request = http::Request::get("https://localhost/healthz").body(<_>::default()).unwrap();
            assert_eq!(sender.send_request(request).await.unwrap().status(), 200);
            driven.abort();
        } else {
            assert!(ask(&mut client, "/healthz").await.starts_with("HTTP/1.1 200"));
        }
    }
    let mut client = authority.client_config().with_no_client_auth();
    client.alpn_protocols = vec![b"spdy/3".to_vec()];
    assert!(connect_tls(gateway.address, client).await.is_err());
}

#[tokio::test]
async fn a_request_in_the_clear_is_told_to_use_tls() {
    let authority = TestCertificateAuthority::new();
    let gateway = authority.gateway("", |_| {});
    let mut client = gateway.connect().await;
    client.send(raw_request("GET /healthz", "", "")).await;
    let answer = client.read_response().await;
    assert_eq!(answer.status, 400);
    assert!(answer.error()["message"].as_str().unwrap().contains("https"));
    assert!(client.read_to_end().await.is_empty());
}

#[tokio::test]
async fn who_must_show_a_certificate_gets_in_with_one_of_the_right_authority_only() {
    let (authority, other) = (TestCertificateAuthority::new(), TestCertificateAuthority::new());
    let more = format!(", clientCa: {:?}", authority.file("ca.pem"));
    let gateway = authority.gateway(&more, |_| {});
    let with = |(cert, key): (CertificateDer<'static>, KeyPair)| {
        let key = PrivatePkcs8KeyDer::from(key.serialize_der());
        authority.client_config().with_client_auth_cert(vec![cert], key.into()).unwrap()
    };
    let mut client =
        connect_tls(gateway.address, with(authority.issue("client", &TestCertificateAuthority::params())))
            .await
            .unwrap();
    assert!(ask(&mut client, "/healthz").await.starts_with("HTTP/1.1 200"));
    let foreign = with(other.issue("client", &TestCertificateAuthority::params()));
    for refused in [foreign, authority.client_config().with_no_client_auth()] {
        // In TLS 1.3 the client finishes its handshake before it learns of the refusal.
        if let Ok(mut client) = connect_tls(gateway.address, refused).await {
            let request = raw_request("GET /healthz", "", "");
            client.write_all(request.as_bytes()).await.unwrap_or_default();
            assert!(client.read(&mut [0; 16]).await.is_err());
        }
    }
}

#[tokio::test]
async fn a_new_certificate_is_shown_from_then_on_and_disturbs_nobody() {
    let authority = TestCertificateAuthority::new();
    let gateway = authority.gateway("", |_| {});
    let shown = |client: &Client<TcpStream>| client.get_ref().1.peer_certificates().unwrap()[0].clone();
    let mut before = authority.connect(gateway.address).await;
    ask(&mut before, "/healthz").await;
    let (new, _) = authority.issue("server", &TestCertificateAuthority::params());
    let mut config = gateway.config.load().as_ref().clone();
    let old = config.tls.take();
    config.tls = authority.load("").unwrap().tls;
    assert_ne!(config.tls, old);
    gateway.config.store(Arc::new(config));
    let after = authority.connect(gateway.address).await;
    assert!(shown(&after) == new && shown(&before) != new);
    assert!(ask(&mut before, "/healthz").await.starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn a_handshake_that_fails_is_an_offence_unless_the_client_said_no() {
    let authority = TestCertificateAuthority::new();
    let identity = authority.tls("").unwrap().identity.unwrap();
    let handshakes = HandshakePool::start(1).unwrap();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let failed = async || {
        let wire = StallTrackingTcp::new(listener.accept().await.unwrap().0);
        handshakes.accept(wire, Arc::clone(&identity.api_config)).await.err().expect("it was agreed on")
    };
    let (distrusting, error) = tokio::join!(
        connect_tls(address, TestCertificateAuthority::new().client_config().with_no_client_auth()),
        failed()
    );
    assert!(distrusting.is_err() && !is_client_offence(&error), "{error}");
    let garbage = async {
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(&[HANDSHAKE_RECORD_TYPE, 3, 1, 0, 4, 9, 9, 9, 9]).await.unwrap();
        client.read_to_end(&mut Vec::new()).await.unwrap_or_default();
    };
    let ((), error) = tokio::join!(garbage, failed());
    assert!(is_client_offence(&error), "{error}");
    let (_, error) = tokio::join!(async { drop(TcpStream::connect(address).await) }, failed());
    assert!(!is_client_offence(&error), "{error}");
}

/// An HTTP/2 client that begins and does not continue.
#[tokio::test]
async fn half_a_preface_is_answered_by_no_text_of_http1() {
    let authority = TestCertificateAuthority::new();
    let gateway = authority.gateway("", |_| {});
    let mut client = authority.client_config().with_no_client_auth();
    client.alpn_protocols = vec![ALPN_HTTP2.to_vec()];
    let mut client = connect_tls(gateway.address, client).await.unwrap();
    client.write_all(b"PRI * HTTP").await.unwrap();
    let mut all = Vec::new();
    drop(client.read_to_end(&mut all).await);
    assert_eq!(String::from_utf8_lossy(&all), "");
}

#[tokio::test]
async fn a_drain_waits_a_moment_for_the_first_request_behind_a_handshake() {
    let authority = TestCertificateAuthority::new();
    let mut gateway =
        authority.gateway("", |config| config.limits.header_read = rouse::units::Millis::secs(9));
    let mut client = authority.connect(gateway.address).await;
    let _silent = authority.connect(gateway.address).await;
    // The sleep lets the gateway's core notice the silent connection too.
    tokio::time::sleep(Duration::from_millis(100)).await;
    gateway.stage.send_replace(ShutdownStage::Draining);
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(ask(&mut client, "/healthz").await.starts_with("HTTP/1.1 200"));
    tokio::time::timeout(Duration::from_secs(4), &mut gateway.run).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_handshake_in_dribs_is_closed_and_holds_nobody_up() {
    let authority = TestCertificateAuthority::new();
    let mut gateway = authority.gateway("", |_| {});
    let begun = Instant::now();
    let mut slow = gateway.connect().await;
    slow.send([HANDSHAKE_RECORD_TYPE, 3, 1]).await;
    let mut silent = gateway.connect().await;
    let mut client = authority.connect(gateway.address).await;
    assert!(ask(&mut client, "/healthz").await.starts_with("HTTP/1.1 200"));
    assert!(slow.read_to_end().await.is_empty() && silent.read_to_end().await.is_empty());
    assert!(begun.elapsed() < Duration::from_secs(3));
    let _midway = gateway.connect().await;
    gateway.stage.send_replace(ShutdownStage::Draining);
    client.read_to_end(&mut Vec::new()).await.expect("no close_notify");
    tokio::time::timeout(Duration::from_secs(4), &mut gateway.run).await.unwrap().unwrap();
}

/// Measures the cost of a new connection, and checks that it does not stall the streams of its core.
#[tokio::test]
async fn handshakes_hold_no_stream_up() {
    let authority = TestCertificateAuthority::new();
    let mut key = None;
    for algorithm in [&rcgen::PKCS_RSA_SHA256, &rcgen::PKCS_ECDSA_P256_SHA256] {
        let gateway = authority.gateway("", |_| {});
        let made = if algorithm == &rcgen::PKCS_RSA_SHA256 {
            KeyPair::generate_rsa_for(algorithm, rcgen::RsaKeySize::_4096).unwrap()
        } else {
            KeyPair::generate_for(algorithm).unwrap()
        };
        let cert = TestCertificateAuthority::params().signed_by(&made, &authority.issuer).unwrap();
        fs::write(authority.file("server.pem"), cert.pem()).unwrap();
        fs::write(authority.file("server.key"), made.serialize_pem()).unwrap();
        let mut config = gateway.config.load().as_ref().clone();
        config.tls = authority.load("").unwrap().tls;
        gateway.config.store(Arc::new(config));
        let begun = Instant::now();
        for _ in 0..20 {
            authority.connect(gateway.address).await;
        }
        println!("{algorithm:?}: {:?} for a connection", begun.elapsed() / 20);
        // Last, because a connection without a request is closed after a while.
        let mut client = authority.connect(gateway.address).await;
        let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let crowd: Vec<_> = (0..16)
            .map(|_| {
                let (client, address) = (authority.client_config().with_no_client_auth(), gateway.address);
                let (connector, stop) = (TlsConnector::from(Arc::new(client)), Arc::clone(&stop));
                tokio::spawn(async move {
                    while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                        let tcp = TcpStream::connect(address).await.unwrap();
                        let name = ServerName::try_from("localhost").unwrap();
                        drop(connector.connect(name, tcp).await);
                    }
                })
            })
            .collect();
        let mut waits = Vec::new();
        for _ in 0..100 {
            let asked = Instant::now();
            ask(&mut client, "/healthz").await;
            waits.push(asked.elapsed());
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        for one in crowd {
            one.await.unwrap();
        }
        waits.sort_unstable();
        println!("{algorithm:?}: beside 16 that connect, median {:?}, p99 {:?}", waits[50], waits[98]);
        key = Some(made);
    }
    drop(key);
}

#[test]
fn files_that_cannot_be_used_are_named_with_the_reason() {
    let authority = TestCertificateAuthority::new();
    let said = || authority.load("").unwrap_err().to_string();
    assert!(said().contains("rouse.yaml:1:6: tls.cert: ") && said().contains("No such file"), "{}", said());
    authority.issue("server", &TestCertificateAuthority::params());
    assert!(authority.load("").is_ok());
    authority.issue("other", &TestCertificateAuthority::params());
    fs::copy(authority.file("other.key"), authority.file("server.key")).unwrap();
    assert!(said().contains("tls.key: ") && said().contains("does not match the certificate"), "{}", said());
    fs::write(
        authority.file("server.key"),
        "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n",
    )
    .unwrap();
    assert!(said().contains("the file has no private key"), "{}", said());
    fs::write(authority.file("server.pem"), "").unwrap();
    assert!(said().contains("the file has no certificate"), "{}", said());
    authority.issue("server", &TestCertificateAuthority::params());
    let error = authority.load(", clientCa: /no/such/ca.pem").unwrap_err().to_string();
    assert!(error.contains("tls.clientCa: /no/such/ca.pem: No such file"), "{error}");
}

#[test]
fn that_files_changed_is_seen_without_an_event() {
    let authority = TestCertificateAuthority::new();
    let tls = authority.tls("").unwrap();
    assert!(tls.is_unchanged_on_disk());
    authority.issue("server", &TestCertificateAuthority::params());
    assert!(!tls.is_unchanged_on_disk());
    fs::remove_file(authority.file("server.pem")).unwrap();
    assert!(!tls.is_unchanged_on_disk());
}

#[test]
fn a_certificate_out_of_its_time_is_warned_of() {
    let authority = TestCertificateAuthority::new();
    let warned = |from: i32, to: i32| {
        let mut params = TestCertificateAuthority::params();
        (params.not_before, params.not_after) =
            (rcgen::date_time_ymd(from, 1, 1), rcgen::date_time_ymd(to, 1, 1));
        authority.issue("server", &params);
        let config = authority.load("").unwrap();
        let ends = config.tls.as_ref().unwrap().expires().unwrap();
        assert_eq!(ends, u64::try_from(params.not_after.unix_timestamp()).unwrap());
        let findings = rouse_config::check(&config);
        assert_eq!(findings.errors, []);
        findings.warnings.iter().map(|problem| problem.text.clone()).find(|text| text.starts_with("tls."))
    };
    assert!(warned(2001, 2002).unwrap().ends_with("the certificate has expired"));
    assert!(warned(4001, 4002).unwrap().ends_with("the certificate is not valid yet"));
    assert_eq!(warned(2001, 4002), None);
}
