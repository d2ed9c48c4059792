//! Orders about engines in launchers, where they are not as those about engines that have Pods of their own: what is kept of an
//! engine is one annotation of many, and its process is the launcher's.

use k8s_openapi::api::core::v1::Pod;
use rouse::{
    pairing::{
        command::Step,
        event::{Answer, Condition, Record},
        ids::EngineId,
    },
    units::{Generation, Tick},
};
use serde_json::{Value, json};

use super::{Failed, Hands, Job, Outcome, engine};
use crate::{
    controllers::{
        crd::fma::InferenceServerConfig,
        dual::{
            engines::{self, Inside, Routing},
            keys,
        },
        fault,
        workload::merge,
    },
    pairing::directory::{Provider, Requester},
    platform::kubernetes::launcher::{self, Error::Conflict, Instance, Launcher, Wanted},
};

impl Hands {
    /// `None`: it is done as for any engine.
    pub(super) async fn inside(
        &self,
        job: &Job,
        id: &EngineId,
        generation: Generation,
        step: &Step,
    ) -> Option<Outcome> {
        Some(match step {
            Step::Bind { record } => self.bind_inside(job, record).await,
            Step::Launch => launch(job, id, generation).await,
            Step::Gate { .. } => return self.lead_away(job, id).await.err().map(Err),
            Step::Unbind { last_used, forget } => {
                Box::pin(self.unbind_inside(job, id, *last_used, *forget)).await
            }
            Step::End { .. } => end(job, id, generation).await,
            Step::Query => match engine::tell_stub(job).await {
                Ok(()) => query(job, id, generation).await,
                Err(failed) => Err(failed),
            },
            _ => return None,
        })
    }

    async fn bind_inside(&self, job: &Job, record: &Record) -> Outcome {
        let (own, provider) = (job.requester()?, job.provider()?);
        let port = job.port.ok_or_else(|| Failed::lost("its port"))?;
        let (slept, routing) = (job.written(&record.engine), Routing::default());
        let (started, routed) = told(job, own, &record.engine, port);
        let inside = Inside { record: record.clone(), slept, port, routing };
        let patch = json!({"metadata": {
            "uid": provider.uid.as_str(),
            "finalizers": [keys::PROVIDER_FINALIZER],
            "labels": {keys::DUAL: own.name.name, keys::SLEEPING: "false"},
            "annotations": {
                engines::key(&record.engine): engines::text(&inside),
                keys::REQUESTER: format!("{} {}", own.id, own.name.name),
                keys::INSTANCE_ID: id_of(&record.engine),
                keys::SERVER_PORT: port.to_string(),
                keys::VLLM_CONFIG: started,
                keys::ROUTING: routed,
            },
        }});
        self.patch(&provider.name, &patch).await?;
        self.name_dual(own, &provider.name.name, Some(&id_of(&record.engine))).await
    }

    /// Whoever reads labels before its requests are waited for comes no more.
    async fn lead_away(&self, job: &Job, id: &EngineId) -> Result<(), Failed> {
        let Some(provider) = &job.provider else { return Ok(()) };
        let led = |own: &Inside| own.record.engine == *id && !own.routing.is_empty();
        if !provider.inside(id).is_some_and(led) {
            return Ok(());
        }
        let Some((pod, mut all)) = self.inside_of(provider).await? else { return Ok(()) };
        let Some(at) = all.iter().position(led) else { return Ok(()) };
        let own = all.swap_remove(at);
        let (labels, mut annotations) = engines::without(&own.routing, &all);
        let own = Inside { routing: Routing::default(), ..own };
        annotations.insert(engines::key(id), Some(engines::text(&own)));
        let metadata = json!({
            "uid": provider.uid.as_str(),
            "resourceVersion": pod.metadata.resource_version,
            "labels": labels,
            "annotations": annotations,
        });
        self.patch(&provider.name, &json!({"metadata": metadata})).await.map(drop)
    }

    /// With the last that is bound the Pod is nobody's.
    async fn unbind_inside(&self, job: &Job, id: &EngineId, last_used: Tick, forget: bool) -> Outcome {
        if let (Some(provider), Some(record)) = (&job.provider, &job.record)
            && let Some((pod, mut all)) = self.inside_of(provider).await?
        {
            let own = all.iter().position(|own| own.record.engine == *id).map(|at| all.swap_remove(at));
            let routing = own.map(|own| own.routing).unwrap_or_default();
            let (mut labels, mut annotations) = engines::without(&routing, &all);
            let kept = job.port.filter(|_| !forget).map(|port| {
                let record = Record { last_used, ..record.clone() };
                engines::text(&Inside { record, slept: job.slept, port, routing: Routing::default() })
            });
            annotations.insert(engines::key(id), kept);
            let nobodys = all.iter().all(|other| other.record.requester.is_none());
            if nobodys {
                labels.insert(keys::DUAL.to_owned(), None);
                let public =
                    [keys::REQUESTER, keys::INSTANCE_ID, keys::SERVER_PORT, keys::VLLM_CONFIG, keys::ROUTING];
                annotations.extend(public.map(|key| (key.to_owned(), None)));
                let asleep = (forget || job.slept.is_some()) && all.iter().all(|other| other.slept.is_some());
                labels.insert(keys::SLEEPING.to_owned(), Some(asleep.to_string()));
            }
            // What is bound meanwhile changes the Pod, and this is tried again.
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
        self.unname_dual(job).await
    }

    /// The Pod as it is now, with what it says of its engines; `None`: it is gone.
    async fn inside_of(&self, provider: &Provider) -> Result<Option<(Pod, Vec<Inside>)>, Failed> {
        let pod = self.look(&provider.name).await?;
        let pod = pod.filter(|pod| pod.metadata.uid.as_deref() == Some(provider.uid.as_str()));
        Ok(pod.map(|pod| {
            let all = engines::read(&pod);
            (pod, all)
        }))
    }
}

/// What is written on the launcher's Pod once this engine serves its requester.
pub(super) fn serving(job: &Job, own: &Requester) -> Result<Value, Failed> {
    let (provider, record) = (job.provider()?, job.record()?);
    let port = job.port.ok_or_else(|| Failed::lost("its port"))?;
    let config = job.config.as_ref().map(|config| &config.spec.model_server_config);
    // A configuration that was changed since is another engine's.
    let config = config.filter(|config| launcher::is_of(config, record.engine.fingerprint));
    let routing = config.map_or_else(Routing::default, |config| Routing {
        labels: config.labels.clone(),
        annotations: config.annotations.clone(),
    });
    let (mut labels, mut annotations) = (routing.labels.clone(), routing.annotations.clone());
    let record = Record { requester: Some(own.id.clone()), ..record.clone() };
    let key = engines::key(&record.engine);
    annotations.insert(key, engines::text(&Inside { record, slept: None, port, routing }));
    labels.insert(keys::SLEEPING.to_owned(), "false".to_owned());
    Ok(json!({"metadata": {"uid": provider.uid.as_str(), "labels": labels, "annotations": annotations}}))
}

/// Values of the annotations `vllm-config` and `isc-routing-metadata`. The environment is left out: it may hold keys that a reader
/// of Pods must not see. Both are `None` if the InferenceServerConfig was edited since the engine was made.
fn told(job: &Job, own: &Requester, id: &EngineId, port: u16) -> (Option<String>, Option<String>) {
    let is_of = |config: &&InferenceServerConfig| {
        launcher::fingerprint(&config.spec.model_server_config, own.served()) == id.fingerprint
    };
    job.config.as_deref().filter(is_of).map_or((None, None), |config| {
        let Wanted { options, gpu_uuids, annotations, .. } =
            Wanted::new(config, own.served(), &id.accelerators, port);
        let started = json!({"options": options, "gpu_uuids": gpu_uuids, "annotations": annotations});
        let server = &config.spec.model_server_config;
        let routed = json!({"labels": server.labels, "annotations": server.annotations});
        (Some(started.to_string()), Some(routed.to_string()))
    })
}

fn id_of(engine: &EngineId) -> String {
    launcher::id(engine.fingerprint, &engine.accelerators)
}

fn of(job: &Job) -> Result<Launcher, Failed> {
    let address = job.provider()?.orders().ok_or_else(|| Failed::lost("the launcher's address"))?;
    Ok(Launcher::new(address, job.launcher_token.clone(), job.command.epoch.0).observed(job.calls()))
}

async fn launch(job: &Job, id: &EngineId, generation: Generation) -> Outcome {
    let port = job.port.ok_or_else(|| Failed::lost("its port"))?;
    let config = job.config.as_ref().ok_or_else(|| Failed::lost("its InferenceServerConfig"))?;
    let served = job.requester.as_ref().and_then(Requester::served);
    if launcher::fingerprint(&config.spec.model_server_config, served) != id.fingerprint {
        return Err(Failed::refused("its InferenceServerConfig has been changed"));
    }
    // Changed since it was decided: the launcher is replaced for the next start.
    let (wanted, here) = (&config.spec.launcher_config_name, job.provider()?.source.as_ref());
    if here.is_none_or(|here| here.config != launcher::pod::label_value(wanted)) {
        return Err(Failed::refused(format!("its launcher is not of the LauncherConfig {wanted}")));
    }
    let wanted = Wanted::new(config, served, &id.accelerators, port).life(generation);
    let launcher = of(job)?;
    fault::point();
    match launcher.put(&id_of(id), &wanted).await {
        Ok(_) => Ok(Answer::Done),
        Err(Conflict(text)) => taken(&launcher, id, generation, text).await,
        Err(error) => Err(failed(error)),
    }
}

/// The launcher has an engine of this id, or has heard a younger leader: it calls both a conflict.
async fn taken(launcher: &Launcher, id: &EngineId, generation: Generation, text: String) -> Outcome {
    match launcher.get(&id_of(id)).await.map_err(failed)?.map(|found| found.generation()) {
        // This order was obeyed before, and the answer was lost.
        Some(Some(found)) if found == generation => Ok(Answer::Done),
        Some(found) if found.is_none_or(|found| found < generation) => Err(failed(Conflict(text))),
        _ => Err(Failed::deposed()),
    }
}

/// Gone, once the launcher says so.
async fn end(job: &Job, id: &EngineId, generation: Generation) -> Outcome {
    let launcher = of(job)?;
    fault::point();
    match launcher.end(&id_of(id), generation).await {
        Ok(_) => Ok(Answer::Done),
        // It ends whatever there is, unless a younger leader has spoken to it.
        Err(Conflict(_)) => Err(Failed::deposed()),
        Err(error) => Err(failed(error)),
    }
}

/// One that stopped, and one of a life before, is put away: nobody can have any other use for it.
async fn query(job: &Job, id: &EngineId, generation: Generation) -> Outcome {
    let (launcher, name) = (of(job)?, id_of(id));
    let alive = |found: &Instance| found.running && found.generation() == Some(generation);
    // What a leader before has under way to it is refused from here on.
    launcher.lead().await.map_err(|error| match error {
        Conflict(_) => Failed::deposed(),
        error => failed(error),
    })?;
    match launcher.get(&name).await.map_err(failed)? {
        Some(found) if alive(&found) => engine::query(job, id).await,
        Some(_) => {
            end(job, id, generation).await?;
            Ok(Answer::Condition(Condition::Absent))
        }
        None => Ok(Answer::Condition(Condition::Absent)),
    }
}

fn failed(error: launcher::Error) -> Failed {
    Failed {
        cause: error.cause(),
        text: error.to_string(),
        tell: matches!(error, launcher::Error::Refused { .. }),
        deposed: false,
    }
}
