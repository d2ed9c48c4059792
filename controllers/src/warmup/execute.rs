//! Executes the commands of Warmups, and writes their statuses. Each is a task of its own.

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{Api, Client, ResourceExt as _};
use rouse::{
    pairing::ids::NodeName,
    warmup::{CommandError, WarmSet, WarmupCommand},
};
use serde_json::{Value, json};

use super::auto::OwnedWarmupChange;
use crate::{
    crd::{Warmup, ledger::ObjectName},
    label,
    writer::{Error, ObjectWriter, fence::SeenObject},
};

/// What tasks write with.
#[derive(Clone)]
pub(super) struct WarmupExecutor {
    pub(super) client: Client,
    pub(super) writer: ObjectWriter,
    /// The value of the labels of warm nodes.
    pub(super) installation: String,
}

/// A write of one command, with what its fence needs.
#[derive(Debug)]
pub(super) enum WarmupWrite {
    Create {
        pod: Box<Value>,
        namespace: String,
    },
    DeletePod {
        name: ObjectName,
        seen: SeenObject,
    },
    Label {
        node: NodeName,
        set: WarmSet,
        is_warm: bool,
        version: Option<String>,
    },
    DeleteWarmup {
        name: ObjectName,
        seen: SeenObject,
    },
    /// What the command is about does not exist any more.
    Nothing,
    /// The command no longer fits what was observed since.
    Outdated,
}

/// The outcome of a task.
#[derive(Debug)]
pub(crate) enum WarmupOutcome {
    Command {
        command: WarmupCommand,
        result: Result<(), CommandError>,
    },
    /// The status of a Warmup was written, or not. `version`: that of the object that it was written for.
    Status {
        name: ObjectName,
        version: Option<String>,
        /// The version that the object has then.
        result: Result<Option<String>, Error>,
    },
    /// A Warmup of a model was written, or not. It is tried again by itself.
    Owned,
}

impl WarmupExecutor {
    /// Executes one command to its one outcome.
    pub(super) async fn execute(
        self,
        command: WarmupCommand,
        write: WarmupWrite,
        epoch: u64,
    ) -> WarmupOutcome {
        let result = self.write(write, epoch).await;
        if let Err(error) = &result {
            tracing::debug!(?command, ?error, "command of a Warmup not executed");
        }
        WarmupOutcome::Command { command, result }
    }

    async fn write(&self, write: WarmupWrite, epoch: u64) -> Result<(), CommandError> {
        let written = match write {
            WarmupWrite::Create { pod, namespace } => {
                let pods: Api<Pod> = Api::namespaced(self.client.clone(), &namespace);
                self.in_term(epoch)?;
                match self.writer.create(&pods, &pod).await {
                    // A Pod of the name exists, and the name says which Pod it is. A conflict about a quota is
                    // another error.
                    Ok(_) | Err(Error::Conflict) => Ok(()),
                    Err(error) => Err(error),
                }
            }
            WarmupWrite::DeletePod { name, seen } => {
                // Only in this version: it may have succeeded since, and no success is thrown away.
                let pods: Api<Pod> = Api::namespaced(self.client.clone(), &name.namespace);
                self.in_term(epoch)?;
                self.writer.delete_exact(&pods, &name.name, &seen).await
            }
            WarmupWrite::Label { node, set, is_warm, version } => {
                self.label(&node, &set, is_warm, version, epoch).await
            }
            WarmupWrite::DeleteWarmup { name, seen } => {
                let warmups: Api<Warmup> = Api::namespaced(self.client.clone(), &name.namespace);
                self.in_term(epoch)?;
                self.writer.delete_exact(&warmups, &name.name, &seen).await
            }
            WarmupWrite::Nothing => Ok(()),
            WarmupWrite::Outdated => Err(Error::Conflict),
        };
        written.map_err(command_error)
    }

    /// Sets or removes the label of a node in the version that was observed.
    ///
    /// A kubelet changes the version every few minutes. Then the label is written once more, in the current version.
    async fn label(
        &self,
        node: &NodeName,
        set: &WarmSet,
        is_warm: bool,
        version: Option<String>,
        epoch: u64,
    ) -> Result<(), Error> {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let value = is_warm.then_some(self.installation.as_str());
        let patch = |version: Option<String>| {
            json!({"metadata": {
                "resourceVersion": version,
                "labels": {label::warm_key(set): value},
            }})
        };
        self.writer.leadership_in(epoch)?;
        match self.writer.patch_merge(&nodes, node.as_str(), &patch(version)).await {
            Err(Error::Conflict) => {}
            // The label of a node goes with the node.
            Ok(_) | Err(Error::Gone) => return Ok(()),
            Err(error) => return Err(error),
        }
        let Some(found) = self.writer.get(&nodes, node.as_str()).await? else { return Ok(()) };
        self.writer.leadership_in(epoch)?;
        self.writer.patch_merge(&nodes, node.as_str(), &patch(found.resource_version())).await.map(drop)
    }

    /// Writes the status of one Warmup.
    pub(super) async fn write_status(
        self,
        name: ObjectName,
        version: Option<String>,
        object: Value,
        epoch: u64,
    ) -> WarmupOutcome {
        let warmups: Api<Warmup> = Api::namespaced(self.client.clone(), &name.namespace);
        let result = match self.writer.leadership_in(epoch) {
            Ok(_) => {
                let applied = self.writer.apply_status(&warmups, &name.name, &object).await;
                applied.map(|warmup: Warmup| warmup.resource_version())
            }
            Err(error) => Err(error),
        };
        WarmupOutcome::Status { name, version, result }
    }

    /// Writes a Warmup of a model.
    pub(super) async fn write_owned(self, change: OwnedWarmupChange, epoch: u64) -> WarmupOutcome {
        let name = change.name().clone();
        if let Err(error) = Box::pin(change.execute(self.client, self.writer, epoch)).await {
            tracing::warn!(%error, warmup = %name, "the Warmup of a model is not written, retrying");
        }
        WarmupOutcome::Owned
    }

    fn in_term(&self, epoch: u64) -> Result<(), CommandError> {
        self.writer.leadership_in(epoch).map(drop).map_err(command_error)
    }
}

fn command_error(error: Error) -> CommandError {
    match error {
        Error::Invalid(message) => CommandError::Refused(message),
        Error::NotLeading | Error::Conflict | Error::Gone | Error::Timeout | Error::Api(_) => {
            CommandError::Transient
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_api_server_refuses_is_refused() {
        let refused = command_error(Error::Invalid("exceeded quota".to_owned()));
        assert_eq!(refused, CommandError::Refused("exceeded quota".to_owned()));
        let quota_changed = kube::core::Status::failure("why", "Conflict").with_code(409).boxed();
        let api = Error::Api(std::sync::Arc::new(kube::Error::Api(quota_changed)));
        for error in [Error::NotLeading, Error::Conflict, Error::Gone, Error::Timeout, api] {
            assert_eq!(command_error(error), CommandError::Transient);
        }
    }
}
