//! Runs one load by hand and prints one line of figures.

use std::{fmt::Write as _, net::SocketAddr, process, time::Duration};

use clap::{Args, Subcommand};
use engine_sim::units;
use hdrhistogram::Histogram;

use super::{
    LoadResult, MAX_OPENED_PER_SECOND, RequestLoad, RequestPace, ResponseCheck, StreamLoad, requests, streams,
};
use crate::measure::{self, CpuMeter, MachineTicks};

/// Put one load on one address, and print the results.
#[derive(Args, Clone, Debug)]
pub(crate) struct AdHocLoad {
    #[command(subcommand)]
    what: AdHocCommand,
    /// Core on which the load runs.
    #[arg(long, global = true)]
    pin: Option<usize>,
    /// Process whose CPU time is reported for each request or event.
    ///
    /// The time includes its child processes, such as a gateway's engines.
    #[arg(long, value_name = "PID", global = true)]
    cost_of: Option<u32>,
}

#[derive(Subcommand, Clone, Debug)]
enum AdHocCommand {
    /// Send requests with one answer each.
    Requests(RequestArgs),
    /// Open streams of events.
    Streams(StreamArgs),
}

/// Target of a load.
#[derive(Args, Clone, Debug)]
pub(super) struct LoadTarget {
    /// Loopback address of the proxy.
    #[arg(long, default_value = "127.0.0.1:8000")]
    pub(super) proxy: SocketAddr,
    /// Model of the requests.
    #[arg(long, default_value = "m")]
    pub(super) model: String,
    /// Bearer token of the requests.
    #[arg(long, default_value = "none")]
    pub(super) key: String,
    /// Check of each answer.
    #[arg(long, value_enum, default_value_t)]
    pub(super) check: ResponseCheck,
}

#[derive(Args, Clone, Debug)]
struct RequestArgs {
    #[command(flatten)]
    target: LoadTarget,
    /// Number of connections.
    #[arg(long, default_value_t = 64)]
    connections: usize,
    /// Duration of the load, in seconds.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Size of a request's body.
    #[arg(long, default_value = "1024", value_parser = units::bytes)]
    body: u64,
    /// Time that the engine takes for an answer.
    #[arg(long, default_value = "0", value_parser = units::duration)]
    engine_time: Duration,
    /// Requests a second, on a fixed schedule. Without it, each connection sends its next request after an answer.
    #[arg(long)]
    rate: Option<f64>,
}

#[derive(Args, Clone, Debug)]
struct StreamArgs {
    #[command(flatten)]
    target: LoadTarget,
    /// Number of streams.
    #[arg(long, default_value_t = 400)]
    streams: usize,
    /// Time between two events of a stream. 0 sends as fast as the sockets accept.
    #[arg(long, default_value = "20ms", value_parser = units::duration)]
    interval: Duration,
    /// Number of events of a stream.
    #[arg(long, default_value_t = 250)]
    events: u32,
    /// Number of streams to open per second.
    #[arg(long, default_value_t = MAX_OPENED_PER_SECOND)]
    opened: u32,
}

impl AdHocLoad {
    /// Runs the load and returns the line to print.
    pub(crate) async fn run(self) -> anyhow::Result<String> {
        if let Some(core) = self.pin {
            measure::pin(core)?;
        }
        let Some(pid) = self.cost_of else { return Ok(self.what.run().await?.0) };
        let (mut cpu, mut own_cpu) = (CpuMeter::new(pid), CpuMeter::new(process::id()));
        let (before, own_before, machine) = (cpu.total()?, own_cpu.total()?, MachineTicks::now()?);
        let (mut line, units) = self.what.run().await?;
        let (spent, own_spent) = (cpu.total()? - before, own_cpu.total()? - own_before);
        let now = MachineTicks::now()?;
        let each = spent.as_secs_f64() * 1e6 / units.max(1) as f64;
        let others = now.cores_used_by_others(&machine, spent + own_spent);
        write!(line, "; {each:.2} us CPU each; {others:.2} cores busy with other things")?;
        if let Some(share) = self.pin.and_then(|core| now.busy(&machine, core)) {
            write!(line, ", {:.0} % of this one in use", share * 100.0)?;
        }
        Ok(line)
    }
}

impl AdHocCommand {
    /// Returns the line, and the number of requests or events.
    async fn run(self) -> anyhow::Result<(String, u64)> {
        match self {
            Self::Requests(args) => {
                let pace =
                    args.rate.map_or(RequestPace::Closed, |per_second| RequestPace::Open { per_second });
                let load = RequestLoad {
                    proxy: args.target.proxy,
                    model: args.target.model,
                    key: args.target.key,
                    connections: args.connections,
                    body: usize::try_from(args.body)?,
                    engine_time: args.engine_time,
                    pace,
                    duration: Duration::try_from_secs_f64(args.seconds)?,
                    check: args.target.check,
                };
                let result = requests(&load).await?;
                Ok((line("request", "latency", &result), result.units))
            }
            Self::Streams(args) => {
                let load = StreamLoad {
                    proxy: args.target.proxy,
                    model: args.target.model,
                    key: args.target.key,
                    streams: args.streams,
                    interval: args.interval,
                    events: args.events,
                    opened_per_second: args.opened,
                    check: args.target.check,
                };
                let result = streams(&load).await?;
                Ok((line("event", "first event", &result), result.units))
            }
        }
    }
}

fn line(unit: &str, latency: &str, result: &LoadResult) -> String {
    let seconds = result.wall.as_secs_f64();
    let rate = result.units as f64 / seconds.max(1e-9);
    let mut line = format!("{} {unit}s in {seconds:.2} s, {rate:.0}/s", result.units);
    write_times(&mut line, latency, &result.latency);
    write_times(&mut line, "lag", &result.lag);
    let (errors, corrupted) = (result.errors, result.corrupted);
    // Writing to a String cannot fail.
    write!(line, "; {errors} errors, {corrupted} corrupted").ok();
    if let Some(complaint) = &result.first_error {
        write!(line, " ({complaint})").ok();
    }
    line
}

fn write_times(line: &mut String, name: &str, times: &Histogram<u64>) {
    if !times.is_empty() {
        let [p50, p99] = [0.5, 0.99].map(|share| times.value_at_quantile(share));
        write!(line, "; {name} p50 {p50} us, p99 {p99} us, max {} us", times.max()).ok();
    }
}
