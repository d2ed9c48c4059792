//! Measures CPU time per request with wrk as the client, which shares no code with our own.
//!
//! The gateway and nginx take turns, then the stub and nginx, each new for its measurement. wrk checks only the status
//! of a response, so our own client checks some responses byte by byte before. It cannot read streams.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use engine_sim::fast::wire::ANSWER_BYTES;
use serde::Deserialize;
use tokio::time::timeout;

use crate::{
    cases::{
        BenchCase, CaseLoad,
        run::MAX_OTHER_CORES,
        watch::{MachineLoad, ProxyProcesses},
    },
    load::{self, RequestLoad},
    peers::{
        BenchEnvironment,
        ComparedProxy::{self, Nginx, Rouse, Stub},
        RunningProxy, install,
        process::{BenchCommand, BenchProcess, kill_orphans},
    },
    report::goals::FigureSpread,
    setup::{ProgramArgs, machine, temporary_folder, until_interrupted},
};

const SCRIPT: &str = include_str!("../../wrk/chat.lua");
/// Our own client's load before wrk's, which also warms the proxy.
const WARM_UP: Duration = Duration::from_millis(500);
/// How long wrk may take beyond its load.
const WRK_GRACE: Duration = Duration::from_secs(30);

/// Compare the CPU time per request with nginx's, with wrk as the client
///
/// Of the gateway, and of the stub if it is built. Each proxy has one worker and a core to itself.
#[derive(Args, Clone, Debug)]
pub(crate) struct WrkArgs {
    /// Number of pairs: the proxy, then nginx
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=100))]
    pairs: u32,
    /// Duration of one measurement, in seconds
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=60))]
    seconds: u32,
    /// How often to repeat a pair that other work disturbed
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(0..=10))]
    repeats: u32,
    #[command(flatten)]
    programs: ProgramArgs,
}

/// The installed wrk and its script.
struct WrkProgram {
    program: PathBuf,
    script: PathBuf,
}

/// What the script prints at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
struct WrkSummary {
    /// Complete responses.
    requests: u64,
    /// Bytes of all responses, with their heads.
    bytes: u64,
    duration_us: u64,
    errors: WrkErrors,
}

/// Failed calls of sockets, responses with a status from 400, and responses after wrk's timeout of 2 s.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
struct WrkErrors {
    connect: u64,
    read: u64,
    write: u64,
    status: u64,
    timeout: u64,
}

/// The figures of one proxy under wrk.
#[derive(Clone, Copy, Debug)]
struct WrkFigures {
    /// The proxy's CPU time per request, in microseconds.
    cpu_us: f64,
    requests_per_second: f64,
    /// How much of its core the proxy used, 0 to 1.
    busy: f64,
    /// Cores that other work used.
    other_work: f64,
}

/// Two neighbours in time.
#[derive(Clone, Copy, Debug)]
struct WrkPair {
    subject: WrkFigures,
    nginx: WrkFigures,
}

impl WrkArgs {
    /// Measures, and returns the tables in Markdown.
    ///
    /// Errors: a program is missing, or a request failed.
    pub(crate) async fn run(self) -> anyhow::Result<String> {
        let folder = temporary_folder()?;
        let wrk = WrkProgram::find(folder.path())?;
        let environment = self.programs.environment(folder.path())?;
        until_interrupted(Box::pin(self.compare(&environment, &wrk))).await
    }

    async fn compare(&self, environment: &BenchEnvironment, wrk: &WrkProgram) -> anyhow::Result<String> {
        environment.installed.find(Nginx)?;
        let (engine, address) = environment.engine().await.context("the engine did not start")?;
        let mut text = self.heading(environment, wrk)?;
        let stub = environment.installed.has(Stub).then_some(Stub);
        for subject in [Rouse].into_iter().chain(stub) {
            let mut pairs = Vec::new();
            for nth in 1..=self.pairs {
                let pair = self.pair(environment, wrk, subject, address).await?;
                eprint!("{}", row(nth, &pair));
                pairs.push(pair);
            }
            text.push_str(&table(subject, &pairs));
        }
        engine.stop().await;
        Ok(text)
    }

    fn heading(&self, environment: &BenchEnvironment, wrk: &WrkProgram) -> anyhow::Result<String> {
        let mut text = format!(
            "# {}, with wrk as the client\n\n{} pairs, {} s each measurement. {}.\n\n",
            BenchCase::Saturated.title(),
            self.pairs,
            self.seconds,
            machine()?
        );
        for target in [Rouse, Stub, Nginx] {
            if let Some(version) = environment.installed.version(target) {
                text.push_str(&format!("* {target}: {version}\n"));
            }
        }
        text.push_str(&format!("* wrk: {}\n", wrk.version().unwrap_or_default()));
        Ok(text)
    }

    /// Measures a pair. Repeats it if other work disturbed it, and returns the quietest try.
    async fn pair(
        &self,
        environment: &BenchEnvironment,
        wrk: &WrkProgram,
        subject: ComparedProxy,
        engine: SocketAddr,
    ) -> anyhow::Result<WrkPair> {
        let mut quietest: Option<WrkPair> = None;
        for _ in 0..=self.repeats {
            let pair = WrkPair {
                subject: self.measure(environment, wrk, subject, engine).await?,
                nginx: self.measure(environment, wrk, Nginx, engine).await?,
            };
            if quietest.is_none_or(|other| pair.other_work() < other.other_work()) {
                quietest = Some(pair);
            }
            if pair.other_work() <= MAX_OTHER_CORES {
                break;
            }
        }
        quietest.context("no pair was measured")
    }

    async fn measure(
        &self,
        environment: &BenchEnvironment,
        wrk: &WrkProgram,
        target: ComparedProxy,
        engine: SocketAddr,
    ) -> anyhow::Result<WrkFigures> {
        let proxy = environment.start(target, 1, engine).await?;
        let measured = self.under_wrk(environment, wrk, target, &proxy).await;
        proxy.stop().await;
        kill_orphans();
        measured.with_context(|| format!("{target} under wrk"))
    }

    async fn under_wrk(
        &self,
        environment: &BenchEnvironment,
        wrk: &WrkProgram,
        target: ComparedProxy,
        proxy: &RunningProxy,
    ) -> anyhow::Result<WrkFigures> {
        let mut watched = ProxyProcesses::of(target, proxy.pid())?;
        let CaseLoad::Requests(requests) = BenchCase::Saturated.load(target, proxy, WARM_UP) else {
            bail!("{} has no requests", BenchCase::Saturated);
        };
        let checked = load::requests(&requests).await?;
        let wrong = checked.errors + checked.corrupted;
        ensure!(wrong == 0, "{wrong} errors before wrk: {}", checked.first_error.unwrap_or_default());
        let core = environment.cores.load.to_string();
        let mut around = MachineLoad::start()?;
        let before = watched.cpu()?;
        let summary = wrk.run(&requests, self.seconds, &core, &environment.folder).await?;
        let cpu_s = watched.cpu()?.saturating_sub(before).as_secs_f64();
        let seconds = summary.duration_us as f64 / 1e6;
        Ok(WrkFigures {
            cpu_us: cpu_s * 1e6 / summary.requests as f64,
            requests_per_second: summary.requests as f64 / seconds,
            busy: cpu_s / seconds,
            other_work: around.cores_used_by_others()?,
        })
    }
}

impl WrkProgram {
    /// Locates wrk, and writes its script into `folder`.
    ///
    /// Errors: wrk is not installed.
    fn find(folder: &Path) -> anyhow::Result<Self> {
        let program = install::on_path("wrk");
        let program =
            program.context("wrk is not installed: run loadtests/compare/install --only nginx --wrk")?;
        let script = folder.join("chat.lua");
        fs::write(&script, SCRIPT).context("cannot write wrk's script")?;
        Ok(Self { program, script })
    }

    fn version(&self) -> Option<String> {
        let line = install::version_line(&self.program, &["-v"])?;
        Some(line.split(" [").next()?.trim_start_matches("wrk ").to_owned())
    }

    /// Puts the load on its proxy for `seconds`, from one thread on `core`.
    ///
    /// Errors: wrk failed, or a request did.
    async fn run(
        &self,
        load: &RequestLoad,
        seconds: u32,
        core: &str,
        folder: &Path,
    ) -> anyhow::Result<WrkSummary> {
        let command = BenchCommand::new(&self.program)
            .args(["--threads", "1", "--connections", &load.connections.to_string()])
            .args(["--duration", &format!("{seconds}s"), "--script"])
            .args([self.script.as_os_str()])
            .args([format!("http://{}/v1/chat/completions", load.proxy)])
            .env("ROUSE_WRK_KEY", &load.key)
            .env("ROUSE_WRK_BODY", &load.json());
        let process = BenchProcess::spawn("wrk", command, core, folder)?;
        let limit = Duration::from_secs(u64::from(seconds)) + WRK_GRACE;
        let output = timeout(limit, process.output()).await.context("wrk did not end")??;
        let summary = WrkSummary::parse(&output)?;
        summary.check()?;
        Ok(summary)
    }
}

impl WrkSummary {
    fn parse(output: &str) -> anyhow::Result<Self> {
        let line = output.lines().find_map(|line| line.strip_prefix("summary: "));
        let line = line.with_context(|| format!("wrk printed no summary: {output}"))?;
        serde_json::from_str(line).context("cannot parse wrk's summary")
    }

    /// Errors: a request failed, or the responses are shorter than the engine's.
    fn check(&self) -> anyhow::Result<()> {
        ensure!(self.errors == WrkErrors::default(), "wrk counted errors: {:?}", self.errors);
        ensure!(self.requests > 0, "wrk received no response");
        let each = self.bytes / self.requests;
        ensure!(
            each >= ANSWER_BYTES as u64,
            "a response has {each} bytes, and the engine's body alone has {ANSWER_BYTES}"
        );
        Ok(())
    }
}

impl WrkPair {
    fn ratio(&self) -> f64 {
        self.subject.cpu_us / self.nginx.cpu_us
    }

    /// Cores that other work used during the more disturbed measurement.
    fn other_work(&self) -> f64 {
        self.subject.other_work.max(self.nginx.other_work)
    }
}

fn table(subject: ComparedProxy, pairs: &[WrkPair]) -> String {
    let mut text = format!(
        "\n## {subject} and nginx\n\n\
         | pair | {subject} µs/request | nginx µs/request | ratio | {subject} requests/s | nginx requests/s | \
         {subject} cores | nginx cores | cores of other work |\n|---|---|---|---|---|---|---|---|---|\n"
    );
    for (nth, pair) in (1..).zip(pairs) {
        text.push_str(&row(nth, pair));
    }
    if let Some(FigureSpread { median, min, max }) =
        FigureSpread::from_figures(pairs.iter().map(WrkPair::ratio).collect())
    {
        text.push_str(&format!(
            "\nCPU per request, {subject} / nginx: median {median:.3}, from {min:.3} to {max:.3}.\n"
        ));
    }
    text
}

fn row(nth: u32, pair: &WrkPair) -> String {
    let WrkPair { subject, nginx } = pair;
    format!(
        "| {nth} | {:.2} | {:.2} | {:.3} | {:.0} | {:.0} | {:.2} | {:.2} | {:.2} |\n",
        subject.cpu_us,
        nginx.cpu_us,
        pair.ratio(),
        subject.requests_per_second,
        nginx.requests_per_second,
        subject.busy,
        nginx.busy,
        pair.other_work()
    )
}

#[cfg(test)]
mod tests;
