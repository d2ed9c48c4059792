//! Orders about engines: their Pods, what is written on these, and what the engines themselves are told.

use std::{collections::BTreeMap, time::Duration};

use k8s_openapi::api::{apps::v1::ReplicaSet, core::v1::Pod};
use kube::{Api, ResourceExt as _};
use rouse::{
    adapter::{Adapter, Health, Kind, Manner, SleepApi, Task},
    fault::Cause as EngineCause,
    model::Level,
    pairing::{
        command::Step,
        event::{Answer, Cause, Condition, Record},
        ids::{EngineId, Mode, RequesterId},
    },
    units::{Generation, Tick},
    wire::Actuated,
};
use serde_json::{Value, json};

use super::{
    Failed, Hands, Job, Outcome, inside,
    requester::{named, stub},
};
use crate::{
    controllers::{
        dual::{
            edition::Edition,
            keys,
            provider::{self, Owner, Place},
            record,
        },
        fault,
        workload::merge,
        writer,
    },
    pairing::{
        ask::Asked,
        directory::{Provider, Requester},
    },
};

/// One small question to an engine.
pub(super) const MOMENT: Duration = Duration::from_secs(5);

impl Hands {
    pub(super) async fn engine(
        &self,
        job: &Job,
        id: &EngineId,
        generation: Generation,
        step: &Step,
    ) -> Outcome {
        if id.mode == Mode::Launcher
            && let Some(outcome) = self.inside(job, id, generation, step).await
        {
            return outcome;
        }
        match step {
            Step::Create { record } => Box::pin(self.create(job, record)).await,
            Step::Bind { record } => self.bind(job, record).await,
            Step::Launch => Err(Failed::refused("it has a Pod of its own, and is not launched")),
            Step::Prove => self.prove(job).await,
            Step::Open { .. } => self.open(job, generation).await,
            Step::Gate { deadline, .. } => self.gate(job, generation, *deadline).await,
            Step::Sleep { level, via } => self.sleep(job, generation, *level, via.as_ref()).await,
            Step::Wake { level, .. } => self.wake(job, generation, *level).await,
            Step::Unbind { last_used, .. } => self.unbind(job, *last_used).await,
            Step::End { .. } => self.end(job, id, generation).await,
            Step::Query => {
                tell_stub(job).await?;
                query(job, id).await
            }
        }
    }

    async fn create(&self, job: &Job, record: &Record) -> Outcome {
        let own = job.requester()?;
        let Some(pod) = self.look(&own.name).await? else {
            return Err(Failed::refused("its requester is gone"));
        };
        if pod.metadata.uid.as_deref() != Some(own.id.as_str()) {
            return Err(Failed::refused("its requester is gone"));
        }
        let place = place(job, &record.engine);
        let owner = self.owner(&pod).await?;
        let mut made = provider::make(&pod, &place, record, owner.as_ref(), &self.settings.make)
            .map_err(|error| Failed::user(error.to_string()))?;
        job.grant(&mut made.pod);
        if let Some(edition) = &own.edition {
            made.pod
                .metadata
                .annotations
                .get_or_insert_default()
                .insert(keys::EDITION.to_owned(), edition.text());
        }
        let object = serde_json::to_value(&made.pod).map_err(|error| Failed::refused(error.to_string()))?;
        self.writer.create(&self.pods(&own.name), &object).await.map_err(|error| {
            // What the API server refuses was asked for by the user.
            let tell = matches!(error, writer::Error::Invalid(_));
            Failed { tell, ..Failed::from(error) }
        })?;
        match self.name_dual(own, &made.name, None).await {
            // It is another Pod of that name by now, and the provider is there all the same.
            Err(Failed { cause: Cause::Conflict, .. }) => Ok(Answer::Done),
            outcome => outcome,
        }
    }

    /// The ReplicaSet that made the requester, and would count a provider with the same labels.
    async fn owner(&self, requester: &Pod) -> Result<Option<Owner>, Failed> {
        let owners = requester.owner_references();
        let made = owners.iter().find(|own| own.controller == Some(true) && own.kind == "ReplicaSet");
        let (Some(made), Some(namespace)) = (made, requester.namespace()) else { return Ok(None) };
        let sets: Api<ReplicaSet> = Api::namespaced(self.client.clone(), &namespace);
        let spec = self.writer.look(&sets, &made.name).await?.and_then(|set| set.spec);
        Ok(spec.map(|spec| Owner { name: format!("the ReplicaSet {}", made.name), selector: spec.selector }))
    }

    /// Whoever looks at the requester finds its provider. Nothing is decided by that.
    pub(super) async fn name_dual(&self, own: &Requester, provider: &str, instance: Option<&str>) -> Outcome {
        let mut metadata = json!({"uid": own.id.as_str(), "labels": {keys::DUAL: provider}});
        if let Some(instance) = instance {
            merge::into(&mut metadata, &json!({"labels": {keys::INSTANCE: instance}}));
        }
        self.patch(&own.name, &json!({"metadata": metadata})).await
    }

    /// What is written before an engine is woken: whose it is, that its Pod stays until it is unbound, and that it may be awake.
    async fn bind(&self, job: &Job, record: &Record) -> Outcome {
        let (own, provider) = (job.requester()?, job.provider()?);
        let mut annotations =
            record::annotations(&job.command.node, record, Some(&own.name.name), job.written(&record.engine));
        if let Some(edition) = merge::under(&mut annotations, keys::EDITION) {
            *edition = json!(own.edition.as_ref().map(Edition::text));
        }
        let patch = json!({"metadata": {
            "uid": provider.uid.as_str(),
            "finalizers": [keys::PROVIDER_FINALIZER],
            "labels": labels(own, provider),
            "annotations": annotations,
        }});
        self.patch(&provider.name, &patch).await
    }

    /// Clients may come, and the kubelet is told so; then everybody who reads labels.
    async fn open(&self, job: &Job, generation: Generation) -> Outcome {
        let (own, engine, provider) = (job.requester()?, job.engine()?, job.provider()?);
        let stub = stub(job, own, generation)?;
        if let Err(failed) = stub.target(engine).await {
            if failed.cause == Cause::Conflict {
                // It relays to an engine that it had before, and cannot be told another: its owner makes one that can.
                self.writer.delete(&self.pods(&own.name), &own.name.name, own.id.as_str()).await?;
            }
            return Err(failed);
        }
        stub.open().await?;
        stub.ready(true).await?;
        if !own.names(provider) {
            self.patch(&own.name, &json!({"metadata": named(own, provider)})).await?;
        }
        if !provider.is_launcher() {
            return Ok(Answer::Done);
        }
        self.patch(&provider.name, &inside::serving(job, own)?).await
    }

    async fn gate(&self, job: &Job, generation: Generation, deadline: Tick) -> Outcome {
        let stub = stub(job, job.requester()?, generation)?;
        stub.ready(false).await?;
        stub.drained(deadline.since(self.now())).await?;
        Ok(Answer::Done)
    }

    async fn sleep(
        &self,
        job: &Job,
        generation: Generation,
        level: Level,
        via: Option<&RequesterId>,
    ) -> Outcome {
        if via.is_some() {
            match self.actuated(job, generation, false, level).await {
                Ok(Some(done)) => {
                    let residue = done.memory.and_then(|memory| job.residue(&memory));
                    return Ok(Answer::Asleep { residue });
                }
                // A stub that dies meanwhile is no reason to lose the engine.
                Ok(None) | Err(Failed { cause: Cause::Unreachable, .. }) => {}
                Err(failed) => return Err(failed),
            }
        }
        // Nobody is behind a gate that could be waited for.
        self.directly(job).await?.sleep(level).await.map_err(engine_failed)?;
        Ok(Answer::Asleep { residue: None })
    }

    async fn wake(&self, job: &Job, generation: Generation, level: Level) -> Outcome {
        if self.actuated(job, generation, true, level).await?.is_some() {
            return Ok(Answer::Done);
        }
        self.directly(job).await?.wake(level).await.map_err(engine_failed)?;
        Ok(Answer::Done)
    }

    /// The engine itself, for an order that no stub can refuse: only a certain leader sends one. Waits for a late renewal, because the
    /// planner takes an order that was not sent for one that failed, and ends the engine.
    async fn directly(&self, job: &Job) -> Result<Adapter, Failed> {
        self.writer.renewed().await?;
        fault::point();
        adapter(job, None, Task::None)
    }

    /// Through the requester's stub, which refuses a leader that was replaced; `None`: it knows no such orders.
    async fn actuated(
        &self,
        job: &Job,
        generation: Generation,
        wake: bool,
        level: Level,
    ) -> Result<Option<Actuated>, Failed> {
        let stub = stub(job, job.requester()?, generation)?;
        stub.target(job.engine()?).await?;
        let core = &self.settings.core;
        if !wake {
            // One that was not told to is closed by this.
            stub.drained(rouse::units::Millis::ZERO).await?;
        }
        let sizes = &job.record()?.sizes;
        let within = if wake { core.wake_within(sizes) } else { core.sleep_within(sizes) };
        stub.actuate(wake, level, within.duration()).await
    }

    /// Its Pod is nobody's from here on, and may go.
    async fn unbind(&self, job: &Job, last_used: Tick) -> Outcome {
        if let Some(provider) = &job.provider {
            let record = Record { last_used, ..job.record()?.clone() };
            let patch = json!({"metadata": {
                "uid": provider.uid.as_str(),
                "$deleteFromPrimitiveList/finalizers": [keys::PROVIDER_FINALIZER],
                "labels": {keys::DUAL: null, keys::SLEEPING: job.slept.is_some().to_string()},
                "annotations": record::annotations(&job.command.node, &record, None, job.slept),
            }});
            self.patch(&provider.name, &patch).await?;
        }
        self.unname_dual(job).await
    }

    pub(super) async fn unname_dual(&self, job: &Job) -> Outcome {
        if let Some(own) = &job.requester {
            let metadata =
                json!({"uid": own.id.as_str(), "labels": {keys::DUAL: null, keys::INSTANCE: null}});
            match self.patch(&own.name, &json!({"metadata": metadata})).await {
                // Another Pod of its name.
                Err(Failed { cause: Cause::Conflict, .. }) => {}
                outcome => drop(outcome?),
            }
        }
        Ok(Answer::Done)
    }

    async fn end(&self, job: &Job, id: &EngineId, generation: Generation) -> Outcome {
        let Some(provider) = &job.provider else {
            // Ordered and not seen yet: by its name, which is made of what it is.
            return self.end_unseen(job, id, generation).await;
        };
        self.writer.delete(&self.pods(&provider.name), &provider.name.name, provider.uid.as_str()).await?;
        Ok(Answer::Done)
    }

    async fn end_unseen(&self, job: &Job, id: &EngineId, generation: Generation) -> Outcome {
        let namespace = job.namespace.as_deref().ok_or_else(|| Failed::lost("where its Pod was to be"))?;
        let name = provider::name(&place(job, id), id);
        let api: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let Some(pod) = self.writer.look(&api, &name).await? else {
            return Ok(Answer::Condition(Condition::Absent));
        };
        // One of that name which is another life of it, or somebody else's, is not what was ordered.
        if record::read(&pod).and_then(Result::ok).is_none_or(|found| found.record.generation != generation) {
            return Ok(Answer::Condition(Condition::Absent));
        }
        let uid = pod.metadata.uid.unwrap_or_default();
        self.writer.delete(&api, &name, &uid).await?;
        Ok(Answer::Done)
    }
}

/// Those that the new requester's patch has, in the place of those of the one before: an engine may serve under another name.
fn labels(own: &Requester, provider: &Provider) -> Value {
    let wanted = own.asked.as_ref().and_then(|asked| asked.as_ref().ok()).and_then(Asked::labels);
    let gone = provider.labels.keys().filter(|key| !keys::is_reserved(key));
    let mut labels: BTreeMap<&str, Option<&str>> = gone.map(|key| (key.as_str(), None)).collect();
    labels.extend(wanted.into_iter().flatten().map(|(key, value)| (key.as_str(), Some(value.as_str()))));
    labels.insert(keys::DUAL, Some(&own.name.name));
    labels.insert(keys::SLEEPING, Some("false"));
    json!(labels)
}

fn place<'a>(job: &'a Job, engine: &'a EngineId) -> Place<'a> {
    Place { node: &job.command.node, accelerators: &engine.accelerators, numbers: job.numbers.as_deref() }
}

/// What a leader before had under way to an engine by its requester's stub is refused there from here on. One that does not run
/// wakes nothing.
pub(super) async fn tell_stub(job: &Job) -> Result<(), Failed> {
    let Some(own) = job.requester.as_ref().filter(|own| own.admin.is_some()) else { return Ok(()) };
    match stub(job, own, Generation::default())?.hear().await {
        Err(failed) if !failed.deposed => {
            tracing::debug!(requester = %own.name, text = failed.text, "its stub was not told who leads");
            Ok(())
        }
        outcome => outcome.map(drop),
    }
}

/// How is it? An engine that does not answer yet is starting: its Pod says when it no longer runs.
pub(super) async fn query(job: &Job, id: &EngineId) -> Outcome {
    let adapter = adapter(job, None, Task::None)?;
    let condition = match adapter.asleep(MOMENT).await {
        // Where it was not written, what wakes it must do for either.
        Some(true) => match job.written(id) {
            Some(level) => Condition::Asleep { level, residue: None },
            None => Condition::AsleepSomehow { residue: None },
        },
        Some(false) => Condition::Awake,
        None => match adapter.health(MOMENT).await {
            Health::Good => Condition::Awake,
            _ => Condition::Starting,
        },
    };
    Ok(Answer::Condition(condition))
}

pub(super) fn adapter(job: &Job, served: Option<String>, task: Task) -> Result<Adapter, Failed> {
    let manner = Manner {
        kind: Kind::Vllm,
        sleep: SleepApi::Vllm,
        served_name: served.unwrap_or_default(),
        task,
        api_key: None,
    };
    Ok(Adapter::new(manner, job.engine()?).observed(job.calls()))
}

fn engine_failed(cause: EngineCause) -> Failed {
    let reached = !matches!(cause, EngineCause::Unreachable | EngineCause::Timeout);
    let text = format!("its engine: {cause}");
    Failed {
        cause: if reached { Cause::Refused } else { Cause::Unreachable },
        text,
        tell: false,
        deposed: false,
    }
}
