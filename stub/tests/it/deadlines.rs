//! Time limits. Where the program's own time is limited, its threads' waits for a processor do not count.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    lock_timed_tests,
    support::{
        ReservedPort, StubBuilder, StubProcess,
        client::chat,
        engine::{ProbedHttpServer, sim},
        run_queue_meter::{ProcThread, RunQueueMeter},
        stub_before, within,
    },
};

const LIST: &str = "/v1/dual-pods/accelerators";
const MEMORY: &str = "/v1/dual-pods/accelerator-memory-usage";

fn watch(stub: &StubProcess, url: &str, more: &str) {
    let answer = stub.post("/v1/readiness-url", &format!("{{\"url\": \"{url}\"{more}}}"));
    assert_eq!(answer.status, 200, "{}", answer.text());
}

fn poller(stub: &StubProcess) -> serde_json::Value {
    stub.get("debug", "/debug/state").json()["readiness"]["poller"].clone()
}

/// Polls without pause.
fn look_until(what: &str, mut is_so: impl FnMut() -> bool) -> Instant {
    let end = Instant::now() + Duration::from_secs(10);
    while !is_so() {
        assert!(Instant::now() < end, "never: {what}");
    }
    Instant::now()
}

#[test]
fn ready_within_20_ms_of_the_engines_first_good_answer() {
    let _alone = lock_timed_tests();
    let stub = StubBuilder::new().start();
    for run in 0..20 {
        let reserved = ReservedPort::bind();
        watch(&stub, &format!("http://{}/health", reserved.address()), "");
        assert!(!stub.ready());
        within("it was refused", Duration::from_secs(5), || poller(&stub)["failures"].as_u64() > Some(5));
        let turns = RunQueueMeter::start([ProcThread::current(), ProcThread::control(&stub)]);
        let listens = Instant::now();
        let engine = ProbedHttpServer::on(reserved.listen(), 200);
        let ready_at = look_until("it is ready", || stub.ready());
        let good = engine.first_good().unwrap();
        let delay = turns.with_thread(engine.thread).without_waits(ready_at - good);
        println!(
            "run {run}: asked {:?} after it listens, seen {:?} after its answer, of which {delay:?} are the stub's",
            good - listens,
            ready_at - good
        );
        assert!(delay <= Duration::from_millis(20), "run {run}: {delay:?} after the answer");
    }
}

#[test]
fn unready_after_the_threshold_and_not_before() {
    let _alone = lock_timed_tests();
    let stub = StubBuilder::new().start();
    let engine = ProbedHttpServer::start(200);
    watch(&stub, &engine.url(), ", \"period\": \"200ms\", \"failureThreshold\": 4");
    within("it is ready", Duration::from_secs(2), || stub.ready());
    let turns =
        RunQueueMeter::start([ProcThread::current(), ProcThread::control(&stub), engine.thread.clone()]);
    engine.set(500);
    let began = Instant::now();
    within("it is unready", Duration::from_secs(5), || !stub.ready());
    let (took, bad) = (began.elapsed(), engine.bad());
    // Four polls, 200 ms apart.
    assert!(bad >= 4, "unready after {bad} bad answers");
    assert!(
        took >= Duration::from_millis(600) && turns.without_waits(took) < Duration::from_millis(1500),
        "{took:?}"
    );
}

#[test]
fn by_itself_the_period_is_a_second_and_the_threshold_three() {
    let _alone = lock_timed_tests();
    let stub = StubBuilder::new().start();
    let engine = ProbedHttpServer::start(200);
    watch(&stub, &engine.url(), "");
    within("it is ready", Duration::from_secs(2), || stub.ready());
    let poller = poller(&stub);
    assert_eq!((&poller["period"], &poller["failureThreshold"]), (&1000.into(), &3.into()));
    let turns =
        RunQueueMeter::start([ProcThread::current(), ProcThread::control(&stub), engine.thread.clone()]);
    engine.set(500);
    let began = Instant::now();
    within("it is unready", Duration::from_secs(10), || !stub.ready());
    let (took, bad) = (began.elapsed(), engine.bad());
    assert!(bad >= 3, "unready after {bad} bad answers");
    assert!(took >= Duration::from_secs(2) && turns.without_waits(took) < Duration::from_secs(5), "{took:?}");
}

/// Requests in flight make no difference.
#[test]
fn a_gate_is_shown_closed_within_5_ms_of_the_order() {
    let _alone = lock_timed_tests();
    let engine = sim("--ttft 1ms --itl 20ms");
    let stub = stub_before(engine.address, &[]);
    let (spi, relay) = (stub.spi(), stub.relay());
    let request = relay.request("POST", "/v1/chat/completions", "", &chat(100_000));
    let mut streams: Vec<_> = (0..100).map(|_| relay.open(&request)).collect();
    streams.iter_mut().for_each(|open| open.until("data: "));
    for generation in 1..=20 {
        let order = format!(r#"{{"epoch":1,"generation":{generation}}}"#);
        let turns = RunQueueMeter::start([ProcThread::current(), ProcThread::control(&stub)]);
        let asked = Instant::now();
        assert_eq!(spi.post("/v1/gate", &order).status, 202);
        assert_eq!(stub.gate()["gated"], true);
        let took = asked.elapsed();
        let without_waits = turns.without_waits(took);
        println!(
            "generation {generation}: closed and shown after {took:?}, of which {without_waits:?} are the stub's"
        );
        assert!(
            without_waits < Duration::from_millis(5),
            "closed and shown after {took:?}, {without_waits:?} of them its own"
        );
        assert_eq!(spi.send("DELETE", "/v1/gate", &order).status, 200);
    }
}

#[test]
fn a_driver_that_hangs_is_told_after_its_deadline_and_blocks_nobody() {
    let _alone = lock_timed_tests();
    let (setting, fake) = StubBuilder::new().nvml(&["GPU-a - 1", "GPU-b - 2", "GPU-c - 3"]);
    let mut stub = setting.start();
    assert_eq!(stub.get("spi", MEMORY).status, 200);
    fake.set_accelerators(&["GPU-a - 1", "GPU-b - hang", "GPU-c - 3"]);

    let names = || {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", stub.pid())).unwrap();
        // The thread may have ended meanwhile.
        let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).ok();
        tasks.filter_map(|task| name(task.unwrap())).collect::<Vec<_>>()
    };
    let asking = |name: &str| names().iter().filter(|comm| comm.starts_with(name)).count();
    let readers = || asking("accelerator-mem");
    // Also the thread that queried their names at the start: it would be counted below, or not.
    within("nobody asks the driver", Duration::from_secs(2), || asking("accelerator") == 0);
    let before = names().len();
    let answered = AtomicUsize::new(0);
    let turns = RunQueueMeter::start([ProcThread::current(), ProcThread::control(&stub)]);
    let began = Instant::now();
    std::thread::scope(|scope| {
        let ask = || {
            let answer = stub.get("spi", MEMORY);
            answered.fetch_add(1, Ordering::SeqCst);
            answer
        };
        let asking: Vec<_> = (0..30).map(|_| scope.spawn(ask)).collect();
        within("it is asked", Duration::from_secs(2), || readers() > 0);
        for _ in 0..20 {
            let turns = RunQueueMeter::start([ProcThread::current(), ProcThread::control(&stub)]);
            let asked = Instant::now();
            assert!(!stub.ready());
            assert_eq!(stub.get("spi", LIST).status, 200);
            assert!(turns.without_waits(asked.elapsed()) < Duration::from_secs(1), "{:?}", asked.elapsed());
        }
        assert_eq!((readers(), names().len()), (1, before + 1), "not a thread for each question");
        assert_eq!(answered.load(Ordering::SeqCst), 0, "all others had their answers while the driver hung");
        for answer in asking {
            let answer = answer.join().unwrap();
            assert_eq!(answer.status, 500);
            let text = answer.text();
            let lines: Vec<&str> = text.lines().collect();
            let [hung, "GPU-c: not read: NVML hangs"] = lines[..] else { panic!("{lines:?}") };
            assert!(hung.starts_with("GPU-b: NVML hangs: no answer for "), "{hung}");
        }
    });
    let took = began.elapsed();
    assert!(took >= Duration::from_secs(5) && turns.without_waits(took) < Duration::from_secs(8), "{took:?}");
    let turns = RunQueueMeter::start([ProcThread::current(), ProcThread::control(&stub)]);
    let later = Instant::now();
    assert_eq!(stub.get("spi", MEMORY).status, 500);
    assert!(turns.without_waits(later.elapsed()) < Duration::from_secs(1), "it is known to hang");

    fake.set_accelerators(&["GPU-a - 1", "GPU-b - 5", "GPU-c - 3"]);
    within("it reads again", Duration::from_secs(5), || stub.get("spi", MEMORY).status == 200);
    assert_eq!(stub.get("spi", MEMORY).text(), "{\"GPU-a\":1,\"GPU-b\":5,\"GPU-c\":3}\n");

    // The driver hangs again, and the process can still end.
    fake.set_accelerators(&["GPU-a - hang", "GPU-b - 5", "GPU-c - 3"]);
    assert_eq!(stub.get("spi", MEMORY).status, 500);
    stub.signal(nix::sys::signal::Signal::SIGTERM);
    assert_eq!(stub.wait_exit_within(Duration::from_secs(5)).code(), Some(0));
}
