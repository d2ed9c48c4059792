//! Runs hours of mixed load at a fixed rate and checks whether memory grows.

use std::time::Duration;

use anyhow::ensure;
use clap::Args;
use engine_sim::units;
use tokio::{
    select,
    task::{JoinSet, spawn_blocking},
    time::{Instant, MissedTickBehavior, interval, sleep_until, timeout_at},
};

use super::{
    LoadResult, RequestLoad, RequestPace, StreamLoad, ad_hoc::LoadTarget, check_bounds,
    raise_descriptor_limit, requests, streams::StreamReader, tally::LoadTally,
};
use crate::measure::{ProcessMemory, tree};

/// How long streams may take beyond their intervals.
const STREAM_GRACE: Duration = Duration::from_secs(30);
/// A shorter series gives no meaningful slope.
const MIN_SAMPLES: usize = 3;

/// Put a long load on one address, and check that a process does not grow.
///
/// The load has requests, streams, and clients that leave in mid-stream.
#[derive(Args, Clone, Debug)]
pub(crate) struct SoakArgs {
    #[command(flatten)]
    target: LoadTarget,
    /// Duration of the load, in minutes.
    #[arg(long, default_value_t = 60.0)]
    minutes: f64,
    /// Process to watch, with its child processes.
    #[arg(long)]
    pid: u32,
    /// Watch the process without its child processes, such as a gateway's engines.
    #[arg(long)]
    alone: bool,
    /// Requests a second. The engine takes 10 ms for each answer.
    #[arg(long, default_value_t = 500.0)]
    rate: f64,
    /// Number of streams to open per second.
    #[arg(long, default_value_t = 20.0)]
    streams: f64,
    /// In one of this many streams, the client leaves in mid-stream. 0: none leaves.
    #[arg(long, default_value_t = 4)]
    leaves: u32,
    /// Number of events of a stream.
    #[arg(long, default_value_t = 100)]
    events: u32,
    /// Time between two events of a stream.
    #[arg(long, default_value = "20ms", value_parser = units::duration)]
    interval: Duration,
    /// Interval between two readings of the memory.
    #[arg(long, default_value = "5s", value_parser = units::duration)]
    sample: Duration,
    /// Share of the duration, from its start, in which memory may grow to what the load needs.
    #[arg(long, default_value_t = 0.2)]
    warm_up: f64,
    /// Maximum growth of proportional memory, in KB an hour; more is a failure.
    #[arg(long, default_value_t = 1024.0)]
    bound: f64,
}

impl SoakArgs {
    /// Runs the soak and returns the line to print.
    ///
    /// Errors: memory grew faster than the bound, a request or stream failed, or the data is insufficient.
    pub(crate) async fn run(self) -> anyhow::Result<String> {
        let lasts = Duration::try_from_secs_f64(self.minutes * 60.0)?;
        let open = self.streams * (self.interval * self.events).as_secs_f64();
        check_bounds(self.target.proxy, 1 + open as usize, 0, lasts)?;
        ensure!(
            self.streams > 0.0 && !self.sample.is_zero(),
            "the rate of streams and the sampling interval must be above 0"
        );
        ensure!(
            (0.0..1.0).contains(&self.warm_up),
            "the warm-up must be a share of the time: from 0 to below 1"
        );
        raise_descriptor_limit()?;
        let load = self.requests(lasts);
        let end = Instant::now() + lasts;
        let (requests, streams, samples) =
            tokio::try_join!(requests(&load), self.streams(end), self.samples(end))?;
        self.judge(&requests, &streams, &samples)
    }

    fn requests(&self, lasts: Duration) -> RequestLoad {
        RequestLoad {
            proxy: self.target.proxy,
            model: self.target.model.clone(),
            key: self.target.key.clone(),
            connections: 64,
            body: 1024,
            engine_time: Duration::from_millis(10),
            pace: RequestPace::Open { per_second: self.rate },
            duration: lasts,
            check: self.target.check,
        }
    }

    async fn streams(&self, end: Instant) -> anyhow::Result<LoadResult> {
        let load = StreamLoad {
            opened_per_second: super::MAX_OPENED_PER_SECOND,
            proxy: self.target.proxy,
            model: self.target.model.clone(),
            key: self.target.key.clone(),
            streams: 1,
            interval: self.interval,
            events: self.events,
            check: self.target.check,
        };
        let tally = LoadTally::new()?;
        let reader = StreamReader::new(&load, &tally);
        let start = Instant::now();
        let mut readers = JoinSet::new();
        for nth in 0_u32.. {
            let due = start + Duration::from_secs_f64(f64::from(nth) / self.streams);
            if due >= end {
                break;
            }
            while timeout_at(due, readers.join_next()).await.is_ok_and(|ended| ended.is_some()) {}
            sleep_until(due).await;
            readers.spawn(reader.clone().run(None, self.abort_after_events(nth)));
        }
        let last = end + self.interval * (self.events + 1) + STREAM_GRACE;
        while let Ok(Some(_)) = timeout_at(last, readers.join_next()).await {}
        tally.counts().errors += readers.len() as u64;
        Ok(tally.result())
    }

    /// After how many events the client of a stream disconnects. The number varies and may be 0.
    fn abort_after_events(&self, nth: u32) -> u32 {
        let leaves = self.leaves > 0 && nth.is_multiple_of(self.leaves);
        if leaves { (nth / self.leaves).wrapping_mul(7919) % self.events.max(1) } else { u32::MAX }
    }

    /// Samples memory after the warm-up.
    async fn samples(&self, end: Instant) -> anyhow::Result<Vec<SoakSample>> {
        let start = Instant::now();
        let begins = start + (end - start).mul_f64(self.warm_up);
        let mut ticks = interval(self.sample);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut samples = Vec::new();
        sleep_until(begins).await;
        loop {
            select! {
                () = sleep_until(end) => return Ok(samples),
                now = ticks.tick() => {
                    let (pid, alone) = (self.pid, self.alone);
                    // The kernel walks all pages for a sample, which must not delay the load.
                    let memory = spawn_blocking(move || memory(pid, alone)).await??;
                    samples.push(SoakSample { at: now - start, memory });
                }
            }
        }
    }

    fn judge(
        &self,
        requests: &LoadResult,
        streams: &LoadResult,
        samples: &[SoakSample],
    ) -> anyhow::Result<String> {
        ensure!(
            samples.len() >= MIN_SAMPLES,
            "{} samples are too few; {MIN_SAMPLES} are needed",
            samples.len()
        );
        let pss = slope(samples, |memory| memory.pss);
        let rss = slope(samples, |memory| memory.rss);
        let last = samples.last().map_or(0, |sample| sample.memory.pss) / 1024;
        let line = format!(
            "{} requests, {} events of streams, {} samples: PSS {last} KB at the end, growing by {pss:.0} KB an hour (RSS {rss:.0})",
            requests.units,
            streams.units,
            samples.len(),
        );
        let complaint = requests.first_error.as_ref().or(streams.first_error.as_ref());
        let wrong = requests.errors + requests.corrupted + streams.errors + streams.corrupted;
        ensure!(
            wrong == 0,
            "{line}; {wrong} requests or events went wrong ({})",
            complaint.map_or("", |c| c)
        );
        ensure!(pss <= self.bound, "{line}; that is over {} KB an hour", self.bound);
        Ok(line)
    }
}

/// Memory of a process and, unless `alone`, its descendants.
fn memory(pid: u32, alone: bool) -> anyhow::Result<ProcessMemory> {
    let mut pids = tree(pid)?;
    ensure!(!pids.is_empty(), "process {pid} is gone");
    if alone {
        pids.truncate(1);
    }
    Ok(ProcessMemory::of(&pids)?)
}

#[derive(Clone, Copy, Debug)]
struct SoakSample {
    at: Duration,
    memory: ProcessMemory,
}

/// Slope of the best-fit line, in KB an hour.
fn slope(samples: &[SoakSample], of: impl Fn(&ProcessMemory) -> u64) -> f64 {
    let points = || samples.iter().map(|s| (s.at.as_secs_f64() / 3600.0, of(&s.memory) as f64 / 1024.0));
    let count = samples.len().max(1) as f64;
    let (hours, kilobytes) = points().fold((0.0, 0.0), |sum, point| (sum.0 + point.0, sum.1 + point.1));
    let (hours, kilobytes) = (hours / count, kilobytes / count);
    let product: f64 = points().map(|(x, y)| (x - hours) * (y - kilobytes)).sum();
    let square: f64 = points().map(|(x, _)| (x - hours).powi(2)).sum();
    if square == 0.0 { 0.0 } else { product / square }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slope_is_told_through_noise() {
        let sample = |second: u64| {
            let pss = (10_000 + second + second % 2 * 50) * 1024;
            SoakSample { at: Duration::from_secs(second), memory: ProcessMemory { pss, rss: 7 << 20 } }
        };
        let samples: Vec<_> = (0..600).map(sample).collect();
        let grown = slope(&samples, |memory| memory.pss);
        assert!((grown - 3600.0).abs() < 20.0, "{grown}");
        assert_eq!(slope(&samples, |memory| memory.rss), 0.0);
        assert_eq!(slope(&[], |memory| memory.rss), 0.0);
    }

    async fn soaked(bound: f64) -> anyhow::Result<String> {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let proxy = listener.local_addr()?;
        tokio::spawn(async move { engine_sim::fast::serve(listener, "m").await });
        let target = LoadTarget {
            proxy,
            model: "m".into(),
            key: "k".into(),
            check: super::super::ResponseCheck::Bytes,
        };
        let soak = SoakArgs {
            target,
            minutes: 2.0 / 60.0,
            pid: std::process::id(),
            alone: true,
            rate: 100.0,
            streams: 40.0,
            leaves: 2,
            events: 10,
            interval: Duration::from_millis(5),
            sample: Duration::from_millis(20),
            warm_up: 0.1,
            bound,
        };
        soak.run().await
    }

    #[tokio::test]
    async fn requests_streams_and_those_who_leave_are_put_on_and_memory_is_judged() {
        let line = soaked(f64::MAX).await.unwrap();
        // Half of the clients disconnect after 0 to 9 events.
        assert!(line.starts_with("200 requests, ") && line.contains("PSS"), "{line}");
        let refused = soaked(f64::NEG_INFINITY).await.unwrap_err().to_string();
        assert!(refused.contains("that is over"), "{refused}");
    }
}
