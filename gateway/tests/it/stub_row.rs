//! A gate that is elsewhere: the stub in front of an engine closes it, and no client notices more than a wait.

use std::{
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use crate::support::{
    Answer, Fixture, Gateway, Sim,
    client::{chat_body, request},
    forms::{self, Framing},
    open::Open,
    row,
};

const CHAT: &str = "/v1/chat/completions";
const CLOSE: &str = r#"{"epoch":1,"generation":1,"drainDeadline":20000}"#;
const OPEN: &str = r#"{"epoch":1,"generation":1}"#;

struct Row {
    gateway: Gateway,
    admin: u16,
}

impl Row {
    /// An engine that is awake behind its stub, with these keys of its model.
    fn start(flags: &str, keys: &str) -> Self {
        let admin = row::free_port();
        let sim = Sim { flags, keys, stub: Some(admin), ..Sim::new("small") };
        let gateway =
            Fixture::new(&["2Gi"]).settings("stream: {grace: 50ms, heartbeat: 50ms}").model(&sim).start();
        gateway.wake("small");
        Self { gateway, admin }
    }

    fn close(&self) -> serde_json::Value {
        let answer = row::order(self.admin, "POST", "/v1/gate", CLOSE);
        assert_eq!(answer.status, 202, "{}", answer.text());
        answer.json()
    }

    fn open(&self) {
        let answer = row::order(self.admin, "DELETE", "/v1/gate", OPEN);
        assert!((200..300).contains(&answer.status), "{}", answer.text());
    }

    /// The stub's.
    fn leases(&self) -> serde_json::Value {
        row::order(self.admin, "GET", "/v1/gate", "").json()["leases"].clone()
    }

    fn ask(&self, stream: bool, tokens: u32) -> Open {
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

fn is_whole(answer: &Answer) -> bool {
    let plain = || answer.complete && answer.json()["choices"].is_array();
    answer.status == 200 && (answer.is_whole_stream() || plain())
}

#[test]
fn nobody_is_lost_or_refused_by_a_stub_that_closes_its_gate_over_fifty_requests() {
    let row = Row::start("--itl 40ms", "");
    let under_way: Vec<Open> = (0..50).map(|n| row.ask(n % 2 == 0, 40)).collect();
    // The gateway's own leases come first.
    row.gateway.until("fifty are under way", Duration::from_secs(10), || row.leases() == 50);
    assert_eq!(row.gateway.leases(), 50);
    assert_eq!(row.close()["leases"], 50);

    let late: Vec<Open> = (0..20).map(|n| row.ask(n % 2 == 0, 3)).collect();
    row.until_waiting(20);
    let reason = row.model()["reason"].as_str().unwrap().to_owned();
    assert!(reason.contains("its gate is closed by its stub"), "{reason}");
    assert_eq!(row.gateway.engine("small#0")["state"], "Awake");
    for open in under_way {
        let answer = open.rest();
        assert!(is_whole(&answer), "{} {}", answer.status, answer.text());
    }
    // Those who wait hold nothing, neither here nor there.
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
    let row = Row::start("", "maxConcurrency: 1");
    row.close();
    let served = Arc::new(Mutex::new(Vec::new()));
    let clients: Vec<_> = (0..6_u64)
        .map(|n| {
            let (open, served) = (row.ask(n % 2 == 0, 20), Arc::clone(&served));
            row.until_waiting(n + 1);
            thread::spawn(move || {
                let answer = open.rest();
                served.lock().unwrap().push(n);
                is_whole(&answer)
            })
        })
        .collect();
    let late =
        row.gateway.client().post_with(CHAT, "x-request-timeout: 1\r\n", &chat_body("small", false, 1));
    assert_eq!((late.status, late.json()["error"]["code"].as_str()), (503, Some("model_not_ready")));
    assert_eq!(late.header("x-rouse-gated"), "");
    assert!(late.text().contains("its gate is closed by its stub"), "{}", late.text());
    row.until_waiting(6);
    row.open();
    for client in clients {
        assert!(client.join().unwrap());
    }
    assert_eq!(*served.lock().unwrap(), [0, 1, 2, 3, 4, 5]);
    assert_eq!(row.gateway.engine("small#0")["state"], "Awake");
}

/// Sizes in which an engine's bytes are written: its events, letters and chunks are all cut somewhere.
const CUTS: [usize; 6] = [1, 2, 3, 7, 64, 1000];

#[test]
fn every_form_of_an_answer_arrives_byte_for_byte_however_it_is_cut() {
    let gateway = Fixture::new(&["1Gi"]).forms("raw", row::free_port()).start();
    gateway.wake("raw");
    let client = gateway.client();
    let ask = |number: usize, cut: usize, version: &str| {
        let headers = format!("{}: {number}\r\n{}: {cut}\r\n", forms::FORM, forms::CUT);
        let request = request(CHAT, &headers, &chat_body("raw", number.is_multiple_of(2), 1));
        client.raw(&request.replacen("HTTP/1.1", version, 1))
    };
    thread::scope(|scope| {
        for (number, form) in forms::all().into_iter().enumerate() {
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
                    let says = form.framing == Framing::Length;
                    assert!(!says || answer.header("content-length") == length, "{told}");
                }
            });
        }
    });
    gateway.until("nobody has a lease", Duration::from_secs(5), || gateway.leases() == 0);
}
