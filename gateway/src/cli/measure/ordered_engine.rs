//! Measures beside a running gateway, by orders that any operator may give.
//!
//! The gateway reserves the memory before it starts the engine, and drains an engine before it puts it to sleep. So no
//! client loses an answer, and a client that comes meanwhile only spoils the measurement, which then fails.

use std::path::PathBuf;

use anyhow::{Context as _, bail, ensure};
use rouse::{
    fleet::report::{EngineView, FleetView, ModelState, ModelView},
    model::{AcceleratorId, AcceleratorRequirement, EngineId, ModelSpec, SleepLevel, SleepLevelPolicy},
};
use rouse_config::Config;

use crate::{
    cli::{
        client::AdminClient,
        orders::{self, ModelOrder},
    },
    platform::local::RecordedEngine,
};

/// An engine that a gateway runs.
pub(super) struct OrderedEngine {
    client: AdminClient,
    spec: ModelSpec,
    state: PathBuf,
    /// The model's state before the measurement, to which it returns.
    before: ModelState,
    evict: bool,
    /// An order was given, so that the model may be in another state.
    has_ordered: bool,
    engine: Option<EngineId>,
    /// The likely accelerators until the gateway has chosen.
    pub(super) accelerators: Vec<AcceleratorId>,
}

impl OrderedEngine {
    /// Checks that the gateway can measure the model now, and changes nothing yet.
    ///
    /// # Errors
    /// The model is in use, or cannot leave its state.
    pub(super) async fn begin(
        client: AdminClient,
        config: &Config,
        spec: &ModelSpec,
        evict: bool,
    ) -> anyhow::Result<Self> {
        let view = fleet(&client).await?;
        let model = model_of(&view, spec)?;
        ensure!(!model.pinned, "{} is pinned: run `rouse-gateway unpin {}` first", spec.name, spec.name);
        ensure_unused(model)?;
        match model.state {
            ModelState::Launching => bail!("{} is starting: try again when it is awake", spec.name),
            ModelState::Awake if !may_sleep(spec) => bail!(
                "{} is awake and cannot sleep: run `rouse-gateway stop {}` first, which ends its requests",
                spec.name,
                spec.name
            ),
            ModelState::Unplaceable => bail!("{} does not fit: {}", spec.name, model.reason),
            ModelState::Awake | ModelState::Asleep | ModelState::Cold | ModelState::Failed => {}
        }
        let before = model.state;
        Ok(Self {
            client,
            spec: spec.clone(),
            state: config.state.clone(),
            before,
            evict,
            has_ordered: false,
            engine: None,
            accelerators: likely_accelerators(config, spec),
        })
    }

    /// Brings the model to its coldest state, alone on its accelerators.
    ///
    /// # Errors
    /// Other models hold the accelerators and may not be evicted, or are in use.
    pub(super) async fn prepare(&mut self) -> anyhow::Result<()> {
        let view = fleet(&self.client).await?;
        self.make_alone(&view).await?;
        // Others may have taken long to drain.
        let now = self.view_of(self.spec.name.as_str()).await?;
        ensure_unused(&now)?;
        ensure!(now.state == self.before, "{} is {} meanwhile: try again", now.name, now.state.as_str());
        self.has_ordered = true;
        self.make_cold(self.before).await
    }

    /// Makes other models leave the accelerators, if that is wanted.
    async fn make_alone(&self, view: &FleetView) -> anyhow::Result<()> {
        for neighbour in neighbours(view, &self.spec) {
            let model = neighbour.engine.model.as_str();
            ensure!(
                self.evict,
                "{model} is {} on {}: wait until it is idle, or pass --evict to put it to sleep",
                neighbour.state.to_lowercase(),
                accelerator_list(&neighbour.accelerators)
            );
            let slept = orders::execute(&self.client, model, ModelOrder::Sleep { level: None }).await;
            if slept.is_ok_and(|slept| slept.failure.is_none()) {
                continue;
            }
            self.stop_unused(model).await?;
        }
        Ok(())
    }

    async fn make_cold(&self, state: ModelState) -> anyhow::Result<()> {
        if state == ModelState::Awake {
            // A drain lets requests end that have just come. A stop would not.
            self.order(ModelOrder::Sleep { level: None }).await?;
        }
        if matches!(state, ModelState::Awake | ModelState::Asleep) {
            self.stop_unused(self.spec.name.as_str()).await?;
        }
        Ok(())
    }

    /// Stops a model, unless clients use it: a stop ends their requests.
    async fn stop_unused(&self, model: &str) -> anyhow::Result<()> {
        ensure_unused(&self.view_of(model).await?)?;
        self.order_for(model, ModelOrder::Stop).await
    }

    pub(super) async fn start(&mut self) -> anyhow::Result<RecordedEngine> {
        self.order(ModelOrder::Wake).await?;
        let view = fleet(&self.client).await?;
        let awake = view.engines.iter().find(|engine| self.is_own(engine) && engine.state == "Awake");
        let id = awake.map(|engine| engine.engine.clone());
        let id = id.with_context(|| format!("{} did not stay awake", self.spec.name))?;
        let recorded = RecordedEngine::find(&self.state, &id)?;
        let recorded = recorded.with_context(|| {
            let state = self.state.display();
            format!("the gateway does not run {id} from {state}: pass --config with the gateway's own file")
        })?;
        self.accelerators.clone_from(&recorded.accelerators);
        self.engine = Some(id);
        Ok(recorded)
    }

    pub(super) async fn sleep(&self, level: SleepLevel) -> anyhow::Result<()> {
        self.ensure_undisturbed("Awake").await?;
        self.order(ModelOrder::Sleep { level: Some(level.number()) }).await?;
        self.ensure_undisturbed(&format!("Asleep({})", level.number())).await
    }

    pub(super) async fn wake(&self, level: SleepLevel) -> anyhow::Result<()> {
        self.ensure_undisturbed(&format!("Asleep({})", level.number())).await?;
        self.order(ModelOrder::Wake).await?;
        self.ensure_undisturbed("Awake").await
    }

    /// Returns the model to the state in which it was.
    pub(super) async fn end(self) {
        if let Err(error) = self.restore().await {
            eprintln!("rouse-gateway: cannot return {} to its former state: {error:#}", self.spec.name);
        }
    }

    /// An order that an interrupt left behind is superseded by those that are given here.
    async fn restore(&self) -> anyhow::Result<()> {
        if !self.has_ordered {
            return Ok(());
        }
        let model = self.spec.name.as_str();
        let now = self.view_of(model).await?;
        // Clients that came meanwhile keep it, and its own policy ends it.
        if ensure_unused(&now).is_err() {
            return Ok(());
        }
        match self.before {
            ModelState::Awake => self.order(ModelOrder::Wake).await,
            ModelState::Asleep if now.state == ModelState::Asleep => {
                // It supersedes a wake. An engine that is just falling asleep refuses it, and needs none.
                self.order(ModelOrder::Sleep { level: None }).await.unwrap_or_default();
                Ok(())
            }
            ModelState::Asleep => {
                self.order(ModelOrder::Wake).await?;
                self.order(ModelOrder::Sleep { level: None }).await
            }
            ModelState::Cold | ModelState::Failed | ModelState::Launching | ModelState::Unplaceable => {
                if now.state == ModelState::Awake && may_sleep(&self.spec) {
                    self.order(ModelOrder::Sleep { level: None }).await?;
                }
                self.stop_unused(model).await
            }
        }
    }

    async fn view_of(&self, model: &str) -> anyhow::Result<ModelView> {
        let view = orders::model_view(&self.client, model).await?;
        view.with_context(|| format!("{model} is no longer configured"))
    }

    async fn order(&self, order: ModelOrder) -> anyhow::Result<()> {
        self.order_for(self.spec.name.as_str(), order).await
    }

    async fn order_for(&self, model: &str, order: ModelOrder) -> anyhow::Result<()> {
        let ended = orders::execute(&self.client, model, order).await?;
        match ended.failure {
            None => Ok(()),
            Some(reason) => bail!("the gateway could not change the state of {model}: {reason}"),
        }
    }

    /// Fails if a client or the gateway's policy has used the engine meanwhile.
    async fn ensure_undisturbed(&self, state: &str) -> anyhow::Result<()> {
        let view = fleet(&self.client).await?;
        ensure_unused(model_of(&view, &self.spec)?)?;
        let engine = view.engines.iter().find(|engine| Some(&engine.engine) == self.engine.as_ref());
        let found = engine.map_or("gone", |engine| engine.state.as_str());
        ensure!(
            found == state,
            "{} is {found} instead of {state}: a client or its idle policy used it meanwhile; try again while it is idle",
            self.spec.name
        );
        Ok(())
    }

    fn is_own(&self, engine: &EngineView) -> bool {
        engine.engine.model == self.spec.name
    }
}

/// Whether the gateway accepts an order to sleep.
fn may_sleep(spec: &ModelSpec) -> bool {
    spec.can_sleep && spec.idle.level != SleepLevelPolicy::Never
}

async fn fleet(client: &AdminClient) -> anyhow::Result<FleetView> {
    Ok(client.get_json("/admin/v1/fleet").await?)
}

fn model_of<'v>(view: &'v FleetView, spec: &ModelSpec) -> anyhow::Result<&'v ModelView> {
    let found = view.models.iter().find(|model| model.name == spec.name);
    found.with_context(|| format!("the gateway does not know {}: reload its configuration", spec.name))
}

fn ensure_unused(model: &ModelView) -> anyhow::Result<()> {
    ensure!(
        model.leases == 0 && model.waiting == 0,
        "{} serves requests ({} running, {} waiting): try again while it is idle",
        model.name,
        model.leases,
        model.waiting
    );
    Ok(())
}

/// Returns the awake engines of other models that are in the way.
fn neighbours<'v>(view: &'v FleetView, spec: &ModelSpec) -> Vec<&'v EngineView> {
    let is_active = |engine: &EngineView| engine.state != "Cold" && !engine.state.starts_with("Asleep");
    let others = view.engines.iter().filter(|engine| engine.engine.model != spec.name && is_active(engine));
    let holds = |engine: &EngineView, id: &AcceleratorId| engine.accelerators.contains(id);
    match &spec.accelerators {
        AcceleratorRequirement::Ids(ids) => {
            others.filter(|engine| ids.iter().any(|id| holds(engine, id))).collect()
        }
        AcceleratorRequirement::Count(count) => {
            let others: Vec<_> = others.collect();
            let is_free = |id: &AcceleratorId| !others.iter().any(|engine| holds(engine, id));
            let free = view.accelerators.iter().filter(|one| is_free(&one.id)).count();
            let needed = usize::try_from(*count).unwrap_or(usize::MAX);
            if free >= needed { Vec::new() } else { others }
        }
        AcceleratorRequirement::InPool { .. } | AcceleratorRequirement::Slots { .. } => Vec::new(),
    }
}

/// Returns all accelerators on which the gateway may place the model.
fn likely_accelerators(config: &Config, spec: &ModelSpec) -> Vec<AcceleratorId> {
    match &spec.accelerators {
        AcceleratorRequirement::Ids(ids) => ids.clone(),
        _ => config.core.accelerators.iter().map(|one| one.id.clone()).collect(),
    }
}

fn accelerator_list(accelerators: &[AcceleratorId]) -> String {
    accelerators.iter().map(AcceleratorId::as_str).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(engines: &str) -> FleetView {
        let accelerators = ["gpu-0", "gpu-1"].map(|id| {
            format!(r#"{{"id": "{id}", "capacity": 1, "reserved": 0, "observed": null, "healthy": true}}"#)
        });
        let accelerators = accelerators.join(",");
        serde_json::from_str(&format!(
            r#"{{"accelerators": [{accelerators}], "host": {{"capacity": 0, "reserved": 0}}, "models": [],
                "engines": [{engines}]}}"#
        ))
        .unwrap()
    }

    fn engine(id: &str, state: &str, on: &str) -> String {
        format!(
            r#"{{"engine": "{id}", "generation": 1, "state": "{state}", "since": 0, "leases": 0,
                "accelerators": ["{on}"], "reserved": 0, "host": 0}}"#
        )
    }

    fn spec(accelerators: &str) -> ModelSpec {
        let yaml = format!(
            "accelerators: [{{id: gpu-0, memory: 8Gi}}, {{id: gpu-1, memory: 8Gi}}]\nmodels: [{{name: m, accelerators: \
             {accelerators}, memory: {{awake: 1Gi}}, engine: {{kind: custom, command: [e, \"${{PORT}}\"]}}}}]\n"
        );
        rouse_config::parse(&yaml, "test").unwrap().core.models.remove(0)
    }

    #[test]
    fn only_awake_engines_of_others_on_accelerators_that_the_model_needs_are_in_the_way() {
        let engines = [
            engine("a#0", "Awake", "gpu-0"),
            engine("b#0", "Asleep(1)", "gpu-1"),
            engine("m#0", "Awake", "gpu-1"),
        ];
        let view = view(&engines.join(","));
        for (accelerators, expected) in
            [("1", &[][..]), ("2", &["a#0"]), ("[gpu-0]", &["a#0"]), ("[gpu-1]", &[])]
        {
            let found = neighbours(&view, &spec(accelerators));
            let found: Vec<_> = found.iter().map(|engine| engine.engine.to_string()).collect();
            assert_eq!(found, expected, "accelerators: {accelerators}");
        }
    }
}
