//! Several serving threads share one port.

use std::{fs, time::Duration};

use crate::{
    live::UNLIMITED_CONNECTIONS,
    support::{GatewayFixture, GatewayProcess, SimModel},
};

const THREADS: usize = 3;
const STREAMS: usize = 200;

#[test]
fn two_hundred_streams_are_served_by_all_threads_and_are_whole() {
    let settings = format!("{UNLIMITED_CONNECTIONS}\napi: {{threads: {THREADS}}}");
    let gateway = GatewayFixture::new(&["2Gi"])
        .settings(&settings)
        .model(&SimModel { flags: "--itl 20ms", ..SimModel::new("m") })
        .start();
    assert!(gateway.client().chat("m", true, 1).is_whole_stream());
    let mut streams: Vec<_> = (0..STREAMS).map(|_| gateway.client().open_chat("m", true, 400)).collect();
    streams.iter_mut().for_each(|stream| stream.until("data: "));
    let before = leaves(&gateway);
    assert_eq!(before.len(), THREADS);
    gateway.until("at work on every thread", Duration::from_secs(5), || {
        before.iter().zip(leaves(&gateway)).all(|(before, now)| now > before + 20)
    });
    for stream in streams {
        assert!(stream.rest().is_whole_stream());
    }
}

/// How often each serving thread has left its core, to sleep or for another thread. An idle thread stays asleep. A
/// thread that never finishes its work on a busy machine is only preempted.
fn leaves(gateway: &GatewayProcess) -> Vec<u64> {
    let tasks = fs::read_dir(format!("/proc/{}/task", gateway.pid())).unwrap();
    let mut threads: Vec<_> = tasks.map(|task| task.unwrap().path()).collect();
    threads.sort();
    let status = threads.iter().map(|thread| fs::read_to_string(thread.join("status")).unwrap());
    let serves = |status: &String| status.starts_with("Name:\tapi-");
    let count = |status: String| {
        let switches = status.lines().filter_map(|line| line.split_once("voluntary_ctxt_switches:"));
        switches.map(|(_, many)| many.trim().parse::<u64>().unwrap()).sum()
    };
    status.filter(serves).map(count).collect()
}
