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
        job: &CommandContext,
        id: &PairingEngineId,
        generation: Generation,
        step: &EngineStep,
    ) -> Option<ExecutionOutcome> {
        Some(match step {
            EngineStep::Bind { record } => self.bind_in_launcher(job, record).await,
            EngineStep::Launch => launch(job, id, generation).await,
            EngineStep::CloseGate { .. } => return self.remove_routing(job, id).await.err().map(Err),
            EngineStep::Unbind { last_used, forget } => {
                Box::pin(self.unbind_in_launcher(job, id, *last_used, *forget)).await
            }
            EngineStep::Stop { .. } => stop_instance(job, id, generation).await,
            EngineStep::Query => match engine::announce_leader_to_stub(job).await {
                Ok(()) => query(job, id, generation).await,
                Err(failed) => Err(failed),
            },
            _ => return None,
        })
    }

    async fn bind_in_launcher(&self, job: &CommandContext, record: &EngineRecord) -> ExecutionOutcome {
        let (own, provider) = (job.requester()?, job.provider()?);
        let port = job.port.ok_or_else(|| ExecutionError::unknown("the engine's port"))?;
        let (slept, routing) = (job.recorded_sleep_level(&record.engine), RoutingMetadata::default());
        let (started, routed) = config_annotations(job, own, &record.engine, port);
        let inside = LauncherEngine { record: record.clone(), sleep_level: slept, port, routing };
        let patch = json!({"metadata": {
            "uid": provider.uid.as_str(),
            "finalizers": [keys::PROVIDER_FINALIZER],
            "labels": {keys::DUAL: own.name.name, keys::SLEEPING: "false"},
            "annotations": {
                launcher_engines::key(&record.engine): launcher_engines::text(&inside),
                keys::REQUESTER: format!("{} {}", own.id, own.name.name),
                keys::INSTANCE_ID: instance_id(&record.engine),
                keys::SERVER_PORT: port.to_string(),
                keys::VLLM_CONFIG: started,
                keys::ROUTING: routed,
            },
        }});
        self.patch(&provider.name, &patch).await?;
        self.label_dual(own, &provider.name.name, Some(&instance_id(&record.engine))).await
    }

    /// Removes the engine's routing labels, so that no client finds it while its gate drains.
    async fn remove_routing(&self, job: &CommandContext, id: &PairingEngineId) -> Result<(), ExecutionError> {
        let Some(provider) = &job.provider else { return Ok(()) };
        let led = |own: &LauncherEngine| own.record.engine == *id && !own.routing.is_empty();
        if !provider.engine(id).is_some_and(led) {
            return Ok(());
        }
        let Some((pod, mut all)) = self.read_launcher_pod(provider).await? else { return Ok(()) };
        let Some(at) = all.iter().position(led) else { return Ok(()) };
        let own = all.swap_remove(at);
        let (labels, mut annotations) = launcher_engines::metadata_without(&own.routing, &all);
        let own = LauncherEngine { routing: RoutingMetadata::default(), ..own };
        annotations.insert(launcher_engines::key(id), Some(launcher_engines::text(&own)));
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
        job: &CommandContext,
        id: &PairingEngineId,
        last_used: Tick,
        forget: bool,
    ) -> ExecutionOutcome {
        if let (Some(provider), Some(record)) = (&job.provider, &job.record)
            && let Some((pod, mut all)) = self.read_launcher_pod(provider).await?
        {
            let own = all.iter().position(|own| own.record.engine == *id).map(|at| all.swap_remove(at));
            let routing = own.map(|own| own.routing).unwrap_or_default();
            let (mut labels, mut annotations) = launcher_engines::metadata_without(&routing, &all);
            let kept = job.port.filter(|_| !forget).map(|port| {
                let record = EngineRecord { last_used, ..record.clone() };
                launcher_engines::text(&LauncherEngine {
                    record,
                    sleep_level: job.sleep_level,
                    port,
                    routing: RoutingMetadata::default(),
                })
            });
            annotations.insert(launcher_engines::key(id), kept);
            let nobodys = all.iter().all(|other| other.record.requester.is_none());
            if nobodys {
                labels.insert(keys::DUAL.to_owned(), None);
                let public =
                    [keys::REQUESTER, keys::INSTANCE_ID, keys::SERVER_PORT, keys::VLLM_CONFIG, keys::ROUTING];
                annotations.extend(public.map(|key| (key.to_owned(), None)));
                let asleep = (forget || job.sleep_level.is_some())
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
                let ours = json!({"$deleteFromPrimitiveList/finalizers": [keys::PROVIDER_FINALIZER]});
                merge::into(&mut metadata, &ours);
            }
            self.patch(&provider.name, &json!({"metadata": metadata})).await?;
        }
        self.unlabel_dual(job).await
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
pub(super) fn serving_patch(job: &CommandContext, own: &RequesterPod) -> Result<Value, ExecutionError> {
    let (provider, record) = (job.provider()?, job.record()?);
    let port = job.port.ok_or_else(|| ExecutionError::unknown("the engine's port"))?;
    let config = job.server_config.as_ref().map(|config| &config.spec.model_server_config);
    // An InferenceServerConfig that was edited since belongs to another engine.
    let config = config.filter(|config| launcher::matches_server(config, record.engine.fingerprint));
    let routing = config.map_or_else(RoutingMetadata::default, |config| RoutingMetadata {
        labels: config.labels.clone(),
        annotations: config.annotations.clone(),
    });
    let (mut labels, mut annotations) = (routing.labels.clone(), routing.annotations.clone());
    let record = EngineRecord { requester: Some(own.id.clone()), ..record.clone() };
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
    job: &CommandContext,
    own: &RequesterPod,
    id: &PairingEngineId,
    port: u16,
) -> (Option<String>, Option<String>) {
    let is_of = |config: &&InferenceServerConfig| {
        launcher::fingerprint(&config.spec.model_server_config, own.served_name()) == id.fingerprint
    };
    job.server_config.as_deref().filter(is_of).map_or((None, None), |config| {
        let InstanceRequest { options, gpu_uuids, annotations, .. } =
            InstanceRequest::new(config, own.served_name(), &id.accelerators, port);
        let started = json!({"options": options, "gpu_uuids": gpu_uuids, "annotations": annotations});
        let server = &config.spec.model_server_config;
        let routed = json!({"labels": server.labels, "annotations": server.annotations});
        (Some(started.to_string()), Some(routed.to_string()))
    })
}

fn instance_id(engine: &PairingEngineId) -> String {
    launcher::instance_id(engine.fingerprint, &engine.accelerators)
}

fn launcher_client(job: &CommandContext) -> Result<LauncherClient, ExecutionError> {
    let address = job
        .provider()?
        .launcher_address()
        .ok_or_else(|| ExecutionError::unknown("the launcher's address"))?;
    Ok(LauncherClient::new(address, job.launcher_token.clone(), job.command.epoch.0)
        .observed(job.call_metrics()))
}

async fn launch(job: &CommandContext, id: &PairingEngineId, generation: Generation) -> ExecutionOutcome {
    let port = job.port.ok_or_else(|| ExecutionError::unknown("the engine's port"))?;
    let config =
        job.server_config.as_ref().ok_or_else(|| ExecutionError::unknown("the InferenceServerConfig"))?;
    let served = job.requester.as_ref().and_then(RequesterPod::served_name);
    if launcher::fingerprint(&config.spec.model_server_config, served) != id.fingerprint {
        return Err(ExecutionError::refused("the InferenceServerConfig has changed since the decision"));
    }
    // The InferenceServerConfig changed since the decision. The launcher is replaced for the next start.
    let (wanted, here) = (&config.spec.launcher_config_name, job.provider()?.source.as_ref());
    if here.is_none_or(|here| here.config != launcher::pod::label_value(wanted)) {
        return Err(ExecutionError::refused(format!(
            "the launcher was not created from the LauncherConfig {wanted}"
        )));
    }
    let wanted = InstanceRequest::new(config, served, &id.accelerators, port).with_generation(generation);
    let launcher = launcher_client(job)?;
    failpoint::hit();
    match launcher.put(&instance_id(id), &wanted).await {
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
    job: &CommandContext,
    id: &PairingEngineId,
    generation: Generation,
) -> ExecutionOutcome {
    let launcher = launcher_client(job)?;
    failpoint::hit();
    match launcher.delete_generation(&instance_id(id), generation).await {
        Ok(_) => Ok(CommandReply::Done),
        // The launcher stops any instance of this id, unless it has seen a newer leader.
        Err(Conflict(_)) => Err(ExecutionError::superseded()),
        Err(error) => Err(launcher_error(error)),
    }
}

/// Queries an engine. Deletes an instance that has stopped or is of an earlier generation: neither has any use.
async fn query(job: &CommandContext, id: &PairingEngineId, generation: Generation) -> ExecutionOutcome {
    let (launcher, name) = (launcher_client(job)?, instance_id(id));
    let alive = |found: &LauncherInstance| found.running && found.generation() == Some(generation);
    // From here on the launcher refuses a former leader's late calls.
    launcher.announce_epoch().await.map_err(|error| match error {
        Conflict(_) => ExecutionError::superseded(),
        error => launcher_error(error),
    })?;
    match launcher.get(&name).await.map_err(launcher_error)? {
        Some(found) if alive(&found) => engine::query(job, id).await,
        Some(_) => {
            stop_instance(job, id, generation).await?;
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
