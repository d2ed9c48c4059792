use std::process::{Command, Stdio};

use super::*;

const GIB: u64 = 1 << 30;

fn book(capacity: u64) -> (tempfile::TempDir, AcceleratorFile) {
    let dir = tempfile::tempdir().unwrap();
    let file =
        AcceleratorFile::create(dir.path().join("cards.json"), &[("gpu-0", capacity), ("gpu-1", capacity)])
            .unwrap();
    (dir, file)
}

#[test]
fn capacity_is_enforced_and_a_refusal_changes_nothing() {
    let (_dir, file) = book(GIB);
    let both = file.holder(&["gpu-0".into(), "gpu-1".into()], "m", None).unwrap();
    both.resize(GIB / 2).unwrap();
    assert!(matches!(both.resize(GIB + 1), Err(Error::OutOfMemory { free, .. }) if free == GIB / 2));
    let usage = file.usage().unwrap();
    assert_eq!(usage["gpu-0"].by_pid, BTreeMap::from([(std::process::id(), GIB / 2)]));
    assert_eq!(usage["gpu-1"].free(), GIB / 2);
}

#[test]
fn what_did_not_fit_stays_known_and_nothing_else_is_taken_for_it() {
    let (_dir, file) = book(GIB);
    let holder = file.holder(&[], "m", None).unwrap();
    assert_eq!(file.refusals().unwrap(), [""; 0]);
    holder.resize(2 * GIB).unwrap_err();
    holder.resize(GIB).unwrap();
    assert!(file.holder(&["none".into()], "m", None).is_err());
    holder.resize(0).unwrap();
    let refused = "2147483648 bytes do not fit on `gpu-0`: 1073741824 of 1073741824 are free";
    assert_eq!(file.refusals().unwrap(), [refused]);
    for _ in 0..100 {
        holder.resize(2 * GIB).unwrap_err();
    }
    assert_eq!(file.refusals().unwrap().len(), 64);
}

#[test]
fn a_number_is_an_index_and_nothing_is_the_first() {
    let (_dir, file) = book(GIB);
    assert_eq!(file.holder(&["1".into()], "m", None).unwrap().ids(), ["gpu-1"]);
    assert_eq!(file.holder(&[String::new()], "m", None).unwrap().ids(), ["gpu-0"]);
    assert!(matches!(file.holder(&["7".into()], "m", None), Err(Error::UnknownAccelerator(_))));
}

#[test]
fn entries_of_the_dead_are_dropped_by_whoever_reads() {
    let (_dir, file) = book(GIB);
    let mut child = Command::new("sleep").arg("60").stdin(Stdio::null()).spawn().unwrap();
    let start = process::start_ticks(child.id()).unwrap();
    let mut holder = file.holder(&[], "dead", None).unwrap();
    (holder.pid, holder.start) = (child.id(), start);
    holder.resize(GIB).unwrap();
    assert_eq!(file.usage().unwrap()["gpu-0"].free(), 0);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(
        file.usage().unwrap()["gpu-0"],
        SimAcceleratorUsage { capacity: GIB, ..SimAcceleratorUsage::default() }
    );
}

#[test]
fn late_memory_stays_counted_until_its_time() {
    let (_dir, file) = book(GIB);
    let holder = file.holder(&[], "late", Some(Duration::from_millis(80))).unwrap();
    holder.resize(GIB).unwrap();
    holder.resize(GIB / 4).unwrap();
    assert_eq!(file.usage().unwrap()["gpu-0"].used_total, GIB);
    let deadline = clock::wall_us() + 2_000_000;
    while file.usage().unwrap()["gpu-0"].used_total != GIB / 4 {
        assert!(clock::wall_us() < deadline, "the memory never came back");
        std::thread::yield_now();
    }
}

#[test]
fn an_account_takes_its_own_late_memory_back_before_others_can() {
    let (_dir, file) = book(GIB);
    let holder = file.holder(&[], "late", Some(Duration::from_secs(60))).unwrap();
    holder.resize(GIB).unwrap();
    holder.resize(GIB / 4).unwrap();
    holder.resize(GIB / 2).unwrap();
    let mut other = holder.clone();
    (other.pid, other.start) = (1, process::start_ticks(1).unwrap());
    assert!(other.resize(GIB / 4).is_err());
    holder.resize(GIB).unwrap();
    assert_eq!(file.usage().unwrap()["gpu-0"].used_total, GIB);
}
