//! Executes the commands about slots, and writes what follows from configurations. Each is a task of its own.

use std::{collections::BTreeSet, sync::Arc};

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{Api, Client};
use rouse::{
    pairing::ids::NodeName,
    slots::{ConfigurationName, InstanceName, NodeLoss, SlotsCommand, device_resources},
};
use serde_json::Value;
use tokio::sync::Semaphore;

use super::{events::EventDetails, index::node_state, node_pods};
use crate::{
    crd::{DeviceConfiguration, DeviceInstance, ledger::ObjectName},
    writer::{Error, ObjectWriter, fence::SeenObject},
};

/// The most nodes that are confirmed to be lost at once. Each takes the API server a list of Pods, and when agents are
/// removed everywhere, the time of all nodes ends together.
const MAX_CONFIRMATIONS: usize = 16;

/// What tasks write with.
#[derive(Clone)]
pub(super) struct SlotsExecutor {
    client: Client,
    writer: ObjectWriter,
    confirmations: Arc<Semaphore>,
}

/// A write of one command, with what its fence needs.
#[derive(Debug)]
pub(super) enum SlotsWrite {
    /// Frees the slots of a node, if it is lost indeed.
    FreeNode {
        instance: InstanceName,
        configuration: ConfigurationName,
        node: NodeName,
        cause: NodeLoss,
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
    /// The slots that Pods of a node may use were listed.
    NodePods {
        node: NodeName,
        requested: Result<BTreeSet<String>, Error>,
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
    pub(super) fn new(client: Client, writer: ObjectWriter) -> Self {
        Self { client, writer, confirmations: Arc::new(Semaphore::new(MAX_CONFIRMATIONS)) }
    }

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
            SlotsWrite::FreeNode { instance, configuration, node, cause, operations } => {
                let resources = device_resources(&instance, &configuration);
                // Nothing closes the semaphore. The permit is kept until the write that the confirmation allows.
                let _permit = self.confirmations.acquire().await;
                self.confirm_loss(&node, &instance, &resources, cause).await?;
                self.patch_instance(instance.as_str(), &operations, epoch).await
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

    /// Checks with the API server that a node is lost for an instance, which Pods use by these resources.
    ///
    /// The watches of nodes and of instances are not in step: the instance may already name a node whose object is
    /// still to come, and a node may be ready again, or have an agent again.
    async fn confirm_loss(
        &self,
        node: &NodeName,
        instance: &InstanceName,
        resources: &[String],
        cause: NodeLoss,
    ) -> Result<(), Error> {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let Some(found) = self.writer.get(&nodes, node.as_str()).await? else { return Ok(()) };
        let state = node_state(&found);
        let requested = node_pods::requested(&self.client, &node_pods::of_node(node)).await?;
        let is_lost = match cause {
            NodeLoss::NoAgent => {
                let is_used = resources.iter().any(|resource| requested.contains(resource));
                state.lacks_agent(instance) && !is_used
            }
            NodeLoss::Gone | NodeLoss::NotReady => !state.ready && requested.is_empty(),
        };
        if is_lost { Ok(()) } else { Err(Error::Conflict) }
    }

    async fn patch_instance(&self, instance: &str, operations: &Value, epoch: u64) -> Result<(), Error> {
        self.writer.leadership_in(epoch)?;
        match self.writer.patch_status_json(&self.instances(), instance, operations).await {
            Ok(_) | Err(Error::Gone) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Lists the slots that Pods of a node may use.
    pub(super) async fn list_pods(self, node: NodeName) -> SlotsOutcome {
        let requested = node_pods::requested(&self.client, &node_pods::of_node_lately(&node)).await;
        SlotsOutcome::NodePods { node, requested }
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
