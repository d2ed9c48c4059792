//! The command line of a comparison.

use std::{collections::BTreeMap, path::PathBuf, process::ExitCode, time::Duration};

use anyhow::{Context as _, bail};
use clap::Args;

use crate::{
    cases::{
        BenchCase,
        run::{ComparePlan, CompareRun as Measuring},
    },
    peers::{BenchEnvironment, ComparedProxy, InstalledPrograms},
    report::{CompareResults, table},
    setup::{ProgramArgs, machine, temporary_folder, until_interrupted},
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
    #[command(flatten)]
    programs: ProgramArgs,
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
        let folder = temporary_folder()?;
        let environment = self.programs.environment(folder.path())?;
        let targets = self.targets(&environment.installed)?;
        let mut results = self.results(&environment, &targets)?;
        let measuring = self.measure(&environment, targets, lasts, &mut results);
        let measured = until_interrupted(Box::pin(measuring)).await;
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
