//! A requester's Pod as it was last seen.

use std::net::SocketAddr;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use rouse::{
    model::AcceleratorId,
    pairing::{
        event::{Ask, Event, SeenRequester},
        ids::{Mode, NodeName, RequesterId, Uid},
    },
    units::{Millis, Tick},
};

use super::{
    kubelet::{address, began, container, created, deleting, has_ended, running},
    provider::Provider,
};
use crate::{
    controllers::{
        crd::ledger::ObjectName,
        dual::{edition::Edition, keys},
        watch,
        workload::Owner,
    },
    pairing::{
        ask::{self, Asked},
        facts::Facts,
    },
};

/// A requester's Pod.
#[derive(Clone, Debug)]
pub(in crate::pairing) struct Requester {
    pub(in crate::pairing) name: ObjectName,
    pub(in crate::pairing) id: RequesterId,
    pub(super) version: u64,
    pub(in crate::pairing) node: Option<NodeName>,
    /// Where its stub takes orders, once it has an address.
    pub(in crate::pairing) admin: Option<SocketAddr>,
    /// What it asks for, once it has a node; or what is wrong with that.
    pub(in crate::pairing) asked: Option<Result<Asked, ask::Error>>,
    pub(in crate::pairing) created: Tick,
    stub: Option<Uid>,
    /// When its stub began to run, if it does.
    pub(in crate::pairing) began: Option<Tick>,
    /// That its Pod names.
    pub(in crate::pairing) accelerators: Vec<AcceleratorId>,
    deleting: Option<Tick>,
    /// The termination grace period of the Pod's spec, and that of its deletion.
    pub(in crate::pairing) grace: Option<Millis>,
    deleted_within: Option<Millis>,
    ended: bool,
    finalizer: bool,
    /// Of whose template it is.
    pub(in crate::pairing) edition: Option<Edition>,
    /// Whose token its stub demands, if any.
    pub(in crate::pairing) owner: Option<Owner>,
    /// Its provider, and where its engine is, as its Pod names them.
    pub(in crate::pairing) dual: Option<String>,
    server: Option<String>,
    /// The annotation in which it is told what is wrong.
    pub(in crate::pairing) status: Option<String>,
}

impl Requester {
    pub(super) fn of(pod: &Pod, mode: Mode) -> Option<Self> {
        let name = ObjectName::new(pod.namespace()?, pod.name_any());
        let node = pod.spec.as_ref()?.node_name.as_deref().map(NodeName::from);
        let port = keys::admin_port(pod);
        Some(Self {
            asked: node.as_ref().map(|node| Asked::of(pod, node, mode)),
            id: RequesterId::from(pod.uid()?),
            version: watch::version(&pod.metadata),
            admin: address(pod).zip(port).map(SocketAddr::from),
            created: created(pod),
            stub: container(pod).and_then(running),
            began: container(pod).and_then(began),
            accelerators: keys::accelerators(pod),
            deleting: deleting(pod),
            grace: pod.spec.as_ref()?.termination_grace_period_seconds.and_then(seconds),
            deleted_within: pod.metadata.deletion_grace_period_seconds.and_then(seconds),
            ended: has_ended(pod),
            finalizer: pod.finalizers().iter().any(|own| own == keys::REQUESTER_FINALIZER),
            edition: Edition::of(pod),
            owner: Owner::of_requester(pod),
            dual: pod.labels().get(keys::DUAL).cloned(),
            server: pod.annotations().get(keys::SERVER_IP).cloned(),
            status: keys::status(pod).map(str::to_owned),
            name,
            node,
        })
    }

    /// Its Pod says already whose engine it has, and where.
    pub(in crate::pairing) fn names(&self, provider: &Provider) -> bool {
        self.dual.as_ref() == Some(&provider.name.name)
            && self.server.is_some()
            && self.server == provider.ip()
    }

    /// The InferenceServerConfig that it asks for.
    pub(in crate::pairing) fn config(&self) -> Option<&ObjectName> {
        self.asked.as_ref()?.as_ref().ok()?.config()
    }

    /// The name by which it asks for its engine.
    pub(in crate::pairing) fn served(&self) -> Option<&str> {
        self.asked.as_ref()?.as_ref().ok()?.served()
    }

    /// Only who is on a node that is known, and asks for something that can be had. Who goes, or has an engine, is told of
    /// whatever it asks for by now: that is no more than to be let go.
    pub(super) fn event(&self, facts: &Facts, bound: impl FnOnce() -> Option<Ask>) -> Option<Event> {
        let node = self.node.clone()?;
        let goes = self.deleting.is_some() || self.ended;
        let asked = self.asked.as_ref().and_then(|asked| asked.as_ref().ok());
        let ask = asked.and_then(|asked| asked.on(&node, facts).ok());
        let ask = ask.or_else(bound).or_else(|| goes.then(Asked::nothing))?;
        if !facts.knows(&node) && !goes {
            return None;
        }
        let seen = SeenRequester {
            ask,
            created: self.created,
            stub: self.stub.clone().filter(|_| self.admin.is_some()),
            accelerators: self.accelerators.clone(),
            deleting: self.deleting,
            grace: self.deleted_within.or(self.grace),
            ended: self.ended,
            finalizer: self.finalizer,
        };
        Some(Event::SeenRequester { node, requester: self.id.clone(), seen })
    }
}

fn seconds(seconds: i64) -> Option<Millis> {
    u64::try_from(seconds).ok().map(Millis::secs)
}
