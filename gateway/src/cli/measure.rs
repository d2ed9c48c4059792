//! `measure`: runs a model alone, and finds out what it takes.
//!
//! Without a gateway it runs the engine itself, through the same platform code. Beside a running one it gives orders,
//! so that the gateway reserves the memory first.

mod ordered_engine;
mod own_engine;
mod sequence;
mod settle;

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
};

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use rouse::{
    model::{ModelSpec, RehearsalPolicy, SleepLevel},
    units::Bytes,
};
use rouse_config::{Config, MachineDefaults, MeasuredMemory, set_memory};
use serde_json::json;

use self::{
    ordered_engine::OrderedEngine,
    own_engine::OwnEngine,
    sequence::{MeasurePlan, ModelMeasurement},
};
use super::{
    client::{AdminClient, AdminEndpoint},
    config_file,
    progress::in_tenths,
    screen::interrupted,
    show::{row, table, use_color},
};
use crate::platform::local::{self, EngineMemoryMeter, RecordedEngine};

/// What to measure, and where to write it.
#[derive(Args, Debug)]
pub(super) struct MeasureArgs {
    /// Name of the model.
    model: String,
    /// Configuration file that has the model.
    #[arg(long, value_name = "FILE", env = "ROUSE_CONFIG")]
    config: PathBuf,
    /// Write the memory into the configuration file. Comments and everything else stay.
    #[arg(long)]
    write: bool,
    /// Write the memory into this InferenceModel, of the cluster that kubectl uses.
    #[arg(long, value_name = "[NAMESPACE/]NAME")]
    kubernetes: Option<String>,
    /// Put other models to sleep, or stop them, if they hold the accelerators and are idle.
    #[arg(long)]
    evict: bool,
    /// Address of the gateway's admin API, if one runs. Default: as the configuration says.
    #[arg(long, value_name = "URL", env = "ROUSE_ADMIN")]
    admin: Option<AdminEndpoint>,
    /// Bearer token for the admin API. Default: as the configuration says.
    #[arg(long, value_name = "TOKEN", env = "ROUSE_ADMIN_TOKEN", hide_env_values = true)]
    token: Option<String>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// The engine that is measured.
enum MeasuredEngine {
    Own(Box<OwnEngine>),
    Ordered(Box<OrderedEngine>),
}

/// A configuration file as it was read.
struct ConfigText {
    text: String,
    config: Config,
    /// The file has no memory for the model yet.
    lacks_memory: bool,
}

pub(super) async fn run(args: &MeasureArgs) -> anyhow::Result<ExitCode> {
    let ConfigText { text, mut config, lacks_memory } = ConfigText::read(&args.config, &args.model)?;
    ensure!(
        config.kubernetes.is_none(),
        "the engines of {} run in a cluster: measure the model on a machine with such an accelerator, with a file for \
         that machine, and pass --kubernetes NAMESPACE/NAME to write the result into the InferenceModel",
        args.config.display()
    );
    if config.accelerators_auto {
        let found = local::discover(config.headroom).context("cannot detect the accelerators")?;
        config.reserve_memory_utilization(&found, config.headroom);
        config.core.accelerators = found;
    }
    let spec = model_spec(&config, &args.model, lacks_memory)?;
    // The launch reads the limit from the configuration.
    for own in config.core.models.iter_mut().filter(|own| own.name == spec.name) {
        own.memory = spec.memory;
    }
    let config = Arc::new(config);
    let measured = Box::pin(measure(args, &config, &spec, lacks_memory)).await?;
    print(&measured, args.json)?;
    let memory = measured.memory();
    if args.write {
        write_file(&args.config, &text, spec.name.as_str(), &memory)?;
    }
    if let Some(object) = &args.kubernetes {
        write_object(object, &memory).await?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Measures, and returns the model to its former state also after an error or an interrupt.
async fn measure(
    args: &MeasureArgs,
    config: &Arc<Config>,
    spec: &ModelSpec,
    lacks_memory: bool,
) -> anyhow::Result<ModelMeasurement> {
    let engine = config.engines.get(&spec.name).context("the model has no engine")?;
    let plan = MeasurePlan { config, spec, engine };
    let mut measured = if local::is_in_use(&config.state) {
        ensure!(
            !lacks_memory,
            "the running gateway cannot have this file, which is invalid: stop the gateway first"
        );
        MeasuredEngine::Ordered(Box::new(
            OrderedEngine::begin(args.client(config), config, spec, args.evict).await?,
        ))
    } else {
        MeasuredEngine::Own(Box::new(OwnEngine::begin(config, spec, args.evict).await?))
    };
    let result = tokio::select! {
        result = sequence::measure(&plan, &mut measured) => result,
        () = interrupted() => {
            eprintln!("rouse-gateway: interrupted; the model returns to its former state");
            Err(anyhow::anyhow!("interrupted, so nothing was measured"))
        }
    };
    measured.end().await;
    result
}

/// Returns the model's entry. Without a memory in the file, all of an accelerator is its limit.
fn model_spec(config: &Config, name: &str, lacks_memory: bool) -> anyhow::Result<ModelSpec> {
    let models = &config.core.models;
    let is_named =
        |spec: &&ModelSpec| spec.name.as_str() == name || spec.aliases.iter().any(|alias| alias == name);
    let Some(spec) = models.iter().find(is_named) else {
        let known: Vec<_> = models.iter().map(|spec| spec.name.as_str()).collect();
        bail!("{} has no model '{name}'; its models: {}", config.origin, known.join(", "));
    };
    let mut spec = spec.clone();
    if lacks_memory {
        let smallest = config.core.accelerators.iter().map(|one| one.capacity).min();
        spec.memory.awake = smallest.unwrap_or(spec.memory.awake);
    }
    Ok(spec)
}

fn print(measured: &ModelMeasurement, json: bool) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    let memory = measured.memory();
    if json {
        let mut value = serde_json::to_value(measured)?;
        if let Some(object) = value.as_object_mut() {
            let sizes = json!({"awake": memory.awake, "asleep": memory.asleep, "host": memory.host});
            object.insert("memory".to_owned(), sizes);
        }
        return Ok(writeln!(out, "{value}")?);
    }
    Ok(write!(out, "{}", render(measured, &memory, use_color()))?)
}

fn render(measured: &ModelMeasurement, memory: &MeasuredMemory, colours: bool) -> String {
    let accelerators: Vec<_> = measured.accelerators.iter().map(ToString::to_string).collect();
    let mut rows = vec![row(["STEP", "ON EACH ACCELERATOR", "HOST", "TIME", "WAKE"])];
    rows.push(row(["awake", &measured.awake.to_string(), "-", &in_tenths(measured.start), "-"]));
    rows.extend(measured.levels.iter().map(|level| {
        let host = level.host.map_or_else(|| "-".to_owned(), |host| host.to_string());
        row([
            &format!("asleep at level {}", level.level),
            &level.asleep.to_string(),
            &host,
            &in_tenths(level.sleep),
            &in_tenths(level.wake),
        ])
    }));
    format!(
        "{} on {}\n\n{}\nmemory: {memory}\n",
        measured.model,
        accelerators.join(", "),
        table(&rows, colours)
    )
}

/// Replaces the model's memory in the file, unless the file has changed since it was read.
fn write_file(path: &Path, before: &str, model: &str, memory: &MeasuredMemory) -> anyhow::Result<()> {
    let shown = path.display();
    let changed = set_memory(before, model, memory).with_context(|| format!("cannot change {shown}"))?;
    if let Err(errors) = rouse_config::parse(&changed, &shown.to_string()) {
        bail!("{shown} would become invalid, and nothing was written: {errors}");
    }
    let now = fs::read_to_string(path).with_context(|| format!("cannot read {shown}"))?;
    ensure!(
        now == before,
        "{shown} has changed during the measurement, and nothing was written: set memory: {memory} there"
    );
    config_file::write(path, &changed, true).with_context(|| format!("cannot write {shown}"))?;
    eprintln!("{shown}: wrote memory: {memory}");
    Ok(())
}

async fn write_object(object: &str, memory: &MeasuredMemory) -> anyhow::Result<()> {
    let (namespace, name) = match object.split_once('/') {
        Some((namespace, name)) => (Some(namespace), name),
        None => (None, object),
    };
    let MeasuredMemory { awake, asleep, host } = *memory;
    rouse_controllers::measured_memory::write(namespace, name, awake, asleep, host).await?;
    eprintln!("InferenceModel {object}: wrote memory: {memory}");
    Ok(())
}

impl MeasureArgs {
    fn client(&self, config: &Config) -> AdminClient {
        let endpoint = self.admin.clone().unwrap_or_else(|| config.admin.address.into());
        AdminClient::new(endpoint, self.token.clone().or_else(|| config.admin.token.clone()))
    }
}

impl ConfigText {
    fn read(path: &Path, model: &str) -> anyhow::Result<Self> {
        let origin = path.display().to_string();
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {origin}"))?;
        let errors = match rouse_config::load(path) {
            Ok(config) => return Ok(Self { text, config, lacks_memory: false }),
            Err(errors) => errors,
        };
        // The memory that is to be measured need not be there yet.
        let filler = MeasuredMemory { awake: Bytes::mib(1), asleep: None, host: None };
        let filled = set_memory(&text, model, &filler).ok();
        let parsed = filled
            .and_then(|filled| rouse_config::parse_with(&MachineDefaults::detect(), &filled, &origin).ok());
        let config = parsed.ok_or(errors)?;
        Ok(Self { text, config, lacks_memory: true })
    }
}

impl MeasuredEngine {
    fn accelerators(&self) -> &[rouse::model::AcceleratorId] {
        match self {
            Self::Own(engine) => &engine.accelerators,
            Self::Ordered(engine) => &engine.accelerators,
        }
    }

    /// Whether the engine has slept before its first measured sleep: a gateway may rehearse it.
    fn has_slept(&self, plan: &MeasurePlan<'_>) -> bool {
        matches!(self, Self::Ordered(_)) && plan.spec.idle.rehearse != RehearsalPolicy::Never
    }

    /// Refuses a start that cannot succeed. A gateway checks that itself.
    fn check_room(&self, plan: &MeasurePlan<'_>, meter: &EngineMemoryMeter) -> anyhow::Result<()> {
        match self {
            Self::Own(engine) => engine.check_room(plan, meter),
            Self::Ordered(_) => Ok(()),
        }
    }

    /// Makes room for the engine of a gateway. One of our own found its room at the beginning.
    async fn prepare(&mut self) -> anyhow::Result<()> {
        match self {
            Self::Own(_) => Ok(()),
            Self::Ordered(engine) => Box::pin(engine.prepare()).await,
        }
    }

    async fn start(&mut self) -> anyhow::Result<RecordedEngine> {
        match self {
            Self::Own(engine) => engine.start().await,
            Self::Ordered(engine) => engine.start().await,
        }
    }

    async fn sleep(&mut self, level: SleepLevel) -> anyhow::Result<()> {
        match self {
            Self::Own(engine) => engine.sleep(level).await,
            Self::Ordered(engine) => engine.sleep(level).await,
        }
    }

    async fn wake(&mut self, level: SleepLevel) -> anyhow::Result<()> {
        match self {
            Self::Own(engine) => engine.wake(level).await,
            Self::Ordered(engine) => engine.wake(level).await,
        }
    }

    /// Returns the model to its former state. A further interrupt kills an engine of our own, and leaves the engine of
    /// a gateway as it is.
    async fn end(self) {
        match self {
            Self::Own(engine) => engine.end().await,
            Self::Ordered(engine) => tokio::select! {
                () = engine.end() => {}
                () = interrupted() => eprintln!("rouse-gateway: interrupted again; the model stays as it is now"),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "accelerators: [{id: a, memory: 8Gi}] # mine\nmodels:\n  - name: m\n    memory: {awake: 1Gi}\n    \
                        engine: {kind: custom, command: [e, \"${PORT}\"]}\n";

    fn memory() -> MeasuredMemory {
        MeasuredMemory { awake: Bytes::mib(1234), asleep: None, host: None }
    }

    #[test]
    fn only_the_memory_of_the_model_changes_in_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("f.yaml");
        fs::write(&file, FILE).unwrap();
        write_file(&file, FILE, "m", &memory()).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), FILE.replace("{awake: 1Gi}", "{awake: 1234Mi}"));
    }

    #[test]
    fn a_file_that_has_changed_meanwhile_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("f.yaml");
        let edited = FILE.replace("mine", "edited");
        fs::write(&file, &edited).unwrap();
        let error = write_file(&file, FILE, "m", &memory()).unwrap_err().to_string();
        assert!(error.contains("has changed during the measurement"), "{error}");
        assert!(error.contains("memory: {awake: 1234Mi}"), "{error}");
        assert_eq!(fs::read_to_string(&file).unwrap(), edited);
    }

    #[test]
    fn a_model_without_memory_is_read_with_all_of_an_accelerator_as_its_limit() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("f.yaml");
        fs::write(&file, FILE.replace("    memory: {awake: 1Gi}\n", "")).unwrap();
        let read = ConfigText::read(&file, "m").unwrap();
        assert!(read.lacks_memory);
        let spec = model_spec(&read.config, "m", true).unwrap();
        assert_eq!(spec.memory.awake, Bytes::gib(7), "less the headroom");
        let unknown = model_spec(&read.config, "x", true).unwrap_err().to_string();
        assert!(unknown.ends_with("has no model 'x'; its models: m"), "{unknown}");
        fs::write(&file, "what: 1\n").unwrap();
        assert!(ConfigText::read(&file, "m").is_err());
    }
}
