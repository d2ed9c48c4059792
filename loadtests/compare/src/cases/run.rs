//! Runs all measurements in sequence.

use std::{io::Write as _, net::SocketAddr, path::Path, time::Duration};

use anyhow::bail;
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};
use tokio::time::{Instant, timeout};

use crate::{
    cases::{
        BenchCase, CaseLoad,
        order::{self, Measurement},
        stall,
        watch::{MachineLoad, ProxyProcesses},
    },
    load::{self, LoadResult, MAX_OPENED_PER_SECOND, RequestLoad, RequestPace, StreamLoad},
    peers::{BenchEnvironment, ComparedProxy, RunningProxy, process::kill_orphans},
    report::{CompareResults, LatencyQuantiles, ResultCell, redact_folders},
};

/// Cores that other work may use before a measurement counts as disturbed.
pub(super) const MAX_OTHER_CORES: f64 = 0.15;
/// Time beyond a load's expected duration.
const LOAD_GRACE: Duration = Duration::from_secs(60);
/// After this time code is paged in, sockets are open and allocators are warm.
const WARM_UP: Duration = Duration::from_millis(200);

/// What to measure.
pub(crate) struct ComparePlan {
    pub(crate) cases: Vec<BenchCase>,
    /// Nginx and the targets compared with it.
    pub(crate) targets: Vec<ComparedProxy>,
    pub(crate) rounds: u32,
    pub(crate) duration: Duration,
    /// How often a disturbed group is repeated.
    pub(crate) repeats: u32,
}

/// A comparison in progress.
pub(crate) struct CompareRun<'a> {
    pub(crate) environment: &'a BenchEnvironment,
    pub(crate) plan: ComparePlan,
    /// The address and process of the engine for all targets but Rouse.
    pub(crate) engine: (SocketAddr, u32),
    groups: u32,
    began: Instant,
}

impl<'a> CompareRun<'a> {
    pub(crate) fn new(
        environment: &'a BenchEnvironment,
        plan: ComparePlan,
        engine: (SocketAddr, u32),
    ) -> Self {
        Self { environment, plan, engine, groups: 0, began: Instant::now() }
    }

    /// Measures everything. Writes the results so far into `folder` after each round, so an interrupted run is still
    /// useful.
    ///
    /// Errors: results cannot be written, or the machine's state cannot be read. A failing proxy gets cells with
    /// errors.
    pub(crate) async fn run(&mut self, results: &mut CompareResults, folder: &Path) -> anyhow::Result<()> {
        for round in 0..self.plan.rounds {
            for case in self.plan.cases.clone() {
                for group in order::groups(case, &self.plan.targets, round) {
                    let cells = self.group(case, round, &group).await?;
                    results.cells.extend(cells);
                }
            }
            results.write(folder)?;
        }
        Ok(())
    }

    /// Measures one group. Repeats it if other work disturbed it, and keeps the quietest try.
    async fn group(
        &mut self,
        case: BenchCase,
        round: u32,
        spots: &[Measurement],
    ) -> anyhow::Result<Vec<ResultCell>> {
        let mut tries: Vec<Vec<ResultCell>> = Vec::new();
        for _ in 0..=self.plan.repeats {
            let number = self.groups;
            self.groups += 1;
            let mut cells = Vec::new();
            for &spot in spots {
                let mut cell = self.cell(case, round, spot).await?;
                cell.group = number;
                self.print(&cell);
                cells.push(cell);
            }
            let quiet = cells.iter().all(|cell| !cell.disturbed);
            tries.push(cells);
            if quiet {
                break;
            }
        }
        let noise = |cells: &Vec<ResultCell>| cells.iter().map(|cell| cell.other_work).fold(0.0, f64::max);
        let best = (0..tries.len()).min_by(|&a, &b| noise(&tries[a]).total_cmp(&noise(&tries[b])));
        for (nth, cells) in tries.iter_mut().enumerate() {
            cells.iter_mut().for_each(|cell| cell.discarded = Some(nth) != best);
        }
        Ok(tries.into_iter().flatten().collect())
    }

    async fn cell(&self, case: BenchCase, round: u32, spot: Measurement) -> anyhow::Result<ResultCell> {
        let cores = self.environment.cores;
        // Sets this thread's cores, which the load runs on.
        let both = [cores.load, cores.proxy];
        set_affinity(if case == BenchCase::Workers { &both } else { &both[..1] })?;
        let mut cell = empty_cell(case, round, spot);
        match self.environment.start(spot.target, spot.workers, self.engine.0).await {
            Ok(proxy) => {
                let measured = self.measure(&mut cell, &proxy).await;
                proxy.stop().await;
                measured
            }
            Err(error) => Err(error),
        }
        .unwrap_or_else(|error| {
            cell.errors += 1;
            cell.first_error = Some(format!("{error:#}"));
        });
        kill_orphans();
        // The results are published, so paths are redacted.
        cell.first_error = cell.first_error.as_deref().map(redact_folders);
        Ok(cell)
    }

    async fn measure(&self, cell: &mut ResultCell, proxy: &RunningProxy) -> anyhow::Result<()> {
        let mut watched = ProxyProcesses::of(cell.target, proxy.pid())?;
        cell.listening_ms = proxy.listening.as_secs_f64() * 1e3;
        cell.idle_bytes = watched.memory()?;
        let work = cell.case.load(cell.target, proxy, self.plan.duration);
        if matches!(work, CaseLoad::Nothing) {
            return Ok(());
        }
        warm_up(&work).await?;
        cell.warm_bytes = watched.memory()?;
        let mut around = MachineLoad::start()?;
        let before = watched.cpu()?;
        let result =
            timeout(self.plan.duration * 4 + LOAD_GRACE, self.work(cell, &work, proxy, &watched)).await;
        let Ok(result) = result else { bail!("the load timed out") };
        let result = result?;
        cell.cpu_s = watched.cpu()?.saturating_sub(before).as_secs_f64();
        cell.other_work = around.cores_used_by_others()?;
        cell.disturbed = cell.other_work > MAX_OTHER_CORES;
        cell.units = result.units;
        cell.errors += result.errors;
        cell.corrupted = result.corrupted;
        cell.first_error = result.first_error;
        cell.wall_s = result.wall.as_secs_f64();
        cell.latency_us = LatencyQuantiles::from(&result.latency);
        cell.lag_us = LatencyQuantiles::from(&result.lag);
        Ok(())
    }

    async fn work(
        &self,
        cell: &mut ResultCell,
        work: &CaseLoad,
        proxy: &RunningProxy,
        watched: &ProxyProcesses,
    ) -> anyhow::Result<LoadResult> {
        match work {
            CaseLoad::Nothing => bail!("the case has no load"),
            CaseLoad::Requests(requests) => load::requests(requests).await,
            CaseLoad::Stall(streams) => {
                let engines = watched.engines().unwrap_or_else(|| vec![self.engine.1]);
                stall::run(streams, proxy, &engines, self.environment.cores.load, &self.environment.folder)
                    .await
            }
            CaseLoad::Streams(streams) if cell.case == BenchCase::Streams5000 && !watched.pids.is_empty() => {
                let (following, open) = watched.open_memory(streams.streams);
                let result = load::streams(streams).await;
                following.abort();
                let open = *open.borrow();
                if open.streams > streams.streams / 2 {
                    (cell.open_bytes, cell.streams) = (Some(open.bytes), open.streams);
                }
                result
            }
            CaseLoad::Streams(streams) => load::streams(streams).await,
        }
    }

    fn print(&self, cell: &ResultCell) {
        let figure =
            |value: Option<f64>, unit| value.map_or_else(String::new, |value| format!(" {value:8.1} {unit}"));
        let ms = |us: u64| us as f64 / 1e3;
        let lag = (cell.lag_us.count > 0).then(|| ms(cell.lag_us.p99));
        let line = format!(
            "{:5.0}s  round {} {:12} {:8} {}w{}{}{}{}{}{}{}\n",
            self.began.elapsed().as_secs_f64(),
            cell.round + 1,
            cell.case,
            cell.target,
            cell.workers,
            figure(cell.per_second().filter(|_| cell.units > 0), "/s"),
            figure(cell.cpu_per_unit(), "µs"),
            figure((cell.latency_us.count > 0).then(|| ms(cell.latency_us.p99)), "ms p99"),
            figure(lag, "ms lag p99"),
            figure(cell.per_stream().map(|bytes| bytes / 1024.0), "KiB/stream"),
            if cell.disturbed {
                format!("  (other processes used {:.2} processors)", cell.other_work)
            } else {
                String::new()
            },
            cell.first_error.as_ref().map_or_else(String::new, |complaint| {
                format!("  {} errors, {} corrupted: {complaint}", cell.errors, cell.corrupted)
            }),
        );
        // An error means that stderr is closed.
        std::io::stderr().write_all(line.as_bytes()).ok();
    }
}

/// Warms up with a little of both kinds of work. Its failures recur in the measurement.
pub(super) async fn warm_up(work: &CaseLoad) -> anyhow::Result<()> {
    let (proxy, model, key, check) = match work {
        CaseLoad::Requests(of) => (of.proxy, &of.model, &of.key, of.check),
        CaseLoad::Streams(of) | CaseLoad::Stall(of) => (of.proxy, &of.model, &of.key, of.check),
        CaseLoad::Nothing => return Ok(()),
    };
    let (model, key) = (model.clone(), key.clone());
    let requests = RequestLoad {
        proxy,
        model: model.clone(),
        key: key.clone(),
        connections: 16,
        body: 1024,
        engine_time: Duration::ZERO,
        pace: RequestPace::Closed,
        duration: WARM_UP,
        check,
    };
    load::requests(&requests).await?;
    let streams = StreamLoad {
        proxy,
        model,
        key,
        streams: 16,
        interval: Duration::from_millis(2),
        events: 20,
        opened_per_second: MAX_OPENED_PER_SECOND,
        check,
    };
    load::streams(&streams).await?;
    Ok(())
}

/// Restricts this thread, and processes that it starts, to these cores.
fn set_affinity(processors: &[usize]) -> anyhow::Result<()> {
    let mut set = CpuSet::new();
    for &processor in processors {
        set.set(processor)?;
    }
    Ok(sched_setaffinity(Pid::from_raw(0), &set)?)
}

fn empty_cell(case: BenchCase, round: u32, spot: Measurement) -> ResultCell {
    ResultCell {
        case,
        target: spot.target,
        workers: spot.workers,
        round,
        group: 0,
        discarded: false,
        other_work: 0.0,
        disturbed: false,
        units: 0,
        errors: 0,
        corrupted: 0,
        first_error: None,
        wall_s: 0.0,
        cpu_s: 0.0,
        latency_us: LatencyQuantiles::default(),
        lag_us: LatencyQuantiles::default(),
        listening_ms: 0.0,
        idle_bytes: 0,
        warm_bytes: 0,
        open_bytes: None,
        streams: 0,
    }
}
