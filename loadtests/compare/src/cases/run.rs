//! All measurements, one after the other.

use std::{io::Write as _, net::SocketAddr, path::Path, time::Duration};

use anyhow::bail;
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};
use tokio::time::{Instant, timeout};

use crate::{
    cases::{
        Case, Work,
        order::{self, Spot},
        stall,
        watch::{Around, Watched},
    },
    load::{self, OPENED, Pace, Requests, Seen, Streams},
    peers::{Place, Proxy, Target, process::end_strays},
    report::{Cell, Results, Times, without_folders},
};

/// Processors that others may use before a measurement counts as disturbed.
const QUIET: f64 = 0.15;
/// Beyond what a load should take.
const PATIENCE: Duration = Duration::from_secs(60);
/// Code is paged in, sockets are open and allocators are warm after so much.
const WARM: Duration = Duration::from_millis(200);

/// What to measure.
pub(crate) struct Plan {
    pub(crate) cases: Vec<Case>,
    /// With nginx and whom it is compared with.
    pub(crate) targets: Vec<Target>,
    pub(crate) rounds: u32,
    pub(crate) lasts: Duration,
    /// How often a disturbed group is measured again.
    pub(crate) repeats: u32,
}

/// A run under way.
pub(crate) struct Run<'a> {
    pub(crate) place: &'a Place,
    pub(crate) plan: Plan,
    /// For all but Rouse: its address and its process.
    pub(crate) engine: (SocketAddr, u32),
    groups: u32,
    began: Instant,
}

impl<'a> Run<'a> {
    pub(crate) fn new(place: &'a Place, plan: Plan, engine: (SocketAddr, u32)) -> Self {
        Self { place, plan, engine, groups: 0, began: Instant::now() }
    }

    /// Measures everything; what is known is written into `folder` after each round, so an interrupted run is of use.
    ///
    /// Errors: results cannot be written, or the machine cannot be looked at. A proxy that fails has cells with errors.
    pub(crate) async fn all(&mut self, results: &mut Results, folder: &Path) -> anyhow::Result<()> {
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

    /// One group; again when others disturbed it, and then the quietest try counts.
    async fn group(&mut self, case: Case, round: u32, spots: &[Spot]) -> anyhow::Result<Vec<Cell>> {
        let mut tries: Vec<Vec<Cell>> = Vec::new();
        for _ in 0..=self.plan.repeats {
            let number = self.groups;
            self.groups += 1;
            let mut cells = Vec::new();
            for &spot in spots {
                let mut cell = self.cell(case, round, spot).await?;
                cell.group = number;
                self.tell(&cell);
                cells.push(cell);
            }
            let quiet = cells.iter().all(|cell| !cell.disturbed);
            tries.push(cells);
            if quiet {
                break;
            }
        }
        let noise = |cells: &Vec<Cell>| cells.iter().map(|cell| cell.other_work).fold(0.0, f64::max);
        let best = (0..tries.len()).min_by(|&a, &b| noise(&tries[a]).total_cmp(&noise(&tries[b])));
        for (nth, cells) in tries.iter_mut().enumerate() {
            cells.iter_mut().for_each(|cell| cell.discarded = Some(nth) != best);
        }
        Ok(tries.into_iter().flatten().collect())
    }

    async fn cell(&self, case: Case, round: u32, spot: Spot) -> anyhow::Result<Cell> {
        let cores = self.place.cores;
        // The thread that load runs on.
        let both = [cores.load, cores.proxy];
        allow(if case == Case::Workers { &both } else { &both[..1] })?;
        let mut cell = empty(case, round, spot);
        match self.place.start(spot.target, spot.workers, self.engine.0).await {
            Ok(proxy) => {
                let measured = self.measure(&mut cell, &proxy).await;
                proxy.stop().await;
                measured
            }
            Err(error) => Err(error),
        }
        .unwrap_or_else(|error| {
            cell.errors += 1;
            cell.complaint = Some(format!("{error:#}"));
        });
        end_strays();
        // Results are published.
        cell.complaint = cell.complaint.as_deref().map(without_folders);
        Ok(cell)
    }

    async fn measure(&self, cell: &mut Cell, proxy: &Proxy) -> anyhow::Result<()> {
        let mut watched = Watched::of(cell.target, proxy.pid())?;
        cell.listening_ms = proxy.listening.as_secs_f64() * 1e3;
        cell.idle_bytes = watched.memory()?;
        let work = cell.case.work(cell.target, proxy, self.plan.lasts);
        if matches!(work, Work::Nothing) {
            return Ok(());
        }
        warm(&work).await?;
        cell.warm_bytes = watched.memory()?;
        let mut around = Around::begin()?;
        let before = watched.cpu()?;
        let seen = timeout(self.plan.lasts * 4 + PATIENCE, self.work(cell, &work, proxy, &watched)).await;
        let Ok(seen) = seen else { bail!("the load did not come to an end") };
        let seen = seen?;
        cell.cpu_s = watched.cpu()?.saturating_sub(before).as_secs_f64();
        cell.other_work = around.others()?;
        cell.disturbed = cell.other_work > QUIET;
        cell.units = seen.units;
        cell.errors += seen.errors;
        cell.corrupted = seen.corrupted;
        cell.complaint = seen.complaint;
        cell.wall_s = seen.wall.as_secs_f64();
        cell.latency_us = Times::from(&seen.latency);
        cell.lag_us = Times::from(&seen.lag);
        Ok(())
    }

    async fn work(
        &self,
        cell: &mut Cell,
        work: &Work,
        proxy: &Proxy,
        watched: &Watched,
    ) -> anyhow::Result<Seen> {
        match work {
            Work::Nothing => bail!("there is nothing to do"),
            Work::Requests(requests) => load::requests(requests).await,
            Work::Stall(streams) => {
                let engines = watched.engines().unwrap_or_else(|| vec![self.engine.1]);
                stall::run(streams, proxy, &engines, self.place.cores.load, &self.place.folder).await
            }
            Work::Streams(streams) if cell.case == Case::Streams5000 && !watched.pids.is_empty() => {
                let (following, open) = watched.open_memory(streams.streams);
                let seen = load::streams(streams).await;
                following.abort();
                let open = *open.borrow();
                if open.streams > streams.streams / 2 {
                    (cell.open_bytes, cell.streams) = (Some(open.bytes), open.streams);
                }
                seen
            }
            Work::Streams(streams) => load::streams(streams).await,
        }
    }

    fn tell(&self, cell: &Cell) {
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
                format!("  (others used {:.2} processors)", cell.other_work)
            } else {
                String::new()
            },
            cell.complaint.as_ref().map_or_else(String::new, |complaint| {
                format!("  {} errors, {} corrupted: {complaint}", cell.errors, cell.corrupted)
            }),
        );
        // Nobody may be listening.
        std::io::stderr().write_all(line.as_bytes()).ok();
    }
}

/// A little of both kinds of work; what goes wrong in it goes wrong again when it counts.
async fn warm(work: &Work) -> anyhow::Result<()> {
    let (proxy, model, key, check) = match work {
        Work::Requests(of) => (of.proxy, &of.model, &of.key, of.check),
        Work::Streams(of) | Work::Stall(of) => (of.proxy, &of.model, &of.key, of.check),
        Work::Nothing => return Ok(()),
    };
    let (model, key) = (model.clone(), key.clone());
    let requests = Requests {
        proxy,
        model: model.clone(),
        key: key.clone(),
        connections: 16,
        body: 1024,
        engine_time: Duration::ZERO,
        pace: Pace::Closed,
        lasts: WARM,
        check,
    };
    load::requests(&requests).await?;
    let streams = Streams {
        proxy,
        model,
        key,
        streams: 16,
        interval: Duration::from_millis(2),
        events: 20,
        opened: OPENED,
        check,
    };
    load::streams(&streams).await?;
    Ok(())
}

/// Lets this thread, and what it starts, run on these processors.
fn allow(processors: &[usize]) -> anyhow::Result<()> {
    let mut set = CpuSet::new();
    for &processor in processors {
        set.set(processor)?;
    }
    Ok(sched_setaffinity(Pid::from_raw(0), &set)?)
}

fn empty(case: Case, round: u32, spot: Spot) -> Cell {
    Cell {
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
        complaint: None,
        wall_s: 0.0,
        cpu_s: 0.0,
        latency_us: Times::default(),
        lag_us: Times::default(),
        listening_ms: 0.0,
        idle_bytes: 0,
        warm_bytes: 0,
        open_bytes: None,
        streams: 0,
    }
}
