//! The stub in front of an engine closes its gate, and clients notice only a wait.

use std::{
    fs,
    net::{SocketAddr, TcpStream},
    path::Path,
    thread,
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::support::{
    GatewayFixture, GatewayProcess, SimModel, TestClient, TestResponse,
    client::{TestExchange, chat_body, request},
    forms::{self, FormFraming},
    row,
};

const CHAT: &str = "/v1/chat/completions";
const CLOSE: &str = r#"{"epoch":1,"generation":1,"drainDeadline":20000}"#;
const OPEN: &str = r#"{"epoch":1,"generation":1}"#;

struct GatewayWithStub {
    gateway: GatewayProcess,
    admin: u16,
}

impl GatewayWithStub {
    /// Starts an engine behind its stub, with these keys of its model, and wakes it.
    fn start(flags: &str, keys: &str) -> Self {
        let row = Self::behind(row::StubInRow::new(), "", flags, keys);
        row.gateway.wake("small");
        row
    }

    /// Starts a gateway before an engine that has had no request yet.
    fn behind(stub: row::StubInRow<'_>, settings: &str, flags: &str, keys: &str) -> Self {
        let sim = SimModel { flags, keys, stub: Some(stub), ..SimModel::new("small") };
        let gateway = GatewayFixture::new(&["2Gi"])
            .settings("stream: {grace: 50ms, heartbeat: 50ms}")
            .settings(settings)
            .model(&sim)
            .start();
        Self { gateway, admin: stub.admin }
    }

    fn close(&self) -> serde_json::Value {
        let answer = row::stub_request(self.admin, "POST", "/v1/gate", CLOSE);
        assert_eq!(answer.status, 202, "{}", answer.text());
        answer.json()
    }

    fn open(&self) {
        let answer = row::stub_request(self.admin, "DELETE", "/v1/gate", OPEN);
        assert!((200..300).contains(&answer.status), "{}", answer.text());
    }

    /// The stub's lease count.
    fn leases(&self) -> serde_json::Value {
        row::stub_request(self.admin, "GET", "/v1/gate", "").json()["leases"].clone()
    }

    fn ask(&self, stream: bool, tokens: u32) -> TestExchange {
        self.gateway.client().open(request(CHAT, "", &chat_body("small", stream, tokens)))
    }

    fn model(&self) -> serde_json::Value {
        self.gateway.fleet()["models"][0].clone()
    }

    fn until_waiting(&self, n: u64) {
        let waiting = || self.model()["waiting"] == n;
        self.gateway.until(&format!("{n} wait"), Duration::from_secs(10), waiting);
    }
}

fn is_whole(answer: &TestResponse) -> bool {
    let plain = || answer.complete && answer.json()["choices"].is_array();
    answer.status == 200 && (answer.is_whole_stream() || plain())
}

#[test]
fn nobody_is_lost_or_refused_by_a_stub_that_closes_its_gate_over_fifty_requests() {
    let folder = tempfile::tempdir().unwrap();
    let (stub_folder, place) = (
        StubRowFolder(folder.path()),
        row::StubInRow { folder: Some(folder.path()), ..row::StubInRow::new() },
    );
    let row = GatewayWithStub::behind(place, "", "--itl 40ms", "");
    assert_eq!(row.gateway.admin().post("/admin/v1/models/small/wake", "").status, 202);
    stub_folder.listens(&row);
    stub_folder.tell();
    row.gateway.until_state("small", "awake");
    // This answer proves the engine, and its gate opens for all requests.
    assert!(is_whole(&row.ask(false, 1).rest()));
    // The test stalls the engine past its stub, so no answer ends before all have begun, whatever the gate does.
    stub_folder.fault(r#"{"stall-streams": true}"#);
    let under_way: Vec<TestExchange> = (0..50).map(|n| row.ask(n % 2 == 0, 40)).collect();
    // The gateway counts its own leases before the stub counts its.
    row.gateway.until("fifty are under way", Duration::from_secs(10), || row.leases() == 50);
    assert_eq!(row.gateway.leases(), 50);
    assert_eq!(row.close()["leases"], 50);

    let late: Vec<TestExchange> = (0..20).map(|n| row.ask(n % 2 == 0, 3)).collect();
    row.until_waiting(20);
    let reason = row.model()["reason"].as_str().unwrap().to_owned();
    assert!(reason.contains("its stub has closed the gate"), "{reason}");
    assert_eq!(row.gateway.engine("small#0")["state"], "Awake");
    stub_folder.fault(r#"{"stall-streams": null}"#);
    for open in under_way {
        let answer = open.rest();
        assert!(is_whole(&answer), "{} {}", answer.status, answer.text());
    }
    // Waiting requests hold no lease in the gateway or in the stub.
    row.gateway.until("nobody has a lease", Duration::from_secs(5), || row.gateway.leases() == 0);
    assert_eq!(row.leases(), 0);
    row.until_waiting(20);

    row.open();
    for open in late {
        let answer = open.rest();
        assert!(is_whole(&answer), "{} {}", answer.status, answer.text());
    }
    row.gateway.until("nobody has a lease", Duration::from_secs(5), || row.gateway.leases() == 0);
    assert_eq!(row.model()["waiting"], 0);
}

#[test]
fn who_came_first_is_let_in_first_and_nobody_waits_past_a_deadline() {
    let row = GatewayWithStub::start("", "maxConcurrency: 1");
    row.close();
    let clients: Vec<_> = (0..6_u64)
        .map(|n| {
            let headers = format!("x-request-id: client-{n}\r\n");
            let body = chat_body("small", n % 2 == 0, 20);
            let open = row.gateway.client().open(request(CHAT, &headers, &body));
            row.until_waiting(n + 1);
            open
        })
        .collect();
    let late =
        row.gateway.client().post_with(CHAT, "x-request-timeout: 1\r\n", &chat_body("small", false, 1));
    assert_eq!((late.status, late.json()["error"]["code"].as_str()), (503, Some("model_not_ready")));
    assert_eq!(late.header("x-rouse-gated"), "");
    assert!(late.text().contains("its stub has closed the gate"), "{}", late.text());
    row.until_waiting(6);
    row.open();
    for client in clients {
        assert!(is_whole(&client.rest()));
    }
    // The order in which the requests reached the engine. Their answers may end in another order.
    let counters = row.gateway.counters("small#0");
    let came = counters["arrivals"].as_array().unwrap().iter().filter_map(|came| came["request_id"].as_str());
    let came: Vec<_> = came.filter_map(|id| id.strip_prefix("client-")?.parse::<u64>().ok()).collect();
    assert_eq!(came, [0, 1, 2, 3, 4, 5], "{counters}");
    assert_eq!(row.gateway.engine("small#0")["state"], "Awake");
}

/// The folder in which a test controls the stub of its row.
struct StubRowFolder<'a>(&'a Path);

impl StubRowFolder<'_> {
    fn read(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.0.join(name)).ok().filter(|text| !text.is_empty())
    }

    fn address(&self, name: &str) -> Option<SocketAddr> {
        self.read(name)?.parse().ok()
    }

    fn tell(&self) {
        fs::copy(self.0.join("engine"), self.0.join("target")).unwrap();
    }

    /// Kills the stub, and returns once another stub without a target listens.
    fn restart(&self, row: &GatewayWithStub) {
        fs::remove_file(self.0.join("target")).unwrap();
        let before = self.read("pid").unwrap();
        kill(Pid::from_raw(before.parse().unwrap()), Signal::SIGKILL).unwrap();
        let anew = || self.read("pid").is_some_and(|pid| pid != before);
        row.gateway.until("another is started", Duration::from_secs(10), anew);
        self.listens(row);
    }

    fn listens(&self, row: &GatewayWithStub) {
        let is_there = |address: SocketAddr| TcpStream::connect(address).is_ok();
        row.gateway.until("the stub listens", Duration::from_secs(10), || {
            self.address("relay").is_some_and(is_there) && is_there(([127, 0, 0, 1], row.admin).into())
        });
        assert_eq!(row::stub_request(row.admin, "GET", "/v1/proxy/config", "").status, 404);
    }

    /// A client of the engine, past its stub.
    fn engine(&self) -> TestClient {
        TestClient::new(self.address("engine").unwrap())
    }

    fn fault(&self, faults: &str) {
        let answer = self.engine().post("/sim/faults", faults);
        assert_eq!(answer.status, 200, "{}", answer.text());
    }

    /// How many requests the engine has received.
    fn seen(&self) -> serde_json::Value {
        self.engine().get("/sim/counters").json()["total"].clone()
    }
}

/// A new container has no target, and a restarted container has lost its target.
#[test]
fn clients_notice_nothing_of_a_stub_that_was_not_told_yet_where_its_engine_is() {
    let folder = tempfile::tempdir().unwrap();
    let (stub_folder, place) = (
        StubRowFolder(folder.path()),
        row::StubInRow { folder: Some(folder.path()), ..row::StubInRow::new() },
    );
    // Requests, not the gateway's probes, discover the missing target.
    let row = GatewayWithStub::behind(place, "timeouts: {health: {every: 1h}}", "", "");
    let served = |open: TestExchange| {
        let answer = open.rest();
        assert!(is_whole(&answer), "{} {}", answer.status, answer.text());
        assert_eq!(answer.header("x-rouse-not-ready"), "");
    };

    let early: Vec<TestExchange> = (0..10).map(|n| row.ask(n % 2 == 0, 3)).collect();
    stub_folder.listens(&row);
    let direct =
        || TestClient::new(stub_folder.address("relay").unwrap()).post(CHAT, &chat_body("small", false, 1));
    let (first, mark) = (direct(), "x-rouse-not-ready");
    assert_eq!((first.status, first.header(mark)), (503, "1"), "what the gateway is answered");
    row.until_waiting(10);
    stub_folder.tell();
    early.into_iter().for_each(served);

    // The stub's engine stays awake and continues.
    let seen = stub_folder.seen();
    stub_folder.restart(&row);
    assert_eq!((direct().status, direct().header(mark)), (503, "1"));
    let late: Vec<TestExchange> = (0..20).map(|n| row.ask(n % 2 == 0, 3)).collect();
    row.until_waiting(20);
    let reason = row.model()["reason"].as_str().unwrap().to_owned();
    assert!(reason.contains("its stub has closed the gate"), "{reason}");
    assert_eq!(row.gateway.engine("small#0")["state"], "Awake");
    assert_eq!(stub_folder.seen(), seen, "somebody got in");
    stub_folder.tell();
    late.into_iter().for_each(served);
    row.gateway.until("nobody has a lease", Duration::from_secs(5), || row.gateway.leases() == 0);
    assert_eq!((row.model()["waiting"].as_u64(), row.leases()), (Some(0), 0.into()));
}

/// Sizes of the engine's writes. They cut its events, characters and chunks at some point each.
const CUTS: [usize; 6] = [1, 2, 3, 7, 64, 1000];

#[test]
fn every_form_of_an_answer_arrives_byte_for_byte_however_it_is_cut() {
    let gateway = GatewayFixture::new(&["1Gi"]).forms_model("raw", row::free_port()).start();
    gateway.wake("raw");
    let client = gateway.client();
    let ask = |number: usize, cut: usize, version: &str| {
        let headers = format!("{}: {number}\r\n{}: {cut}\r\n", forms::FORM_HEADER, forms::CUT_HEADER);
        let request = request(CHAT, &headers, &chat_body("raw", number.is_multiple_of(2), 1));
        client.raw(&request.replacen("HTTP/1.1", version, 1))
    };
    thread::scope(|scope| {
        for (number, form) in forms::all_forms().into_iter().enumerate() {
            scope.spawn(move || {
                let told = format!("form {number}, {:?} of {}", form.framing, form.kind);
                let cuts = if form.body.len() > 100_000 { &[4093, 70_001][..] } else { &CUTS };
                for (cut, version) in cuts.iter().flat_map(|cut| ["HTTP/1.1", "HTTP/1.0"].map(|v| (*cut, v)))
                {
                    let answer = ask(number, cut, version);
                    assert_eq!((answer.status, answer.header("content-type")), (200, form.kind), "{told}");
                    assert!(answer.body == form.body, "{told} by {cut} to {version}: {}", answer.text());
                    assert!(answer.complete, "{told} by {cut} to {version}");
                    let length = form.body.len().to_string();
                    let says = form.framing == FormFraming::Length;
                    assert!(!says || answer.header("content-length") == length, "{told}");
                }
            });
        }
    });
    gateway.until("nobody has a lease", Duration::from_secs(5), || gateway.leases() == 0);
}
