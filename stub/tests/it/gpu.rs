//! Compares the stub's view of real accelerators with `nvidia-smi`.

use std::{collections::BTreeMap, process::Command};

use crate::support::StubBuilder;

/// Returns the MiB in use by UUID, or why there is none.
fn nvidia_smi() -> Result<BTreeMap<String, u64>, String> {
    let query = ["--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits"];
    let output = Command::new("nvidia-smi").args(query).output().map_err(|error| error.to_string())?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        return Err(text);
    }
    let row = |line: &str| {
        let (uuid, used) = line.split_once(", ")?;
        Some((uuid.to_owned(), used.trim().parse().ok()?))
    };
    text.lines().map(|line| row(line).ok_or_else(|| format!("'{line}' is no UUID and MiB"))).collect()
}

#[test]
fn uuids_and_used_memory_are_those_of_nvidia_smi() {
    let before = match nvidia_smi() {
        Ok(before) if !before.is_empty() => before,
        Ok(_) => return eprintln!("skipped: nvidia-smi lists no accelerator here"),
        Err(why) => return eprintln!("skipped: nvidia-smi does not tell of any accelerator here: {why}"),
    };
    let mut setting = StubBuilder::new();
    if let Ok(path) = std::env::var("LD_LIBRARY_PATH") {
        setting = setting.env("LD_LIBRARY_PATH", path);
    }
    let stub = setting.start();
    let list = stub.get("spi", "/v1/dual-pods/accelerators");
    let mut list: Vec<String> = serde_json::from_str(&list.text()).unwrap_or_else(|_| panic!("{list:?}"));
    let usage = stub.get("spi", "/v1/dual-pods/accelerator-memory-usage");
    let usage: BTreeMap<String, u64> =
        serde_json::from_str(&usage.text()).unwrap_or_else(|_| panic!("{usage:?}"));
    let after = nvidia_smi().unwrap();
    if list.iter().any(|id| id.starts_with("MIG-")) {
        return eprintln!("skipped: this accelerator is cut into parts, of which nvidia-smi tells otherwise");
    }

    list.sort();
    assert_eq!(list.iter().collect::<Vec<_>>(), before.keys().collect::<Vec<_>>());
    assert_eq!(usage.keys().collect::<Vec<_>>(), before.keys().collect::<Vec<_>>());
    for (uuid, used) in usage {
        // Another process may use the accelerator meanwhile.
        let (least, most) = (before[&uuid].min(after[&uuid]), before[&uuid].max(after[&uuid]));
        assert!((least..=most).contains(&used), "{uuid}: {used} MiB, and nvidia-smi: {least} to {most}");
        println!("{uuid}: {used} MiB, and nvidia-smi: {least} to {most}");
    }
}
