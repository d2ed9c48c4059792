//! Writes a model's measured memory into its InferenceModel, for a person at a terminal.

use anyhow::Context as _;
use futures_util::future::BoxFuture;
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use rouse::units::Bytes;
use serde_json::{Value, json};

use crate::{
    api_error::api_error_message,
    crd::{InferenceModel, scalar::Quantity},
};

/// Owner of the written fields, as the API server records it.
const FIELD_MANAGER: &str = "rouse-measure";

/// Replaces the memory of this InferenceModel. What was not measured (`None`) stays.
///
/// The cluster and the default namespace are those of kubectl. The future is boxed for the program's size (ADR 18).
///
/// # Errors
/// There is no configuration of the Kubernetes API, the object does not exist, or the API server refuses the change.
pub fn write<'a>(
    namespace: Option<&'a str>,
    name: &'a str,
    awake: Bytes,
    asleep: Option<Bytes>,
    host: Option<Bytes>,
) -> BoxFuture<'a, anyhow::Result<()>> {
    Box::pin(async move {
        let client = Client::try_default().await.context("cannot find the Kubernetes API: set KUBECONFIG")?;
        let objects: Api<InferenceModel> = match namespace {
            Some(namespace) => Api::namespaced(client, namespace),
            None => Api::default_namespaced(client),
        };
        let options = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
        let patch = Patch::Merge(memory_patch(awake, asleep, host));
        objects.patch(name, &options, &patch).await.map_err(|error| {
            anyhow::anyhow!("cannot change the InferenceModel {name}: {}", api_error_message(&error))
        })?;
        Ok(())
    })
}

fn memory_patch(awake: Bytes, asleep: Option<Bytes>, host: Option<Bytes>) -> Value {
    let mut spec = json!({"memory": Quantity::from(awake)});
    // A merge patch would delete a field that is null.
    for (field, size) in [("memoryAsleep", asleep), ("hostMemory", host)] {
        if let (Some(size), Some(spec)) = (size, spec.as_object_mut()) {
            spec.insert(field.to_owned(), json!(Quantity::from(size)));
        }
    }
    json!({"spec": spec})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_measured_is_changed() {
        let patch = memory_patch(Bytes::mib(9217), Some(Bytes::gib(1)), None);
        assert_eq!(patch, json!({"spec": {"memory": "9217Mi", "memoryAsleep": "1Gi"}}));
    }
}
