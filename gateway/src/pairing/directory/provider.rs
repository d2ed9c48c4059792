//! A provider's Pod as it was last seen: of one engine, or of a launcher.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use rouse::{
    pairing::{
        event::{Record, SeenProvider, Stage},
        ids::{EngineId, NodeName, ProviderId, Uid},
    },
    units::{Bytes, Tick},
};

use super::kubelet::{address, container, created, stage, trouble};
use crate::{
    controllers::{
        crd::{fma::amount, ledger::ObjectName},
        dual::{
            edition::Edition,
            engines::{self, Inside, Routing},
            keys, record,
        },
        watch,
    },
    platform::kubernetes::launcher::{self, pod::Source},
};

/// A provider's Pod.
#[derive(Clone, Debug)]
pub(in crate::pairing) struct Provider {
    pub(in crate::pairing) name: ObjectName,
    pub(in crate::pairing) uid: Uid,
    pub(super) version: u64,
    pub(super) node: NodeName,
    pub(super) id: ProviderId,
    /// Once it has one.
    address: Option<IpAddr>,
    /// What the Pod says of its engines, and the labels that it has.
    pub(super) inside: BTreeMap<EngineId, Inside>,
    pub(in crate::pairing) labels: BTreeMap<String, String>,
    /// Of whose template it was asked for last.
    pub(in crate::pairing) edition: Option<Edition>,
    /// Of a launcher: what it was made from; and whether all that the Pod says of its engines could be read.
    pub(in crate::pairing) source: Option<Source>,
    whole: bool,
    pub(super) seen: SeenProvider,
    /// Why its container does not run.
    pub(super) trouble: Option<String>,
    /// A kubelet may have begun to run it.
    pub(super) placed: bool,
    pub(in crate::pairing) created: Tick,
}

impl Provider {
    pub(super) fn of(pod: &Pod, found: record::Found) -> Option<Self> {
        let record::Found { node, record, slept, port } = found;
        let id = ProviderId::direct(&record.engine);
        Self::with(pod, node, id, vec![Inside { record, slept, port, routing: Routing::default() }])
    }

    pub(super) fn launcher(pod: &Pod, node: NodeName, id: ProviderId) -> Option<Self> {
        let mut own = Self::with(pod, node, id, engines::read(pod))?;
        own.source = Source::read(pod);
        own.seen.build = own.source.as_ref().map(Source::build);
        own.whole = own.inside.len() == engines::count(pod);
        Some(own)
    }

    fn with(pod: &Pod, node: NodeName, id: ProviderId, inside: Vec<Inside>) -> Option<Self> {
        let uid = Uid::from(pod.uid()?);
        let restarts = container(pod).map_or(0, |own| u32::try_from(own.restart_count).unwrap_or_default());
        Some(Self {
            name: ObjectName::new(pod.namespace()?, pod.name_any()),
            uid: uid.clone(),
            version: watch::version(&pod.metadata),
            labels: pod.labels().clone(),
            node,
            placed: pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some()),
            created: created(pod),
            id,
            address: address(pod),
            edition: Edition::read(pod),
            source: None,
            whole: true,
            trouble: trouble(pod),
            seen: SeenProvider {
                uid,
                stage: stage(pod),
                deleting: pod.metadata.deletion_timestamp.is_some(),
                restarts,
                build: None,
                host: memory_limit(pod),
                records: inside.iter().map(|own| own.record.clone()).collect(),
            },
            inside: inside.into_iter().map(|own| (own.record.engine.clone(), own)).collect(),
        })
    }

    /// What the Pod says of this engine.
    pub(in crate::pairing) fn inside(&self, engine: &EngineId) -> Option<&Inside> {
        self.inside.get(engine)
    }

    /// As Pods write it.
    pub(in crate::pairing) fn ip(&self) -> Option<String> {
        self.address.map(|address| address.to_string())
    }

    pub(in crate::pairing) fn at(&self, port: u16) -> Option<SocketAddr> {
        self.address.map(|ip| SocketAddr::from((ip, port)))
    }

    pub(in crate::pairing) fn is_launcher(&self) -> bool {
        self.id.is_launcher()
    }

    pub(in crate::pairing) const fn node(&self) -> &NodeName {
        &self.node
    }

    pub(in crate::pairing) const fn stage(&self) -> Stage {
        self.seen.stage
    }

    /// It has a node.
    pub(in crate::pairing) const fn is_placed(&self) -> bool {
        self.placed
    }

    /// What the Pod says of its engines.
    pub(in crate::pairing) fn records(&self) -> &[Record] {
        &self.seen.records
    }

    /// One of its engines is somebody's.
    pub(in crate::pairing) fn is_bound(&self) -> bool {
        self.records().iter().any(|record| record.requester.is_some())
    }

    /// Whether nothing is in it of which its Pod says what cannot be read.
    pub(in crate::pairing) const fn is_whole(&self) -> bool {
        self.whole
    }

    /// Where a launcher takes orders.
    pub(in crate::pairing) fn orders(&self) -> Option<SocketAddr> {
        self.at(launcher::PORT)
    }
}

/// The memory limit that applies to the engines' container: the lowest of its spec, its status and the Pod. Spec and status differ
/// while a resize is under way.
fn memory_limit(pod: &Pod) -> Option<Bytes> {
    let spec = pod.spec.as_ref()?;
    let own = spec.containers.iter().find(|own| own.name == keys::CONTAINER);
    let said = [
        own.and_then(|own| own.resources.as_ref()),
        container(pod).and_then(|own| own.resources.as_ref()),
        spec.resources.as_ref(),
    ];
    let limits = said.into_iter().flatten().filter_map(|resources| resources.limits.as_ref());
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
