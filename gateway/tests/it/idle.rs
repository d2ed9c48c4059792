//! An idle gateway: a quick start and a small footprint.
//!
//! These bounds hold for a debug build on a busy machine; `loadtests/compare` measures the figures of the release
//! build.

use std::time::Duration;

use crate::support::{GatewayFixture, GatewayProcess, SimModel, read, threads::ThreadRunTimes};

/// CPU time of all threads together, so that it does not depend on other processes on the cores.
const START: Duration = Duration::from_millis(500);
/// Allocated memory in KiB. The program's own pages are left out, because a debug build's are larger.
const MEMORY_KIB: u64 = 6 << 10;

#[test]
fn a_start_takes_little_of_a_core_and_an_idle_gateway_little_memory() {
    let gateway = GatewayFixture::new(&["2Gi"]).model(&SimModel::new("small")).start();
    let spent = ThreadRunTimes::of(gateway.pid()).total();
    assert!(spent < START, "{spent:?} of CPU to be ready");
    let memory = allocated_kib(&gateway);
    assert!(memory < MEMORY_KIB, "{memory} KiB");
}

fn allocated_kib(gateway: &GatewayProcess) -> u64 {
    let rollup = read(format!("/proc/{}/smaps_rollup", gateway.pid()).as_ref());
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss_Anon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}
