//! A gateway that nobody uses: soon there, and small.
//!
//! Bounds that hold for a debug build on a busy machine; the figures of what ships are measured by `loadtests/compare`.

use std::time::Duration;

use crate::support::{GatewayFixture, GatewayProcess, SimModel, read, threads::ThreadRunTimes};

/// For all threads together, so that it does not matter who else keeps the cores busy.
const START: Duration = Duration::from_millis(500);
/// What it allocated. The program itself is another matter in a debug build.
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
