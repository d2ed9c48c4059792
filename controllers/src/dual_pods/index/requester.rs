//! A requester's Pod as last observed.

use std::net::SocketAddr;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use rouse::{
    model::{AcceleratorId, SleepLevel},
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
    crd::ledger::ObjectName,
    dual_pods::{
        facts::ClusterFacts,
        keys,
        patched_launcher::PatchedLauncher,
        requester_spec::{self, RequesterSpec},
        template_revision::TemplateRevision,
    },
    workload::{ASLEEP, ModelRef},
    writer::fence::SeenObject,
};

/// A requester's Pod.
#[derive(Clone, Debug)]
pub(in crate::dual_pods) struct RequesterPod {
    pub(in crate::dual_pods) name: ObjectName,
    pub(in crate::dual_pods) id: RequesterId,
    /// For the fences of writes to the Pod.
    pub(in crate::dual_pods) seen: SeenObject,
    pub(in crate::dual_pods) node: Option<NodeName>,
    /// Address of the stub's API, once the Pod has an address.
    pub(in crate::dual_pods) stub_address: Option<SocketAddr>,
    /// The requested engine, once the Pod has a node; or why the request is invalid.
    pub(in crate::dual_pods) spec: Option<Result<RequesterSpec, requester_spec::Error>>,
    pub(in crate::dual_pods) created: Tick,
    stub_container: Option<Uid>,
    /// When its stub started, while it runs.
    pub(in crate::dual_pods) stub_started_at: Option<Tick>,
    /// Accelerators that the Pod's annotation names.
    pub(in crate::dual_pods) accelerators: Vec<AcceleratorId>,
    deleting_since: Option<Tick>,
    /// Termination grace periods of the Pod's spec and of its deletion.
    pub(in crate::dual_pods) grace: Option<Millis>,
    deletion_grace: Option<Millis>,
    terminated: bool,
    finalizer: bool,
    /// Revision of the template that the Pod was made from.
    pub(in crate::dual_pods) revision: Option<TemplateRevision>,
    /// The model whose token the stub requires, if any.
    pub(in crate::dual_pods) owner: Option<ModelRef>,
    /// Provider and engine address that the Pod's metadata names.
    pub(in crate::dual_pods) dual: Option<String>,
    server_ip: Option<String>,
    /// Status annotation, which reports errors to the user.
    pub(in crate::dual_pods) status: Option<String>,
    /// The gateway decides when its engine sleeps and wakes.
    actuated: bool,
    /// Level at which its engine sleeps or may sleep, as the gateway has recorded.
    pub(in crate::dual_pods) asleep: Option<SleepLevel>,
}

impl RequesterPod {
    pub(super) fn of(pod: &Pod, mode: ProviderMode) -> Option<Self> {
        let name = ObjectName::new(pod.namespace()?, pod.name_any());
        let node = pod.spec.as_ref()?.node_name.as_deref().map(NodeName::from);
        let port = keys::admin_port(pod);
        Some(Self {
            spec: node.as_ref().map(|node| RequesterSpec::of(pod, node, mode)),
            id: RequesterId::from(pod.uid()?),
            seen: SeenObject::of(&pod.metadata),
            stub_address: address(pod).zip(port).map(SocketAddr::from),
            created: created(pod),
            stub_container: container(pod).and_then(running_container_id),
            stub_started_at: container(pod).and_then(started_at),
            accelerators: keys::accelerators(pod),
            deleting_since: deleting(pod),
            grace: pod.spec.as_ref()?.termination_grace_period_seconds.and_then(seconds),
            deletion_grace: pod.metadata.deletion_grace_period_seconds.and_then(seconds),
            terminated: has_ended(pod),
            finalizer: pod.finalizers().iter().any(|finalizer| finalizer == keys::REQUESTER_FINALIZER),
            revision: TemplateRevision::of(pod),
            owner: ModelRef::of_requester(pod),
            dual: pod.labels().get(keys::DUAL).cloned(),
            server_ip: pod.annotations().get(keys::SERVER_IP).cloned(),
            status: keys::status(pod).map(str::to_owned),
            actuated: keys::is_actuated_by_gateway(pod),
            asleep: pod
                .annotations()
                .get(ASLEEP)
                .and_then(|level| SleepLevel::from_number(level.parse().ok()?)),
            name,
            node,
        })
    }

    /// Whether the gateway decides about the engine of this requester, which stays while the engine sleeps.
    pub(in crate::dual_pods) const fn stays_for_gateway(&self) -> bool {
        self.actuated && self.deleting_since.is_none() && !self.terminated
    }

    /// Whether the Pod's metadata already names this provider and its address.
    pub(in crate::dual_pods) fn has_provider_metadata(&self, provider: &ProviderPod) -> bool {
        self.dual.as_ref() == Some(&provider.name.name)
            && self.server_ip.is_some()
            && self.server_ip == provider.ip()
    }

    /// Returns the requested InferenceServerConfig.
    pub(in crate::dual_pods) fn config(&self) -> Option<&ObjectName> {
        self.spec.as_ref()?.as_ref().ok()?.config()
    }

    /// Returns the launcher and the engine that its server patch makes, in mode launcher.
    pub(in crate::dual_pods) fn patched_launcher(&self) -> Option<&PatchedLauncher> {
        self.spec.as_ref()?.as_ref().ok()?.patched_launcher()
    }

    /// Returns the name under which the requester uses its engine.
    pub(in crate::dual_pods) fn served_name(&self) -> Option<&str> {
        self.spec.as_ref()?.as_ref().ok()?.served_name()
    }

    /// Returns this requester's event if its node is known and its request is valid.
    ///
    /// A requester that leaves or has an engine is reported whatever it requests now: it only has to be let go.
    pub(super) fn event(
        &self,
        facts: &ClusterFacts,
        bound: impl FnOnce() -> Option<RequestedEngine>,
    ) -> Option<PairingEvent> {
        let node = self.node.clone()?;
        let is_leaving = self.deleting_since.is_some() || self.terminated;
        let spec = self.spec.as_ref().and_then(|spec| spec.as_ref().ok());
        let requested = spec.and_then(|spec| spec.resolve(&node, facts).ok());
        let requested = requested.or_else(bound).or_else(|| is_leaving.then(RequesterSpec::empty_request))?;
        if !facts.has_node(&node) && !is_leaving {
            return None;
        }
        let observed = ObservedRequester {
            requested,
            created: self.created,
            stub_container: self.stub_container.clone().filter(|_| self.stub_address.is_some()),
            accelerators: self.accelerators.clone(),
            deleting_since: self.deleting_since,
            grace: self.deletion_grace.or(self.grace),
            terminated: self.terminated,
            finalizer: self.finalizer,
            actuated: self.actuated,
        };
        Some(PairingEvent::RequesterObserved { node, requester: self.id.clone(), observed })
    }
}

fn seconds(seconds: i64) -> Option<Millis> {
    u64::try_from(seconds).ok().map(Millis::secs)
}
