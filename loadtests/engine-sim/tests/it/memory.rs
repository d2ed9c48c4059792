use std::path::PathBuf;

use engine_sim::accelerator::AcceleratorFile;
use tokio::time::Instant;

use crate::support::*;

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

struct SimulatedAccelerators {
    _dir: tempfile::TempDir,
    book: AcceleratorFile,
    path: PathBuf,
}

fn machine(capacity: u64) -> SimulatedAccelerators {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("accelerators.json");
    let book = AcceleratorFile::create(&path, &[("gpu-0", capacity), ("gpu-1", capacity)]).unwrap();
    SimulatedAccelerators { _dir: dir, book, path }
}

impl SimulatedAccelerators {
    fn flags(&self, more: &str) -> String {
        format!(
            "--enable-sleep-mode --sleep-time 1ms --wake-time 1ms --accelerator-file {} {more}",
            self.path.display()
        )
    }

    fn used(&self, id: &str) -> u64 {
        self.book.usage().unwrap()[id].used_total
    }

    fn comes_to(&self, id: &str, bytes: u64) {
        let began = Instant::now();
        while self.used(id) != bytes {
            assert!(began.elapsed() < TEST_TIMEOUT, "{id} never held {bytes}: {:?}", self.book.usage());
        }
    }
}

#[test]
fn of_two_engines_that_do_not_fit_the_second_dies_of_out_of_memory() {
    let machine = machine(3 * GIB / 2);
    let first = start(&machine.flags(""));
    assert_eq!(machine.book.usage().unwrap()["gpu-0"].by_pid[&first.pid()], GIB);
    let (code, text) = wait_until_listening(spawn(&machine.flags(""))).err().unwrap();
    assert_eq!(code, Some(1));
    assert!(
        text.contains("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB"),
        "{text}"
    );
    assert_eq!(machine.used("gpu-0"), GIB);
    assert_eq!(first.get("/health").status, 200);
}

#[test]
fn a_killed_engine_frees_its_memory() {
    let machine = machine(GIB);
    let first = start(&machine.flags("--accelerators gpu-0,1"));
    assert_eq!((machine.used("gpu-0"), machine.used("gpu-1")), (GIB, GIB));
    first.kill("-KILL");
    first.exit();
    assert_eq!((machine.used("gpu-0"), machine.used("gpu-1")), (0, 0));
    start(&machine.flags(""));
}

#[test]
fn two_that_profile_at_once_size_each_other_wrongly() {
    let machine = machine(4 * GIB);
    let flags = machine.flags("--start-time 400ms --profile-time 300ms --gpu-memory-utilization 0.45");
    let both = [spawn(&flags), spawn(&flags)].map(wait_until_listening);
    let dead: Vec<&String> =
        both.iter().filter_map(|engine| engine.as_ref().err()).map(|(_, text)| text).collect();
    assert!(!dead.is_empty(), "both live");
    let known = ["No available memory for the cache blocks", "To serve at least one request"];
    assert!(dead.iter().all(|text| known.iter().any(|known| text.contains(known))), "{dead:?}");
}

#[test]
fn two_that_start_one_after_the_other_get_their_share() {
    let machine = machine(4 * GIB);
    let flags = machine.flags("--gpu-memory-utilization 0.45");
    let (first, second) = (start(&flags), start(&flags));
    let share = (4.0 * GIB as f64 * 0.45) as u64;
    let usage = machine.book.usage().unwrap();
    assert_eq!(usage["gpu-0"].by_pid[&first.pid()], share);
    assert_eq!(usage["gpu-0"].by_pid[&second.pid()], share);
    assert_eq!(first.counter("kv_cache_bytes"), share - GIB / 2);
}

#[test]
fn a_share_that_is_not_free_at_start_is_fatal() {
    let machine = machine(4 * GIB);
    let _first = start(&machine.flags(""));
    let (code, text) =
        wait_until_listening(spawn(&machine.flags("--gpu-memory-utilization 0.9"))).err().unwrap();
    assert_eq!(code, Some(1));
    assert!(text.contains("is less than desired GPU memory utilization (0.9,"), "{text}");
}

#[test]
fn explicit_cache_sizes_let_two_start_at_once() {
    let machine = machine(4 * GIB);
    let more =
        "--start-time 200ms --profile-time 150ms --gpu-memory-utilization 0.9 --kv-cache-memory-bytes 1Gi";
    let flags = machine.flags(more);
    let both = [spawn(&flags), spawn(&flags)].map(wait_until_listening);
    assert!(both.iter().all(Result::is_ok));
    assert_eq!(machine.used("gpu-0"), 3 * GIB);
}

#[test]
fn sleep_leaves_the_residue_and_level_1_holds_host_memory() {
    let machine = machine(2 * GIB);
    let engine = start(&machine.flags("--accelerators 0,1"));
    engine.post("/sleep?level=1", "");
    assert_eq!((machine.used("gpu-0"), machine.used("gpu-1")), (64 * MIB, 64 * MIB));
    assert_eq!(machine.book.host_usage().unwrap()[&engine.pid()], GIB);
    engine.post("/wake_up", "");
    assert_eq!(machine.used("gpu-0"), GIB);
    assert!(machine.book.host_usage().unwrap().is_empty());
    engine.post("/sleep?level=2", "");
    assert!(machine.book.host_usage().unwrap().is_empty());
    engine.post("/wake_up?tags=weights", "");
    assert_eq!(machine.used("gpu-1"), (512 + 64) * MIB);
    engine.post("/wake_up?tags=kv_cache", "");
    assert_eq!(machine.used("gpu-1"), GIB);
}

#[test]
fn a_wake_that_does_not_fit_is_500_and_death() {
    let machine = machine(3 * GIB / 2);
    let first = start(&machine.flags(""));
    first.post("/sleep", "");
    let _second = start(&machine.flags(""));
    let answer = first.post("/wake_up", "");
    assert_eq!(answer.status, 500);
    assert!(answer.text().contains("CUDA out of memory"));
    let (status, text) = first.exit();
    assert_eq!(status.code(), Some(1));
    assert!(text.contains("torch.OutOfMemoryError"));
    assert_eq!(machine.used("gpu-0"), GIB);
}

#[test]
fn late_memory_stays_counted_after_sleep_and_after_death() {
    for signal in ["-TERM", "-KILL"] {
        let machine = machine(2 * GIB);
        let engine = start(&machine.flags("--fault late-memory=300ms"));
        engine.post("/sleep", "");
        assert_eq!(machine.used("gpu-0"), GIB);
        machine.comes_to("gpu-0", 64 * MIB);
        engine.kill(signal);
        engine.exit();
        assert_eq!(machine.used("gpu-0"), 64 * MIB, "{signal}");
        machine.comes_to("gpu-0", 0);
    }
}

#[test]
fn a_start_can_run_out_of_memory_on_request() {
    let (code, text) = wait_until_listening(spawn("--fault oom-at-start")).err().unwrap();
    assert_eq!(code, Some(1));
    assert!(text.contains("torch.OutOfMemoryError"), "{text}");
}
