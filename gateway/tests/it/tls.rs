//! Certificates of a running gateway: shown, replaced, requested, and refused with their reason.

use std::{
    io::{Read as _, Write as _},
    path::Path,
    process::Command,
    time::Duration,
};

use nix::sys::signal::Signal;
use rustls::pki_types::CertificateDer;

use crate::support::{
    GatewayFixture, GatewayProcess, SimModel, TestResponse,
    client::{chat_body, request},
    tls::{BlockingTlsStream, CertificateAuthority, connect_tls},
};

fn start(more: &str) -> (GatewayProcess, CertificateAuthority) {
    let fixture = GatewayFixture::new(&["2Gi"]).model(&SimModel::new("m"));
    let authority = CertificateAuthority::new(fixture.dir());
    authority.issue("server");
    let settings = authority.settings(&more.replace("DIR", &fixture.dir().display().to_string()));
    (fixture.settings(&settings).start(), authority)
}

fn ask(stream: &mut BlockingTlsStream) -> String {
    stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut seen = Vec::new();
    while !seen.ends_with(b"ok\n") {
        let mut room = [0; 1024];
        let n = stream.read(&mut room).unwrap();
        assert!(n > 0, "ended after {:?}", String::from_utf8_lossy(&seen));
        seen.extend_from_slice(&room[..n]);
    }
    String::from_utf8(seen).unwrap()
}

fn shown(gateway: &GatewayProcess, authority: &CertificateAuthority) -> CertificateDer<'static> {
    let mut stream = connect_tls(gateway.api, &authority.client(&[], None));
    ask(&mut stream);
    stream.conn.peer_certificates().unwrap()[0].clone().into_owned()
}

#[test]
fn a_stream_comes_whole_over_tls_and_the_port_says_so_to_others() {
    let (gateway, authority) = start("");
    let mut stream = connect_tls(gateway.api, &authority.client(&["http/1.1"], None));
    let text = request("/v1/chat/completions", "", &chat_body("m", true, 50));
    stream.write_all(text.as_bytes()).unwrap();
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).expect("the end was not announced");
    assert!(TestResponse::parse(&bytes).unwrap().is_whole_stream());
    let plain = gateway.client().get("/healthz");
    assert_eq!(plain.status, 400);
    assert!(plain.text().contains("https"), "{}", plain.text());
}

#[test]
fn certificates_are_replaced_when_their_files_are_and_connections_stay() {
    let (gateway, authority) = start("");
    let mut kept = connect_tls(gateway.api, &authority.client(&[], None));
    ask(&mut kept);
    let soon = Duration::from_secs(10);
    let (second, _) = authority.issue("server");
    gateway.until("the new one is shown", soon, || shown(&gateway, &authority) == second);
    ask(&mut kept);
    // The key does not belong to the certificate, so the gateway keeps the old pair.
    std::fs::write(gateway.dir.join("server.key"), rcgen::KeyPair::generate().unwrap().serialize_pem())
        .unwrap();
    gateway.until("it is refused", soon, || gateway.log().contains("does not match the certificate"));
    assert!(shown(&gateway, &authority) == second);
    // certbot replaces the files this way: a new link in the place of the old one.
    let (third, _) = authority.issue("third");
    for (link, to) in [("server.pem", "third.pem"), ("server.key", "third.key")] {
        std::fs::remove_file(gateway.dir.join(link)).unwrap();
        std::os::unix::fs::symlink(to, gateway.dir.join(link)).unwrap();
    }
    gateway.until("the third is shown", soon, || shown(&gateway, &authority) == third);
    // The gateway watches nothing behind a link, so a signal makes it read the files again.
    let (fourth, _) = authority.issue("third");
    gateway.signal(Signal::SIGHUP);
    gateway.until("the fourth is shown", soon, || shown(&gateway, &authority) == fourth);
    ask(&mut kept);
}

#[test]
fn certificates_that_come_after_the_configuration_that_names_them_are_taken() {
    let (gateway, authority) = start("");
    let first = shown(&gateway, &authority);
    let soon = Duration::from_secs(20);
    let file = gateway.dir.join("rouse.yaml");
    let yaml = std::fs::read_to_string(&file).unwrap().replace("/server.", "/later/new.");
    std::fs::write(&file, yaml).unwrap();
    gateway.until("it is refused", soon, || gateway.log().contains("later/new.pem: No such file"));
    assert!(shown(&gateway, &authority) == first);
    // The folder does not exist yet, either.
    let folder = gateway.dir.join("later");
    std::fs::create_dir(&folder).unwrap();
    let (second, _) = authority.issue("later/new");
    gateway.until("the second is shown", soon, || shown(&gateway, &authority) == second);
    // Another folder, which already contains the files, replaces the folder as a whole.
    std::fs::create_dir(gateway.dir.join("next")).unwrap();
    let (third, _) = authority.issue("next/new");
    std::fs::rename(&folder, gateway.dir.join("old")).unwrap();
    std::fs::rename(gateway.dir.join("next"), &folder).unwrap();
    gateway.until("the third is shown", soon, || shown(&gateway, &authority) == third);
    let (fourth, _) = authority.issue("later/new");
    gateway.until("the fourth is shown", soon, || shown(&gateway, &authority) == fourth);
}

#[test]
fn the_end_of_the_certificate_is_a_metric() {
    let (gateway, _) = start("");
    let metrics = gateway.admin().get("/metrics").text();
    let value = |line: &str| line.strip_prefix("rouse_tls_certificate_expiry_seconds ")?.parse::<i64>().ok();
    assert!(metrics.lines().find_map(value).unwrap() > 2_000_000_000, "{metrics}");
}

/// Connections that still wait in the accept queue at shutdown get the same service as accepted ones.
#[test]
fn connections_that_queued_when_the_gateway_goes_are_served() {
    const CLIENTS: usize = 100;
    let (gateway, authority) = start("");
    let client = authority.client(&["http/1.1"], None);
    gateway.signal(Signal::SIGSTOP);
    let served = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|_| {
                let mut stream = connect_tls(gateway.api, &client);
                scope.spawn(move || {
                    stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n").ok()?;
                    let mut answer = [0; 12];
                    stream.read_exact(&mut answer).ok()?;
                    (&answer == b"HTTP/1.1 200").then_some(())
                })
            })
            .collect();
        gateway.signal(Signal::SIGTERM);
        gateway.signal(Signal::SIGCONT);
        clients.into_iter().filter_map(|client| client.join().unwrap()).count()
    });
    assert_eq!(served, CLIENTS);
}

#[test]
fn clients_without_a_certificate_of_the_authority_do_not_get_in() {
    let (gateway, authority) = start(", clientCa: DIR/ca.pem");
    let mut stream = connect_tls(gateway.api, &authority.client(&[], Some(authority.issue("client"))));
    ask(&mut stream);
    let elsewhere = tempfile::tempdir().unwrap();
    let foreign = CertificateAuthority::new(elsewhere.path()).issue("client");
    for refused in [None, Some(foreign)] {
        let mut stream = connect_tls(gateway.api, &authority.client(&[], refused));
        stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n").unwrap_or_default();
        assert!(stream.read(&mut [0; 16]).is_err());
    }
}

fn check(dir: &Path) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rouse-gateway"));
    let output = command.args(["check", "rouse.yaml"]).current_dir(dir).output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn a_start_with_certificates_that_do_not_fit_says_which_file_and_why() {
    let fixture = GatewayFixture::new(&["2Gi"]).model(&SimModel::new("m"));
    let dir = fixture.dir().to_owned();
    let authority = CertificateAuthority::new(&dir);
    let fixture = fixture.settings(&authority.settings(""));
    std::fs::write(dir.join("rouse.yaml"), fixture.yaml()).unwrap();
    let (code, said) = check(&dir);
    assert_eq!(code, Some(64), "{said}");
    assert!(said.contains("tls.cert: ") && said.contains("server.pem: No such file"), "{said}");
    authority.issue("other");
    authority.issue("server");
    std::fs::copy(dir.join("other.key"), dir.join("server.key")).unwrap();
    let (code, said) = check(&dir);
    assert_eq!(code, Some(64), "{said}");
    assert!(said.contains("server.key: the key does not match the certificate in"), "{said}");
    let mut start = Command::new(env!("CARGO_BIN_EXE_rouse-gateway"));
    let start = start.args(["--config", "rouse.yaml"]).current_dir(&dir).output().unwrap();
    assert_eq!((start.status.code(), String::from_utf8(start.stderr).unwrap()), (Some(64), said));
    authority.issue("server");
    assert_eq!(check(&dir).0, Some(0));
}
