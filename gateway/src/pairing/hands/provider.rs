//! Orders about launchers' Pods.

use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt as _};
use rouse::pairing::{
    command::OfProvider,
    event::{Answer, Condition},
    ids::{ProviderId, Uid},
};
use tokio::time::Instant;

use super::{Failed, Hands, Outcome};
use crate::{
    controllers::{workload::merge, writer},
    pairing::job::Job,
    platform::kubernetes::launcher::pod::{self, Origin, Place},
};

impl Hands {
    pub(super) async fn launcher(&self, job: &Job, id: &ProviderId, step: &OfProvider) -> Outcome {
        match step {
            OfProvider::Create { .. } => self.create_launcher(job, id).await,
            OfProvider::Delete { uid, .. } => self.delete_launcher(job, id, uid.as_ref()).await,
        }
    }

    /// Beside whoever asks for an engine in it, which is where the LauncherConfig is.
    async fn create_launcher(&self, job: &Job, id: &ProviderId) -> Outcome {
        let config = job.launcher.as_ref().ok_or_else(|| Failed::lost("its LauncherConfig"))?;
        let accelerator = id.accelerators.first().ok_or_else(|| Failed::lost("its accelerator"))?;
        let node = &job.command.node;
        let namespace = config.namespace().unwrap_or_default();
        let place = Place { namespace: &namespace, node, hostname: node.as_str(), accelerator };
        let user = |error: &dyn ToString| Failed::user(error.to_string());
        let made = place.pod(Origin::Config(config), &self.settings.key).map_err(|error| user(&error))?;
        let mut granted: Pod = serde_json::from_value(made.clone()).map_err(|error| user(&error))?;
        job.grant(&mut granted);
        let mut object = serde_json::to_value(&granted).map_err(|error| user(&error))?;
        // A field that Pods do not have is for the API server to refuse.
        merge::fill(&mut object, &made);
        let pods = Api::namespaced(self.client.clone(), &namespace);
        let begun = Instant::now();
        let created = self.writer.create::<Pod>(&pods, &object).await;
        if let Some(answered) = was_answered(created.as_ref().err()) {
            self.metrics.created(&namespace, &config.name_any(), answered, begun.elapsed().into());
        }
        match created {
            // There is one for each place: it is this.
            Ok(_) | Err(writer::Error::Conflict) => Ok(Answer::Done),
            Err(error) => {
                // What the API server refuses was asked for by whoever wrote the LauncherConfig.
                let tell = matches!(error, writer::Error::Invalid(_));
                Err(Failed { tell, ..Failed::from(error) })
            }
        }
    }

    async fn delete_launcher(&self, job: &Job, id: &ProviderId, uid: Option<&Uid>) -> Outcome {
        if let Some(own) = &job.provider {
            let uid = uid.unwrap_or(&own.uid);
            self.writer.delete(&self.pods(&own.name), &own.name.name, uid.as_str()).await?;
            return Ok(Answer::Done);
        }
        // It was ordered, and has not been seen: where somebody asks for it, it would be.
        let asker = job.requester.as_ref().map(|own| own.name.namespace.clone());
        let namespace = asker.or_else(|| job.launcher.as_ref()?.namespace());
        let (Some(namespace), Some(accelerator)) = (namespace, id.accelerators.first()) else {
            return Ok(Answer::Condition(Condition::Absent));
        };
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &namespace);
        let name = pod::name(&job.command.node, accelerator);
        let Some(pod) = self.writer.look(&api, &name).await? else {
            return Ok(Answer::Condition(Condition::Absent));
        };
        self.writer.delete(&api, &name, &pod.metadata.uid.unwrap_or_default()).await?;
        Ok(Answer::Done)
    }
}

/// Whether the API server has answered, with whatever; `None`: it was not asked.
fn was_answered(error: Option<&writer::Error>) -> Option<bool> {
    match error {
        Some(writer::Error::NotLeading) => None,
        Some(writer::Error::Late) => Some(false),
        Some(writer::Error::Api(error)) => Some(matches!(**error, kube::Error::Api(_))),
        _ => Some(true),
    }
}
