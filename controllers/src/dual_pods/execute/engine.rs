//! Executes engine commands: creates Pods, writes their metadata, and queries engines.

use std::{collections::BTreeMap, time::Duration};

use k8s_openapi::api::{apps::v1::ReplicaSet, core::v1::Pod};
use kube::{Api, ResourceExt as _};
use rouse::{
    pairing::{
        command::EngineStep,
        event::{CommandFailure, CommandReply, EngineRecord, QueriedCondition},
        ids::{PairingEngineId, ProviderMode},
    },
    units::{Generation, Tick},
};
use rouse_net::adapter::{Adapter, EngineHealth, EngineKind, EngineProfile, ProbeTask, SleepApi};
use serde_json::{Value, json};

use super::{CommandContext, ExecutionError, ExecutionOutcome, Executor, requester::stub};
use crate::{
    crd::ledger::ObjectName,
    dual_pods::{
        index::{ProviderPod, RequesterPod},
        keys,
        provider::{self, ProviderPlacement, RequesterOwner},
        record,
        requester_spec::RequesterSpec,
        template_revision::TemplateRevision,
    },
    workload::merge,
    writer,
};

/// Timeout of one small query to an engine.
pub(super) const ENGINE_CALL_TIMEOUT: Duration = Duration::from_secs(5);

impl Executor {
    pub(super) async fn execute_engine_step(
        &self,
        context: &CommandContext,
        id: &PairingEngineId,
        generation: Generation,
        step: &EngineStep,
    ) -> ExecutionOutcome {
        if id.mode == ProviderMode::Launcher
            && let Some(outcome) = self.execute_in_launcher(context, id, generation, step).await
        {
            return outcome;
        }
        match step {
            EngineStep::Create { record } => Box::pin(self.create(context, record)).await,
            EngineStep::Bind { record } => self.bind(context, record).await,
            EngineStep::Launch => Err(ExecutionError::refused(
                "the engine has a Pod of its own and cannot be launched in a launcher",
            )),
            EngineStep::SendCanary => self.send_canary(context).await,
            EngineStep::OpenGate { .. } => self.open_gate(context, generation).await,
            EngineStep::CloseGate { deadline, .. } => self.close_gate(context, generation, *deadline).await,
            EngineStep::Sleep { level, via } => self.sleep(context, generation, *level, via.as_ref()).await,
            EngineStep::Wake { level, .. } => self.wake(context, generation, *level).await,
            EngineStep::Unbind { last_used, .. } => self.unbind(context, *last_used).await,
            EngineStep::Stop { .. } => self.stop(context, id, generation).await,
            EngineStep::Query => {
                announce_leader_to_stub(context).await?;
                query(context, id).await
            }
        }
    }

    async fn create(&self, context: &CommandContext, record: &EngineRecord) -> ExecutionOutcome {
        let requester = context.requester()?;
        let Some(pod) = self.get_pod(&requester.name).await? else {
            return Err(ExecutionError::refused("the requester is gone"));
        };
        if pod.metadata.uid.as_deref() != Some(requester.id.as_str()) {
            return Err(ExecutionError::refused("the requester is gone"));
        }
        let placement = place(context, &record.engine);
        let owner = self.owner(&pod).await?;
        let mut made = provider::build(&pod, &placement, record, owner.as_ref(), context.resource())
            .map_err(|error| ExecutionError::user_error(error.to_string()))?;
        context.grant(&mut made.pod);
        context.stamp(&mut made.pod);
        if let Some(revision) = &requester.revision {
            made.pod
                .metadata
                .annotations
                .get_or_insert_default()
                .insert(keys::TEMPLATE_REVISION.to_owned(), revision.text());
        }
        let object =
            serde_json::to_value(&made.pod).map_err(|error| ExecutionError::refused(error.to_string()))?;
        self.writer.create(&self.pods(&requester.name), &object).await.map_err(|error| {
            // The user requested what the API server refuses.
            let user_facing = matches!(error, writer::Error::Invalid(_));
            ExecutionError { user_facing, ..ExecutionError::from(error) }
        })?;
        match self.label_dual(context, requester, &made.name, None).await {
            // Another writer changed the requester. The provider was created nevertheless.
            Err(ExecutionError { cause: CommandFailure::Conflict, .. }) => Ok(CommandReply::Done),
            outcome => outcome,
        }
    }

    /// Returns the ReplicaSet that made the requester. It would count a provider with the same labels.
    pub(super) async fn owner(&self, requester: &Pod) -> Result<Option<RequesterOwner>, ExecutionError> {
        let owners = requester.owner_references();
        let made = owners.iter().find(|owner| owner.controller == Some(true) && owner.kind == "ReplicaSet");
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
        context: &CommandContext,
        requester: &RequesterPod,
        provider: &str,
        instance: Option<&str>,
    ) -> ExecutionOutcome {
        let mut metadata = json!({"labels": {keys::DUAL: provider}});
        if let Some(instance) = instance {
            merge::into(&mut metadata, &json!({"labels": {keys::INSTANCE: instance}}));
        }
        self.patch_requester(context, requester, &json!({"metadata": metadata})).await
    }

    /// Records the binding before a wake: the requester, a finalizer, and that the engine may be awake.
    async fn bind(&self, context: &CommandContext, record: &EngineRecord) -> ExecutionOutcome {
        let (requester, provider) = (context.requester()?, context.provider()?);
        let mut annotations = record::annotations(
            &context.command.node,
            record,
            Some(&requester.name.name),
            context.recorded_sleep_level(&record.engine),
        );
        if let Some(revision) = merge::under(&mut annotations, keys::TEMPLATE_REVISION) {
            *revision = json!(requester.revision.as_ref().map(TemplateRevision::text));
        }
        let patch = json!({"metadata": {
            "finalizers": [keys::PROVIDER_FINALIZER],
            "labels": labels(requester, provider),
            "annotations": annotations,
        }});
        self.patch_provider(context, provider, &patch).await
    }

    /// Unbinds the engine; its Pod may go from here on.
    async fn unbind(&self, context: &CommandContext, last_used: Tick) -> ExecutionOutcome {
        if let Some(provider) = &context.provider {
            let record = EngineRecord { last_used, ..context.record()?.clone() };
            let patch = json!({"metadata": {
                "$deleteFromPrimitiveList/finalizers": [keys::PROVIDER_FINALIZER],
                "labels": {keys::DUAL: null, keys::SLEEPING: context.sleep_level.is_some().to_string()},
                "annotations": record::annotations(&context.command.node, &record, None, context.sleep_level),
            }});
            self.patch_provider(context, provider, &patch).await?;
        }
        self.unlabel_dual(context).await
    }

    pub(super) async fn unlabel_dual(&self, context: &CommandContext) -> ExecutionOutcome {
        if let Some(requester) = &context.requester {
            let patch = json!({"metadata": {"labels": {keys::DUAL: null, keys::INSTANCE: null}}});
            self.patch_requester(context, requester, &patch).await?;
        }
        Ok(CommandReply::Done)
    }

    async fn stop(
        &self,
        context: &CommandContext,
        id: &PairingEngineId,
        generation: Generation,
    ) -> ExecutionOutcome {
        let Some(provider) = &context.provider else {
            // The Pod was ordered and not seen yet. Its name is derived from the engine.
            return self.stop_unobserved(context, id, generation).await;
        };
        self.delete(&provider.name, &context.fence(&provider.seen)).await
    }

    async fn stop_unobserved(
        &self,
        context: &CommandContext,
        id: &PairingEngineId,
        generation: Generation,
    ) -> ExecutionOutcome {
        let namespace = context
            .namespace
            .as_deref()
            .ok_or_else(|| ExecutionError::unknown("the namespace of the engine's Pod"))?;
        let name = ObjectName::new(namespace, provider::name(&place(context, id), id));
        let Some(pod) = self.get_pod(&name).await? else {
            return Ok(CommandReply::Condition(QueriedCondition::Absent));
        };
        // A Pod of that name from another generation, or of another owner, is not the ordered one.
        if record::read(&pod).and_then(Result::ok).is_none_or(|found| found.record.generation != generation) {
            return Ok(CommandReply::Condition(QueriedCondition::Absent));
        }
        self.delete(&name, &context.exact_fence(&pod)).await
    }
}

/// Replaces the former requester's labels by the new one's: the engine may serve under another name.
fn labels(requester: &RequesterPod, provider: &ProviderPod) -> Value {
    let requested =
        requester.spec.as_ref().and_then(|spec| spec.as_ref().ok()).and_then(RequesterSpec::labels);
    let other_labels = provider.labels.keys().filter(|key| !keys::is_reserved(key));
    let mut labels: BTreeMap<&str, Option<&str>> = other_labels.map(|key| (key.as_str(), None)).collect();
    labels.extend(requested.into_iter().flatten().map(|(key, value)| (key.as_str(), Some(value.as_str()))));
    labels.insert(keys::DUAL, Some(&requester.name.name));
    labels.insert(keys::SLEEPING, Some("false"));
    json!(labels)
}

fn place<'a>(context: &'a CommandContext, engine: &'a PairingEngineId) -> ProviderPlacement<'a> {
    ProviderPlacement {
        node: &context.command.node,
        accelerators: &engine.accelerators,
        numbers: context.numbers.as_deref(),
    }
}

/// Announces this leader to the requester's stub, which then refuses a former leader's late orders.
///
/// A stub that does not run wakes no engine, so its silence is no error.
pub(super) async fn announce_leader_to_stub(context: &CommandContext) -> Result<(), ExecutionError> {
    let Some(requester) = context.requester.as_ref().filter(|requester| requester.stub_address.is_some())
    else {
        return Ok(());
    };
    let announced = stub(context, requester, Generation::default())?.announce_leader().await;
    match announced.map_err(ExecutionError::from) {
        Err(failed) if !failed.superseded => {
            tracing::debug!(requester = %requester.name, error = failed.text, "leader not announced to the stub");
            Ok(())
        }
        outcome => outcome.map(drop),
    }
}

/// Queries an engine's state. An engine that does not answer counts as starting: its Pod shows whether it runs.
pub(super) async fn query(context: &CommandContext, id: &PairingEngineId) -> ExecutionOutcome {
    let adapter = adapter(context, None, ProbeTask::None)?;
    let condition = match adapter.is_asleep(ENGINE_CALL_TIMEOUT).await {
        // Without a recorded level, the wake must work for both levels.
        Some(true) => match context.recorded_sleep_level(id) {
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
    context: &CommandContext,
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
    Ok(Adapter::new(manner, context.engine_address()?).with_observer(context.call_metrics()))
}
