//! Several keys share one full engine: how a flood delays a quiet key, and what equal keys get.

use std::{
    io::Write as _,
    process::{Command, Stdio},
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;

use rouse::{
    fleet::{command::Command as Decided, event::Event},
    journal,
};

use crate::support::{GatewayFixture, GatewayProcess, SimModel, TestClient, client::chat_body, pause, read};

const CHAT: &str = "/v1/chat/completions";

/// Starts a gateway with these keys and one model that answers `places` requests at a time.
fn start(places: u32, keys: &[&str]) -> GatewayProcess {
    let lines: String = keys.iter().map(|name| format!("  {}\n", line(name))).collect();
    let limit = format!("maxConcurrency: {places}");
    let model = SimModel { keys: &limit, ..SimModel::new("m") };
    let fixture =
        GatewayFixture::new(&["2Gi"]).settings(&format!("keys:\n{}", lines.trim_end())).model(&model);
    let journal = fixture.dir().join("journal").display().to_string();
    fixture.flag("--journal").flag(&journal).start()
}

/// Returns how many places went to other keys while one of this key's requests waited: the maximum over its requests,
/// from the gateway's journal. The count does not depend on the load of the machine.
fn most_passed_by(gateway: &GatewayProcess, quiet: &str) -> usize {
    let lines = journal::read(&read(&gateway.dir.join("journal"))).unwrap();
    let (mut waiting, mut worst) = (Vec::<(_, usize)>::new(), 0);
    journal::replay(&lines, |_, events, plan, _| {
        waiting.extend(events.iter().filter_map(|event| match event {
            Event::Arrived { waiter } if waiter.key == quiet => Some((waiter.id, 0)),
            _ => None,
        }));
        let granted = |c: &Decided| match c {
            Decided::Grant { waiter, .. } => Some(*waiter),
            _ => None,
        };
        let granted: Vec<_> = plan.commands.iter().filter_map(granted).collect();
        waiting.retain(|(id, _)| !granted.contains(id));
        for (_, passed) in &mut waiting {
            *passed += granted.len();
            worst = worst.max(*passed);
        }
    });
    worst
}

/// Returns the configuration's line for a key whose secret derives from its name.
fn line(name: &str) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rouse-gateway"));
    command.args(["key", name, "--stdin"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(secret(name).as_bytes()).unwrap();
    let output = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
    output.trim().strip_prefix("configuration").unwrap().trim().to_owned()
}

fn secret(name: &str) -> String {
    format!("rouse-test-secret-of-{name}")
}

/// One answer: its cost as the gateway weighs it, how long its request waited for a place, and the time from there.
struct WeighedResponse {
    worth: u64,
    waited: Duration,
    took: Duration,
}

fn ask(client: TestClient, key: &str, tokens: u32) -> WeighedResponse {
    let began = Instant::now();
    let headers = format!("Authorization: Bearer {}\r\n", secret(key));
    let answer = client.post_with(CHAT, &headers, &chat_body("m", false, tokens));
    assert_eq!(answer.status, 200, "{}", answer.text());
    let usage = &answer.json()["usage"];
    let worth = |name: &str| usage[name].as_u64().unwrap();
    // An answer without a wait for a place has no such header.
    let queue = answer.header("server-timing").strip_prefix("queue;dur=").and_then(|t| t.split(',').next());
    let waited = Duration::from_millis(queue.map_or(0, |ms| ms.parse().unwrap()));
    WeighedResponse {
        worth: worth("prompt_tokens") + 2 * worth("completion_tokens"),
        waited,
        took: began.elapsed().saturating_sub(waited),
    }
}

#[test]
fn a_quiet_key_beside_a_hundred_clients_of_another_waits_no_longer_than_one_answer() {
    let _alone = crate::lock_timed_tests();
    let gateway = start(2, &["flood", "quiet"]);
    let client = gateway.client();
    ask(client, "quiet", 1);
    let over = AtomicBool::new(false);
    let others = Mutex::new(Vec::new());
    let flood = |n: u32| {
        while !over.load(Ordering::Relaxed) {
            let asked = ask(client, "flood", 20 + n % 41);
            others.lock().unwrap().push(asked);
        }
    };
    let answered = || others.lock().unwrap().len();
    let mut quiet = Vec::new();
    std::thread::scope(|scope| {
        let flood = &flood;
        (0..100).for_each(|n| drop(scope.spawn(move || flood(n))));
        let waiting = || gateway.fleet()["models"][0]["waiting"].as_u64() > Some(80);
        gateway.until("the flood waits", Duration::from_secs(20), waiting);
        // The first two requests find free places and owe nothing for them: the very first place goes by arrival.
        gateway.until("one that waited was served", Duration::from_secs(20), || answered() >= 3);
        for _ in 0..20 {
            quiet.push(ask(client, "quiet", 10));
            // This counts answers instead of time: on a machine that stands still for a moment, the key would otherwise
            // stop being quiet.
            let before = answered();
            gateway.until("others go on", Duration::from_secs(20), || answered() >= before + 6);
        }
        over.store(true, Ordering::Relaxed);
    });
    let others = others.into_inner().unwrap();
    let most = |spans: &mut dyn Iterator<Item = Duration>| spans.max().unwrap();
    let worst = most(&mut quiet.iter().map(|a| a.waited));
    let usual = quiet.iter().map(|a| a.waited).sum::<Duration>() / 20;
    let (their_wait, longest) =
        (most(&mut others.iter().map(|a| a.waited)), most(&mut others.iter().map(|a| a.took)));
    println!(
        "beside a hundred others, who waited up to {their_wait:?}, the quiet key waited {usual:?} on average, \
         {worst:?} at most; their longest answer took {longest:?}"
    );
    assert_eq!(most_passed_by(&gateway, "quiet"), 0, "the next place was not the quiet key's");
    // Slack for a gateway that waits for a core.
    let slack = Duration::from_millis(100);
    assert!(worst <= longest + slack, "{worst:?} for a place, while no answer took longer than {longest:?}");
    assert!(worst * 4 < their_wait, "{worst:?}, and the others {their_wait:?}");
}

#[test]
fn eight_equal_keys_are_served_alike_whatever_they_ask_for() {
    let _alone = crate::lock_timed_tests();
    let names: Vec<String> = (0..8).map(|n| format!("team-{n}")).collect();
    let keys: Vec<&str> = names.iter().map(String::as_str).collect();
    let gateway = start(4, &keys);
    let client = gateway.client();
    ask(client, "team-0", 1);
    let served: Vec<AtomicU64> = keys.iter().map(|_| AtomicU64::new(0)).collect();
    let (begun, over) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for (n, key) in (0_u32..).zip(&keys) {
            for c in 0..2 + n {
                let (served, begun, over) = (&served, &begun, &over);
                scope.spawn(move || {
                    while !over.load(Ordering::Relaxed) {
                        let worth = ask(client, key, 5 + 9 * (n * 3 % 8) + c).worth;
                        if begun.load(Ordering::Relaxed) && !over.load(Ordering::Relaxed) {
                            served[n as usize].fetch_add(worth, Ordering::Relaxed);
                        }
                    }
                });
            }
        }
        let waiting = || gateway.fleet()["models"][0]["waiting"].as_u64() > Some(20);
        gateway.until("all wait", Duration::from_secs(20), waiting);
        begun.store(true, Ordering::Relaxed);
        pause(Duration::from_secs(12));
        over.store(true, Ordering::Relaxed);
    });
    let shares: Vec<f64> = served.iter().map(|n| n.load(Ordering::Relaxed) as f64).collect();
    let index = shares.iter().sum::<f64>().powi(2) / (8.0 * shares.iter().map(|s| s * s).sum::<f64>());
    println!("Jain's index {index:.4} of {shares:?}");
    assert!(index >= 0.95, "{index:.4} of {shares:?}");
}
