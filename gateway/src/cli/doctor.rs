//! `doctor`: says what of this machine or of a configuration will make trouble, and what to do about it.
//!
//! Each file below checks one area and returns [`DoctorFinding`]s. None of them changes anything. What the
//! configuration alone shows is found by [`rouse_config::check`], as for `check`; the rest needs this machine.

mod driver;
mod engines;
mod finding;
mod limits;
mod permissions;
mod ports;

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Write as _,
    path::PathBuf,
    process::ExitCode,
};

use clap::Args;
use nix::sys::{
    resource::{RLIM_INFINITY, Resource, getrlimit},
    statvfs::statvfs,
};
use rouse::units::{Bytes, pluralize};
use rouse_config::{
    Config, EngineConfig,
    host::{HostMemory, SystemFiles},
};
use rouse_net::process::table;
use serde::Serialize;

use super::{
    detect::{accelerators::ask_driver, probe, programs},
    show::use_color,
};
use crate::platform::local::ENGINE_MARK;
use driver::ProcessOwner;
use finding::{DoctorFinding, FindingLevel};
use limits::ProcessLimits;

/// Selects what to examine.
#[derive(Args, Debug)]
pub(super) struct DoctorArgs {
    /// Configuration to examine besides the machine.
    #[arg(long, value_name = "FILE", env = "ROUSE_CONFIG")]
    config: Option<PathBuf>,
    /// Print the findings as JSON.
    #[arg(long)]
    json: bool,
}

/// The command's output, for programs.
#[derive(Serialize)]
struct DoctorReport<'a> {
    findings: &'a [DoctorFinding],
    errors: usize,
    warnings: usize,
}

/// Examines everything. The exit code is 1 if there are errors.
pub(super) async fn run(args: &DoctorArgs) -> anyhow::Result<ExitCode> {
    let mut findings = Vec::new();
    let config = args.config.as_deref().and_then(|file| engines::load(file, &mut findings));
    let config = config.as_ref();
    let files = SystemFiles::default();
    let in_cluster = config.is_some_and(|config| config.kubernetes.is_some());
    let gateway = probe::with_progress("asking for a running gateway", ports::find_gateway(config)).await;
    findings.extend(ports::check(config, &gateway, &files));
    if in_cluster {
        let what = "accelerators and engines are on the cluster's nodes: nothing of this machine was examined for them";
        findings.push(DoctorFinding::ok("accelerators", what));
    } else {
        let answer = probe::with_progress("asking the driver for accelerators", ask_driver()).await;
        findings.extend(driver::check(&answer, config, &files, owner_of));
        if let Some(config) = config {
            findings.extend(engines::check_files(config));
            findings.extend(check_programs(config).await);
        }
        findings.extend(limits::check(config, HostMemory::read(&files).as_ref(), &process_limits()));
        findings.extend(permissions::check(config, &gateway, &files, rustix::process::geteuid().as_raw()));
    }
    report(args.json, &findings)
}

/// Looks once at each program that the engines' commands start.
async fn check_programs(config: &Config) -> Vec<DoctorFinding> {
    // Program, and module of Python: the rest of a command selects no other program.
    let start = |engine: &EngineConfig| engine.command.iter().take(3).cloned().collect::<Vec<_>>();
    let starts: BTreeSet<Vec<String>> = config.engines.values().map(|engine| start(engine)).collect();
    let mut found = BTreeMap::new();
    let mut titles = BTreeSet::new();
    for words in starts {
        let what = format!("looking at {}", words.first().map_or("", String::as_str));
        if let Some(program) = probe::with_progress(&what, programs::of_command(&words)).await {
            titles.insert(program.title());
            found.insert(words, program);
        }
    }
    let flags = config.engines.iter().flat_map(|(name, engine)| {
        let program = found.get(&start(engine));
        program.map(|program| engines::check_flags(name, engine, program)).unwrap_or_default()
    });
    titles.into_iter().map(|title| DoctorFinding::ok("engines", title)).chain(flags).collect()
}

/// Tells whose process this is, as far as its environment may be read.
fn owner_of(pid: u32) -> ProcessOwner {
    if i32::try_from(pid).is_ok_and(|pid| table::env_value(pid, ENGINE_MARK).is_some()) {
        return ProcessOwner::Engine;
    }
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    ProcessOwner::Foreign(name.trim().to_owned())
}

fn process_limits() -> ProcessLimits {
    // Engines take the soft limit as it is; the gateway raises that of descriptors to the hard one.
    let locked = getrlimit(Resource::RLIMIT_MEMLOCK).ok().map(|(soft, _)| soft);
    let descriptors = getrlimit(Resource::RLIMIT_NOFILE).ok().map(|(_, hard)| hard);
    ProcessLimits {
        locked: locked.filter(|limit| *limit != RLIM_INFINITY).map(Bytes),
        descriptors: descriptors.filter(|limit| *limit != RLIM_INFINITY),
        shared: statvfs("/dev/shm").ok().map(|shm| Bytes(shm.blocks().saturating_mul(shm.fragment_size()))),
    }
}

fn report(json: bool, findings: &[DoctorFinding]) -> anyhow::Result<ExitCode> {
    let count = |level| findings.iter().filter(|finding| finding.level == level).count();
    let (errors, warnings) = (count(FindingLevel::Error), count(FindingLevel::Warning));
    let mut out = std::io::stdout().lock();
    if json {
        let report = DoctorReport { findings, errors, warnings };
        writeln!(out, "{}", serde_json::to_string(&report)?)?;
    } else {
        let colours = use_color();
        findings.iter().try_for_each(|finding| write!(out, "{}", finding.render(colours)))?;
        writeln!(out, "{}, {}", pluralize(errors, "error"), pluralize(warnings, "warning"))?;
    }
    Ok(if errors > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
