//! Measures the memory of idle connections and of open streams, which the gateway, the stub and nginx have alike.
//!
//! A figure is the growth of a warm proxy, which is new for each figure, divided by its connections or streams.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context as _, bail, ensure};
use clap::Args;

use crate::{
    cases::{BenchCase, CaseLoad, run::warm_up, watch::ProxyProcesses},
    load::{self, IdleConnections, RequestLoad, StreamLoad},
    peers::{
        BenchEnvironment,
        ComparedProxy::{self, Nginx, Rouse, Stub},
        RunningProxy,
        process::kill_orphans,
    },
    report::goals::FigureSpread,
    setup::{ProgramArgs, machine, temporary_folder, until_interrupted},
};

/// Events per stream, at five a second. All streams are open together after the first.
const EVENTS: u32 = 20;

/// Measure the memory of an idle connection and of an open stream
///
/// Of the gateway, the stub and nginx, with one worker each.
#[derive(Args, Clone, Debug)]
pub(crate) struct MemoryArgs {
    /// Number of rounds
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=20))]
    rounds: u32,
    /// Number of idle connections; a stub accepts 2,048
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u16).range(1..=2000))]
    connections: u16,
    /// Number of open streams
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u16).range(1..=2000))]
    streams: u16,
    #[command(flatten)]
    programs: ProgramArgs,
}

/// What a proxy holds while its memory is read.
enum MemoryCase {
    IdleConnections,
    OpenStreams,
}

/// Bytes of memory, for each round.
#[derive(Debug, Default)]
struct MemoryFigures {
    per_connection: Vec<f64>,
    per_stream: Vec<f64>,
}

impl MemoryArgs {
    /// Measures, and returns the table in Markdown.
    ///
    /// Errors: a program is missing, or a request or a stream failed.
    pub(crate) async fn run(self) -> anyhow::Result<String> {
        let folder = temporary_folder()?;
        let environment = self.programs.environment(folder.path())?;
        until_interrupted(Box::pin(self.compare(&environment))).await
    }

    async fn compare(&self, environment: &BenchEnvironment) -> anyhow::Result<String> {
        for target in [Stub, Nginx] {
            environment.installed.find(target)?;
        }
        let (engine, address) = environment.engine().await.context("the engine did not start")?;
        let mut text = format!(
            "# Memory of a connection\n\n{} rounds, {} idle connections, {} streams. {}.\n\n\
             | | bytes per idle connection | bytes per open stream |\n|---|---|---|\n",
            self.rounds,
            self.connections,
            self.streams,
            machine()?
        );
        for target in [Rouse, Stub, Nginx] {
            let mut figures = MemoryFigures::default();
            for round in 1..=self.rounds {
                let at = || format!("{target}, round {round}");
                let measure = |case| self.measure(environment, target, address, case);
                let connection = measure(MemoryCase::IdleConnections).await.with_context(at)?;
                let stream = measure(MemoryCase::OpenStreams).await.with_context(at)?;
                eprintln!("round {round} {target}: {connection:.0} B/connection, {stream:.0} B/stream");
                figures.per_connection.push(connection);
                figures.per_stream.push(stream);
            }
            text.push_str(&row(target, figures));
        }
        engine.stop().await;
        Ok(text)
    }

    /// Measures the bytes of one connection or stream, on a proxy that serves nothing else.
    async fn measure(
        &self,
        environment: &BenchEnvironment,
        target: ComparedProxy,
        engine: SocketAddr,
        case: MemoryCase,
    ) -> anyhow::Result<f64> {
        let proxy = environment.start(target, 1, engine).await?;
        let measured = match case {
            MemoryCase::IdleConnections => self.idle_connections(target, &proxy).await,
            MemoryCase::OpenStreams => self.open_streams(target, &proxy).await,
        };
        proxy.stop().await;
        kill_orphans();
        measured
    }

    async fn idle_connections(&self, target: ComparedProxy, proxy: &RunningProxy) -> anyhow::Result<f64> {
        let watched = ProxyProcesses::of(target, proxy.pid())?;
        // The duration has no effect on idle connections.
        let CaseLoad::Requests(requests) = BenchCase::Saturated.load(target, proxy, Duration::ZERO) else {
            bail!("{} has no requests", BenchCase::Saturated);
        };
        let requests = RequestLoad { connections: usize::from(self.connections), ..requests };
        warm_up(&CaseLoad::Requests(requests.clone())).await?;
        let before = watched.memory()?;
        let idle = IdleConnections::open(&requests).await?;
        Ok(watched.memory()?.saturating_sub(before) as f64 / idle.count() as f64)
    }

    async fn open_streams(&self, target: ComparedProxy, proxy: &RunningProxy) -> anyhow::Result<f64> {
        let watched = ProxyProcesses::of(target, proxy.pid())?;
        let CaseLoad::Streams(streams) = BenchCase::Streams5000.load(target, proxy, Duration::ZERO) else {
            bail!("{} has no streams", BenchCase::Streams5000);
        };
        let streams = StreamLoad { streams: usize::from(self.streams), events: EVENTS, ..streams };
        warm_up(&CaseLoad::Streams(streams.clone())).await?;
        let before = watched.memory()?;
        let (following, open) = watched.open_memory(streams.streams);
        let result = load::streams(&streams).await;
        following.abort();
        let result = result?;
        let wrong = result.errors + result.corrupted;
        ensure!(wrong == 0, "{wrong} errors: {}", result.first_error.unwrap_or_default());
        let open = *open.borrow();
        ensure!(
            open.streams == streams.streams,
            "{} of {} streams were open at the same time; repeat it on an idle machine",
            open.streams,
            streams.streams
        );
        Ok(open.bytes.saturating_sub(before) as f64 / open.streams as f64)
    }
}

fn row(target: ComparedProxy, figures: MemoryFigures) -> String {
    let spread = |figures| {
        FigureSpread::from_figures(figures).map_or_else(
            || "-".to_owned(),
            |FigureSpread { median, min, max }| format!("{median:.0} [{min:.0}..{max:.0}]"),
        )
    };
    format!("| {target} | {} | {} |\n", spread(figures.per_connection), spread(figures.per_stream))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_the_median_and_the_range_of_each_figure() {
        let figures =
            MemoryFigures { per_connection: vec![900.0, 1100.4, 1000.0], per_stream: vec![4000.0, 3000.0] };
        assert_eq!(row(Stub, figures), "| stub | 1000 [900..1100] | 3500 [3000..4000] |\n");
        assert_eq!(row(Nginx, MemoryFigures::default()), "| nginx | - | - |\n");
    }
}
