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
    crd::ledger::ObjectName,
    dual_pods::{command_context::CommandContext, index::RequesterPod},
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
        Box::pin(self.ensure_unselected(context)).await?;
        let LauncherTemplate { namespace, config_name, source } = LauncherTemplate::of(context)?;
        let accelerator =
            id.accelerators.first().ok_or_else(|| ExecutionError::unknown("the launcher's accelerator"))?;
        let node = &context.command.node;
        let placement = LauncherPlacement {
            namespace: &namespace,
            node,
            hostname: node.as_str(),
            accelerator,
            resource: context.resource(),
        };
        let user = |error: &dyn ToString| ExecutionError::user_error(error.to_string());
        let made = placement.pod(source, &self.settings.key).map_err(|error| user(&error))?;
        let mut granted: Pod = serde_json::from_value(made.clone()).map_err(|error| user(&error))?;
        context.grant(&mut granted);
        context.stamp(&mut granted);
        let mut object = serde_json::to_value(&granted).map_err(|error| user(&error))?;
        // The API server has to refuse fields that Pods do not have.
        merge::fill(&mut object, &made);
        let pods = Api::namespaced(self.client.clone(), &namespace);
        let started = Instant::now();
        let created = self.writer.create::<Pod>(&pods, &object).await;
        if let Some(answered) = was_answered(created.as_ref().err()) {
            self.metrics.observe_launcher_creation(
                &namespace,
                &config_name,
                answered,
                started.elapsed().into(),
            );
        }
        match created {
            // Each place has one launcher, so the existing Pod is this one.
            Ok(_) | Err(writer::Error::Conflict) => Ok(CommandReply::Done),
            Err(error) => {
                // The author of the LauncherConfig or of the patch requested what the API server refuses.
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
            if uid.is_some_and(|uid| *uid != provider.uid) {
                // The Pod of the decision is gone.
                return Ok(CommandReply::Done);
            }
            return self.delete(&provider.name, &context.fence(&provider.seen)).await;
        }
        // Ordered but not seen yet: the Pod would be in the namespace of the requester that waits for it.
        let asker = context.requester.as_ref().map(|requester| requester.name.namespace.clone());
        let namespace = asker.or_else(|| context.launcher_config.as_ref()?.namespace());
        let (Some(namespace), Some(accelerator)) = (namespace, id.accelerators.first()) else {
            return Ok(CommandReply::Condition(QueriedCondition::Absent));
        };
        let name = ObjectName::new(namespace, pod::name(&context.command.node, accelerator));
        let Some(pod) = self.get_pod(&name).await? else {
            return Ok(CommandReply::Condition(QueriedCondition::Absent));
        };
        self.delete(&name, &context.exact_fence(&pod)).await
    }
}

/// What a launcher is created from.
struct LauncherTemplate<'a> {
    namespace: String,
    /// Empty for a server patch.
    config_name: String,
    source: LauncherSource<'a>,
}

impl<'a> LauncherTemplate<'a> {
    /// A requester's server patch comes before the LauncherConfig of a population policy.
    fn of(context: &'a CommandContext) -> Result<Self, ExecutionError> {
        if let Some(patched) = context.requester.as_ref().and_then(RequesterPod::patched_launcher) {
            return Ok(Self {
                namespace: patched.revision.namespace.clone(),
                config_name: String::new(),
                source: LauncherSource::Patch(&patched.template),
            });
        }
        let config = context.launcher_config.as_ref();
        let config = config.ok_or_else(|| ExecutionError::unknown("the LauncherConfig"))?;
        Ok(Self {
            namespace: config.namespace().unwrap_or_default(),
            config_name: config.name_any(),
            source: LauncherSource::Config(config),
        })
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
