//! Executes engine commands: creates Pods, writes their metadata, and calls stubs and engines.

use std::{collections::BTreeMap, time::Duration};

use k8s_openapi::api::{apps::v1::ReplicaSet, core::v1::Pod};
use kube::{Api, ResourceExt as _};
use rouse::{
    fault::FailureCause as EngineCause,
    model::SleepLevel,
    pairing::{
        command::EngineStep,
        event::{CommandFailure, CommandReply, EngineRecord, QueriedCondition},
        ids::{PairingEngineId, ProviderMode, RequesterId},
    },
    units::{Generation, Tick},
};
use rouse_net::{
    adapter::{Adapter, EngineHealth, EngineKind, EngineProfile, ProbeTask, SleepApi},
    stub_api::ActuationResult,
};
use serde_json::{Value, json};

use super::{
    CommandContext, ExecutionError, ExecutionOutcome, Executor, launcher_engine,
    requester::{provider_metadata, stub},
};
use crate::{
    dual_pods::{
        index::{ProviderPod, RequesterPod},
        keys,
        provider::{self, ProviderPlacement, RequesterOwner},
        record,
        requester_spec::RequesterSpec,
        template_revision::TemplateRevision,
    },
    failpoint,
    workload::merge,
    writer,
};

/// Timeout of one small query to an engine.
pub(super) const ENGINE_CALL_TIMEOUT: Duration = Duration::from_secs(5);

impl Executor {
    pub(super) async fn execute_engine_step(
        &self,
        job: &CommandContext,
        id: &PairingEngineId,
        generation: Generation,
        step: &EngineStep,
    ) -> ExecutionOutcome {
        if id.mode == ProviderMode::Launcher
            && let Some(outcome) = self.execute_in_launcher(job, id, generation, step).await
        {
            return outcome;
        }
        match step {
            EngineStep::Create { record } => Box::pin(self.create(job, record)).await,
            EngineStep::Bind { record } => self.bind(job, record).await,
            EngineStep::Launch => Err(ExecutionError::refused(
                "the engine has a Pod of its own and cannot be launched in a launcher",
            )),
            EngineStep::SendCanary => self.send_canary(job).await,
            EngineStep::OpenGate { .. } => self.open_gate(job, generation).await,
            EngineStep::CloseGate { deadline, .. } => self.close_gate(job, generation, *deadline).await,
            EngineStep::Sleep { level, via } => self.sleep(job, generation, *level, via.as_ref()).await,
            EngineStep::Wake { level, .. } => self.wake(job, generation, *level).await,
            EngineStep::Unbind { last_used, .. } => self.unbind(job, *last_used).await,
            EngineStep::Stop { .. } => self.stop(job, id, generation).await,
            EngineStep::Query => {
                announce_leader_to_stub(job).await?;
                query(job, id).await
            }
        }
    }

    async fn create(&self, job: &CommandContext, record: &EngineRecord) -> ExecutionOutcome {
        let own = job.requester()?;
        let Some(pod) = self.get_pod(&own.name).await? else {
            return Err(ExecutionError::refused("the requester is gone"));
        };
        if pod.metadata.uid.as_deref() != Some(own.id.as_str()) {
            return Err(ExecutionError::refused("the requester is gone"));
        }
        let place = place(job, &record.engine);
        let owner = self.owner(&pod).await?;
        let mut made = provider::build(&pod, &place, record, owner.as_ref(), &self.settings.make)
            .map_err(|error| ExecutionError::user_error(error.to_string()))?;
        job.grant(&mut made.pod);
        if let Some(edition) = &own.revision {
            made.pod
                .metadata
                .annotations
                .get_or_insert_default()
                .insert(keys::TEMPLATE_REVISION.to_owned(), edition.text());
        }
        let object =
            serde_json::to_value(&made.pod).map_err(|error| ExecutionError::refused(error.to_string()))?;
        self.writer.create(&self.pods(&own.name), &object).await.map_err(|error| {
            // The user requested what the API server refuses.
            let tell = matches!(error, writer::Error::Invalid(_));
            ExecutionError { user_facing: tell, ..ExecutionError::from(error) }
        })?;
        match self.label_dual(own, &made.name, None).await {
            // The name belongs to another Pod by now. The provider was created nevertheless.
            Err(ExecutionError { cause: CommandFailure::Conflict, .. }) => Ok(CommandReply::Done),
            outcome => outcome,
        }
    }

    /// Returns the ReplicaSet that made the requester. It would count a provider with the same labels.
    async fn owner(&self, requester: &Pod) -> Result<Option<RequesterOwner>, ExecutionError> {
        let owners = requester.owner_references();
        let made = owners.iter().find(|own| own.controller == Some(true) && own.kind == "ReplicaSet");
        let (Some(made), Some(namespace)) = (made, requester.namespace()) else { return Ok(None) };
        let sets: Api<ReplicaSet> = Api::namespaced(self.client.clone(), &namespace);
        let spec = self.writer.get(&sets, &made.name).await?.and_then(|set| set.spec);
        Ok(spec.map(|spec| RequesterOwner {
            name: format!("the ReplicaSet {}", made.name),
            selector: spec.selector,
        }))
    }

    /// Labels the requester with its provider, for users. No decision depends on the label.
    pub(super) async fn label_dual(
        &self,
        own: &RequesterPod,
        provider: &str,
        instance: Option<&str>,
    ) -> ExecutionOutcome {
        let mut metadata = json!({"uid": own.id.as_str(), "labels": {keys::DUAL: provider}});
        if let Some(instance) = instance {
            merge::into(&mut metadata, &json!({"labels": {keys::INSTANCE: instance}}));
        }
        self.patch(&own.name, &json!({"metadata": metadata})).await
    }

    /// Records the binding before a wake: the requester, a finalizer, and that the engine may be awake.
    async fn bind(&self, job: &CommandContext, record: &EngineRecord) -> ExecutionOutcome {
        let (own, provider) = (job.requester()?, job.provider()?);
        let mut annotations = record::annotations(
            &job.command.node,
            record,
            Some(&own.name.name),
            job.recorded_sleep_level(&record.engine),
        );
        if let Some(edition) = merge::under(&mut annotations, keys::TEMPLATE_REVISION) {
            *edition = json!(own.revision.as_ref().map(TemplateRevision::text));
        }
        let patch = json!({"metadata": {
            "uid": provider.uid.as_str(),
            "finalizers": [keys::PROVIDER_FINALIZER],
            "labels": labels(own, provider),
            "annotations": annotations,
        }});
        self.patch(&provider.name, &patch).await
    }

    /// Opens the gate to clients, then updates the readiness, then the Pods' labels.
    async fn open_gate(&self, job: &CommandContext, generation: Generation) -> ExecutionOutcome {
        let (own, engine, provider) = (job.requester()?, job.engine_address()?, job.provider()?);
        let stub = stub(job, own, generation)?;
        if let Err(failed) = stub.set_target(engine).await.map_err(ExecutionError::from) {
            if failed.cause == CommandFailure::Conflict {
                // The stub relays to an earlier engine and accepts no other. Its owner creates a new requester.
                self.writer.delete(&self.pods(&own.name), &own.name.name, own.id.as_str()).await?;
            }
            return Err(failed);
        }
        stub.open().await?;
        stub.set_ready(true).await?;
        if !own.has_provider_metadata(provider) {
            self.patch(&own.name, &json!({"metadata": provider_metadata(own, provider)})).await?;
        }
        if !provider.is_launcher() {
            return Ok(CommandReply::Done);
        }
        self.patch(&provider.name, &launcher_engine::serving_patch(job, own)?).await
    }

    async fn close_gate(
        &self,
        job: &CommandContext,
        generation: Generation,
        deadline: Tick,
    ) -> ExecutionOutcome {
        let stub = stub(job, job.requester()?, generation)?;
        stub.set_ready(false).await?;
        stub.close_and_drain(deadline.since(self.now())).await?;
        Ok(CommandReply::Done)
    }

    async fn sleep(
        &self,
        job: &CommandContext,
        generation: Generation,
        level: SleepLevel,
        via: Option<&RequesterId>,
    ) -> ExecutionOutcome {
        if via.is_some() {
            match self.actuate_through_stub(job, generation, false, level).await {
                Ok(Some(done)) => {
                    let residue = done.memory.and_then(|memory| job.residue(&memory));
                    return Ok(CommandReply::Asleep { residue });
                }
                // A stub that dies meanwhile must not cost the engine.
                Ok(None) | Err(ExecutionError { cause: CommandFailure::Unreachable, .. }) => {}
                Err(failed) => return Err(failed),
            }
        }
        // No gate has requests to wait for.
        self.direct_adapter(job).await?.sleep(level).await.map_err(engine_error)?;
        Ok(CommandReply::Asleep { residue: None })
    }

    async fn wake(
        &self,
        job: &CommandContext,
        generation: Generation,
        level: SleepLevel,
    ) -> ExecutionOutcome {
        if self.actuate_through_stub(job, generation, true, level).await?.is_some() {
            return Ok(CommandReply::Done);
        }
        self.direct_adapter(job).await?.wake(level).await.map_err(engine_error)?;
        Ok(CommandReply::Done)
    }

    /// Returns a client of the engine itself, for an order that no stub can refuse: only a confirmed leader sends it.
    ///
    /// Waits for a late renewal, because the pairing logic counts an unsent command as failed and stops the engine.
    async fn direct_adapter(&self, job: &CommandContext) -> Result<Adapter, ExecutionError> {
        self.writer.wait_leadership().await?;
        failpoint::hit();
        adapter(job, None, ProbeTask::None)
    }

    /// Actuates through the requester's stub, which refuses a replaced leader. `None`: the stub has no such call.
    async fn actuate_through_stub(
        &self,
        job: &CommandContext,
        generation: Generation,
        wake: bool,
        level: SleepLevel,
    ) -> Result<Option<ActuationResult>, ExecutionError> {
        let stub = stub(job, job.requester()?, generation)?;
        stub.set_target(job.engine_address()?).await?;
        let core = &self.settings.core;
        if !wake {
            // Closes a gate that no earlier command closed.
            stub.close_and_drain(rouse::units::Millis::ZERO).await?;
        }
        let sizes = &job.record()?.sizes;
        let within = if wake { core.wake_timeout_for(sizes) } else { core.sleep_timeout_for(sizes) };
        Ok(stub.actuate(wake, level, within.duration()).await?)
    }

    /// Unbinds the engine; its Pod may go from here on.
    async fn unbind(&self, job: &CommandContext, last_used: Tick) -> ExecutionOutcome {
        if let Some(provider) = &job.provider {
            let record = EngineRecord { last_used, ..job.record()?.clone() };
            let patch = json!({"metadata": {
                "uid": provider.uid.as_str(),
                "$deleteFromPrimitiveList/finalizers": [keys::PROVIDER_FINALIZER],
                "labels": {keys::DUAL: null, keys::SLEEPING: job.sleep_level.is_some().to_string()},
                "annotations": record::annotations(&job.command.node, &record, None, job.sleep_level),
            }});
            self.patch(&provider.name, &patch).await?;
        }
        self.unlabel_dual(job).await
    }

    pub(super) async fn unlabel_dual(&self, job: &CommandContext) -> ExecutionOutcome {
        if let Some(own) = &job.requester {
            let metadata =
                json!({"uid": own.id.as_str(), "labels": {keys::DUAL: null, keys::INSTANCE: null}});
            match self.patch(&own.name, &json!({"metadata": metadata})).await {
                // The name belongs to another Pod.
                Err(ExecutionError { cause: CommandFailure::Conflict, .. }) => {}
                outcome => drop(outcome?),
            }
        }
        Ok(CommandReply::Done)
    }

    async fn stop(
        &self,
        job: &CommandContext,
        id: &PairingEngineId,
        generation: Generation,
    ) -> ExecutionOutcome {
        let Some(provider) = &job.provider else {
            // The Pod was ordered and not seen yet. Its name is derived from the engine.
            return self.stop_unobserved(job, id, generation).await;
        };
        self.writer.delete(&self.pods(&provider.name), &provider.name.name, provider.uid.as_str()).await?;
        Ok(CommandReply::Done)
    }

    async fn stop_unobserved(
        &self,
        job: &CommandContext,
        id: &PairingEngineId,
        generation: Generation,
    ) -> ExecutionOutcome {
        let namespace = job
            .namespace
            .as_deref()
            .ok_or_else(|| ExecutionError::unknown("the namespace of the engine's Pod"))?;
        let name = provider::name(&place(job, id), id);
        let api: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let Some(pod) = self.writer.get(&api, &name).await? else {
            return Ok(CommandReply::Condition(QueriedCondition::Absent));
        };
        // A Pod of that name from another generation, or of another owner, is not the ordered one.
        if record::read(&pod).and_then(Result::ok).is_none_or(|found| found.record.generation != generation) {
            return Ok(CommandReply::Condition(QueriedCondition::Absent));
        }
        let uid = pod.metadata.uid.unwrap_or_default();
        self.writer.delete(&api, &name, &uid).await?;
        Ok(CommandReply::Done)
    }
}

/// Replaces the former requester's labels by the new one's: the engine may serve under another name.
fn labels(own: &RequesterPod, provider: &ProviderPod) -> Value {
    let wanted = own.spec.as_ref().and_then(|asked| asked.as_ref().ok()).and_then(RequesterSpec::labels);
    let gone = provider.labels.keys().filter(|key| !keys::is_reserved(key));
    let mut labels: BTreeMap<&str, Option<&str>> = gone.map(|key| (key.as_str(), None)).collect();
    labels.extend(wanted.into_iter().flatten().map(|(key, value)| (key.as_str(), Some(value.as_str()))));
    labels.insert(keys::DUAL, Some(&own.name.name));
    labels.insert(keys::SLEEPING, Some("false"));
    json!(labels)
}

fn place<'a>(job: &'a CommandContext, engine: &'a PairingEngineId) -> ProviderPlacement<'a> {
    ProviderPlacement {
        node: &job.command.node,
        accelerators: &engine.accelerators,
        numbers: job.numbers.as_deref(),
    }
}

/// Announces this leader to the requester's stub, which then refuses a former leader's late orders.
///
/// A stub that does not run wakes no engine, so its silence is no error.
pub(super) async fn announce_leader_to_stub(job: &CommandContext) -> Result<(), ExecutionError> {
    let Some(own) = job.requester.as_ref().filter(|own| own.stub_address.is_some()) else { return Ok(()) };
    let announced = stub(job, own, Generation::default())?.announce_leader().await;
    match announced.map_err(ExecutionError::from) {
        Err(failed) if !failed.superseded => {
            tracing::debug!(requester = %own.name, error = failed.text, "leader not announced to the stub");
            Ok(())
        }
        outcome => outcome.map(drop),
    }
}

/// Queries an engine's state. An engine that does not answer counts as starting: its Pod shows whether it runs.
pub(super) async fn query(job: &CommandContext, id: &PairingEngineId) -> ExecutionOutcome {
    let adapter = adapter(job, None, ProbeTask::None)?;
    let condition = match adapter.is_asleep(ENGINE_CALL_TIMEOUT).await {
        // Without a recorded level, the wake must work for both levels.
        Some(true) => match job.recorded_sleep_level(id) {
            Some(level) => QueriedCondition::Asleep { level, residue: None },
            None => QueriedCondition::AsleepAtUnknownLevel { residue: None },
        },
        Some(false) => QueriedCondition::Awake,
        None => match adapter.health(ENGINE_CALL_TIMEOUT).await {
            EngineHealth::Healthy => QueriedCondition::Awake,
            _ => QueriedCondition::Starting,
        },
    };
    Ok(CommandReply::Condition(condition))
}

pub(super) fn adapter(
    job: &CommandContext,
    served: Option<String>,
    task: ProbeTask,
) -> Result<Adapter, ExecutionError> {
    let manner = EngineProfile {
        kind: EngineKind::Vllm,
        sleep: SleepApi::Vllm,
        served_name: served.unwrap_or_default(),
        task,
        api_key: None,
    };
    Ok(Adapter::new(manner, job.engine_address()?).with_observer(job.call_metrics()))
}

fn engine_error(cause: EngineCause) -> ExecutionError {
    let reached = !matches!(cause, EngineCause::Unreachable | EngineCause::Timeout);
    let text = format!("the engine call failed: {cause}");
    ExecutionError {
        cause: if reached { CommandFailure::Refused } else { CommandFailure::Unreachable },
        text,
        user_facing: false,
        superseded: false,
    }
}
