//! Executes the commands about slots, and writes what follows from configurations. Each is a task of its own.

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{Api, Client};
use rouse::{
    pairing::ids::NodeName,
    slots::{ConfigurationName, InstanceName, SlotsCommand},
};
use serde_json::Value;

use super::{events::EventDetails, index::is_ready, node_pods};
use crate::{
    crd::{DeviceConfiguration, DeviceInstance, ledger::ObjectName},
    writer::{Error, ObjectWriter, fence::SeenObject},
};

/// What tasks write with.
#[derive(Clone)]
pub(super) struct SlotsExecutor {
    pub(super) client: Client,
    pub(super) writer: ObjectWriter,
}

/// A write of one command, with what its fence needs.
#[derive(Debug)]
pub(super) enum SlotsWrite {
    /// Frees the slots of a node, if it is lost indeed.
    FreeNode {
        instance: String,
        node: NodeName,
        operations: Value,
    },
    /// Adds and removes slots.
    Layout {
        instance: String,
        operations: Value,
    },
    DeleteInstance {
        instance: String,
        seen: SeenObject,
    },
    DeletePod {
        pod: ObjectName,
        seen: SeenObject,
    },
    /// The command no longer fits what was observed since.
    Outdated,
}

/// The outcome of a task.
#[derive(Debug)]
pub(crate) enum SlotsOutcome {
    Command {
        command: SlotsCommand,
        details: EventDetails,
        result: Result<(), Error>,
    },
    /// The Pods of a node that may use slots were counted.
    NodePods {
        node: NodeName,
        pods: Result<u32, Error>,
    },
    /// The status of a configuration was written, or not.
    Status {
        configuration: ConfigurationName,
        result: Result<(), Error>,
    },
    /// The capacity in the spec of an instance was written, or not.
    Capacity {
        instance: InstanceName,
        result: Result<(), Error>,
    },
}

impl SlotsExecutor {
    /// Executes one command to its one outcome.
    pub(super) async fn execute(
        self,
        command: SlotsCommand,
        details: EventDetails,
        write: SlotsWrite,
        epoch: u64,
    ) -> SlotsOutcome {
        let result = self.write(write, epoch).await;
        if let Err(error) = &result {
            tracing::debug!(?command, %error, "command about slots not executed");
        }
        SlotsOutcome::Command { command, details, result }
    }

    async fn write(&self, write: SlotsWrite, epoch: u64) -> Result<(), Error> {
        match write {
            SlotsWrite::FreeNode { instance, node, operations } => {
                self.confirm_loss(&node).await?;
                self.patch_instance(&instance, &operations, epoch).await
            }
            SlotsWrite::Layout { instance, operations } => {
                self.patch_instance(&instance, &operations, epoch).await
            }
            SlotsWrite::DeleteInstance { instance, seen } => {
                // In this version only: a slot may have been claimed since.
                self.writer.leadership_in(epoch)?;
                self.writer.delete_exact(&self.instances(), &instance, &seen).await
            }
            SlotsWrite::DeletePod { pod, seen } => {
                let pods: Api<Pod> = Api::namespaced(self.client.clone(), &pod.namespace);
                self.writer.leadership_in(epoch)?;
                self.writer.delete_exact(&pods, &pod.name, &seen).await
            }
            SlotsWrite::Outdated => Err(Error::Conflict),
        }
    }

    /// Checks with the API server that a node is lost.
    ///
    /// The watches of nodes and of instances are not in step: the instance may already name a node whose object is
    /// still to come, and a node may be ready again.
    async fn confirm_loss(&self, node: &NodeName) -> Result<(), Error> {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let Some(found) = self.writer.get(&nodes, node.as_str()).await? else { return Ok(()) };
        if is_ready(&found) || node_pods::count(&self.client, &node_pods::of_node(node)).await? > 0 {
            return Err(Error::Conflict);
        }
        Ok(())
    }

    async fn patch_instance(&self, instance: &str, operations: &Value, epoch: u64) -> Result<(), Error> {
        self.writer.leadership_in(epoch)?;
        match self.writer.patch_status_json(&self.instances(), instance, operations).await {
            Ok(_) | Err(Error::Gone) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Counts the Pods of a node that may use slots.
    pub(super) async fn count_pods(self, node: NodeName) -> SlotsOutcome {
        let pods = node_pods::count(&self.client, &node_pods::of_node_lately(&node)).await;
        SlotsOutcome::NodePods { node, pods }
    }

    /// Writes the status of a configuration.
    pub(super) async fn write_status(
        self,
        configuration: ConfigurationName,
        object: Value,
        epoch: u64,
    ) -> SlotsOutcome {
        let all: Api<DeviceConfiguration> = Api::all(self.client.clone());
        let result = match self.writer.leadership_in(epoch) {
            Ok(_) => self.writer.apply_status(&all, configuration.as_str(), &object).await.map(drop),
            Err(error) => Err(error),
        };
        SlotsOutcome::Status { configuration, result }
    }

    /// Writes the capacity in the spec of an instance. The patch has the version that was read.
    pub(super) async fn write_capacity(
        self,
        instance: InstanceName,
        patch: Value,
        epoch: u64,
    ) -> SlotsOutcome {
        let result = match self.writer.leadership_in(epoch) {
            Ok(_) => self.writer.patch_merge(&self.instances(), instance.as_str(), &patch).await.map(drop),
            Err(error) => Err(error),
        };
        SlotsOutcome::Capacity { instance, result }
    }

    fn instances(&self) -> Api<DeviceInstance> {
        Api::all(self.client.clone())
    }
}
