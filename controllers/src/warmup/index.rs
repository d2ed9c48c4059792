//! What the controller of Warmups observes, and the events that follow from it for the decisions.

mod known_warmup;
mod nodes;
mod pods;
mod resolved_changes;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use k8s_openapi::api::core::v1::{Node, Pod};
use rouse::{
    pairing::ids::NodeName,
    units::{Millis, Tick},
    warmup::{ImageName, NodeKey, WarmPodName, WarmSet, WarmupEvent, WarmupId, WarmupTargets},
};

use self::{
    known_warmup::KnownWarmup,
    nodes::{CandidateChange, NodeIndex},
    pods::{GroupPods, PullingEngines, WarmupPods},
    resolved_changes::ResolvedChanges,
};
use super::{
    node_facts::canonical,
    status,
    targets::{CandidateNode, ResolvedTargets, TargetInputs, concerned, targets},
};
use crate::{
    convert::warmup::{convert, model_set},
    crd::{AcceleratorNode, Warmup, ledger::ObjectName},
    index::Resolved,
    metrics::WarmSetGauge,
    watch::{Delta, WatchedObject, missing},
    writer::fence::SeenObject,
};

pub(crate) use self::pods::{EndedAttempt, GROUP_LABEL};

/// What the index needs to know of the installation.
#[derive(Clone, Debug, Default)]
pub(crate) struct IndexSettings {
    /// Number of initial lists of each kind that namespaces have.
    pub expected_lists: usize,
    /// The value of the labels of warm nodes: the namespace of the gateways.
    pub installation: String,
    /// Pause after the first failure of a node.
    pub retry_delay: Millis,
    /// Image of the stub, which runs beside every engine.
    pub stub_image: String,
}

/// The objects as last observed.
#[derive(Debug)]
pub(super) struct WarmupIndex {
    settings: IndexSettings,
    listed: BTreeSet<Option<String>>,
    warmups: BTreeMap<ObjectName, KnownWarmup>,
    pods: WarmupPods,
    pulls: PullingEngines,
    groups: GroupPods,
    nodes: NodeIndex,
    resolved: Option<Arc<Resolved>>,
    /// Warmups that have changed.
    changed: BTreeSet<ObjectName>,
    /// Warmups that were deleted, or replaced by others of the same name.
    gone: BTreeSet<ObjectName>,
    /// Warmups whose targets may have changed.
    stale: BTreeSet<ObjectName>,
    /// The models that are to be kept warm, each with its set; `None` until the decisions have heard of them.
    kept_models: Option<BTreeMap<ObjectName, WarmSet>>,
    resolved_changed: bool,
    /// What [`Self::warm_sets`] returns may have changed.
    warm_sets_changed: bool,
}

impl WarmupIndex {
    pub(super) fn new(settings: IndexSettings) -> Self {
        let nodes = NodeIndex::new(settings.installation.clone());
        Self {
            settings,
            listed: BTreeSet::new(),
            warmups: BTreeMap::new(),
            pods: WarmupPods::default(),
            pulls: PullingEngines::default(),
            groups: GroupPods::default(),
            nodes,
            resolved: None,
            changed: BTreeSet::new(),
            gone: BTreeSet::new(),
            stale: BTreeSet::new(),
            kept_models: None,
            resolved_changed: false,
            warm_sets_changed: false,
        }
    }

    /// Forgets what is only observed while leading. All nodes count as changed.
    pub(super) fn begin_term(&mut self) {
        self.listed.clear();
        self.warmups.clear();
        self.pods = WarmupPods::default();
        self.pulls = PullingEngines::default();
        self.groups = GroupPods::default();
        self.changed.clear();
        self.gone.clear();
        self.stale.clear();
        self.kept_models = None;
        self.resolved_changed = true;
        self.warm_sets_changed = true;
        self.nodes.forget_changes();
        self.nodes.mark_all();
    }

    /// Whether everything was seen once.
    pub(super) fn is_complete(&self) -> bool {
        let lists = self.settings.expected_lists;
        self.resolved.is_some()
            && self.nodes.is_listed()
            && self.listed.len() >= lists
            && self.pods.is_listed(lists)
            && self.pulls.is_listed(lists)
            && self.groups.is_listed(lists)
    }

    /// Returns whether more than statuses may have changed.
    pub(super) fn apply_warmups(&mut self, delta: &Delta<Warmup>) -> bool {
        match delta {
            Delta::All { namespace, objects } => {
                for name in missing(&self.warmups, namespace.as_deref(), objects) {
                    self.remove_warmup(&name);
                }
                for found in objects {
                    self.set_warmup(found);
                }
                self.listed.insert(namespace.clone());
                true
            }
            Delta::Applied(found) => self.set_warmup(found),
            Delta::Deleted(name) => {
                self.remove_warmup(name);
                true
            }
        }
    }

    pub(super) fn apply_warmup_pods(&mut self, delta: &Delta<Pod>, now: Tick) {
        self.pods.apply(delta, now);
    }

    pub(super) fn apply_engine_pods(&mut self, delta: &Delta<Pod>) {
        self.pulls.apply(delta);
    }

    pub(super) fn apply_group_pods(&mut self, delta: &Delta<Pod>) {
        self.groups.apply(delta);
    }

    /// Takes a change of nodes. Only a leader asks later which have changed.
    pub(super) fn apply_nodes(&mut self, delta: &Delta<Node>, leads: bool) {
        self.nodes.apply(delta);
        if !leads {
            self.nodes.forget_changes();
        }
    }

    pub(super) fn apply_accelerator_nodes(&mut self, delta: &Delta<AcceleratorNode>) {
        self.nodes.apply_accelerators(delta);
    }

    pub(super) fn set_resolved(&mut self, resolved: Arc<Resolved>) {
        self.resolved_changed = true;
        let of_models = self.warmups.iter().filter_map(|(name, known)| Some((name, known.model()?)));
        match &self.resolved {
            Some(before) => {
                let changes = ResolvedChanges::between(before, &resolved);
                let changed = of_models.filter(|(_, model)| changes.concern(model));
                self.stale.extend(changed.map(|(name, _)| name.clone()));
            }
            None => self.stale.extend(of_models.map(|(name, _)| name.clone())),
        }
        self.resolved = Some(resolved);
    }

    pub(super) const fn resolved(&self) -> Option<&Arc<Resolved>> {
        self.resolved.as_ref()
    }

    pub(super) fn warmup(&self, name: &ObjectName) -> Option<&KnownWarmup> {
        self.warmups.get(name)
    }

    /// Returns the Warmups as they were observed last, those that are being deleted included.
    pub(super) fn warmups(&self) -> impl Iterator<Item = &Warmup> {
        self.warmups.values().map(|known| &*known.object)
    }

    /// Returns what the fence of a write to the Pod of a Warmup needs.
    pub(super) fn seen_pod(&self, name: &ObjectName) -> Option<&SeenObject> {
        self.pods.seen(name)
    }

    /// Returns the version of the node that was observed last.
    pub(super) fn node_version(&self, node: &NodeName) -> Option<String> {
        self.nodes.version(node)
    }

    /// Whether the node can mount an image as a volume.
    pub(super) fn mounts_images(&self, node: &NodeName) -> bool {
        self.nodes.mounts_images(node)
    }

    /// Returns the attempts that have ended since this was last asked.
    pub(super) fn take_ended(&mut self) -> Vec<EndedAttempt> {
        self.pods.take_ended()
    }

    /// Returns the events of everything that has changed since this was last asked.
    pub(super) fn take_events(&mut self) -> Vec<WarmupEvent> {
        let mut events = Vec::new();
        for name in std::mem::take(&mut self.gone) {
            events.push(WarmupEvent::WarmupDeleted(id(&name)));
        }
        self.resolve_targets(&mut events);
        for name in std::mem::take(&mut self.changed) {
            let Some(known) = self.warmups.get(&name).filter(|known| !known.is_ending()) else { continue };
            let request = Arc::new(known.request());
            let stored = Arc::clone(&known.stored);
            events.push(WarmupEvent::Warmup { id: id(&name), request, stored });
        }
        let nodes = self.nodes.take_changed().into_iter();
        events.extend(nodes.map(|(name, facts)| WarmupEvent::Node { name, facts }));
        let pods = self.pods.take_changed().into_iter();
        events.extend(
            pods.map(|(name, pod)| WarmupEvent::Pod { name: WarmPodName::from(name.to_string()), pod }),
        );
        let pulls = self.pulls.take_changed().into_iter();
        events.extend(pulls.map(|(node, pods)| WarmupEvent::EnginesPulling { node, pods }));
        if std::mem::take(&mut self.resolved_changed) && self.find_kept_models() {
            let sets = self.kept_models.iter().flat_map(BTreeMap::values);
            events.push(WarmupEvent::KnownSets(sets.cloned().collect()));
            self.warm_sets_changed = true;
        }
        events
    }

    /// Finds the models that are to be kept warm. Returns whether others are.
    ///
    /// A set of another model belongs to that model's Warmups, and without any, no node stays labelled.
    fn find_kept_models(&mut self) -> bool {
        let served = self.resolved.iter().flat_map(|resolved| &resolved.served);
        let names = served.filter(|(_, served)| served.model.keeps_warm).map(|(name, _)| name);
        let names: Vec<&ObjectName> = names.collect();
        if self.kept_models.as_ref().is_some_and(|known| known.keys().eq(names.iter().copied())) {
            return false;
        }
        // A hash of each name is the costly part.
        let mut before = self.kept_models.take().unwrap_or_default();
        let found = names.into_iter().map(|name| {
            let set = before.remove(name).unwrap_or_else(|| model_set(name));
            (name.clone(), set)
        });
        self.kept_models = Some(found.collect());
        true
    }

    /// Returns whether the numbers of warm nodes may have changed since this was last asked.
    pub(super) fn take_warm_sets_changed(&mut self) -> bool {
        let counts_changed = self.nodes.take_counts_changed();
        std::mem::take(&mut self.warm_sets_changed) || counts_changed
    }

    /// Returns the numbers of warm nodes, by the set of each model and each Warmup that has any.
    pub(super) fn warm_sets(&self) -> BTreeMap<WarmSet, WarmSetGauge> {
        let kept = self.kept_models.iter().flatten().map(|(model, set)| (set, ("model", model)));
        let of_warmups = self.warmups.iter().filter_map(|(name, known)| {
            let target = known.model().map_or(("warmup", name), |model| ("model", model));
            Some((&known.accepted.as_ref().ok()?.request.set, target))
        });
        let targets: BTreeMap<&WarmSet, (&str, &ObjectName)> = kept.chain(of_warmups).collect();
        let counts = self.nodes.warm_counts().iter();
        let gauges = counts.filter_map(|(set, nodes)| {
            let (kind, object) = targets.get(set)?;
            let (namespace, target) = (object.namespace.clone(), format!("{kind}/{}", object.name));
            Some((set.clone(), WarmSetGauge { namespace, target, nodes: *nodes }))
        });
        gauges.collect()
    }

    /// Returns whether more than the status has changed.
    fn set_warmup(&mut self, found: &WatchedObject<Warmup>) -> bool {
        // An object that cannot be read stays what it was.
        let WatchedObject::Readable(object) = found else { return false };
        let name = found.name();
        self.pods.set_uid(&name, object.metadata.uid.as_deref());
        let before = self.warmups.remove(&name);
        let uid = |object: &Warmup| object.metadata.uid.clone();
        if before.as_ref().is_some_and(|before| uid(&before.object) != uid(object)) {
            self.gone.insert(name.clone());
        }
        let is_same = |before: &KnownWarmup| {
            uid(&before.object) == uid(object)
                && before.object.metadata.generation == object.metadata.generation
        };
        let stored = Arc::new(status::progress(&name, object.status.as_ref()));
        let object = Arc::clone(object);
        let before = before.filter(is_same);
        let has_changed = before.as_ref().is_none_or(|before| {
            let (then, now) = (&before.object.metadata, &object.metadata);
            then.deletion_timestamp != now.deletion_timestamp || then.owner_references != now.owner_references
        });
        let known = match before {
            Some(before) => KnownWarmup { object, stored, ..before },
            None => {
                let accepted = convert(&object, self.settings.retry_delay);
                self.warm_sets_changed = true;
                self.stale.insert(name.clone());
                KnownWarmup { object, accepted, targets: None, stored }
            }
        };
        if known.is_ending() {
            self.gone.insert(name.clone());
        }
        self.changed.insert(name.clone());
        self.warmups.insert(name, known);
        has_changed
    }

    fn remove_warmup(&mut self, name: &ObjectName) {
        if self.warmups.remove(name).is_some() {
            self.pods.set_uid(name, None);
            self.gone.insert(name.clone());
            self.warm_sets_changed = true;
        }
    }

    /// Marks the Warmups whose targets may follow otherwise from what has changed. Looks at no node that has not.
    fn mark_stale(&mut self) {
        let groups = self.groups.take_changed();
        let changes = self.nodes.take_candidate_changes();
        if changes.is_empty() && groups.is_empty() {
            return;
        }
        let candidates = self.nodes.candidates();
        let exists = |name: &NodeName| Some((name.clone(), candidates.get(name)?.clone()));
        let nodes: BTreeMap<NodeName, CandidateNode> = changes.keys().filter_map(exists).collect();
        let is_stale = |name: &ObjectName, known: &KnownWarmup| {
            !self.stale.contains(name)
                && (known.group().is_some_and(|group| groups.contains(group))
                    || self.concerns(&changes, &nodes, known))
        };
        let stale = self.warmups.iter().filter(|(name, known)| is_stale(name, known));
        let stale: Vec<ObjectName> = stale.map(|(name, _)| name.clone()).collect();
        self.stale.extend(stale);
    }

    /// Whether the targets may follow otherwise from the nodes that have changed. `nodes`: those that exist.
    fn concerns(
        &self,
        changes: &BTreeMap<NodeName, CandidateChange>,
        nodes: &BTreeMap<NodeName, CandidateNode>,
        known: &KnownWarmup,
    ) -> bool {
        let least = known.least_change();
        let changed = changes.iter().filter(|(_, change)| **change >= least).map(|(name, _)| name);
        let changed: Vec<&NodeName> = changed.collect();
        let Some(accepted) = known.accepted.as_ref().ok().filter(|_| !changed.is_empty()) else {
            return false;
        };
        let Some(before) = &known.targets else { return true };
        let find = |inputs: TargetInputs<'_>| concerned(&accepted.target, &changed, before, inputs);
        self.with_inputs(known, nodes, &BTreeSet::new(), find)
    }

    /// Looks for the targets of Warmups for which they may have changed.
    fn resolve_targets(&mut self, events: &mut Vec<WarmupEvent>) {
        self.mark_stale();
        let mut images_changed = false;
        for name in std::mem::take(&mut self.stale) {
            let Some(known) = self.warmups.get(&name).filter(|known| !known.is_ending()) else { continue };
            let found = self.find_targets(known);
            let Some(known) = self.warmups.get_mut(&name) else { continue };
            if known.targets.as_ref() == Some(&found) {
                continue;
            }
            images_changed = true;
            let tolerations = |targets: &ResolvedTargets| targets.tolerations.clone();
            if known.targets.as_ref().map(tolerations).unwrap_or_default() != found.tolerations {
                self.changed.insert(name.clone());
            }
            events.push(WarmupEvent::Targets { id: id(&name), targets: found.targets.clone() });
            known.targets = Some(found);
        }
        if images_changed {
            self.nodes.set_wanted(wanted_images(self.warmups.values()));
        }
    }

    fn find_targets(&self, known: &KnownWarmup) -> ResolvedTargets {
        let accepted = match &known.accepted {
            Ok(accepted) => accepted,
            Err(reason) => {
                let targets = WarmupTargets::Refused { reason: reason.clone() };
                return ResolvedTargets { targets, actions: BTreeMap::new(), tolerations: Vec::new() };
            }
        };
        let former = match &known.targets {
            // Nodes that were chosen before matter only where not all of them are.
            _ if !known.is_limited() => BTreeSet::new(),
            Some(targets) => targets.actions.keys().cloned().collect(),
            // A new leader keeps the nodes on which a former one has begun.
            None => {
                let begun = |node: &&NodeName| known.stored.record.get(NodeKey::new(node)).is_some();
                self.nodes.candidates().keys().filter(begun).cloned().collect()
            }
        };
        let find = |inputs: TargetInputs<'_>| targets(&accepted.target, inputs);
        self.with_inputs(known, self.nodes.candidates(), &former, find)
    }

    /// Calls `find` with what the targets of the Warmup follow from, of these nodes.
    fn with_inputs<T>(
        &self,
        known: &KnownWarmup,
        nodes: &BTreeMap<NodeName, CandidateNode>,
        former: &BTreeSet<NodeName>,
        find: impl FnOnce(TargetInputs<'_>) -> T,
    ) -> T {
        let group_pods = known.group().map(|group| self.groups.of_group(group)).unwrap_or_default();
        let nothing = Resolved::default();
        find(TargetInputs {
            nodes,
            group_pods: &group_pods,
            resolved: self.resolved.as_deref().unwrap_or(&nothing),
            stub_image: &self.settings.stub_image,
            former,
        })
    }
}

/// Returns the Warmup's name for the decisions.
pub(super) fn id(name: &ObjectName) -> WarmupId {
    WarmupId::from(name.to_string())
}

/// Splits the name that the decisions have for a Warmup or its Pod.
pub(super) fn object_name(id: &str) -> ObjectName {
    let (namespace, name) = id.split_once('/').unwrap_or(("", id));
    ObjectName::new(namespace, name)
}

/// Returns the images that Warmups want, by their canonical names.
fn wanted_images<'a>(
    warmups: impl Iterator<Item = &'a KnownWarmup>,
) -> BTreeMap<String, BTreeSet<ImageName>> {
    let mut wanted: BTreeMap<String, BTreeSet<ImageName>> = BTreeMap::new();
    // Thousands of nodes share few actions.
    let mut seen = BTreeSet::new();
    for actions in warmups.flat_map(|known| &known.targets).flat_map(|targets| targets.actions.values()) {
        if !seen.insert(Arc::as_ptr(actions)) {
            continue;
        }
        for image in &actions.images {
            if let Some(name) = canonical(image.as_str()) {
                wanted.entry(name).or_default().insert(image.clone());
            }
        }
    }
    wanted
}
