//! The launchers that are there: what is heard of each, and where its engines listen.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use rouse::pairing::{
    event::{Epoch, PairingEvent},
    ids::{NodeName, PairingEngineId, ProviderId, RequesterId, Uid},
    node::{PairingEngineState, PairingNode},
};
use tokio::{
    sync::mpsc,
    task::{AbortHandle, JoinSet},
};

use super::index::PodIndex;
use crate::{
    controllers::stub_key::StubKey,
    metrics::DualPodMetrics,
    platform::kubernetes::launcher::{LauncherClient, LauncherInstance, LauncherWatchEvent, engine_id},
};

/// Engines of launchers listen here and above.
const FIRST_ENGINE_PORT: u16 = 8100;
/// What was heard and not taken note of yet; more waits in the launchers.
const EVENT_CHANNEL_CAPACITY: usize = 256;

/// Where engines listen that were bound by this leader, and whose Pods may not have been seen with that yet. No two of a node
/// have the same port.
#[derive(Debug, Default)]
pub(super) struct EnginePorts(BTreeMap<(NodeName, PairingEngineId), u16>);

impl EnginePorts {
    pub(super) fn get(&self, node: &NodeName, engine: &PairingEngineId) -> Option<u16> {
        self.0.get(&(node.clone(), engine.clone())).copied()
    }

    /// The engine's own, or the lowest that none of the node's has. `there`: what the launchers' Pods say.
    pub(super) fn allocate<'a>(
        &mut self,
        node: &PairingNode,
        engine: &PairingEngineId,
        there: impl Iterator<Item = (&'a PairingEngineId, u16)>,
    ) -> u16 {
        self.0.retain(|(at, known), _| *at != node.name || node.engines.contains_key(known));
        let there: BTreeMap<&PairingEngineId, u16> = there.collect();
        let own = self.get(&node.name, engine).or_else(|| there.get(engine).copied());
        let given = self.0.iter().filter(|((at, _), _)| *at == node.name).map(|(_, port)| *port);
        let taken: BTreeSet<u16> = given.chain(there.values().copied()).collect();
        let free =
            || (FIRST_ENGINE_PORT..=u16::MAX).find(|port| !taken.contains(port)).unwrap_or(FIRST_ENGINE_PORT);
        let port = own.unwrap_or_else(free);
        self.0.insert((node.name.clone(), engine.clone()), port);
        port
    }
}

/// What a launcher tells.
#[derive(Debug)]
pub(super) struct LauncherEvent {
    pub(super) node: NodeName,
    pub(super) launcher: ProviderId,
    /// Of its Pod.
    uid: Uid,
    pub(super) change: LauncherWatchEvent,
}

/// One connection to each launcher that is ready, for as long as its Pod is there.
#[derive(Debug)]
pub(super) struct LauncherWatches {
    tx: mpsc::Sender<LauncherEvent>,
    pub(super) rx: mpsc::Receiver<LauncherEvent>,
    tasks: JoinSet<()>,
    watches: BTreeMap<Uid, AbortHandle>,
}

impl LauncherWatches {
    pub(super) fn new() -> Self {
        let (tell, heard) = mpsc::channel(EVENT_CHANNEL_CAPACITY);
        Self { tx: tell, rx: heard, tasks: JoinSet::new(), watches: BTreeMap::new() }
    }

    /// To nobody any more.
    pub(super) fn clear(&mut self) {
        *self = Self::new();
    }

    /// To all that are there.
    pub(super) fn sync(
        &mut self,
        directory: &PodIndex,
        epoch: Epoch,
        key: &StubKey,
        metrics: &DualPodMetrics,
    ) {
        let there: BTreeSet<&Uid> = directory.launcher_uids().collect();
        self.watches.retain(|uid, task| {
            let stays = there.contains(uid);
            if !stays {
                task.abort();
            }
            stays
        });
        while self.tasks.try_join_next().is_some() {}
        for (node, id, own) in directory.launchers() {
            let (false, Some(address)) = (self.watches.contains_key(&own.uid), own.launcher_address()) else {
                continue;
            };
            let calls = Arc::new(metrics.call_observer(&own.name.namespace, None));
            let token = key.launcher_token(&own.name);
            let launcher = LauncherClient::new(address, Some(token), epoch.0).observed(calls);
            let (node, id, uid) = (node.clone(), id.clone(), own.uid.clone());
            let (tell, of) = (self.tx.clone(), uid.clone());
            let wrap = move |seen| LauncherEvent {
                node: node.clone(),
                launcher: id.clone(),
                uid: of.clone(),
                change: seen,
            };
            let task = self.tasks.spawn(async move { launcher.watch(tell, wrap).await });
            self.watches.insert(uid, task);
        }
    }

    /// Whether it is of a launcher that is listened to: what was under way from one before is not.
    pub(super) fn is_watched(&self, heard: &LauncherEvent) -> bool {
        self.watches.contains_key(&heard.uid)
    }
}

/// What follows from it for the decisions.
pub(super) fn events(heard: &LauncherEvent) -> Vec<PairingEvent> {
    let all: Vec<&LauncherInstance> = match &heard.change {
        LauncherWatchEvent::Listed(all) => all.iter().collect(),
        LauncherWatchEvent::Created(instance)
        | LauncherWatchEvent::Updated(instance)
        | LauncherWatchEvent::Stopped { instance, .. }
        | LauncherWatchEvent::Deleted(instance) => vec![instance],
        LauncherWatchEvent::Disconnected => Vec::new(),
    };
    let gone = matches!(heard.change, LauncherWatchEvent::Deleted(_));
    all.into_iter().filter_map(|instance| event(&heard.node, instance, gone)).collect()
}

fn event(node: &NodeName, instance: &LauncherInstance, gone: bool) -> Option<PairingEvent> {
    let (node, engine, generation) = (node.clone(), engine_id(instance)?, instance.generation()?);
    if gone || !instance.running {
        // One that stopped may have left processes that hold its memory, which its deletion ends: until then it is not gone.
        return Some(PairingEvent::EngineDied { node, engine, generation, gone });
    }
    (instance.ready == Some(true)).then_some(PairingEvent::EngineReady { node, engine, generation })
}

/// An engine that ended while it was starting: what the requester's user is told of it.
pub(super) fn start_failure(heard: &LauncherEvent, node: &PairingNode) -> Option<(RequesterId, String)> {
    let LauncherWatchEvent::Stopped { instance, exit_code } = &heard.change else { return None };
    let known = node.engines.get(&engine_id(instance)?)?;
    let starts = matches!(known.state, PairingEngineState::Creating | PairingEngineState::Starting);
    let own = known.requester().filter(|_| starts && instance.generation() == Some(known.generation))?;
    let how = exit_code.map_or_else(String::new, |code| match code {
        0.. => format!(" with code {code}"),
        _ => format!(" by signal {}", code.unsigned_abs()),
    });
    let name = instance.config().unwrap_or("its InferenceServerConfig");
    let text = format!(
        "the engine of {name} ended{how} before it answered: its launcher has the log of {}",
        instance.id
    );
    Some((own.clone(), text))
}

/// Engines that ran, and that a list does not show. It may be from before they were launched: each has to be asked for.
pub(super) fn missing(heard: &LauncherEvent, node: &PairingNode) -> Vec<PairingEngineId> {
    let LauncherWatchEvent::Listed(all) = &heard.change else { return Vec::new() };
    let listed: BTreeSet<PairingEngineId> = all.iter().filter_map(engine_id).collect();
    let runs = |state| {
        !matches!(
            state,
            PairingEngineState::Unknown
                | PairingEngineState::Creating
                | PairingEngineState::Stopping { .. }
                | PairingEngineState::Gone
        )
    };
    let ours = node.engines_in(&heard.launcher).filter(|own| runs(own.state) && !listed.contains(&own.id));
    ours.map(|own| own.id.clone()).collect()
}

/// Engines that run there and that nobody knows of, by the ids that the launcher has for them: a leader before ordered them, and
/// they came when this one had looked already.
pub(super) fn orphans(heard: &LauncherEvent, node: &PairingNode) -> Vec<String> {
    let all: &[LauncherInstance] = match &heard.change {
        LauncherWatchEvent::Listed(all) => all,
        LauncherWatchEvent::Created(instance) => std::slice::from_ref(instance),
        _ => &[],
    };
    let unknown = |own: &&LauncherInstance| {
        own.generation().is_some() && engine_id(own).is_some_and(|id| !node.engines.contains_key(&id))
    };
    all.iter().filter(unknown).map(|own| own.id.clone()).collect()
}

/// Asks once more for one that is missing; nothing, where it is there or nobody answers.
pub(super) async fn verify(
    launcher: Arc<LauncherClient>,
    node: NodeName,
    engine: PairingEngineId,
    generation: rouse::units::Generation,
) -> Option<PairingEvent> {
    let id = crate::platform::kubernetes::launcher::instance_id(engine.fingerprint, &engine.accelerators);
    let found = launcher.get(&id).await.ok()?;
    found.is_none().then_some(PairingEvent::EngineDied { node, engine, generation, gone: true })
}

#[cfg(test)]
mod tests {
    use rouse::{
        pairing::ids::{EngineFingerprint, ProviderMode},
        units::Generation,
    };
    use serde_json::json;

    use super::*;
    use crate::platform::kubernetes::launcher::instance_id;

    fn engine(fingerprint: u64) -> PairingEngineId {
        PairingEngineId {
            mode: ProviderMode::Launcher,
            accelerators: ["GPU-0".into()].into(),
            fingerprint: EngineFingerprint(fingerprint),
        }
    }

    fn shown(status: &str, ready: bool, generation: &str) -> LauncherInstance {
        let own = engine(7);
        let instance = json!({
            "instance_id": instance_id(own.fingerprint, &own.accelerators), "status": status, "ready": ready,
            "gpu_uuids": ["GPU-0"], "annotations": {"rouse.dev/generation": generation},
        });
        serde_json::from_value(instance).unwrap()
    }

    fn launcher_event(seen: LauncherWatchEvent) -> LauncherEvent {
        let launcher = ProviderId::launcher("GPU-0".into());
        LauncherEvent { node: "n".into(), launcher, uid: "u".into(), change: seen }
    }

    #[test]
    fn an_engine_keeps_its_port_and_no_other_of_its_node_gets_it() {
        let (mut ports, mut node) = (EnginePorts::default(), PairingNode::new("n".into()));
        let (one, two, three) = (engine(1), engine(2), engine(3));
        assert_eq!(ports.allocate(&node, &one, [(&two, 8101)].into_iter()), 8100);
        // What the core does with its order to bind.
        let record = rouse::pairing::event::EngineRecord {
            engine: one.clone(),
            generation: Generation(1),
            sizes: rouse::pairing::event::MemorySizes {
                awake: rouse::units::Bytes::ZERO,
                asleep: rouse::units::Bytes::ZERO,
                host: rouse::units::Bytes::ZERO,
            },
            level: rouse::model::SleepLevelPolicy::Auto,
            stop_after: None,
            requester: None,
            last_used: rouse::units::Tick(0),
        };
        let seen = rouse::pairing::event::ObservedProvider {
            uid: "u".into(),
            phase: rouse::pairing::event::ProviderPhase::Ready,
            deleting: false,
            restarts: 0,
            build: None,
            memory_limit: None,
            records: vec![record],
        };
        let mut core = rouse::pairing::Pairing::new(rouse::pairing::settings::PairingSettings::default());
        let provider = ProviderId::launcher("GPU-0".into());
        core.on(
            &PairingEvent::ProviderObserved { node: node.name.clone(), provider, observed: seen },
            rouse::units::Tick(0),
        );
        node.engines.clone_from(&core.node(&node.name).unwrap().engines);
        assert_eq!(ports.allocate(&node, &three, [(&two, 8101)].into_iter()), 8102);
        assert_eq!(ports.allocate(&node, &one, std::iter::empty()), 8100);
        assert_eq!(ports.allocate(&node, &two, [(&two, 8101)].into_iter()), 8101);
    }

    #[test]
    fn an_engine_that_nobody_knows_of_is_a_stray_and_what_others_started_is_not() {
        let node = PairingNode::new("n".into());
        let ours = shown("running", true, "3");
        let id = ours.id.clone();
        assert_eq!(
            orphans(
                &launcher_event(LauncherWatchEvent::Listed(vec![ours.clone(), shown("running", true, "?")])),
                &node
            ),
            [id]
        );
        assert_eq!(orphans(&launcher_event(LauncherWatchEvent::Deleted(ours)), &node), Vec::<String>::new());
    }

    #[test]
    fn what_is_heard_is_of_one_life_and_what_stopped_is_not_gone() {
        let said = |seen| {
            let all = events(&launcher_event(seen));
            all.into_iter().map(|event| match event {
                PairingEvent::EngineReady { generation, .. } => (generation.0, "answers"),
                PairingEvent::EngineDied { generation, gone: true, .. } => (generation.0, "gone"),
                PairingEvent::EngineDied { generation, .. } => (generation.0, "died"),
                other => panic!("{other:?}"),
            })
        };
        let said = |seen| said(seen).collect::<Vec<_>>();
        assert_eq!(said(LauncherWatchEvent::Created(shown("running", false, "3"))), []);
        assert_eq!(said(LauncherWatchEvent::Updated(shown("running", true, "3"))), [(3, "answers")]);
        let stopped =
            LauncherWatchEvent::Stopped { instance: shown("stopped", false, "3"), exit_code: Some(-9) };
        assert_eq!(said(stopped), [(3, "died")]);
        assert_eq!(said(LauncherWatchEvent::Deleted(shown("stopped", false, "3"))), [(3, "gone")]);
        assert_eq!(said(LauncherWatchEvent::Listed(vec![shown("running", true, "4")])), [(4, "answers")]);
        assert_eq!(said(LauncherWatchEvent::Updated(shown("running", true, "?"))), [], "none of ours");
        assert_eq!(said(LauncherWatchEvent::Disconnected), []);
    }
}
