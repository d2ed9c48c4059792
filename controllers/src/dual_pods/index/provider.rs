//! A provider's Pod as last observed: of one engine, or a launcher.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use rouse::{
    pairing::{
        event::{EngineRecord, ObservedProvider, ProviderPhase},
        ids::{NodeName, PairingEngineId, ProviderId, Uid},
    },
    units::{Bytes, Tick},
};

use super::pod_status::{address, container, container_failure, created, provider_phase};
use crate::{
    crd::{fma::amount, ledger::ObjectName},
    dual_pods::{
        keys,
        launcher_engines::{self, LauncherEngine, RoutingMetadata},
        record,
        template_revision::TemplateRevision,
    },
    platform::launcher::{self, pod::LauncherRevision},
    writer::fence::SeenObject,
};

/// A provider's Pod.
#[derive(Clone, Debug)]
pub(in crate::dual_pods) struct ProviderPod {
    pub(in crate::dual_pods) name: ObjectName,
    pub(in crate::dual_pods) uid: Uid,
    /// For the fences of writes to the Pod.
    pub(in crate::dual_pods) seen: SeenObject,
    pub(super) node: NodeName,
    pub(super) id: ProviderId,
    /// `None` until the Pod has an address.
    address: Option<IpAddr>,
    /// Engine records on the Pod, and the Pod's labels.
    pub(super) engines: BTreeMap<PairingEngineId, LauncherEngine>,
    pub(in crate::dual_pods) labels: BTreeMap<String, String>,
    /// Template revision of the requester that requested it last.
    pub(in crate::dual_pods) revision: Option<TemplateRevision>,
    /// For a launcher: what it was made from, and whether all engine records on the Pod could be parsed.
    pub(in crate::dual_pods) source: Option<LauncherRevision>,
    fully_parsed: bool,
    pub(super) observed: ObservedProvider,
    /// Why its container does not run.
    pub(super) container_failure: Option<String>,
    /// A kubelet may have started it.
    pub(super) scheduled: bool,
    pub(in crate::dual_pods) created: Tick,
}

impl ProviderPod {
    pub(super) fn of(pod: &Pod, found: record::ProviderRecord) -> Option<Self> {
        let record::ProviderRecord { node, record, sleep_level, port } = found;
        let id = ProviderId::direct(&record.engine);
        Self::new(
            pod,
            node,
            id,
            vec![LauncherEngine { record, sleep_level, port, routing: RoutingMetadata::default() }],
        )
    }

    pub(super) fn launcher(pod: &Pod, node: NodeName, id: ProviderId) -> Option<Self> {
        let mut provider = Self::new(pod, node, id, launcher_engines::read(pod))?;
        provider.source = LauncherRevision::read(pod);
        provider.observed.build = provider.source.as_ref().map(LauncherRevision::build);
        provider.fully_parsed = provider.engines.len() == launcher_engines::count(pod);
        Some(provider)
    }

    fn new(pod: &Pod, node: NodeName, id: ProviderId, engines: Vec<LauncherEngine>) -> Option<Self> {
        let uid = Uid::from(pod.uid()?);
        let restarts =
            container(pod).map_or(0, |status| u32::try_from(status.restart_count).unwrap_or_default());
        Some(Self {
            name: ObjectName::new(pod.namespace()?, pod.name_any()),
            uid: uid.clone(),
            seen: SeenObject::of(&pod.metadata),
            labels: pod.labels().clone(),
            node,
            scheduled: pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some()),
            created: created(pod),
            id,
            address: address(pod),
            revision: TemplateRevision::read(pod),
            source: None,
            fully_parsed: true,
            container_failure: container_failure(pod),
            observed: ObservedProvider {
                uid,
                phase: provider_phase(pod),
                deleting: pod.metadata.deletion_timestamp.is_some(),
                restarts,
                build: None,
                memory_limit: memory_limit(pod),
                records: engines.iter().map(|engine| engine.record.clone()).collect(),
            },
            engines: engines.into_iter().map(|engine| (engine.record.engine.clone(), engine)).collect(),
        })
    }

    /// Returns the Pod's record of this engine.
    pub(in crate::dual_pods) fn engine(&self, engine: &PairingEngineId) -> Option<&LauncherEngine> {
        self.engines.get(engine)
    }

    /// Returns the IP in the form that Pods use.
    pub(in crate::dual_pods) fn ip(&self) -> Option<String> {
        self.address.map(|address| address.to_string())
    }

    pub(in crate::dual_pods) fn socket_addr(&self, port: u16) -> Option<SocketAddr> {
        self.address.map(|ip| SocketAddr::from((ip, port)))
    }

    pub(in crate::dual_pods) fn is_launcher(&self) -> bool {
        self.id.is_launcher()
    }

    pub(in crate::dual_pods) const fn node(&self) -> &NodeName {
        &self.node
    }

    pub(in crate::dual_pods) const fn phase(&self) -> ProviderPhase {
        self.observed.phase
    }

    /// Whether the Pod has a node.
    pub(in crate::dual_pods) const fn is_scheduled(&self) -> bool {
        self.scheduled
    }

    /// Whether this is a launcher that accepts calls.
    pub(in crate::dual_pods) fn accepts_launcher_calls(&self) -> bool {
        self.is_launcher() && self.phase() == ProviderPhase::Ready && !self.observed.deleting
    }

    /// Returns the Pod's records of its engines.
    pub(in crate::dual_pods) fn records(&self) -> &[EngineRecord] {
        &self.observed.records
    }

    /// Whether one of its engines is bound to a requester.
    pub(in crate::dual_pods) fn is_bound(&self) -> bool {
        self.records().iter().any(|record| record.requester.is_some())
    }

    /// Whether all engine records on the Pod could be parsed.
    pub(in crate::dual_pods) const fn is_fully_parsed(&self) -> bool {
        self.fully_parsed
    }

    /// Returns the address of the launcher's API.
    pub(in crate::dual_pods) fn launcher_address(&self) -> Option<SocketAddr> {
        self.socket_addr(launcher::PORT)
    }
}

/// Returns the memory limit of the engines' container: the lowest of its spec, its status and the Pod.
///
/// Spec and status differ while a resize is under way.
fn memory_limit(pod: &Pod) -> Option<Bytes> {
    let spec = pod.spec.as_ref()?;
    let spec_container = spec.containers.iter().find(|container| container.name == keys::CONTAINER);
    let requirements = [
        spec_container.and_then(|container| container.resources.as_ref()),
        container(pod).and_then(|status| status.resources.as_ref()),
        spec.resources.as_ref(),
    ];
    let limits = requirements.into_iter().flatten().filter_map(|resources| resources.limits.as_ref());
    limits.filter_map(|limits| amount::bytes(&limits.get("memory")?.0)).min()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_least_memory_limit_of_those_that_hold_for_the_engine_counts() {
        let limit = |memory: &str| json!({"limits": {"memory": memory}});
        let pod = |container, whole, status| -> Pod {
            let containers = json!([{"name": "side", "resources": limit("1Gi")}, {"name": "inference-server", "resources": container}]);
            let running = json!({"name": "inference-server", "ready": true, "restartCount": 0, "image": "",
                "imageID": "", "resources": status});
            let spec = json!({"containers": containers, "resources": whole});
            serde_json::from_value(json!({"spec": spec, "status": {"containerStatuses": [running]}})).unwrap()
        };
        let none = json!({});
        let of = |container, whole, status| memory_limit(&pod(container, whole, status));
        assert_eq!(of(none.clone(), none.clone(), none.clone()), None);
        assert_eq!(of(limit("40Gi"), none.clone(), none.clone()), Some(Bytes::gib(40)));
        assert_eq!(of(limit("40Gi"), limit("30Gi"), none.clone()), Some(Bytes::gib(30)));
        assert_eq!(of(limit("40Gi"), none, limit("20Gi")), Some(Bytes::gib(20)), "it is being raised");
    }
}
