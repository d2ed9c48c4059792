//! What dual pods are marked with, in the public project's words. Seed 1 spells their prefix `dual-pod.`, which is read as well
//! and never written.

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use rouse::model::AcceleratorId;

/// The container that counts, in requesters and providers.
pub const CONTAINER: &str = "inference-server";

/// Annotations of requesters. The first makes a Pod one.
pub const SERVER_PATCH: &str = "dual-pods.llm-d.ai/server-patch";
pub const SERVER_CONFIG: &str = "dual-pods.llm-d.ai/inference-server-config";
/// What the engine of its InferenceServerConfig is to be called, where that says no name.
pub const SERVED_NAME: &str = "rouse.dev/served-name";
/// `plain` or `sleep`: how its engine is made and put away, whatever the installation does.
pub const MODE: &str = "rouse.dev/provider-mode";
/// Of a model's requesters: the uid of the InferenceModel whose token their stubs demand.
pub const TOKEN_OF: &str = "rouse.dev/stub-token-of";
pub const ADMIN_PORT: &str = "dual-pods.llm-d.ai/admin-port";
/// `{"ConfigErrors": null}` or `{"ConfigErrors": ["…"]}`.
pub const STATUS: &str = "dual-pods.llm-d.ai/status";
/// The same under a key of Rouse's own, where a policy keeps the public project's from being written.
pub const OWN_STATUS: &str = "rouse.dev/status";
/// Where its engine is, for a stub that reads it by the downward API.
pub const SERVER_IP: &str = "dual-pods.llm-d.ai/inference-server-ip";

/// Of both Pods: UUIDs, `a,b`.
pub const ACCELERATORS: &str = "dual-pods.llm-d.ai/accelerators";
/// A label of both while they are bound: the other's name.
pub const DUAL: &str = "dual-pods.llm-d.ai/dual";
/// Label of a requester whose engine runs in a launcher: the engine's instance id there. Rouse does not read it back.
pub const INSTANCE: &str = "dual-pods.llm-d.ai/instance";

/// A label of the providers of a model's engines: its name, as [`crate::controllers::label::value`] has it.
pub const ENGINE_OF: &str = "rouse.dev/engine-of";

/// Of providers: `UID NAME` of the requester. This is the binding.
pub const REQUESTER: &str = "dual-pods.llm-d.ai/requester";
pub const SERVER_PORT: &str = "dual-pods.llm-d.ai/server-port";
/// Of a launcher, beside the two before: which of its engines was bound last. For others to read; what is decided by is in
/// [`super::launcher_engines`].
pub const INSTANCE_ID: &str = "dual-pods.llm-d.ai/instance-id";
/// Annotations of a launcher: how the bound engine is started, and its routing metadata, as JSON. Rouse does not read them back.
pub const VLLM_CONFIG: &str = "dual-pods.llm-d.ai/vllm-config";
pub const ROUTING: &str = "dual-pods.llm-d.ai/isc-routing-metadata";
/// Annotation of a provider with one engine: a hash that providers share when they can serve each other's requesters. Rouse does
/// not read it back.
pub const NOMINAL: &str = "dual-pods.llm-d.ai/nominal";
/// A label: `true` or `false`.
pub const SLEEPING: &str = "dual-pods.llm-d.ai/sleeping";
/// Of providers: the revision of the requester's template that it was made for; see [`super::template_revision`].
pub const TEMPLATE_REVISION: &str = "rouse.dev/edition";
/// All else that is kept of an engine; [`super::record`] says what.
pub const ENGINE: &str = "rouse.dev/engine";

pub const REQUESTER_FINALIZER: &str = "dual-pods.llm-d.ai/requester";
pub const PROVIDER_FINALIZER: &str = "dual-pods.llm-d.ai/provider";

/// What an engine takes of each accelerator awake and asleep, and of its node's RAM asleep.
pub const MEMORY: &str = "rouse.dev/gpu-memory";
pub const MEMORY_ASLEEP: &str = "rouse.dev/gpu-memory-asleep";
pub const HOST_MEMORY: &str = "rouse.dev/host-memory";
/// How deep an engine sleeps (`1`, `2`, `auto`, `never`), and after how long asleep it is ended (`1h`, `never`).
pub const SLEEP_LEVEL: &str = "rouse.dev/sleep-level";
pub const STOP_AFTER: &str = "rouse.dev/stop-after";

const PREFIX: &str = "dual-pods.llm-d.ai/";
const SEED_PREFIX: &str = "dual-pod.llm-d.ai/";
const DEFAULT_ADMIN_PORT: u16 = 8081;

/// An annotation of the public project's, in either spelling.
#[must_use]
pub fn read<'a>(pod: &'a Pod, key: &str) -> Option<&'a str> {
    let all = pod.annotations();
    let seeds = || key.strip_prefix(PREFIX).and_then(|name| all.get(&format!("{SEED_PREFIX}{name}")));
    all.get(key).or_else(seeds).map(String::as_str)
}

/// Whether a user asks for a server by this Pod.
#[must_use]
pub fn is_requester(pod: &Pod) -> bool {
    let role = format!("{PREFIX}role");
    [SERVER_PATCH, SERVER_CONFIG].iter().any(|key| read(pod, key).is_some())
        || read(pod, &role) == Some("requester")
}

/// What its user was told last.
#[must_use]
pub fn status(pod: &Pod) -> Option<&str> {
    pod.annotations().get(OWN_STATUS).map(String::as_str).or_else(|| read(pod, STATUS))
}

/// What its user has to mend, as its status says it.
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

/// Where its stub takes orders; `None`: what is said there is no port.
#[must_use]
pub fn admin_port(pod: &Pod) -> Option<u16> {
    read(pod, ADMIN_PORT)
        .map_or(Some(DEFAULT_ADMIN_PORT), |text| text.trim().parse().ok().filter(|port| *port > 0))
}

/// What was heard of its accelerators before.
#[must_use]
pub fn accelerators(pod: &Pod) -> Vec<AcceleratorId> {
    let text = read(pod, ACCELERATORS).unwrap_or_default();
    text.split(',').map(str::trim).filter(|id| !id.is_empty()).map(AcceleratorId::from).collect()
}

/// Labels with these are written by who runs dual pods, and by nobody else.
#[must_use]
pub fn is_reserved(key: &str) -> bool {
    [PREFIX, SEED_PREFIX, "rouse.dev/"].iter().any(|prefix| key.starts_with(prefix))
}

/// `a,b`, as annotations have it.
#[must_use]
pub fn join_ids(accelerators: &[AcceleratorId]) -> String {
    accelerators.iter().map(AcceleratorId::as_str).collect::<Vec<_>>().join(",")
}
