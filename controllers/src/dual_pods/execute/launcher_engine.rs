//! Executes engine commands that differ for engines in launchers.
//!
//! There, an engine's record is one annotation among many on the Pod, and its process belongs to the launcher.

use k8s_openapi::api::core::v1::Pod;
use rouse::{
    pairing::{
        command::EngineStep,
        event::{CommandReply, EngineRecord, QueriedCondition},
        ids::PairingEngineId,
    },
    units::{Generation, Tick},
};
use serde_json::{Value, json};

use super::{CommandContext, ExecutionError, ExecutionOutcome, Executor, engine};
use crate::{
    crd::fma::InferenceServerConfig,
    dual_pods::{
        index::{ProviderPod, RequesterPod},
        keys,
        launcher_engines::{self, LauncherEngine, RoutingMetadata},
        patched_launcher::PatchedLauncher,
        provider,
    },
    failpoint,
    platform::launcher::{
        self, EpochSupport, Error::Conflict, InstanceRequest, LauncherClient, LauncherInstance,
    },
    workload::merge,
};

impl Executor {
    /// Returns `None` if the command is executed as for any engine.
    pub(super) async fn execute_in_launcher(
        &self,
        context: &CommandContext,
        id: &PairingEngineId,
        generation: Generation,
        step: &EngineStep,
    ) -> Option<ExecutionOutcome> {
        Some(match step {
            EngineStep::Bind { record } => self.bind_in_launcher(context, record).await,
            EngineStep::Launch => match Box::pin(self.ensure_unselected(context)).await {
                Ok(()) => launch(context, id, generation).await,
                Err(failed) => Err(failed),
            },
            EngineStep::CloseGate { .. } => return self.remove_routing(context, id).await.err().map(Err),
            EngineStep::Unbind { last_used, forget } => {
                Box::pin(self.unbind_in_launcher(context, id, *last_used, *forget)).await
            }
            EngineStep::Stop { .. } => stop_instance(context, id, generation).await,
            EngineStep::Query => match engine::announce_leader_to_stub(context).await {
                Ok(()) => query(context, id, generation).await,
                Err(failed) => Err(failed),
            },
            _ => return None,
        })
    }

    async fn bind_in_launcher(&self, context: &CommandContext, record: &EngineRecord) -> ExecutionOutcome {
        let (requester, provider) = (context.requester()?, context.provider()?);
        let port = context.port.ok_or_else(|| ExecutionError::unknown("the engine's port"))?;
        let (slept, routing) = (context.recorded_sleep_level(&record.engine), RoutingMetadata::default());
        let (started, routed) = config_annotations(context, requester, &record.engine, port);
        let inside = LauncherEngine { record: record.clone(), sleep_level: slept, port, routing };
        let patch = json!({"metadata": {
            "finalizers": [keys::PROVIDER_FINALIZER],
            "labels": {keys::DUAL: requester.name.name, keys::SLEEPING: "false"},
            "annotations": {
                launcher_engines::key(&record.engine): launcher_engines::text(&inside),
                keys::REQUESTER: format!("{} {}", requester.id, requester.name.name),
                keys::INSTANCE_ID: instance_id(&record.engine),
                keys::SERVER_PORT: port.to_string(),
                keys::VLLM_CONFIG: started,
                keys::ROUTING: routed,
            },
        }});
        self.patch_provider(context, provider, &patch).await?;
        self.label_dual(context, requester, &provider.name.name, Some(&instance_id(&record.engine))).await
    }

    /// Refuses a server patch whose labels the requester's own controller selects by.
    ///
    /// The launcher's Pod has these labels while the engine serves.
    pub(super) async fn ensure_unselected(&self, context: &CommandContext) -> Result<(), ExecutionError> {
        let Some(requester) = &context.requester else { return Ok(()) };
        let Some(patched) = requester.patched_launcher() else { return Ok(()) };
        let Some(pod) = self.get_pod(&requester.name).await? else {
            return Err(ExecutionError::refused("the requester is gone"));
        };
        match self.owner(&pod).await?.filter(|owner| owner.selects(&patched.server.labels)) {
            Some(owner) => {
                Err(ExecutionError::user_error(provider::Error::Selected { owner: owner.name }.to_string()))
            }
            None => Ok(()),
        }
    }

    /// Removes the engine's routing labels, so that no client finds it while its gate drains.
    ///
    /// While the gateway decides about the engine, its clients come through the requester, whatever the labels.
    async fn remove_routing(
        &self,
        context: &CommandContext,
        id: &PairingEngineId,
    ) -> Result<(), ExecutionError> {
        if context.stays_for_gateway() {
            return Ok(());
        }
        let Some(provider) = &context.provider else { return Ok(()) };
        let led = |engine: &LauncherEngine| engine.record.engine == *id && !engine.routing.is_empty();
        if !provider.engine(id).is_some_and(led) {
            return Ok(());
        }
        let Some((pod, mut all)) = self.read_launcher_pod(provider).await? else { return Ok(()) };
        let Some(at) = all.iter().position(led) else { return Ok(()) };
        let engine = all.swap_remove(at);
        let (labels, mut annotations) = launcher_engines::metadata_without(&engine.routing, &all);
        let engine = LauncherEngine { routing: RoutingMetadata::default(), ..engine };
        annotations.insert(launcher_engines::key(id), Some(launcher_engines::text(&engine)));
        let patch = json!({"metadata": {"labels": labels, "annotations": annotations}});
        self.patch(&provider.name, &context.exact_fence(&pod), &patch).await.map(drop)
    }

    /// Unbinds an engine in a launcher. Without bound engines, the Pod is unbound, too.
    async fn unbind_in_launcher(
        &self,
        context: &CommandContext,
        id: &PairingEngineId,
        last_used: Tick,
        forget: bool,
    ) -> ExecutionOutcome {
        if let (Some(provider), Some(record)) = (&context.provider, &context.record)
            && let Some((pod, mut all)) = self.read_launcher_pod(provider).await?
        {
            let engine =
                all.iter().position(|engine| engine.record.engine == *id).map(|at| all.swap_remove(at));
            let routing = engine.map(|engine| engine.routing).unwrap_or_default();
            let (mut labels, mut annotations) = launcher_engines::metadata_without(&routing, &all);
            let port_record = context.port.filter(|_| !forget).map(|port| {
                let record = EngineRecord { last_used, ..record.clone() };
                launcher_engines::text(&LauncherEngine {
                    record,
                    sleep_level: context.sleep_level,
                    port,
                    routing: RoutingMetadata::default(),
                })
            });
            annotations.insert(launcher_engines::key(id), port_record);
            let nobodys = all.iter().all(|other| other.record.requester.is_none());
            if nobodys {
                labels.insert(keys::DUAL.to_owned(), None);
                let public =
                    [keys::REQUESTER, keys::INSTANCE_ID, keys::SERVER_PORT, keys::VLLM_CONFIG, keys::ROUTING];
                annotations.extend(public.map(|key| (key.to_owned(), None)));
                let asleep = (forget || context.sleep_level.is_some())
                    && all.iter().all(|other| other.sleep_level.is_some());
                labels.insert(keys::SLEEPING.to_owned(), Some(asleep.to_string()));
            }
            let mut metadata = json!({"labels": labels, "annotations": annotations});
            if nobodys {
                let finalizer_patch =
                    json!({"$deleteFromPrimitiveList/finalizers": [keys::PROVIDER_FINALIZER]});
                merge::into(&mut metadata, &finalizer_patch);
            }
            // A concurrent bind changes the Pod's content, so this patch fails and the command is retried.
            let fence = context.exact_fence(&pod);
            self.patch(&provider.name, &fence, &json!({"metadata": metadata})).await?;
        }
        self.unlabel_dual(context).await
    }

    /// Reads the Pod's current state and the records of its engines; `None` if the Pod is gone.
    async fn read_launcher_pod(
        &self,
        provider: &ProviderPod,
    ) -> Result<Option<(Pod, Vec<LauncherEngine>)>, ExecutionError> {
        let pod = self.get_pod(&provider.name).await?;
        let pod = pod.filter(|pod| pod.metadata.uid.as_deref() == Some(provider.uid.as_str()));
        Ok(pod.map(|pod| {
            let all = launcher_engines::read(&pod);
            (pod, all)
        }))
    }
}

/// Builds the patch of the launcher's Pod for an engine that serves its requester; `None` if the Pod shows that
/// already.
pub(super) fn serving_patch(
    context: &CommandContext,
    requester: &RequesterPod,
    provider: &ProviderPod,
) -> Result<Option<Value>, ExecutionError> {
    let record = context.record()?;
    let port = context.port.ok_or_else(|| ExecutionError::unknown("the engine's port"))?;
    let config = context.server_config.as_ref().map(|config| &config.spec.model_server_config);
    // An InferenceServerConfig that was edited since belongs to another engine.
    let config = config.filter(|config| launcher::matches_server(config, record.engine.fingerprint));
    let server = patched(requester, &record.engine).map(|patched| &patched.server).or(config);
    let routing = server.map_or_else(RoutingMetadata::default, |server| RoutingMetadata {
        labels: server.labels.clone(),
        annotations: server.annotations.clone(),
    });
    let (mut labels, mut annotations) = (routing.labels.clone(), routing.annotations.clone());
    let key = launcher_engines::key(&record.engine);
    let record = EngineRecord { requester: Some(requester.id.clone()), ..record.clone() };
    let serving = LauncherEngine { record, sleep_level: None, port, routing };
    if provider.engine(&serving.record.engine).is_some_and(|known| is_serving(known, &serving)) {
        return Ok(None);
    }
    annotations.insert(key, launcher_engines::text(&serving));
    labels.insert(keys::SLEEPING.to_owned(), "false".to_owned());
    Ok(Some(json!({"metadata": {"labels": labels, "annotations": annotations}})))
}

/// Whether the Pod's record says that the engine serves like this. An engine that the gateway wakes keeps its record.
fn is_serving(known: &LauncherEngine, serving: &LauncherEngine) -> bool {
    let record = EngineRecord { last_used: serving.record.last_used, ..known.record.clone() };
    LauncherEngine { record, ..known.clone() } == *serving
}

/// Builds the annotations `vllm-config` and `isc-routing-metadata`.
///
/// They omit the environment: it may hold keys that a reader of Pods must not see. Both are `None` if the
/// InferenceServerConfig or the server patch was edited since the engine was made.
fn config_annotations(
    context: &CommandContext,
    requester: &RequesterPod,
    id: &PairingEngineId,
    port: u16,
) -> (Option<String>, Option<String>) {
    let is_of = |config: &&InferenceServerConfig| {
        launcher::fingerprint(&config.spec.model_server_config, requester.served_name()) == id.fingerprint
    };
    let order = match patched(requester, id) {
        Some(patched) => {
            Some((InstanceRequest::patched(&patched.server, &id.accelerators, port), &patched.server))
        }
        None => context.server_config.as_deref().filter(is_of).map(|config| {
            let order = InstanceRequest::new(config, requester.served_name(), &id.accelerators, port);
            (order, &config.spec.model_server_config)
        }),
    };
    order.map_or((None, None), |(order, server)| {
        let InstanceRequest { options, gpu_uuids, annotations, .. } = order;
        let started = json!({"options": options, "gpu_uuids": gpu_uuids, "annotations": annotations});
        let routed = json!({"labels": server.labels, "annotations": server.annotations});
        (Some(started.to_string()), Some(routed.to_string()))
    })
}

/// Returns the requester's server patch if this engine is made from it.
fn patched<'a>(requester: &'a RequesterPod, id: &PairingEngineId) -> Option<&'a PatchedLauncher> {
    requester.patched_launcher().filter(|patched| patched.fingerprint == id.fingerprint)
}

fn instance_id(engine: &PairingEngineId) -> String {
    launcher::instance_id(engine.fingerprint, &engine.accelerators)
}

fn launcher_client(context: &CommandContext) -> Result<LauncherClient, ExecutionError> {
    let address = context
        .provider()?
        .launcher_address()
        .ok_or_else(|| ExecutionError::unknown("the launcher's address"))?;
    Ok(LauncherClient::new(address, context.launcher_token.clone(), context.command.epoch.0)
        .observed(context.call_metrics()))
}

async fn launch(context: &CommandContext, id: &PairingEngineId, generation: Generation) -> ExecutionOutcome {
    let port = context.port.ok_or_else(|| ExecutionError::unknown("the engine's port"))?;
    let order = match context.requester.as_ref().and_then(RequesterPod::patched_launcher) {
        Some(patched) => patched_order(context, patched, id, port)?,
        None => configured_order(context, id, port)?,
    };
    let request = order.with_generation(generation);
    let launcher = launcher_client(context)?;
    failpoint::hit();
    match launcher.put(&instance_id(id), &request).await {
        Ok(_) => Ok(CommandReply::Done),
        Err(Conflict(text)) => resolve_conflict(&launcher, id, generation, text).await,
        Err(error) => Err(launcher_error(error)),
    }
}

/// Builds the start order for the engine of a server patch.
fn patched_order(
    context: &CommandContext,
    patched: &PatchedLauncher,
    id: &PairingEngineId,
    port: u16,
) -> Result<InstanceRequest, ExecutionError> {
    // If the patch makes another launcher by now, this one is replaced for the next start.
    if patched.fingerprint != id.fingerprint || context.provider()?.source.as_ref() != Some(&patched.revision)
    {
        return Err(ExecutionError::refused("the server patch has changed since the decision"));
    }
    Ok(InstanceRequest::patched(&patched.server, &id.accelerators, port))
}

/// Builds the start order for the engine of an InferenceServerConfig.
fn configured_order(
    context: &CommandContext,
    id: &PairingEngineId,
    port: u16,
) -> Result<InstanceRequest, ExecutionError> {
    let config =
        context.server_config.as_ref().ok_or_else(|| ExecutionError::unknown("the InferenceServerConfig"))?;
    let served = context.requester.as_ref().and_then(RequesterPod::served_name);
    if launcher::fingerprint(&config.spec.model_server_config, served) != id.fingerprint {
        return Err(ExecutionError::refused("the InferenceServerConfig has changed since the decision"));
    }
    // The InferenceServerConfig changed since the decision. The launcher is replaced for the next start.
    let (config_name, source) = (&config.spec.launcher_config_name, context.provider()?.source.as_ref());
    if source.is_none_or(|source| source.config != launcher::pod::label_value(config_name)) {
        return Err(ExecutionError::refused(format!(
            "the launcher was not created from the LauncherConfig {config_name}"
        )));
    }
    Ok(InstanceRequest::new(config, served, &id.accelerators, port))
}

/// Resolves a conflict: the launcher has an engine of this id, or has seen a newer leader.
async fn resolve_conflict(
    launcher: &LauncherClient,
    id: &PairingEngineId,
    generation: Generation,
    text: String,
) -> ExecutionOutcome {
    let Some(found) = launcher.get(&instance_id(id)).await.map_err(launcher_error)? else {
        return Err(conflict_without_instance(launcher, text).await);
    };
    match found.generation() {
        // An earlier try of this command succeeded, and its answer was lost.
        Some(found) if found == generation => Ok(CommandReply::Done),
        found if found.is_none_or(|found| found < generation) => Err(launcher_error(Conflict(text))),
        _ => Err(ExecutionError::superseded()),
    }
}

/// Explains a conflict about an instance that does not exist.
///
/// A newer leader has stopped this generation. The public launcher knows no leaders, and calls an unknown accelerator a
/// conflict, too.
async fn conflict_without_instance(launcher: &LauncherClient, text: String) -> ExecutionError {
    match launcher.announce_epoch().await {
        Ok(EpochSupport::Unknown) => ExecutionError::user_error(format!(
            "{}; if the launcher lacks an accelerator, give its Pod access to all of the node: set gpuAccess in the \
             AcceleratorPool, or runtimeClassName in the LauncherConfig",
            Conflict(text)
        )),
        Ok(EpochSupport::Fenced) | Err(Conflict(_)) => ExecutionError::superseded(),
        Err(error) => launcher_error(error),
    }
}

/// Stops an instance; returns once the launcher confirms that it is gone.
async fn stop_instance(
    context: &CommandContext,
    id: &PairingEngineId,
    generation: Generation,
) -> ExecutionOutcome {
    let launcher = launcher_client(context)?;
    failpoint::hit();
    match launcher.delete_generation(&instance_id(id), generation).await {
        Ok(_) => Ok(CommandReply::Done),
        // The launcher stops any instance of this id, unless it has seen a newer leader.
        Err(Conflict(_)) => Err(ExecutionError::superseded()),
        Err(error) => Err(launcher_error(error)),
    }
}

/// Queries an engine. Deletes an instance that has stopped or is of an earlier generation: neither has any use.
async fn query(context: &CommandContext, id: &PairingEngineId, generation: Generation) -> ExecutionOutcome {
    let (launcher, name) = (launcher_client(context)?, instance_id(id));
    let alive = |found: &LauncherInstance| found.running && found.generation() == Some(generation);
    // From here on the launcher refuses a former leader's late calls.
    launcher.announce_epoch().await.map_err(|error| match error {
        Conflict(_) => ExecutionError::superseded(),
        error => launcher_error(error),
    })?;
    match launcher.get(&name).await.map_err(launcher_error)? {
        Some(found) if alive(&found) => engine::query(context, id).await,
        Some(_) => {
            stop_instance(context, id, generation).await?;
            Ok(CommandReply::Condition(QueriedCondition::Absent))
        }
        None => Ok(CommandReply::Condition(QueriedCondition::Absent)),
    }
}

fn launcher_error(error: launcher::Error) -> ExecutionError {
    ExecutionError {
        cause: error.cause(),
        text: error.to_string(),
        user_facing: matches!(error, launcher::Error::Refused { .. }),
        superseded: false,
    }
}

#[cfg(test)]
mod tests;
