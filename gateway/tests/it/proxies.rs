//! Clients behind proxies and load balancers: each has its own limits, and forged headers gain nothing.

use std::{
    io::{Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    time::Duration,
};

use serde_json::Value;
use socket2::{Domain, Socket, Type};

use crate::support::{
    GatewayFixture, GatewayProcess, SimModel,
    client::{TestExchange, chat_body, request},
    frames::{self, DATA, END_HEADERS, END_STREAM, HEADERS, POST, WINDOW_UPDATE, frame, header_block},
    read,
    tls::{CertificateAuthority, tls_over},
};

const CHAT: &str = "/v1/chat/completions";
const ABUSER: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 9);
const OTHER: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 7);
/// Long enough that the answer runs until its client leaves.
const ENDLESS: u32 = 10_000;
const SOON: Duration = Duration::from_secs(10);

/// A gateway with one awake model, whose proxies connect from 127.0.0.1. `proxies` are more keys of theirs.
fn start(proxies: &str, settings: &str) -> GatewayProcess {
    let fixture = GatewayFixture::new(&["2Gi"]);
    start_on(fixture, proxies, settings)
}

fn start_on(fixture: GatewayFixture, proxies: &str, settings: &str) -> GatewayProcess {
    let log = fixture.dir().join("access.log").display().to_string();
    let proxies = format!("listen: {{proxies: {{networks: [127.0.0.1]{proxies}}}}}");
    let gateway = fixture
        .settings(&format!("{proxies}\nlogs: {{access: {log:?}}}\n{settings}"))
        .model(&SimModel::new("m"))
        .start();
    gateway.wake_by_admin("m");
    gateway
}

/// Connects from an address of this machine that is no proxy's.
fn connect_from(gateway: &GatewayProcess, address: [u8; 4]) -> TestExchange {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from((address, 0)).into()).unwrap();
    socket.connect(&gateway.api.into()).unwrap();
    let socket = TcpStream::from(socket);
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    TestExchange::new(socket)
}

/// The PROXY protocol header of this client's connection.
fn proxy_header(client: Ipv4Addr) -> Vec<u8> {
    let mut header = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x13".to_vec();
    header.extend(client.octets());
    header.extend([192, 0, 2, 1]);
    header.extend(40_000_u16.to_be_bytes());
    header.extend(443_u16.to_be_bytes());
    // A field of four bytes that no reader knows.
    header.extend(b"\xee\0\x04more");
    header
}

/// A request that tries to pass for another client.
fn forging_request(number: usize) -> String {
    format!(
        "GET /v1/models HTTP/1.1\r\nHost: h\r\nX-Forwarded-For: 192.0.2.{number}\r\nForwarded: \
         for=192.0.2.{number}\r\nX-Real-IP: 192.0.2.{number}\r\n\r\n"
    )
}

/// Sends these bytes and returns the connection with the status of its first answer.
fn ask(mut open: TestExchange, bytes: impl AsRef<[u8]>) -> (u16, TestExchange) {
    open.write(bytes);
    let status = open.answer().status;
    (status, open)
}

/// The client and the status of every request in the access log.
fn logged(gateway: &GatewayProcess) -> Vec<(String, u64)> {
    let line = |line: &str| {
        let line: Value = serde_json::from_str(line).ok()?;
        Some((line["client"].as_str()?.to_owned(), line["status"].as_u64()?))
    };
    read(&gateway.dir.join("access.log")).lines().filter_map(line).collect()
}

fn until_logged(gateway: &GatewayProcess, client: impl std::fmt::Display, status: u64) {
    let expected = (client.to_string(), status);
    gateway.until(&format!("{expected:?} is logged"), SOON, || logged(gateway).contains(&expected));
}

#[test]
fn requests_behind_one_proxy_are_limited_by_their_own_client() {
    for (setting, template) in [
        ("", "X-Forwarded-For: 192.0.2.1, CLIENT\r\nForwarded: for=192.0.2.2\r\n"),
        ("", "X-Forwarded-For: unknown\r\nX-Forwarded-For: CLIENT:4711, 127.0.0.1\r\n"),
        (
            ", header: forwarded",
            "Forwarded: for=\", for=\"CLIENT:4711\";proto=https\r\nX-Forwarded-For: 192.0.2.3\r\n",
        ),
    ] {
        let gateway = start(setting, "limits: {connectionsPerAddress: 2}");
        let headers = |client: Ipv4Addr| template.replace("CLIENT", &client.to_string());
        let ask = |client| gateway.client().post_with(CHAT, &headers(client), &chat_body("m", false, 1));
        let mut open: Vec<_> = (0..2)
            .map(|_| gateway.client().open(request(CHAT, &headers(ABUSER), &chat_body("m", true, ENDLESS))))
            .collect();
        open.iter_mut().for_each(|stream| stream.until("data: "));

        let refused = ask(ABUSER);
        assert_eq!((refused.status, refused.header("retry-after")), (429, "1"), "{template}");
        assert!(refused.text().contains("limits.connectionsPerAddress"), "{}", refused.text());
        assert_eq!(ask(OTHER).status, 200, "{template}");
        let probe =
            format!("GET /readyz HTTP/1.1\r\nHost: h\r\n{}Connection: close\r\n\r\n", headers(ABUSER));
        assert_eq!(gateway.client().raw(&probe).status, 200, "a health check is no client's");
        until_logged(&gateway, ABUSER, 429);
        until_logged(&gateway, OTHER, 200);

        drop(open);
        gateway.until("the abuser has left, and may come back", SOON, || ask(ABUSER).status == 200);
    }
}

#[test]
fn connections_behind_one_load_balancer_are_limited_by_the_address_in_their_header() {
    let gateway = start(", proxyProtocol: true", "limits: {connectionsPerAddress: 2}");
    let open = |client, number| {
        let bytes = [proxy_header(client), forging_request(number).into_bytes()].concat();
        ask(TestExchange::new(gateway.client().connect()), bytes)
    };
    let held: Vec<_> = (1..=2).map(|number| open(ABUSER, number)).collect();
    assert!(held.iter().all(|(status, _)| *status == 200));
    assert_eq!(open(ABUSER, 3).0, 429);
    assert_eq!(open(OTHER, 4).0, 200);
    // The load balancer's own health check.
    let local =
        [&b"\r\n\r\n\0\r\nQUIT\n\x20\0\0\0"[..], b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n"].concat();
    assert_eq!(ask(TestExchange::new(gateway.client().connect()), local).0, 200);
    until_logged(&gateway, ABUSER, 200);
    until_logged(&gateway, OTHER, 200);
    until_logged(&gateway, Ipv4Addr::LOCALHOST, 200);
    drop(held);
    gateway.until("the abuser has left, and may come back", SOON, || open(ABUSER, 5).0 == 200);
    assert!(logged(&gateway).iter().all(|(client, _)| !client.starts_with("192.0.2.")));
}

#[test]
fn a_peer_outside_of_the_networks_is_counted_as_itself_whatever_it_sends() {
    for setting in ["", ", header: forwarded", ", proxyProtocol: true"] {
        let gateway = start(setting, "limits: {connectionsPerAddress: 2}");
        let open = |number| ask(connect_from(&gateway, [127, 0, 0, 2]), forging_request(number));
        let held: Vec<_> = (1..=2).map(&open).collect();
        assert!(held.iter().all(|(status, _)| *status == 200), "{setting}");
        assert_eq!(open(3).0, 429, "{setting}");
        assert_eq!(ask(connect_from(&gateway, [127, 0, 0, 3]), forging_request(1)).0, 200, "{setting}");
        drop(held);
        // A header of the PROXY protocol is not HTTP.
        let forged = [proxy_header(OTHER), forging_request(1).into_bytes()].concat();
        assert_eq!(ask(connect_from(&gateway, [127, 0, 0, 3]), forged).0, 400, "{setting}");
        for address in ["127.0.0.2", "127.0.0.3"] {
            until_logged(&gateway, address, 200);
        }
        assert!(logged(&gateway).iter().all(|(client, _)| client.starts_with("127.0.0.")), "{setting}");
    }
}

#[test]
fn a_connection_without_its_header_is_closed_and_the_log_says_why() {
    let gateway = start(", proxyProtocol: true", "limits: {headerRead: 300ms}");
    let half = proxy_header(OTHER)[..14].to_vec();
    let too_long = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\xff\xff".to_vec();
    for (bytes, told) in [
        (
            b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n".to_vec(),
            "does not begin with a PROXY protocol v2 header",
        ),
        (
            b"PROXY TCP4 203.0.113.9 192.0.2.1 40000 443\r\n".to_vec(),
            "begins with a PROXY protocol v1 header",
        ),
        (half, "took longer than limits.headerRead"),
        (too_long, "4096 are allowed"),
    ] {
        assert!(gateway.client().open(bytes).closes(), "{told}");
        gateway.until_logged(told);
    }
    // A load balancer that only looks whether the port is open does nothing wrong.
    drop(gateway.client().connect());
    let bytes = [proxy_header(OTHER), forging_request(1).into_bytes()].concat();
    assert_eq!(ask(TestExchange::new(gateway.client().connect()), bytes).0, 200);
    assert!(!gateway.log().contains("ended before its first byte"));
}

#[test]
fn the_header_comes_before_tls() {
    let fixture = GatewayFixture::new(&["2Gi"]);
    let authority = CertificateAuthority::new(fixture.dir());
    authority.issue("server");
    let tls = authority.settings("");
    let gateway = start_on(fixture, ", proxyProtocol: true", &tls);
    let mut tcp = gateway.client().connect();
    tcp.write_all(&proxy_header(OTHER)).unwrap();
    let mut stream = tls_over(tcp, &authority.client(&["http/1.1"], None));
    stream.write_all(forging_request(1).as_bytes()).unwrap();
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"HTTP/1.1 200");
    until_logged(&gateway, OTHER, 200);
}

#[test]
fn each_request_of_an_http2_connection_has_its_own_client() {
    let gateway = start("", "limits: {connectionsPerAddress: 1}");
    let chat = |stream: u32, client: Ipv4Addr, tokens: u32| {
        let client = client.to_string();
        let headers = [&POST[..], &[("x-forwarded-for", client.as_str())]].concat();
        let body = chat_body("m", tokens == ENDLESS, tokens);
        let head = frame(HEADERS, END_HEADERS, stream, &header_block(&headers));
        [head, frame(DATA, END_STREAM, stream, body.as_bytes())].concat()
    };
    let mut connection = gateway.client().connect();
    connection.write_all(&frames::preface_and_settings(&[])).unwrap();
    // One stream that is not read must not hold up the others.
    connection.write_all(&frame(WINDOW_UPDATE, 0, 0, &(1_u32 << 30).to_be_bytes())).unwrap();
    connection.write_all(&chat(1, ABUSER, ENDLESS)).unwrap();
    while frames::read_frame(&mut connection).is_some_and(|frame| (frame.stream, frame.kind) != (1, DATA)) {}
    connection.write_all(&[chat(3, ABUSER, 1), chat(5, OTHER, 1)].concat()).unwrap();
    until_logged(&gateway, ABUSER, 429);
    until_logged(&gateway, OTHER, 200);
    assert_eq!(logged(&gateway).len(), 2, "the stream still runs");
}
