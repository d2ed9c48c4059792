//! The command line of a comparison.

use std::{collections::BTreeMap, fs, path::PathBuf, process::ExitCode, time::Duration};

use anyhow::{Context as _, bail};
use clap::Args;
use nix::{
    sched::sched_getaffinity,
    sys::{
        prctl::set_child_subreaper,
        resource::{Resource, getrlimit, setrlimit},
    },
    unistd::Pid,
};
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    cases::{
        BenchCase,
        run::{ComparePlan, CompareRun as Measuring},
    },
    measure,
    peers::{BenchCores, BenchEnvironment, ComparedProxy, InstalledPrograms, process::kill_orphans},
    report::{CompareResults, MachineInfo, table},
};

/// Start and measure the gateway and its peers, and write table and plots
#[derive(Args, Clone, Debug)]
// The last value wins, even over a script's earlier value.
#[command(args_override_self = true)]
pub(crate) struct RunArgs {
    /// Number of rounds
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Duration of one measurement, in seconds: 0.1 to 60
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Cases to measure [default: all]
    #[arg(long, value_delimiter = ',')]
    only: Vec<BenchCase>,
    /// Proxies to compare with [default: nginx,haproxy,smg,smg-quiet, and stub if it is built]
    ///
    /// Nginx is always one of them, because every result is relative to it.
    #[arg(long, value_delimiter = ',')]
    peers: Vec<ComparedProxy>,
    /// Folder for the results
    #[arg(long, default_value = "loadtests/results")]
    out: PathBuf,
    /// How often to repeat a measurement that other work disturbed
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(0..=10))]
    repeats: u32,
    /// Binary of the gateway [default: the one beside this program]
    #[arg(long)]
    gateway: Option<PathBuf>,
    /// Binary of the stub [default: the one beside this program, if it is built]
    #[arg(long)]
    stub: Option<PathBuf>,
    /// Binary of the simulated engine [default: the one beside this program]
    #[arg(long)]
    engine: Option<PathBuf>,
    /// Exit with 0 even if a goal was missed
    #[arg(long)]
    report_only: bool,
}

/// Write table and plots again from earlier results
#[derive(Args, Clone, Debug)]
pub(crate) struct ReportArgs {
    /// Folder with results.json
    #[arg(default_value = "loadtests/results")]
    folder: PathBuf,
}

impl RunArgs {
    pub(crate) async fn run(self) -> anyhow::Result<ExitCode> {
        let lasts = Duration::try_from_secs_f64(self.seconds).context("--seconds")?;
        if !(Duration::from_millis(100)..=Duration::from_secs(60)).contains(&lasts) {
            bail!("--seconds must be from 0.1 to 60");
        }
        // Adopt a crashed gateway's engines, so that they can be ended.
        set_child_subreaper(true)?;
        // Each of 5,000 streams needs a client's and an engine's socket. Child processes inherit the limit.
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
        let installed = InstalledPrograms::new(self.gateway.clone(), self.engine.clone(), self.stub.clone())?;
        let targets = self.targets(&installed)?;
        let folder = tempfile::Builder::new()
            .prefix("rouse-compare-")
            .tempdir()
            .context("cannot create a temporary folder")?;
        let environment = BenchEnvironment { installed, cores: cores()?, folder: folder.path().to_owned() };
        measure::pin(environment.cores.load)?;
        let mut results = self.results(&environment, &targets)?;
        let (mut interrupt, mut terminate) =
            (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        let measured = tokio::select! {
            measured = self.measure(&environment, targets, lasts, &mut results) => measured,
            _ = interrupt.recv() => Err(anyhow::anyhow!("interrupted")),
            _ = terminate.recv() => Err(anyhow::anyhow!("terminated")),
        };
        kill_orphans();
        if let Err(error) = measured {
            if !results.cells.is_empty() {
                results.write(&self.out)?;
            }
            return Err(error);
        }
        print!("{}", table::markdown(&results));
        let missed = table::missed(&results);
        for goal in &missed {
            eprintln!("missed: {goal}");
        }
        Ok(ExitCode::from(u8::from(!missed.is_empty() && !self.report_only)))
    }

    async fn measure(
        &self,
        environment: &BenchEnvironment,
        targets: Vec<ComparedProxy>,
        lasts: Duration,
        results: &mut CompareResults,
    ) -> anyhow::Result<()> {
        let (engine, address) = environment.engine().await.context("the engine did not start")?;
        let cases = if self.only.is_empty() { BenchCase::ALL.to_vec() } else { self.only.clone() };
        let plan =
            ComparePlan { cases, targets, rounds: self.rounds, duration: lasts, repeats: self.repeats };
        Measuring::new(environment, plan, (address, engine.pid())).run(results, &self.out).await?;
        engine.stop().await;
        Ok(())
    }

    fn targets(&self, installed: &InstalledPrograms) -> anyhow::Result<Vec<ComparedProxy>> {
        let mut targets = vec![ComparedProxy::Direct, ComparedProxy::Rouse, ComparedProxy::Nginx];
        if self.peers.is_empty() {
            targets.extend([ComparedProxy::Haproxy, ComparedProxy::Smg, ComparedProxy::SmgQuiet]);
            targets.extend(installed.has(ComparedProxy::Stub).then_some(ComparedProxy::Stub));
        }
        targets.extend(&self.peers);
        targets.sort();
        targets.dedup();
        for &target in
            targets.iter().filter(|target| !matches!(target, ComparedProxy::Direct | ComparedProxy::Rouse))
        {
            installed.find(target)?;
        }
        Ok(targets)
    }

    fn results(
        &self,
        environment: &BenchEnvironment,
        targets: &[ComparedProxy],
    ) -> anyhow::Result<CompareResults> {
        let versions: BTreeMap<_, _> = targets
            .iter()
            .filter_map(|&target| Some((target.name().to_owned(), environment.installed.version(target)?)))
            .collect();
        Ok(CompareResults {
            rounds: self.rounds,
            seconds: self.seconds,
            machine: machine()?,
            versions,
            binary: environment.installed.stripped(&environment.folder),
            cells: Vec::new(),
        })
    }
}

impl ReportArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let results = CompareResults::read(&self.folder.join("results.json"))?;
        results.write(&self.folder)?;
        print!("{}", table::markdown(&results));
        Ok(ExitCode::SUCCESS)
    }
}

/// Returns the first two cores that this process may use.
fn cores() -> anyhow::Result<BenchCores> {
    let allowed = sched_getaffinity(Pid::from_raw(0))?;
    let is_allowed = |&processor: &usize| allowed.is_set(processor).unwrap_or(false);
    let mut both = (0..nix::sched::CpuSet::count()).filter(is_allowed);
    match (both.next(), both.next()) {
        (Some(proxy), Some(load)) => Ok(BenchCores { proxy, load }),
        _ => bail!("a comparison needs two processors: one for the proxy, one for load and engine"),
    }
}

fn machine() -> anyhow::Result<MachineInfo> {
    let processors = fs::read_to_string("/proc/cpuinfo")?;
    let field = |name: &str| {
        let line = processors.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|line| line.split_once(": ")).map_or("unknown processor", |(_, value)| value.trim())
    };
    let memory = fs::read_to_string("/proc/meminfo")?;
    let kib: u64 = memory.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).unwrap_or(0);
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    // Drop the suffix that names the builder.
    let kernel = kernel.trim().split('-').next().unwrap_or_default().to_owned();
    Ok(MachineInfo {
        kernel,
        processor: field("model name").to_owned(),
        processors: processors.lines().filter(|line| line.starts_with("processor")).count(),
        memory_gib: (kib + (1 << 19)) >> 20,
    })
}
