//! Executes commands about launchers' Pods.

use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt as _};
use rouse::pairing::{
    command::ProviderStep,
    event::{CommandReply, QueriedCondition},
    ids::{ProviderId, Uid},
};
use tokio::time::Instant;

use super::{ExecutionError, ExecutionOutcome, Executor};
use crate::{
    dual_pods::command_context::CommandContext,
    platform::launcher::pod::{self, LauncherPlacement, LauncherSource},
    workload::merge,
    writer,
};

impl Executor {
    pub(super) async fn execute_launcher_step(
        &self,
        context: &CommandContext,
        id: &ProviderId,
        step: &ProviderStep,
    ) -> ExecutionOutcome {
        match step {
            ProviderStep::Create { .. } => self.create_launcher(context, id).await,
            ProviderStep::Delete { uid, .. } => self.delete_launcher(context, id, uid.as_ref()).await,
        }
    }

    /// Creates a launcher in its LauncherConfig's namespace, which is also that of its requesters.
    async fn create_launcher(&self, context: &CommandContext, id: &ProviderId) -> ExecutionOutcome {
        let config =
            context.launcher_config.as_ref().ok_or_else(|| ExecutionError::unknown("the LauncherConfig"))?;
        let accelerator =
            id.accelerators.first().ok_or_else(|| ExecutionError::unknown("the launcher's accelerator"))?;
        let node = &context.command.node;
        let namespace = config.namespace().unwrap_or_default();
        let placement =
            LauncherPlacement { namespace: &namespace, node, hostname: node.as_str(), accelerator };
        let user = |error: &dyn ToString| ExecutionError::user_error(error.to_string());
        let made = placement
            .pod(LauncherSource::Config(config), &self.settings.key)
            .map_err(|error| user(&error))?;
        let mut granted: Pod = serde_json::from_value(made.clone()).map_err(|error| user(&error))?;
        context.grant(&mut granted);
        let mut object = serde_json::to_value(&granted).map_err(|error| user(&error))?;
        // The API server has to refuse fields that Pods do not have.
        merge::fill(&mut object, &made);
        let pods = Api::namespaced(self.client.clone(), &namespace);
        let started = Instant::now();
        let created = self.writer.create::<Pod>(&pods, &object).await;
        if let Some(answered) = was_answered(created.as_ref().err()) {
            self.metrics.observe_launcher_creation(
                &namespace,
                &config.name_any(),
                answered,
                started.elapsed().into(),
            );
        }
        match created {
            // Each place has one launcher, so the existing Pod is this one.
            Ok(_) | Err(writer::Error::Conflict) => Ok(CommandReply::Done),
            Err(error) => {
                // The author of the LauncherConfig requested what the API server refuses.
                let user_facing = matches!(error, writer::Error::Invalid(_));
                Err(ExecutionError { user_facing, ..ExecutionError::from(error) })
            }
        }
    }

    async fn delete_launcher(
        &self,
        context: &CommandContext,
        id: &ProviderId,
        uid: Option<&Uid>,
    ) -> ExecutionOutcome {
        if let Some(provider) = &context.provider {
            let uid = uid.unwrap_or(&provider.uid);
            self.writer.delete(&self.pods(&provider.name), &provider.name.name, uid.as_str()).await?;
            return Ok(CommandReply::Done);
        }
        // Ordered but not seen yet: the Pod would be in the namespace of the requester that waits for it.
        let asker = context.requester.as_ref().map(|requester| requester.name.namespace.clone());
        let namespace = asker.or_else(|| context.launcher_config.as_ref()?.namespace());
        let (Some(namespace), Some(accelerator)) = (namespace, id.accelerators.first()) else {
            return Ok(CommandReply::Condition(QueriedCondition::Absent));
        };
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &namespace);
        let name = pod::name(&context.command.node, accelerator);
        let Some(pod) = self.writer.get(&api, &name).await? else {
            return Ok(CommandReply::Condition(QueriedCondition::Absent));
        };
        self.writer.delete(&api, &name, &pod.metadata.uid.unwrap_or_default()).await?;
        Ok(CommandReply::Done)
    }
}

/// Whether the API server answered in any way; `None` if no request was sent.
fn was_answered(error: Option<&writer::Error>) -> Option<bool> {
    match error {
        Some(writer::Error::NotLeading) => None,
        Some(writer::Error::Timeout) => Some(false),
        Some(writer::Error::Api(error)) => Some(matches!(**error, kube::Error::Api(_))),
        _ => Some(true),
    }
}
