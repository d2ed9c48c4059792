//! A requester's Pod as it was last seen.

use std::net::SocketAddr;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use rouse::{
    model::AcceleratorId,
    pairing::{
        event::{ObservedRequester, PairingEvent, RequestedEngine},
        ids::{NodeName, ProviderMode, RequesterId, Uid},
    },
    units::{Millis, Tick},
};

use super::{
    pod_status::{address, container, created, deleting, has_ended, running_container_id, started_at},
    provider::ProviderPod,
};
use crate::{
    controllers::{
        crd::ledger::ObjectName,
        dual_pods::{keys, template_revision::TemplateRevision},
        watch,
        workload::ModelRef,
    },
    pairing::{
        facts::ClusterFacts,
        requester_spec::{self, RequesterSpec},
    },
};

/// A requester's Pod.
#[derive(Clone, Debug)]
pub(in crate::pairing) struct RequesterPod {
    pub(in crate::pairing) name: ObjectName,
    pub(in crate::pairing) id: RequesterId,
    pub(super) version: u64,
    pub(in crate::pairing) node: Option<NodeName>,
    /// Where its stub takes orders, once it has an address.
    pub(in crate::pairing) stub_address: Option<SocketAddr>,
    /// What it asks for, once it has a node; or what is wrong with that.
    pub(in crate::pairing) spec: Option<Result<RequesterSpec, requester_spec::Error>>,
    pub(in crate::pairing) created: Tick,
    stub_container: Option<Uid>,
    /// When its stub began to run, if it does.
    pub(in crate::pairing) stub_started_at: Option<Tick>,
    /// That its Pod names.
    pub(in crate::pairing) accelerators: Vec<AcceleratorId>,
    deleting_since: Option<Tick>,
    /// The termination grace period of the Pod's spec, and that of its deletion.
    pub(in crate::pairing) grace: Option<Millis>,
    deletion_grace: Option<Millis>,
    terminated: bool,
    finalizer: bool,
    /// Of whose template it is.
    pub(in crate::pairing) revision: Option<TemplateRevision>,
    /// Whose token its stub demands, if any.
    pub(in crate::pairing) owner: Option<ModelRef>,
    /// Its provider, and where its engine is, as its Pod names them.
    pub(in crate::pairing) dual: Option<String>,
    server_ip: Option<String>,
    /// The annotation in which it is told what is wrong.
    pub(in crate::pairing) status: Option<String>,
}

impl RequesterPod {
    pub(super) fn of(pod: &Pod, mode: ProviderMode) -> Option<Self> {
        let name = ObjectName::new(pod.namespace()?, pod.name_any());
        let node = pod.spec.as_ref()?.node_name.as_deref().map(NodeName::from);
        let port = keys::admin_port(pod);
        Some(Self {
            spec: node.as_ref().map(|node| RequesterSpec::of(pod, node, mode)),
            id: RequesterId::from(pod.uid()?),
            version: watch::version(&pod.metadata),
            stub_address: address(pod).zip(port).map(SocketAddr::from),
            created: created(pod),
            stub_container: container(pod).and_then(running_container_id),
            stub_started_at: container(pod).and_then(started_at),
            accelerators: keys::accelerators(pod),
            deleting_since: deleting(pod),
            grace: pod.spec.as_ref()?.termination_grace_period_seconds.and_then(seconds),
            deletion_grace: pod.metadata.deletion_grace_period_seconds.and_then(seconds),
            terminated: has_ended(pod),
            finalizer: pod.finalizers().iter().any(|own| own == keys::REQUESTER_FINALIZER),
            revision: TemplateRevision::of(pod),
            owner: ModelRef::of_requester(pod),
            dual: pod.labels().get(keys::DUAL).cloned(),
            server_ip: pod.annotations().get(keys::SERVER_IP).cloned(),
            status: keys::status(pod).map(str::to_owned),
            name,
            node,
        })
    }

    /// Its Pod says already whose engine it has, and where.
    pub(in crate::pairing) fn has_provider_metadata(&self, provider: &ProviderPod) -> bool {
        self.dual.as_ref() == Some(&provider.name.name)
            && self.server_ip.is_some()
            && self.server_ip == provider.ip()
    }

    /// The InferenceServerConfig that it asks for.
    pub(in crate::pairing) fn config(&self) -> Option<&ObjectName> {
        self.spec.as_ref()?.as_ref().ok()?.config()
    }

    /// The name by which it asks for its engine.
    pub(in crate::pairing) fn served_name(&self) -> Option<&str> {
        self.spec.as_ref()?.as_ref().ok()?.served_name()
    }

    /// Only who is on a node that is known, and asks for something that can be had. Who goes, or has an engine, is told of
    /// whatever it asks for by now: that is no more than to be let go.
    pub(super) fn event(
        &self,
        facts: &ClusterFacts,
        bound: impl FnOnce() -> Option<RequestedEngine>,
    ) -> Option<PairingEvent> {
        let node = self.node.clone()?;
        let goes = self.deleting_since.is_some() || self.terminated;
        let asked = self.spec.as_ref().and_then(|asked| asked.as_ref().ok());
        let ask = asked.and_then(|asked| asked.resolve(&node, facts).ok());
        let ask = ask.or_else(bound).or_else(|| goes.then(RequesterSpec::empty_request))?;
        if !facts.has_node(&node) && !goes {
            return None;
        }
        let seen = ObservedRequester {
            requested: ask,
            created: self.created,
            stub_container: self.stub_container.clone().filter(|_| self.stub_address.is_some()),
            accelerators: self.accelerators.clone(),
            deleting_since: self.deleting_since,
            grace: self.deletion_grace.or(self.grace),
            terminated: self.terminated,
            finalizer: self.finalizer,
        };
        Some(PairingEvent::RequesterObserved { node, requester: self.id.clone(), observed: seen })
    }
}

fn seconds(seconds: i64) -> Option<Millis> {
    u64::try_from(seconds).ok().map(Millis::secs)
}
