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
    },
    failpoint,
    platform::launcher::{self, Error::Conflict, InstanceRequest, LauncherClient, LauncherInstance},
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
            EngineStep::Launch => launch(context, id, generation).await,
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
            "uid": provider.uid.as_str(),
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
        self.patch(&provider.name, &patch).await?;
        self.label_dual(requester, &provider.name.name, Some(&instance_id(&record.engine))).await
    }

    /// Removes the engine's routing labels, so that no client finds it while its gate drains.
    async fn remove_routing(
        &self,
        context: &CommandContext,
        id: &PairingEngineId,
    ) -> Result<(), ExecutionError> {
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
        let metadata = json!({
            "uid": provider.uid.as_str(),
            "resourceVersion": pod.metadata.resource_version,
            "labels": labels,
            "annotations": annotations,
        });
        self.patch(&provider.name, &json!({"metadata": metadata})).await.map(drop)
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
            // A concurrent bind changes the Pod's version, so this patch fails and is retried.
            let mut metadata = json!({
                "uid": provider.uid.as_str(),
                "resourceVersion": pod.metadata.resource_version,
                "labels": labels,
                "annotations": annotations,
            });
            if nobodys {
                let finalizer_patch =
                    json!({"$deleteFromPrimitiveList/finalizers": [keys::PROVIDER_FINALIZER]});
                merge::into(&mut metadata, &finalizer_patch);
            }
            self.patch(&provider.name, &json!({"metadata": metadata})).await?;
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

/// Builds the patch of the launcher's Pod for an engine that serves its requester.
pub(super) fn serving_patch(
    context: &CommandContext,
    requester: &RequesterPod,
) -> Result<Value, ExecutionError> {
    let (provider, record) = (context.provider()?, context.record()?);
    let port = context.port.ok_or_else(|| ExecutionError::unknown("the engine's port"))?;
    let config = context.server_config.as_ref().map(|config| &config.spec.model_server_config);
    // An InferenceServerConfig that was edited since belongs to another engine.
    let config = config.filter(|config| launcher::matches_server(config, record.engine.fingerprint));
    let routing = config.map_or_else(RoutingMetadata::default, |config| RoutingMetadata {
        labels: config.labels.clone(),
        annotations: config.annotations.clone(),
    });
    let (mut labels, mut annotations) = (routing.labels.clone(), routing.annotations.clone());
    let record = EngineRecord { requester: Some(requester.id.clone()), ..record.clone() };
    let key = launcher_engines::key(&record.engine);
    annotations
        .insert(key, launcher_engines::text(&LauncherEngine { record, sleep_level: None, port, routing }));
    labels.insert(keys::SLEEPING.to_owned(), "false".to_owned());
    Ok(json!({"metadata": {"uid": provider.uid.as_str(), "labels": labels, "annotations": annotations}}))
}

/// Builds the annotations `vllm-config` and `isc-routing-metadata`.
///
/// They omit the environment: it may hold keys that a reader of Pods must not see. Both are `None` if the
/// InferenceServerConfig was edited since the engine was made.
fn config_annotations(
    context: &CommandContext,
    requester: &RequesterPod,
    id: &PairingEngineId,
    port: u16,
) -> (Option<String>, Option<String>) {
    let is_of = |config: &&InferenceServerConfig| {
        launcher::fingerprint(&config.spec.model_server_config, requester.served_name()) == id.fingerprint
    };
    context.server_config.as_deref().filter(is_of).map_or((None, None), |config| {
        let InstanceRequest { options, gpu_uuids, annotations, .. } =
            InstanceRequest::new(config, requester.served_name(), &id.accelerators, port);
        let started = json!({"options": options, "gpu_uuids": gpu_uuids, "annotations": annotations});
        let server = &config.spec.model_server_config;
        let routed = json!({"labels": server.labels, "annotations": server.annotations});
        (Some(started.to_string()), Some(routed.to_string()))
    })
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
    let request = InstanceRequest::new(config, served, &id.accelerators, port).with_generation(generation);
    let launcher = launcher_client(context)?;
    failpoint::hit();
    match launcher.put(&instance_id(id), &request).await {
        Ok(_) => Ok(CommandReply::Done),
        Err(Conflict(text)) => resolve_conflict(&launcher, id, generation, text).await,
        Err(error) => Err(launcher_error(error)),
    }
}

/// Resolves a conflict: the launcher has an engine of this id, or has seen a newer leader.
async fn resolve_conflict(
    launcher: &LauncherClient,
    id: &PairingEngineId,
    generation: Generation,
    text: String,
) -> ExecutionOutcome {
    match launcher.get(&instance_id(id)).await.map_err(launcher_error)?.map(|found| found.generation()) {
        // An earlier try of this command succeeded, and its answer was lost.
        Some(Some(found)) if found == generation => Ok(CommandReply::Done),
        Some(found) if found.is_none_or(|found| found < generation) => Err(launcher_error(Conflict(text))),
        _ => Err(ExecutionError::superseded()),
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
