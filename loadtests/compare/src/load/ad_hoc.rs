//! Load by hand: one line of figures for one load.

use std::{fmt::Write as _, net::SocketAddr, time::Duration};

use clap::{Args, Subcommand};
use engine_sim::units;
use hdrhistogram::Histogram;

use super::{Check, Pace, Requests, Seen, Streams, requests, streams};

/// Put one load on one address, and print what was seen.
#[derive(Args, Clone, Debug)]
pub(crate) struct AdHoc {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand, Clone, Debug)]
enum What {
    /// Requests with one answer each.
    Requests(RequestArgs),
    /// Streams of events.
    Streams(StreamArgs),
}

/// Where to.
#[derive(Args, Clone, Debug)]
struct Target {
    /// A loopback address.
    #[arg(long, default_value = "127.0.0.1:8000")]
    proxy: SocketAddr,
    #[arg(long, default_value = "m")]
    model: String,
    /// Sent as a bearer.
    #[arg(long, default_value = "none")]
    key: String,
    /// What must hold of each answer.
    #[arg(long, value_enum, default_value_t)]
    check: Check,
}

#[derive(Args, Clone, Debug)]
struct RequestArgs {
    #[command(flatten)]
    target: Target,
    #[arg(long, default_value_t = 64)]
    connections: usize,
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Bytes of a request's body.
    #[arg(long, default_value = "1024", value_parser = units::bytes)]
    body: u64,
    /// How long the engine takes for an answer.
    #[arg(long, default_value = "0", value_parser = units::duration)]
    engine_time: Duration,
    /// Requests a second on a fixed schedule; without it each connection asks as fast as it is answered.
    #[arg(long)]
    rate: Option<f64>,
}

#[derive(Args, Clone, Debug)]
struct StreamArgs {
    #[command(flatten)]
    target: Target,
    #[arg(long, default_value_t = 400)]
    streams: usize,
    /// Between two events of one stream; 0 is as fast as the sockets.
    #[arg(long, default_value = "20ms", value_parser = units::duration)]
    interval: Duration,
    /// Events of one stream.
    #[arg(long, default_value_t = 250)]
    events: u32,
}

impl AdHoc {
    /// Runs it; the line to print.
    pub(crate) async fn run(self) -> anyhow::Result<String> {
        match self.what {
            What::Requests(args) => {
                let pace = args.rate.map_or(Pace::Closed, |per_second| Pace::Open { per_second });
                let load = Requests {
                    proxy: args.target.proxy,
                    model: args.target.model,
                    key: args.target.key,
                    connections: args.connections,
                    body: usize::try_from(args.body)?,
                    engine_time: args.engine_time,
                    pace,
                    lasts: Duration::try_from_secs_f64(args.seconds)?,
                    check: args.target.check,
                };
                Ok(line("request", "latency", &requests(&load).await?))
            }
            What::Streams(args) => {
                let load = Streams {
                    proxy: args.target.proxy,
                    model: args.target.model,
                    key: args.target.key,
                    streams: args.streams,
                    interval: args.interval,
                    events: args.events,
                    check: args.target.check,
                };
                Ok(line("event", "first event", &streams(&load).await?))
            }
        }
    }
}

fn line(unit: &str, latency: &str, seen: &Seen) -> String {
    let seconds = seen.wall.as_secs_f64();
    let rate = seen.units as f64 / seconds.max(1e-9);
    let mut line = format!("{} {unit}s in {seconds:.2} s, {rate:.0}/s", seen.units);
    write_times(&mut line, latency, &seen.latency);
    write_times(&mut line, "lag", &seen.lag);
    let (errors, corrupted) = (seen.errors, seen.corrupted);
    // Writing to a string does not fail.
    write!(line, "; {errors} errors, {corrupted} corrupted").ok();
    if let Some(complaint) = &seen.complaint {
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
