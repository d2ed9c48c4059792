//! Annotation, label and finalizer keys of dual pods, as the public project names them. Seed 1 spells the prefix
//! `dual-pod.`, which Rouse reads and never writes.

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use rouse::model::AcceleratorId;

/// Name of the engine's container in requesters and providers.
pub const CONTAINER: &str = "inference-server";

/// Annotations of requesters. Either one makes a Pod a requester.
pub const SERVER_PATCH: &str = "dual-pods.llm-d.ai/server-patch";
pub const SERVER_CONFIG: &str = "dual-pods.llm-d.ai/inference-server-config";
/// Served model name of the InferenceServerConfig's engine, if the config sets none.
pub const SERVED_NAME: &str = "rouse.dev/served-name";
/// Provider mode of this requester, `plain`, `sleep` or `launcher`; overrides the installation's mode.
pub const MODE: &str = "rouse.dev/provider-mode";
/// On a model's requesters: uid of the InferenceModel whose token their stubs require.
pub const TOKEN_OF: &str = "rouse.dev/stub-token-of";
/// On requesters: the component that puts their engines to sleep; [`GATEWAY_ACTUATION`] for the gateway.
///
/// The requester of such an engine stays while the engine sleeps. Without the annotation, an engine sleeps only once
/// its requester is gone.
pub const ACTUATION: &str = "rouse.dev/actuation";
pub const GATEWAY_ACTUATION: &str = "gateway";
pub const ADMIN_PORT: &str = "dual-pods.llm-d.ai/admin-port";
/// `{"Errors": null}` or `{"Errors": ["…"]}`.
pub const STATUS: &str = "dual-pods.llm-d.ai/status";
/// Rouse's own key for the value of [`STATUS`].
///
/// It serves clusters where a policy denies writes to the public project's key.
pub const OWN_STATUS: &str = "rouse.dev/status";
/// Address of the requester's engine, for a stub that reads it through the downward API.
pub const SERVER_IP: &str = "dual-pods.llm-d.ai/inference-server-ip";

/// On both Pods: UUIDs, as `a,b`.
pub const ACCELERATORS: &str = "dual-pods.llm-d.ai/accelerators";
/// Label of both Pods while they are bound: the name of the other Pod.
pub const DUAL: &str = "dual-pods.llm-d.ai/dual";
/// Label of a requester whose engine runs in a launcher: the engine's instance id there. Rouse does not read it back.
pub const INSTANCE: &str = "dual-pods.llm-d.ai/instance";

/// Label of a provider of a model's engine: hash of the model's name, see [`crate::label::value`].
pub const ENGINE_OF: &str = "rouse.dev/engine-of";

/// On providers: `UID NAME` of the requester. This annotation is the binding.
pub const REQUESTER: &str = "dual-pods.llm-d.ai/requester";
pub const SERVER_PORT: &str = "dual-pods.llm-d.ai/server-port";
/// On launchers, beside [`REQUESTER`] and [`SERVER_PORT`]: the instance id of the engine that was bound last.
///
/// For other readers only; Rouse decides by [`super::launcher_engines`].
pub const INSTANCE_ID: &str = "dual-pods.llm-d.ai/instance-id";
/// Annotations of a launcher: start options of the bound engine, and its routing metadata, as JSON. Rouse does not read
/// them back.
pub const VLLM_CONFIG: &str = "dual-pods.llm-d.ai/vllm-config";
pub const ROUTING: &str = "dual-pods.llm-d.ai/isc-routing-metadata";
/// Annotation of a provider with one engine: a hash that interchangeable providers share. Rouse does not read it back.
pub const NOMINAL: &str = "dual-pods.llm-d.ai/nominal";
/// Label: `true` or `false`.
pub const SLEEPING: &str = "dual-pods.llm-d.ai/sleeping";
/// On providers: the template revision of the requester that the provider was made for; see
/// [`super::template_revision`].
pub const TEMPLATE_REVISION: &str = "rouse.dev/edition";
/// Annotation of a provider: all other engine state, see [`super::record`].
pub const ENGINE: &str = "rouse.dev/engine";

pub const REQUESTER_FINALIZER: &str = "dual-pods.llm-d.ai/requester";
pub const PROVIDER_FINALIZER: &str = "dual-pods.llm-d.ai/provider";

/// Memory of the engine: on each accelerator awake and asleep, and in the node's RAM asleep.
pub const MEMORY: &str = "rouse.dev/gpu-memory";
pub const MEMORY_ASLEEP: &str = "rouse.dev/gpu-memory-asleep";
pub const HOST_MEMORY: &str = "rouse.dev/host-memory";
/// How deep an engine sleeps (`1`, `2`, `auto`, `never`), and how long it sleeps before it stops (`1h`, `never`).
pub const SLEEP_LEVEL: &str = "rouse.dev/sleep-level";
pub const STOP_AFTER: &str = "rouse.dev/stop-after";

const PREFIX: &str = "dual-pods.llm-d.ai/";
const SEED_PREFIX: &str = "dual-pod.llm-d.ai/";
const DEFAULT_ADMIN_PORT: u16 = 8081;

/// Reads an annotation with the public project's prefix, in either spelling.
#[must_use]
pub fn read<'a>(pod: &'a Pod, key: &str) -> Option<&'a str> {
    let all = pod.annotations();
    let seeds = || key.strip_prefix(PREFIX).and_then(|name| all.get(&format!("{SEED_PREFIX}{name}")));
    all.get(key).or_else(seeds).map(String::as_str)
}

/// Whether this Pod is a requester.
#[must_use]
pub fn is_requester(pod: &Pod) -> bool {
    let role = format!("{PREFIX}role");
    [SERVER_PATCH, SERVER_CONFIG].iter().any(|key| read(pod, key).is_some())
        || read(pod, &role) == Some("requester")
}

/// Whether the gateway decides when the engine of this requester sleeps and wakes.
#[must_use]
pub fn is_actuated_by_gateway(pod: &Pod) -> bool {
    pod.annotations().get(ACTUATION).is_some_and(|by| by == GATEWAY_ACTUATION)
}

/// Returns the last status that was written for the Pod's user.
#[must_use]
pub fn status(pod: &Pod) -> Option<&str> {
    pod.annotations().get(OWN_STATUS).map(String::as_str).or_else(|| read(pod, STATUS))
}

/// Returns the errors in the Pod's status that its user must correct.
#[must_use]
pub fn errors(pod: &Pod) -> Option<String> {
    #[derive(serde::Deserialize)]
    struct RequesterStatus {
        #[serde(rename = "Errors")]
        errors: Option<Vec<String>>,
    }
    let status: RequesterStatus = serde_json::from_str(status(pod)?).ok()?;
    status.errors.filter(|errors| !errors.is_empty()).map(|errors| errors.join("; "))
}

/// Returns the admin port of the Pod's stub; `None` if invalid.
#[must_use]
pub fn admin_port(pod: &Pod) -> Option<u16> {
    read(pod, ADMIN_PORT)
        .map_or(Some(DEFAULT_ADMIN_PORT), |text| text.trim().parse().ok().filter(|port| *port > 0))
}

/// Returns the accelerators that were last recorded on the Pod.
#[must_use]
pub fn accelerators(pod: &Pod) -> Vec<AcceleratorId> {
    let text = read(pod, ACCELERATORS).unwrap_or_default();
    text.split(',').map(str::trim).filter(|id| !id.is_empty()).map(AcceleratorId::from).collect()
}

/// Whether a label key is reserved for the controllers of dual pods.
#[must_use]
pub fn is_reserved(key: &str) -> bool {
    [PREFIX, SEED_PREFIX, "rouse.dev/"].iter().any(|prefix| key.starts_with(prefix))
}

/// Joins ids as `a,b`, the format of the annotations.
#[must_use]
pub fn join_ids(accelerators: &[AcceleratorId]) -> String {
    accelerators.iter().map(AcceleratorId::as_str).collect::<Vec<_>>().join(",")
}
