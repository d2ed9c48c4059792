//! The agent's calls to the API server about DeviceInstances: one deadline each, counted by outcome.

use std::time::Duration;

use kube::{Api, Client, api::PostParams};
use prometheus::IntCounterVec;
use rouse::slots::InstanceName;
use serde_json::Value;
use tokio::time;

use super::{MANAGER, agent_view::AgentState};
use crate::{
    crd::DeviceInstance,
    failpoint, slot_patch,
    writer::{Error, outcome_label},
};

/// Timeout of one call. An Allocate has five seconds for a claim, a read after a lost race, and another claim.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);

/// Reads and writes DeviceInstances.
#[derive(Clone, Debug)]
pub(super) struct InstanceApi {
    api: Api<DeviceInstance>,
    /// Counted by kind and outcome.
    writes: IntCounterVec,
}

impl InstanceApi {
    pub(super) fn new(client: Client, writes: IntCounterVec) -> Self {
        Self { api: Api::all(client), writes }
    }

    /// Reads an instance again, which sends the lists of plugins if they change with it.
    ///
    /// # Errors
    /// See [`Error`].
    pub(super) async fn refresh(&self, state: &AgentState, name: &InstanceName) -> Result<(), Error> {
        let found = time::timeout(CALL_TIMEOUT, self.api.get_opt(name.as_str())).await;
        match found.map_err(|_| Error::Timeout)?? {
            Some(object) => state.observe_instance(object),
            None => drop(state.update(|view| view.instances.remove(name))),
        }
        Ok(())
    }

    /// Creates an instance.
    ///
    /// # Errors
    /// [`Error::Conflict`] if it exists. See [`Error`].
    pub(super) async fn create(&self, object: &DeviceInstance) -> Result<DeviceInstance, Error> {
        failpoint::hit();
        let parameters = PostParams { field_manager: Some(MANAGER.to_owned()), ..PostParams::default() };
        let created = time::timeout(CALL_TIMEOUT, self.api.create(&parameters, object)).await;
        self.count(created.map_err(|_| Error::Timeout).and_then(|created| created.map_err(Error::from)))
    }

    /// Applies a JSON Patch to an instance's status, and returns the object with it.
    ///
    /// # Errors
    /// [`Error::Conflict`] if a test in the patch fails. See [`Error`].
    pub(super) async fn patch(&self, name: &str, operations: &Value) -> Result<DeviceInstance, Error> {
        let patched =
            time::timeout(CALL_TIMEOUT, slot_patch::send(&self.api, name, MANAGER, operations)).await;
        self.count(patched.map_err(|_| Error::Timeout).flatten())
    }

    fn count(&self, outcome: Result<DeviceInstance, Error>) -> Result<DeviceInstance, Error> {
        self.writes.with_label_values(&["DeviceInstance", outcome_label(&outcome)]).inc();
        outcome
    }
}
