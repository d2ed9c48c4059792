//! Gateways that end, are killed, start again or reload their file: engines and clients hardly notice.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use nix::sys::signal::Signal;
use tokio::time::Instant;

use crate::{
    live::{EngineUnderTest, is_alive},
    support::{GatewayFixture, GatewayProcess, SimModel, pause, read},
};

const ADOPTED_WITHIN: Duration = Duration::from_secs(2);

#[test]
fn engines_outlive_a_killed_gateway_and_are_adopted_as_they_are_with_their_idle_clocks() {
    let gateway = GatewayFixture::new(&["4Gi"])
        .model(&SimModel { keys: "idle: {sleepAfter: 6s}", ..SimModel::new("awake") })
        .model(&SimModel { keys: "idle: {sleepAfter: 1s, stopAfter: 7s}", ..SimModel::new("asleep") })
        .model(&SimModel::new("cold"))
        .start();
    assert!(gateway.client().chat("asleep", true, 4).is_whole_stream());
    let last_used = Instant::now();
    sleep(&gateway, "asleep");
    assert!(gateway.client().chat("awake", true, 4).is_whole_stream());
    let used = Instant::now();
    let before = ["awake#0", "asleep#0"].map(|id| EngineUnderTest::of(&gateway, id).pid);
    // The gateway writes changed clocks to disk within this time.
    pause(Duration::from_secs(3));
    let mut gateway = gateway;
    kill(&mut gateway);
    assert!(before.iter().all(|pid| is_alive(*pid)));

    let began = Instant::now();
    let again = GatewayProcess::spawn(&gateway.dir, &[]);
    println!("ready again after {:?}", began.elapsed());
    assert!(began.elapsed() < ADOPTED_WITHIN);
    assert_eq!(again.engine("awake#0")["state"], "Awake");
    assert_eq!(again.engine("asleep#0")["state"], "Asleep(1)");
    assert_eq!(["awake#0", "asleep#0"].map(|id| EngineUnderTest::of(&again, id).pid), before);
    assert_eq!(processes(&gateway.dir), 2);
    // Each round checks both engines, because their order is not certain.
    let (mut asleep, mut stopped) = (None, None);
    again.until("one fell asleep and the other was stopped", Duration::from_secs(24), || {
        if asleep.is_none() && again.engine("awake#0")["state"] == "Asleep(1)" {
            asleep = Some(used.elapsed());
        }
        if stopped.is_none() && again.engine("asleep#0")["state"] == "Cold" {
            stopped = Some(last_used.elapsed());
        }
        asleep.is_some() && stopped.is_some()
    });
    let (asleep, stopped) = (asleep.unwrap(), stopped.unwrap());
    println!("asleep {asleep:?} after its last use, sleepAfter being 6 s");
    assert!((5.5..11.0).contains(&asleep.as_secs_f64()), "{asleep:?}");
    println!("stopped {stopped:?} after its last use, stopAfter being 7 s");
    assert!((6.5..9.0).contains(&stopped.as_secs_f64()), "{stopped:?}");
    let hot = again.client().chat("awake", true, 4);
    assert!(hot.is_whole_stream(), "{}", hot.text());
    assert_eq!((hot.header("x-rouse-cold-start"), processes(&gateway.dir)), ("hot", 1));
    for model in ["awake", "asleep"] {
        assert_eq!(launches(&gateway.dir, model), 1);
    }
}

#[test]
fn an_adopted_engine_serves_at_once_and_its_memory_stays_booked() {
    let mut gateway = GatewayFixture::new(&["1200Mi"]).model(&SimModel::new("m")).start();
    assert!(gateway.client().chat("m", true, 4).is_whole_stream());
    kill(&mut gateway);
    let again = GatewayProcess::spawn(&gateway.dir, &[]);
    assert_eq!(again.fleet()["accelerators"][0]["reserved"], 1_u64 << 30);
    let answer = again.client().chat("m", true, 4);
    assert!(answer.is_whole_stream(), "{}", answer.text());
    assert_eq!((answer.header("x-rouse-cold-start"), launches(&gateway.dir, "m")), ("", 1));
}

#[test]
fn a_stream_that_ran_when_the_gateway_was_killed_counts_as_use_and_leaves_nothing_behind() {
    let mut gateway = GatewayFixture::new(&["2Gi"])
        .model(&SimModel { keys: "idle: {sleepAfter: 5s}", ..SimModel::new("m") })
        .start();
    let stream = gateway.client().open_stream("m", 100_000);
    let engine = EngineUnderTest::of(&gateway, "m#0");
    pause(Duration::from_secs(6));
    kill(&mut gateway);
    let killed = Instant::now();
    assert!(!stream.rest().complete);
    let again = GatewayProcess::spawn(&gateway.dir, &[]);
    again.until("the engine aborted it", Duration::from_secs(1), || engine.counters()["running"] == 0);
    assert_eq!(again.engine("m#0")["leases"], 0);
    again.until("asleep", Duration::from_secs(10), || again.engine("m#0")["state"] == "Asleep(1)");
    // The gateway records the engine's use every three seconds, and the engine sleeps five seconds after its last use,
    // however long the next gateway takes to start.
    println!("asleep {:?} after the end of the stream", killed.elapsed());
    assert!(killed.elapsed() > Duration::from_millis(1200), "{:?}", killed.elapsed());
}

#[test]
fn a_gateway_killed_while_an_engine_falls_asleep_or_wakes_serves_it_afterwards() {
    let slow = SimModel { flags: "--sleep-time 1s --wake-time 1s", ..SimModel::new("m") };
    let mut gateway = GatewayFixture::new(&["1200Mi"]).model(&slow).start();
    assert!(gateway.client().chat("m", true, 4).is_whole_stream());
    // The engine is falling asleep until the test has seen that, and for a second more.
    gateway.fault("m#0", r#"{"hang-sleep": true}"#);
    assert_eq!(gateway.admin().post("/admin/v1/models/m/sleep?level=1", "").status, 202);
    gateway
        .until("on its way", Duration::from_secs(5), || gateway.engine("m#0")["state"] == "FallingAsleep(1)");
    gateway.fault("m#0", r#"{"hang-sleep": null}"#);
    pause(Duration::from_millis(300));
    kill(&mut gateway);
    let mut again = GatewayProcess::spawn(&gateway.dir, &[]);
    assert!(again.client().chat("m", true, 4).is_whole_stream());
    sleep(&again, "m");
    again.fault("m#0", r#"{"hang-wake": true}"#);
    let waiter = again.client().open_chat("m", true, 4);
    again.until("on its way", Duration::from_secs(5), || again.engine("m#0")["state"] == "Waking(1)");
    again.fault("m#0", r#"{"hang-wake": null}"#);
    pause(Duration::from_millis(300));
    kill(&mut again);
    drop(waiter);
    let last = GatewayProcess::spawn(&gateway.dir, &[]);
    assert!(last.client().chat("m", true, 4).is_whole_stream());
    assert_eq!(processes(&gateway.dir), 1);
}

#[test]
fn a_gateway_killed_during_a_launch_adopts_what_is_still_starting() {
    let mut gateway = GatewayFixture::new(&["2Gi"])
        .model(&SimModel { flags: "--start-time 2s", ..SimModel::new("m") })
        .start();
    let waiting = gateway.client().open_chat("m", true, 4);
    let engine = EngineUnderTest::of(&gateway, "m#0");
    kill(&mut gateway);
    drop(waiting);
    let again = GatewayProcess::spawn(&gateway.dir, &[]);
    assert!(again.client().chat("m", true, 4).is_whole_stream());
    assert_eq!((EngineUnderTest::of(&again, "m#0").pid, launches(&gateway.dir, "m")), (engine.pid, 1));
}

#[test]
fn an_engine_that_is_silent_while_it_is_adopted_gets_time_to_answer() {
    let mut gateway = GatewayFixture::new(&["2Gi"])
        .model(&SimModel { engine: "startTimeout: 5s", ..SimModel::new("m") })
        .start();
    assert!(gateway.client().chat("m", true, 4).is_whole_stream());
    let engine = EngineUnderTest::of(&gateway, "m#0");
    pause(Duration::from_secs(5));
    kill(&mut gateway);
    engine.signal(Signal::SIGSTOP);
    let again = GatewayProcess::spawn(&gateway.dir, &[]);
    engine.signal(Signal::SIGCONT);
    let answer = again.client().chat("m", true, 4);
    assert!(answer.is_whole_stream(), "{}", answer.text());
    assert_eq!((EngineUnderTest::of(&again, "m#0").pid, launches(&gateway.dir, "m")), (engine.pid, 1));
}

#[test]
fn left_overs_of_models_that_are_gone_are_ended_and_those_of_another_command_replaced() {
    let mut gateway = GatewayFixture::new(&["4Gi"])
        .model(&SimModel::new("kept"))
        .model(&SimModel::new("changed"))
        .model(&SimModel::new("removed"))
        .start();
    for model in ["kept", "changed", "removed"] {
        assert!(gateway.client().chat(model, true, 4).is_whole_stream());
    }
    let [kept, changed, removed] =
        ["kept#0", "changed#0", "removed#0"].map(|id| EngineUnderTest::of(&gateway, id));
    kill(&mut gateway);
    let file = gateway.dir.join("rouse.yaml");
    let text = without(&read(&file), "removed");
    let changed_text = text.replace(r#""--model", "changed","#, r#""--model", "changed", "--tokens", "3","#);
    assert_ne!(text, changed_text);
    fs::write(&file, changed_text).unwrap();
    let again = GatewayProcess::spawn(&gateway.dir, &[]);
    assert!(!removed.lives());
    again.until_logged("left over");
    again.until("the outdated one was put away", Duration::from_secs(5), || !changed.lives());
    assert!(again.client().chat("changed", true, 4).is_whole_stream());
    assert_ne!(EngineUnderTest::of(&again, "changed#0").pid, changed.pid);
    assert_eq!(EngineUnderTest::of(&again, "kept#0").pid, kept.pid);
    assert_eq!(again.client().chat("removed", true, 4).status, 404);
}

#[test]
fn a_second_gateway_on_one_state_directory_says_so_and_goes() {
    let gateway = GatewayFixture::new(&["2Gi"]).model(&SimModel::new("m")).start();
    assert!(gateway.client().chat("m", true, 4).is_whole_stream());
    let second = Command::new(env!("CARGO_BIN_EXE_rouse-gateway"))
        .arg("--config")
        .arg(gateway.dir.join("rouse.yaml"))
        .args(["--api", "127.0.0.1:0", "--admin", "127.0.0.1:0"])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert_eq!(second.status.code(), Some(1));
    let text = String::from_utf8_lossy(&second.stderr);
    assert!(text.contains("another gateway uses this state directory"), "{text}");
    assert!(gateway.client().chat("m", true, 4).is_whole_stream());
}

#[test]
fn sigterm_lets_a_stream_finish_and_then_ends_the_engines() {
    let mut gateway = GatewayFixture::new(&["2Gi"]).model(&SimModel::new("m")).start();
    gateway.wake("m");
    let (client, admin) = (gateway.client(), gateway.admin());
    let engine = EngineUnderTest::of(&gateway, "m#0");
    // The gateway lives as long as the stream, and the stream ends once the test has checked the gateway.
    gateway.stall("m#0", true);
    let stream = client.open_chat("m", true, 100);
    gateway.until("it streams", Duration::from_secs(5), || engine.counters()["running"] == 1);
    gateway.signal(Signal::SIGTERM);
    gateway.until("not ready any more", Duration::from_secs(2), || admin.get("/readyz").status == 503);
    gateway.stall("m#0", false);
    let whole = stream.rest();
    assert!(whole.is_whole_stream(), "{}", whole.text());
    assert_eq!(gateway.wait(), Some(0));
    assert!(!engine.lives());
    assert_eq!(processes(&gateway.dir), 0);
    assert!(std::panic::catch_unwind(move || client.connect()).is_err());
}

#[test]
fn after_the_grace_streams_and_waiters_are_told_that_the_gateway_goes() {
    let mut gateway = GatewayFixture::new(&["4Gi"])
        .settings("shutdown: {grace: 500ms}\nstream: {grace: 100ms}")
        .model(&SimModel::new("m"))
        .model(&SimModel { flags: "--start-time 1m", ..SimModel::new("starts") })
        .start();
    let running = gateway.client().open_stream("m", 100_000);
    let mut begun = gateway.client().open_chat("starts", true, 4);
    begun.until(":");
    let plain = gateway.client().open_chat("starts", false, 4);
    gateway.until("both wait", Duration::from_secs(5), || {
        gateway.fleet()["models"].as_array().unwrap().iter().any(|model| model["waiting"] == 2)
    });
    let began = Instant::now();
    gateway.signal(Signal::SIGTERM);
    for stream in [running, begun] {
        let told = stream.rest();
        let last = told.events().pop().unwrap_or_default();
        assert!(last.contains("shutting_down") && !told.text().contains("[DONE]"), "{}", told.text());
    }
    let refused = plain.rest();
    assert_eq!((refused.status, refused.json()["error"]["code"].as_str()), (503, Some("shutting_down")));
    assert_eq!(gateway.wait(), Some(0));
    println!("ended {:?} after SIGTERM", began.elapsed());
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    assert_eq!(processes(&gateway.dir), 0);
}

#[test]
fn a_second_sigterm_means_now() {
    let mut gateway =
        GatewayFixture::new(&["2Gi"]).settings("shutdown: {grace: 1m}").model(&SimModel::new("m")).start();
    let stream = gateway.client().open_stream("m", 100_000);
    gateway.signal(Signal::SIGTERM);
    // The gateway would miss a second signal that arrives before it took the first.
    gateway.until("it goes", Duration::from_secs(5), || gateway.admin().get("/readyz").status == 503);
    let began = Instant::now();
    gateway.signal(Signal::SIGTERM);
    assert!(stream.rest().broke_off_with("shutting_down"));
    assert_eq!(gateway.wait(), Some(0));
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

#[test]
fn engines_that_are_left_are_adopted_by_the_next_start() {
    let mut gateway = GatewayFixture::new(&["4Gi"])
        .settings("shutdown: {engines: leave}")
        .model(&SimModel::new("awake"))
        .model(&SimModel::new("asleep"))
        .start();
    for model in ["awake", "asleep"] {
        assert!(gateway.client().chat(model, true, 4).is_whole_stream());
    }
    sleep(&gateway, "asleep");
    let before = ["awake#0", "asleep#0"].map(|id| EngineUnderTest::of(&gateway, id).pid);
    gateway.signal(Signal::SIGTERM);
    assert_eq!(gateway.wait(), Some(0));
    assert!(before.iter().all(|pid| is_alive(*pid)));
    let again = GatewayProcess::spawn(&gateway.dir, &[]);
    assert_eq!(["awake#0", "asleep#0"].map(|id| EngineUnderTest::of(&again, id).pid), before);
    assert_eq!(again.engine("asleep#0")["state"], "Asleep(1)");
    let file = gateway.dir.join("rouse.yaml");
    fs::write(&file, read(&file).replace("engines: leave", "engines: stop")).unwrap();
    again.until("reloaded", Duration::from_secs(5), || again.log().contains("configuration reloaded"));
    assert_eq!(again.terminate(), Some(0));
    assert!(before.iter().all(|pid| !is_alive(*pid)));
}

#[test]
fn a_reload_touches_what_changed_and_nothing_else() {
    let gateway = GatewayFixture::new(&["8Gi"])
        .model(&SimModel::new("kept"))
        .model(&SimModel::new("changed"))
        .model(&SimModel::new("removed"))
        .model(&SimModel { flags: "--start-time 1m", ..SimModel::new("awaited") })
        .start();
    for model in ["kept", "changed", "removed"] {
        assert!(gateway.client().chat(model, true, 4).is_whole_stream());
    }
    let [kept, changed, removed] =
        ["kept#0", "changed#0", "removed#0"].map(|id| EngineUnderTest::of(&gateway, id));
    let stream = gateway.client().open_stream("kept", 300);
    let waiter = gateway.client().open_chat("awaited", false, 4);
    let awaited = EngineUnderTest::of(&gateway, "awaited#0");
    let file = gateway.dir.join("rouse.yaml");
    let text = without(&without(&read(&file), "removed"), "awaited");
    fs::write(&file, text.replace(r#""--model", "changed","#, r#""--model", "changed", "--tokens", "3","#))
        .unwrap();
    let refused = waiter.rest();
    assert_eq!(
        (refused.status, refused.json()["error"]["code"].as_str()),
        (404, Some("model_not_found")),
        "{}",
        refused.text()
    );
    for engine in [&changed, &removed, &awaited] {
        gateway.until("ended", Duration::from_secs(5), || !engine.lives());
    }
    assert!(stream.rest().is_whole_stream());
    assert_eq!(gateway.client().chat("removed", true, 4).status, 404);
    assert!(gateway.client().chat("changed", true, 4).is_whole_stream());
    assert_eq!(EngineUnderTest::of(&gateway, "kept#0").pid, kept.pid);
    assert_eq!(launches(&gateway.dir, "kept"), 1);
}

#[test]
fn an_invalid_file_is_refused_whole_and_sighup_reads_a_good_one() {
    let gateway = GatewayFixture::new(&["4Gi"]).model(&SimModel::new("m")).start();
    assert!(gateway.client().chat("m", true, 4).is_whole_stream());
    let engine = EngineUnderTest::of(&gateway, "m#0");
    let file = gateway.dir.join("rouse.yaml");
    let good = read(&file);
    let more = good.replace("    accelerators: 1", "    aliases: [n]\n    accelerators: 1");
    assert_ne!(good, more);
    gateway.signal(Signal::SIGHUP);
    let unchanged =
        || gateway.log().lines().any(|line| line.ends_with("configuration reloaded: nothing changed"));
    gateway.until("read again", Duration::from_secs(5), unchanged);
    fs::write(&file, format!("{more}unknown: 1\n")).unwrap();
    gateway
        .until("refused", Duration::from_secs(5), || gateway.log().contains("configuration reload failed"));
    assert!(gateway.log().contains("unknown"), "{}", gateway.log());
    assert_eq!(gateway.client().chat("n", true, 4).status, 404);
    assert!(gateway.client().chat("m", true, 4).is_whole_stream());
    // The gateway does not notice a change behind a link, so a reload from there needs the signal.
    let (target, link) = (file.with_extension("target"), file.with_extension("link"));
    fs::write(&target, &good).unwrap();
    std::os::unix::fs::symlink(&target, &link).unwrap();
    fs::rename(&link, &file).unwrap();
    let mended = || gateway.log().contains("nothing changed; the file is valid again");
    gateway.until("mended", Duration::from_secs(5), mended);
    fs::write(&target, &more).unwrap();
    gateway.signal(Signal::SIGHUP);
    gateway.until("reloaded", Duration::from_secs(5), || gateway.client().chat("n", true, 4).status == 200);
    assert_eq!(EngineUnderTest::of(&gateway, "m#0").pid, engine.pid);
    let changes = gateway.log().matches("configuration reloaded: changed m").count();
    assert_eq!(changes, 1, "{}", gateway.log());
}

fn kill(gateway: &mut GatewayProcess) {
    gateway.signal(Signal::SIGKILL);
    assert_eq!(gateway.wait(), None);
}

#[test]
fn a_start_that_fails_leaves_the_journal_of_the_gateway_that_runs_as_it_is() {
    let fixture = GatewayFixture::new(&["2Gi"]).model(&SimModel::new("m"));
    let journal = fixture.dir().join("journal");
    let gateway = fixture.flag("--journal").flag(journal.to_str().unwrap()).start();
    assert!(gateway.client().chat("m", true, 4).is_whole_stream());
    let other = gateway.dir.join("other.yaml");
    let text = read(&gateway.dir.join("rouse.yaml"));
    fs::write(&other, text.replace("state\"\n", "other-state\"\n")).unwrap();
    // The first start meets the lock on the state directory. The second has a state directory of its own, and its port
    // is taken.
    let taken = gateway.api.to_string();
    for (file, api) in [("rouse.yaml", "127.0.0.1:0"), ("other.yaml", taken.as_str())] {
        let failed = Command::new(env!("CARGO_BIN_EXE_rouse-gateway"))
            .arg("--config")
            .arg(gateway.dir.join(file))
            .args(["--admin", "127.0.0.1:0", "--api", api, "--journal", journal.to_str().unwrap()])
            .stdin(Stdio::null())
            .output()
            .unwrap();
        assert_eq!(failed.status.code(), Some(1), "{}", String::from_utf8_lossy(&failed.stderr));
        assert!(!gateway.dir.join("journal.1").exists(), "{file}");
    }
    let before = read(&journal);
    assert!(gateway.client().chat("m", true, 4).is_whole_stream());
    sleep(&gateway, "m");
    gateway.until("it is written on", Duration::from_secs(5), || read(&journal).len() > before.len());
    assert!(read(&journal).starts_with(&before), "it was begun anew");
}

fn sleep(gateway: &GatewayProcess, model: &str) {
    let order = gateway.admin().post(&format!("/admin/v1/models/{model}/sleep?level=1"), "");
    assert_eq!(order.status, 202, "{}", order.text());
    let id = format!("{model}#0");
    gateway.until("asleep", Duration::from_secs(5), || gateway.engine(&id)["state"] == "Asleep(1)");
}

/// Returns the configuration without this model's entry.
fn without(yaml: &str, model: &str) -> String {
    let (head, models) = yaml.split_once("models:\n").unwrap();
    let entries = models.split_inclusive("\n").fold(Vec::<String>::new(), |mut entries, line| {
        if line.starts_with("  - name: ") {
            entries.push(String::new());
        }
        entries.last_mut().unwrap().push_str(line);
        entries
    });
    let name = format!("  - name: {model}\n");
    let kept: String = entries.into_iter().filter(|entry| !entry.starts_with(&name)).collect();
    format!("{head}models:\n{kept}")
}

/// Counts the processes with the mark of this gateway's state directory: engines, whether or not a gateway knows them.
fn processes(dir: &Path) -> usize {
    let mark = format!("ROUSE_ENGINE={}|", dir.join("state").canonicalize().unwrap().display());
    let all = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    let marked = all.filter(|entry| {
        let environment = fs::read(entry.path().join("environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|variable| variable.starts_with(mark.as_bytes()))
    });
    marked.count()
}

/// How often any gateway started an engine of this model.
fn launches(dir: &Path, model: &str) -> usize {
    read(&dir.join(format!("state/logs/{model}-0.log"))).matches("=== rouse:").count()
}
