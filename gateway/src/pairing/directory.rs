//! The Pods of dual pods as they were last seen, and what the decisions call them.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::ResourceExt as _;
use rouse::{
    model::AcceleratorId,
    pairing::{
        event::{Ask, Event, Record, SeenProvider, SeenRequester, Stage},
        ids::{EngineId, Mode, NodeName, ProviderId, RequesterId, Uid},
    },
    units::{Millis, Tick},
};

use super::{
    ask::{self, Asked},
    facts::Facts,
};
use crate::{
    controllers::{
        condition::tick,
        crd::ledger::ObjectName,
        dual::{
            edition::Edition,
            engines::{self, Inside, Routing},
            keys, record,
        },
        watch::{self, Change, Found},
        workload::Owner,
    },
    platform::kubernetes::launcher::{
        self,
        pod::{self as launchers, Source},
    },
};

/// Everything that was seen and is still there.
#[derive(Debug)]
pub(super) struct Directory {
    /// Of requesters that do not say it.
    mode: Mode,
    pods: BTreeMap<ObjectName, Role>,
    /// Pods that a list has shown and the watch not yet. What the watch says went there is one of the same name from before.
    ahead: BTreeSet<ObjectName>,
    /// What the watch has said since a list was asked for, some of which is newer than that.
    late: Option<Vec<Change<Pod>>>,
    requesters: BTreeMap<RequesterId, ObjectName>,
    providers: BTreeMap<(NodeName, ProviderId), ObjectName>,
}

/// What a Pod is here.
#[derive(Clone, Debug)]
pub(super) enum Role {
    Requester(Box<Requester>),
    Provider(Box<Provider>),
}

/// A requester's Pod.
#[derive(Clone, Debug)]
pub(super) struct Requester {
    pub(super) name: ObjectName,
    pub(super) id: RequesterId,
    version: u64,
    pub(super) node: Option<NodeName>,
    /// Where its stub takes orders, once it has an address.
    pub(super) admin: Option<SocketAddr>,
    /// What it asks for, once it has a node; or what is wrong with that.
    pub(super) asked: Option<Result<Asked, ask::Error>>,
    pub(super) created: Tick,
    stub: Option<Uid>,
    /// When its stub began to run, if it does.
    pub(super) began: Option<Tick>,
    /// That its Pod names.
    pub(super) accelerators: Vec<AcceleratorId>,
    deleting: Option<Tick>,
    ended: bool,
    finalizer: bool,
    /// Of whose template it is.
    pub(super) edition: Option<Edition>,
    /// Whose token its stub demands, if any.
    pub(super) owner: Option<Owner>,
    /// Its provider, and where its engine is, as its Pod names them.
    pub(super) dual: Option<String>,
    server: Option<String>,
    /// The annotation in which it is told what is wrong.
    pub(super) status: Option<String>,
}

/// A provider's Pod.
#[derive(Clone, Debug)]
pub(super) struct Provider {
    pub(super) name: ObjectName,
    pub(super) uid: Uid,
    version: u64,
    node: NodeName,
    id: ProviderId,
    /// Once it has one.
    address: Option<IpAddr>,
    /// What the Pod says of its engines, and the labels that it has.
    inside: BTreeMap<EngineId, Inside>,
    pub(super) labels: BTreeMap<String, String>,
    /// Of whose template it was asked for last.
    pub(super) edition: Option<Edition>,
    /// Of a launcher: what it was made from; and whether all that the Pod says of its engines could be read.
    pub(super) source: Option<Source>,
    whole: bool,
    seen: SeenProvider,
    /// A kubelet may have begun to run it.
    placed: bool,
    pub(super) created: Tick,
}

impl Directory {
    pub(super) const fn new(mode: Mode) -> Self {
        Self {
            mode,
            pods: BTreeMap::new(),
            ahead: BTreeSet::new(),
            late: None,
            requesters: BTreeMap::new(),
            providers: BTreeMap::new(),
        }
    }

    pub(super) fn requester(&self, id: &RequesterId) -> Option<&Requester> {
        match self.pods.get(self.requesters.get(id)?)? {
            Role::Requester(requester) => Some(requester),
            Role::Provider(_) => None,
        }
    }

    pub(super) fn requesters(&self) -> impl Iterator<Item = &Requester> {
        self.requesters.keys().filter_map(|id| self.requester(id))
    }

    pub(super) fn role(&self, name: &ObjectName) -> Option<&Role> {
        self.pods.get(name)
    }

    /// Of all Pods.
    pub(super) fn names(&self) -> impl Iterator<Item = &ObjectName> {
        self.pods.keys()
    }

    pub(super) fn provider(&self, node: &NodeName, id: &ProviderId) -> Option<&Provider> {
        match self.pods.get(self.providers.get(&(node.clone(), id.clone()))?)? {
            Role::Provider(provider) => Some(provider),
            Role::Requester(_) => None,
        }
    }

    /// Lists are asked for. What the watch says from here on is taken note of once they have come.
    pub(super) fn await_lists(&mut self) {
        self.late.get_or_insert_default();
    }

    /// Takes note of what the watch has said meanwhile. Nobody is told.
    pub(super) fn catch_up(&mut self, facts: &Facts) {
        for change in self.late.take().unwrap_or_default() {
            self.take(change, facts, &mut drop);
        }
    }

    /// Takes note of lists that the watch may not have come to yet, and of what it has said since they were asked for.
    pub(super) fn list(&mut self, lists: Vec<Change<Pod>>, facts: &Facts) {
        let late = self.late.take();
        let before: BTreeMap<ObjectName, String> =
            self.pods.iter().map(|(name, role)| (name.clone(), role.uid().to_owned())).collect();
        lists.into_iter().for_each(|all| self.take(all, facts, &mut drop));
        let new =
            self.pods.iter().filter(|(name, role)| before.get(*name).is_none_or(|uid| uid != role.uid()));
        self.ahead.extend(new.map(|(name, _)| name.clone()));
        self.late = late;
        self.catch_up(facts);
    }

    /// Launchers that can be spoken to, with their nodes.
    pub(super) fn launchers(&self) -> impl Iterator<Item = (&NodeName, &ProviderId, &Provider)> {
        let all = self.providers.keys().filter_map(|(node, id)| Some((node, id, self.provider(node, id)?)));
        all.filter(|(_, id, own)| id.is_launcher() && own.seen.stage == Stage::Ready && !own.seen.deleting)
    }

    /// Of all launchers' Pods, whether they can be spoken to or not.
    pub(super) fn launcher_uids(&self) -> impl Iterator<Item = &Uid> {
        let launchers = self.providers.keys().filter(|(_, id)| id.is_launcher());
        launchers.filter_map(|(node, id)| self.provider(node, id)).map(|own| &own.uid)
    }

    /// Where the engines of a node's launchers listen, as far as their Pods say it.
    pub(super) fn ports<'a>(&'a self, node: &'a NodeName) -> impl Iterator<Item = (&'a EngineId, u16)> {
        let of = move |(at, id): &'a (NodeName, ProviderId)| {
            if at == node && id.is_launcher() { self.provider(at, id) } else { None }
        };
        let all = self.providers.keys().filter_map(of);
        all.flat_map(|own| own.inside.iter().map(|(engine, inside)| (engine, inside.port)))
    }

    /// Takes note of a change; what it means goes to `tell`.
    pub(super) fn take(&mut self, change: Change<Pod>, facts: &Facts, tell: &mut impl FnMut(Event)) {
        if let Some(late) = &mut self.late {
            late.push(change);
            return;
        }
        match change {
            Change::All { namespace, objects } => {
                let there: BTreeMap<ObjectName, Found<Pod>> =
                    objects.into_iter().map(|found| (found.name(), found)).collect();
                let within = |name: &ObjectName| namespace.as_ref().is_none_or(|n| *n == name.namespace);
                let gone: Vec<ObjectName> = self
                    .pods
                    .keys()
                    .filter(|name| within(name) && !there.contains_key(name))
                    .cloned()
                    .collect();
                gone.iter().for_each(|name| self.lost(name, tell));
                self.ahead.retain(|name| !within(name));
                there.into_values().filter_map(Found::good).for_each(|pod| self.saw(&pod, facts, tell));
            }
            Change::Applied(found) => {
                let (name, uid) = (found.name(), found.metadata().uid.clone());
                let known = self.pods.get(&name);
                let same = known.filter(|role| uid.as_deref() == Some(role.uid()));
                if self.ahead.contains(&name) && same.is_none() {
                    return;
                }
                self.ahead.remove(&name);
                // The list was newer.
                let stale = same.is_some_and(|role| role.version() > watch::version(found.metadata()));
                if let Some(pod) = found.good().filter(|_| !stale) {
                    self.saw(&pod, facts, tell);
                }
            }
            Change::Deleted(name) if self.ahead.contains(&name) => {}
            Change::Deleted(name) => self.lost(&name, tell),
        }
    }

    /// Everything once more, to who has forgotten it.
    pub(super) fn again(&self, facts: &Facts, tell: &mut impl FnMut(Event)) {
        self.pods.values().for_each(|role| self.say(role, facts, tell));
    }

    fn saw(&mut self, pod: &Pod, facts: &Facts, tell: &mut impl FnMut(Event)) {
        let Some(role) = Role::of(pod, self.mode) else { return };
        // Another Pod of the same name: the one before was not seen to go.
        if self.pods.get(role.name()).is_some_and(|before| before.uid() != role.uid()) {
            let name = role.name().clone();
            self.lost(&name, tell);
        }
        match &role {
            Role::Requester(own) => drop(self.requesters.insert(own.id.clone(), own.name.clone())),
            Role::Provider(own) => {
                drop(self.providers.insert((own.node.clone(), own.id.clone()), own.name.clone()));
            }
        }
        self.say(&role, facts, tell);
        self.pods.insert(role.name().clone(), role);
    }

    fn say(&self, role: &Role, facts: &Facts, tell: &mut impl FnMut(Event)) {
        match role {
            Role::Requester(own) => {
                let bound = || self.bound(own);
                own.event(facts, bound).into_iter().for_each(tell);
            }
            Role::Provider(own) => tell(Event::SeenProvider {
                node: own.node.clone(),
                provider: own.id.clone(),
                seen: own.seen.clone(),
            }),
        }
    }

    /// What a provider says that this requester has.
    fn bound(&self, own: &Requester) -> Option<Ask> {
        let all = self.providers.keys().filter(|(node, _)| own.node.as_ref() == Some(node));
        let mut records = all.filter_map(|(node, id)| self.provider(node, id)).flat_map(|p| &p.seen.records);
        let found = records.find(|record| record.requester.as_ref() == Some(&own.id))?;
        let Record { engine, sizes, level, .. } = found;
        let (mode, fingerprint) = (engine.mode, engine.fingerprint);
        Some(Ask { mode, fingerprint, build: None, sizes: *sizes, level: *level })
    }

    fn lost(&mut self, name: &ObjectName, tell: &mut impl FnMut(Event)) {
        match self.pods.remove(name) {
            Some(Role::Requester(own)) => {
                self.requesters.remove(&own.id);
                if let Some(node) = own.node {
                    tell(Event::RequesterGone { node, requester: own.id });
                }
            }
            Some(Role::Provider(own)) => {
                let place = (own.node, own.id);
                if self.providers.get(&place) == Some(name) {
                    self.providers.remove(&place);
                }
                let (node, provider) = place;
                let uid = own.uid;
                // A kubelet tells the end of what it ran before it lets the object go.
                tell(if own.placed && own.seen.stage != Stage::Ended {
                    Event::ProviderVanished { node, provider, uid }
                } else {
                    Event::ProviderGone { node, provider, uid }
                });
            }
            None => {}
        }
    }
}

impl Role {
    /// `None`: a Pod that has nothing to do with this.
    fn of(pod: &Pod, mode: Mode) -> Option<Self> {
        if let Some(found) = record::read(pod) {
            // What cannot be read is nobody's engine, and is left to whoever wrote it.
            let found =
                found.inspect_err(|error| tracing::warn!(pod = pod.name_any(), %error, "a provider")).ok()?;
            return Provider::of(pod, found).map(Box::new).map(Self::Provider);
        }
        if let Some((node, accelerator)) = launchers::place(pod) {
            let id = ProviderId::launcher(accelerator);
            return Provider::launcher(pod, node, id).map(Box::new).map(Self::Provider);
        }
        keys::is_requester(pod).then(|| Requester::of(pod, mode).map(Box::new).map(Self::Requester)).flatten()
    }

    fn name(&self) -> &ObjectName {
        match self {
            Self::Requester(own) => &own.name,
            Self::Provider(own) => &own.name,
        }
    }

    fn uid(&self) -> &str {
        match self {
            Self::Requester(own) => own.id.as_str(),
            Self::Provider(own) => own.uid.as_str(),
        }
    }

    fn version(&self) -> u64 {
        match self {
            Self::Requester(own) => own.version,
            Self::Provider(own) => own.version,
        }
    }
}

impl Requester {
    fn of(pod: &Pod, mode: Mode) -> Option<Self> {
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
            ended: has_ended(pod),
            finalizer: pod.finalizers().iter().any(|own| own == keys::REQUESTER_FINALIZER),
            edition: Edition::of(pod),
            owner: Owner::of_requester(pod),
            dual: pod.labels().get(keys::DUAL).cloned(),
            server: pod.annotations().get(keys::SERVER_IP).cloned(),
            status: pod.annotations().get(keys::STATUS).cloned(),
            name,
            node,
        })
    }

    /// Its Pod says already whose engine it has, and where.
    pub(super) fn names(&self, provider: &Provider) -> bool {
        self.dual.as_ref() == Some(&provider.name.name)
            && self.server.is_some()
            && self.server == provider.ip()
    }

    /// The InferenceServerConfig that it asks for.
    pub(super) fn config(&self) -> Option<&ObjectName> {
        self.asked.as_ref()?.as_ref().ok()?.config()
    }

    /// Only who is on a node that is known, and asks for something that can be had. Who goes, or has an engine, is told of
    /// whatever it asks for by now: that is no more than to be let go.
    fn event(&self, facts: &Facts, bound: impl FnOnce() -> Option<Ask>) -> Option<Event> {
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
            ended: self.ended,
            finalizer: self.finalizer,
        };
        Some(Event::SeenRequester { node, requester: self.id.clone(), seen })
    }
}

impl Provider {
    fn of(pod: &Pod, found: record::Found) -> Option<Self> {
        let record::Found { node, record, slept, port } = found;
        let id = ProviderId::direct(&record.engine);
        Self::with(pod, node, id, vec![Inside { record, slept, port, routing: Routing::default() }])
    }

    fn launcher(pod: &Pod, node: NodeName, id: ProviderId) -> Option<Self> {
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
            seen: SeenProvider {
                uid,
                stage: stage(pod),
                deleting: pod.metadata.deletion_timestamp.is_some(),
                restarts,
                build: None,
                records: inside.iter().map(|own| own.record.clone()).collect(),
            },
            inside: inside.into_iter().map(|own| (own.record.engine.clone(), own)).collect(),
        })
    }

    /// What the Pod says of this engine.
    pub(super) fn inside(&self, engine: &EngineId) -> Option<&Inside> {
        self.inside.get(engine)
    }

    /// As Pods write it.
    pub(super) fn ip(&self) -> Option<String> {
        self.address.map(|address| address.to_string())
    }

    pub(super) fn at(&self, port: u16) -> Option<SocketAddr> {
        self.address.map(|ip| SocketAddr::from((ip, port)))
    }

    pub(super) fn is_launcher(&self) -> bool {
        self.id.is_launcher()
    }

    pub(super) const fn node(&self) -> &NodeName {
        &self.node
    }

    pub(super) const fn stage(&self) -> Stage {
        self.seen.stage
    }

    /// It has a node.
    pub(super) const fn is_placed(&self) -> bool {
        self.placed
    }

    /// What the Pod says of its engines.
    pub(super) fn records(&self) -> &[Record] {
        &self.seen.records
    }

    /// One of its engines is somebody's.
    pub(super) fn is_bound(&self) -> bool {
        self.records().iter().any(|record| record.requester.is_some())
    }

    /// Whether nothing is in it of which its Pod says what cannot be read.
    pub(super) const fn is_whole(&self) -> bool {
        self.whole
    }

    /// Where a launcher takes orders.
    pub(super) fn orders(&self) -> Option<SocketAddr> {
        self.at(launcher::PORT)
    }
}

fn created(pod: &Pod) -> Tick {
    pod.creation_timestamp().map_or(Tick(0), |time| tick(&time))
}

fn address(pod: &Pod) -> Option<IpAddr> {
    pod.status.as_ref()?.pod_ip.as_ref()?.parse().ok()
}

/// The container that counts, as the kubelet sees it.
fn container(pod: &Pod) -> Option<&ContainerStatus> {
    let all = pod.status.as_ref()?.container_statuses.as_ref()?;
    all.iter().find(|own| own.name == keys::CONTAINER)
}

/// Its id, while it runs.
fn running(own: &ContainerStatus) -> Option<Uid> {
    own.state.as_ref()?.running.as_ref()?;
    own.container_id.as_deref().map(Uid::from)
}

fn began(own: &ContainerStatus) -> Option<Tick> {
    own.state.as_ref()?.running.as_ref()?.started_at.as_ref().map(tick)
}

fn has_ended(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// Since when it is: its object says until when it may be.
fn deleting(pod: &Pod) -> Option<Tick> {
    let until = pod.metadata.deletion_timestamp.as_ref().map(tick)?;
    let grace =
        u64::try_from(pod.metadata.deletion_grace_period_seconds.unwrap_or_default()).unwrap_or_default();
    Some(Tick(until.0.saturating_sub(Millis::secs(grace).0)))
}

fn stage(pod: &Pod) -> Stage {
    if has_ended(pod) {
        return Stage::Ended;
    }
    let Some(own) = container(pod) else { return Stage::Pending };
    match (running(own), own.ready) {
        (Some(_), true) => Stage::Ready,
        (Some(_), false) if own.restart_count == 0 => Stage::Running,
        (None, _)
            if own.restart_count == 0
                && own.last_state.as_ref().is_none_or(|last| last.terminated.is_none()) =>
        {
            Stage::Pending
        }
        _ => Stage::Trouble,
    }
}

#[cfg(test)]
mod tests;
