//! `init`: writes a configuration for what this machine has.
//!
//! [`proposal`] turns what [`super::detect`] finds into models with memory, and [`yaml`] writes them with the reasons.
//! The text is checked as `check` does before it is written.

mod accelerator_choice;
mod estimate;
mod proposal;
mod yaml;

use std::{
    env, fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context as _, anyhow, bail};
use clap::Args;
use rouse::{shell_words, units::pluralize};
use rouse_config::host::{HostMemory, SystemFiles};
use serde::Serialize;

use super::{
    config_file,
    detect::{
        LeftOut,
        accelerators::ask_driver,
        model_files::{self, GgufModel},
        probe,
        programs::{FoundProgram, ProgramFolders},
        snapshots::{self, HubCache, SnapshotModel},
    },
};
use accelerator_choice::AcceleratorChoice;
use proposal::{ConfigProposal, ProposedModel};

/// What to write, and where to look.
#[derive(Args, Debug)]
pub(super) struct InitArgs {
    /// File to write.
    #[arg(long, short, value_name = "FILE", default_value = "rouse.yaml")]
    output: PathBuf,
    /// Replace the file if it exists.
    #[arg(long)]
    force: bool,
    /// Also look for models below this folder. May be given several times.
    #[arg(long, value_name = "DIR")]
    models: Vec<PathBuf>,
    /// Print what was found and written as JSON.
    #[arg(long)]
    json: bool,
}

/// What a machine has for models.
#[derive(Debug, Default)]
struct FoundMachine {
    programs: Vec<FoundProgram>,
    gguf: Vec<GgufModel>,
    snapshots: Vec<SnapshotModel>,
    left_out: Vec<LeftOut>,
    /// The places that were searched, for a machine on which nothing was found.
    searched: Vec<String>,
}

/// The command's outcome, for programs.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct InitReport<'a> {
    file: String,
    accelerators: &'a AcceleratorChoice,
    engines: Vec<String>,
    models: &'a [ProposedModel],
    left_out: &'a [LeftOut],
    searched: &'a [String],
    next: Vec<String>,
}

pub(super) async fn run(args: &InitArgs) -> anyhow::Result<ExitCode> {
    if !args.force && args.output.symlink_metadata().is_ok() {
        bail!(
            "{} exists: pass --force to replace it, or --output FILE to write another",
            args.output.display()
        );
    }
    if let Some(missing) = args.models.iter().find(|folder| !folder.is_dir()) {
        bail!("--models {}: there is no such folder", missing.display());
    }
    let machine = look_at_machine(&args.models).await;
    let driver = probe::with_progress("asking the driver for accelerators", ask_driver()).await;
    let memory = HostMemory::read(&SystemFiles::default());
    let accelerators = AcceleratorChoice::new(&driver, memory.as_ref(), &machine.programs);
    let leaves_engines = leaves_engines(&args.output);
    let proposal = ConfigProposal { leaves_engines, ..ConfigProposal::new(accelerators, machine) };
    let text = yaml::render(&proposal);
    check(&text, &args.output)?;
    config_file::write(&args.output, &text, args.force)
        .with_context(|| format!("cannot write {}", args.output.display()))?;
    report(args, &proposal)
}

/// Whether this file exists and leaves engines running, as that of the package does.
fn leaves_engines(file: &Path) -> bool {
    let text = fs::read_to_string(file).unwrap_or_default();
    rouse_config::parse(&text, &file.display().to_string()).is_ok_and(|config| !config.shutdown.stop_engines)
}

/// Finds programs and models. What cannot be read is left out with the reason.
async fn look_at_machine(named: &[PathBuf]) -> FoundMachine {
    let home = env::home_dir().filter(|home| home.is_absolute());
    let folders = ProgramFolders::of_environment(home.as_deref());
    let programs = folders.programs().await;
    let cache = HubCache::of_environment(home.as_deref());
    let (search, ollama) = (named.to_vec(), model_files::ollama_folder(home.as_deref()));
    let usual = home.as_deref().map(model_files::usual_folders).unwrap_or_default();
    let mut machine = FoundMachine { programs, ..FoundMachine::default() };
    machine.searched = searched(&folders, &usual, &search, cache.as_ref());
    let looking =
        tokio::task::spawn_blocking(move || look_at_files(&[search, usual].concat(), cache.as_ref()));
    let found = probe::with_progress("looking for models", looking).await;
    let (gguf, snapshots, left_out) = found.unwrap_or_default();
    (machine.gguf, machine.snapshots, machine.left_out) = (gguf, snapshots, left_out);
    if let Some(folder) = ollama {
        let why = "Ollama's files have digests for names: link one that `ollama show MODEL --modelfile` names after FROM \
                   to NAME.gguf in a folder of yours, and pass that folder with --models";
        machine.left_out.push(LeftOut::new(folder.display(), why));
    }
    machine
}

/// Reads all models in these folders and in the cache. Blocks.
fn look_at_files(
    folders: &[PathBuf],
    cache: Option<&HubCache>,
) -> (Vec<GgufModel>, Vec<SnapshotModel>, Vec<LeftOut>) {
    let (in_cache, mut left_out) = cache.map(HubCache::snapshots).unwrap_or_default();
    // Snapshots may hold GGUF files, too: llama.cpp downloads into the same cache.
    let mut files = model_files::find(&[folders, in_cache.as_slice()].concat());
    left_out.append(&mut files.left_out);
    let (gguf, unread) = model_files::read_models(&files.gguf);
    left_out.extend(unread);
    let mut models = Vec::new();
    for folder in in_cache.iter().filter(|folder| !files.gguf.iter().any(|file| file.starts_with(folder))) {
        match cache.map(|cache| cache.read_model(folder)) {
            Some(Ok(model)) => models.push(model),
            Some(Err(why)) => left_out.push(LeftOut::new(folder.display(), why)),
            None => {}
        }
    }
    let is_cached = |folder: &Path| in_cache.iter().any(|snapshot| folder.starts_with(snapshot));
    for folder in files.folders.iter().filter(|folder| !is_cached(folder)) {
        match snapshots::read_folder(folder) {
            Ok(model) => models.push(model),
            Err(why) => left_out.push(LeftOut::new(folder.display(), why)),
        }
    }
    (gguf, models, left_out)
}

fn searched(
    programs: &ProgramFolders,
    usual: &[PathBuf],
    named: &[PathBuf],
    cache: Option<&HubCache>,
) -> Vec<String> {
    let list = |folders: &[PathBuf]| {
        let shown: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
        shown.join(", ")
    };
    let mut lines = vec![
        format!("vllm, sglang, llama-server and llama_cpp.server in {}", list(&programs.0)),
        format!("GGUF files in {}", list(&[named, usual].concat())),
    ];
    lines.extend(cache.map(|cache| format!("models of Hugging Face in {}", cache.folder.display())));
    lines
}

/// Refuses a text that `check` would refuse. That is a defect of this command, and the message helps to report it.
fn check(text: &str, output: &Path) -> anyhow::Result<()> {
    let origin = output.display().to_string();
    let config = rouse_config::parse(text, &origin)
        .map_err(|errors| anyhow!("the proposed configuration is not valid: {errors}"))?;
    let errors = rouse_config::check(&config).errors;
    if let Some(problem) = errors.first() {
        bail!("the proposed configuration is not valid: {}", problem.display(&origin));
    }
    Ok(())
}

/// Returns the commands to run next.
fn next_commands(file: &Path, proposal: &ConfigProposal) -> Vec<String> {
    let file = shell_words::quote(&file.display().to_string());
    let mut next = vec![
        format!("rouse-gateway doctor --config {file}"),
        format!("rouse-gateway check {file}"),
        format!("rouse-gateway --config {file}"),
    ];
    if let Some(model) = proposal.models.first() {
        next.push(format!(
            "rouse-gateway measure {} --config {file} --write",
            shell_words::quote(&model.name)
        ));
    }
    next
}

fn report(args: &InitArgs, proposal: &ConfigProposal) -> anyhow::Result<ExitCode> {
    let next = next_commands(&args.output, proposal);
    let engines = proposal.programs.iter().map(FoundProgram::title).collect();
    let mut out = std::io::stdout().lock();
    if args.json {
        let report = InitReport {
            file: args.output.display().to_string(),
            accelerators: &proposal.accelerators,
            engines,
            models: &proposal.models,
            left_out: &proposal.left_out,
            searched: &proposal.searched,
            next,
        };
        writeln!(out, "{}", serde_json::to_string(&report)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let found = pluralize(proposal.models.len(), "model");
    writeln!(
        out,
        "Wrote {} with {found}. Accelerators: {}.",
        args.output.display(),
        proposal.accelerators.summary()
    )?;
    for model in &proposal.models {
        writeln!(out, "  {}  {} of memory, estimated", model.name, model.awake)?;
    }
    if proposal.models.is_empty() {
        writeln!(out, "No model can be served yet; the file has an example. Looked for:")?;
        proposal.searched.iter().try_for_each(|line| writeln!(out, "  {line}"))?;
    }
    if !proposal.left_out.is_empty() {
        writeln!(out, "Left out:")?;
        proposal.left_out.iter().try_for_each(|one| writeln!(out, "  {}: {}", one.what, one.why))?;
    }
    writeln!(out, "Next:")?;
    next.iter().try_for_each(|command| writeln!(out, "  {command}"))?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests;
