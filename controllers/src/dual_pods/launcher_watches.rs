//! Watches all launchers and assigns ports to their engines.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use rouse::pairing::{
    event::{LeaderEpoch, PairingEvent},
    ids::{NodeName, PairingEngineId, ProviderId, RequesterId, Uid},
    node::{PairingEngineState, PairingNode},
};
use tokio::{
    sync::mpsc,
    task::{AbortHandle, JoinSet},
};

use super::{index::PairingPodIndex, per_engine::PerEngine};
use crate::{
    metrics::DualPodMetrics,
    platform::launcher::{LauncherClient, LauncherInstance, LauncherWatchEvent, engine_id},
    stub_key::StubKey,
};

/// Lowest port for engines of launchers.
const FIRST_ENGINE_PORT: u16 = 8100;
/// Maximum number of unprocessed events; further events wait in the launchers.
const EVENT_CHANNEL_CAPACITY: usize = 256;

/// Ports of engines that this leader has bound, whose Pods may not show them yet.
///
/// No two engines of a node have the same port.
#[derive(Debug, Default)]
pub(super) struct EnginePorts(PerEngine<u16>);

impl EnginePorts {
    pub(super) fn get(&self, node: &NodeName, engine: &PairingEngineId) -> Option<u16> {
        self.0.get(node, engine).copied()
    }

    /// Returns the engine's own port, or else the node's lowest free port. `recorded`: ports on the launchers' Pods.
    pub(super) fn allocate<'a>(
        &mut self,
        node: &PairingNode,
        engine: &PairingEngineId,
        recorded: impl Iterator<Item = (&'a PairingEngineId, u16)>,
    ) -> u16 {
        self.retain_on(&node.name, |known| node.engines.contains_key(known));
        let recorded: BTreeMap<&PairingEngineId, u16> = recorded.collect();
        let existing_port = self.get(&node.name, engine).or_else(|| recorded.get(engine).copied());
        let given = self.0.values_on(&node.name);
        let used: BTreeSet<u16> = given.chain(recorded.values()).copied().collect();
        let free =
            || (FIRST_ENGINE_PORT..=u16::MAX).find(|port| !used.contains(port)).unwrap_or(FIRST_ENGINE_PORT);
        let port = existing_port.unwrap_or_else(free);
        self.0.insert(&node.name, engine.clone(), port);
        port
    }

    /// Keeps the node's engines that still exist.
    pub(super) fn retain_on(&mut self, node: &NodeName, exists: impl Fn(&PairingEngineId) -> bool) {
        self.0.retain_on(node, exists);
    }
}

/// An event of a launcher.
#[derive(Debug)]
pub(crate) struct LauncherEvent {
    pub(super) node: NodeName,
    pub(super) launcher: ProviderId,
    /// UID of the launcher's Pod.
    uid: Uid,
    /// The term in which its connection was opened.
    term: u64,
    pub(super) change: LauncherWatchEvent,
}

/// A launcher and its node.
pub(super) type LauncherLocation = (NodeName, ProviderId);

/// Connections to launchers: one per launcher that is ready, while its Pod exists.
#[derive(Debug)]
pub(super) struct LauncherWatches {
    tx: mpsc::Sender<LauncherEvent>,
    /// Counts this gateway's terms. Events of earlier terms' connections do not count.
    term: u64,
    tasks: JoinSet<()>,
    /// The connection to each launcher, and the UID of the launcher's Pod.
    watches: BTreeMap<LauncherLocation, (Uid, AbortHandle)>,
}

impl LauncherWatches {
    /// Returns the watches and their events.
    pub(super) fn new() -> (Self, mpsc::Receiver<LauncherEvent>) {
        let (tx, rx) = mpsc::channel(EVENT_CHANNEL_CAPACITY);
        (Self { tx, term: 0, tasks: JoinSet::new(), watches: BTreeMap::new() }, rx)
    }

    /// Ends all connections.
    pub(super) fn clear(&mut self) {
        self.term += 1;
        self.tasks = JoinSet::new();
        self.watches.clear();
    }

    /// Connects to new launchers, and ends the connections of vanished ones.
    ///
    /// Visits only the launchers that changed since the last call.
    pub(super) fn sync(
        &mut self,
        index: &mut PairingPodIndex,
        epoch: LeaderEpoch,
        key: &StubKey,
        metrics: &DualPodMetrics,
    ) {
        while self.tasks.try_join_next().is_some() {}
        for location in index.take_changed_launchers() {
            let (node, id) = &location;
            let provider = index.provider(node, id);
            if let Some((uid, task)) = self.watches.get(&location)
                && provider.is_none_or(|provider| provider.uid != *uid)
            {
                task.abort();
                self.watches.remove(&location);
            }
            let Some(provider) = provider.filter(|provider| provider.accepts_launcher_calls()) else {
                continue;
            };
            let (false, Some(address)) = (self.watches.contains_key(&location), provider.launcher_address())
            else {
                continue;
            };
            let call_observer = Arc::new(metrics.call_observer(&provider.name.namespace, None));
            let token = key.launcher_token(&provider.name);
            let launcher = LauncherClient::new(address, Some(token), epoch.0).observed(call_observer);
            let (node, id, uid) = (node.clone(), id.clone(), provider.uid.clone());
            let (tx, of, term) = (self.tx.clone(), uid.clone(), self.term);
            let wrap = move |change| LauncherEvent {
                node: node.clone(),
                launcher: id.clone(),
                uid: of.clone(),
                term,
                change,
            };
            let task = self.tasks.spawn(async move { launcher.watch(tx, wrap).await });
            self.watches.insert(location, (uid, task));
        }
    }

    /// Whether the event's launcher is still watched. An earlier launcher's late events do not count.
    pub(super) fn is_watched(&self, launcher_event: &LauncherEvent) -> bool {
        let location = (launcher_event.node.clone(), launcher_event.launcher.clone());
        launcher_event.term == self.term
            && self.watches.get(&location).is_some_and(|(uid, _)| *uid == launcher_event.uid)
    }
}

/// Converts a launcher's event into pairing events.
pub(super) fn events(launcher_event: &LauncherEvent) -> Vec<PairingEvent> {
    let all: Vec<&LauncherInstance> = match &launcher_event.change {
        LauncherWatchEvent::Listed(all) => all.iter().collect(),
        LauncherWatchEvent::Created(instance)
        | LauncherWatchEvent::Updated(instance)
        | LauncherWatchEvent::Stopped { instance, .. }
        | LauncherWatchEvent::Deleted(instance) => vec![instance],
        LauncherWatchEvent::Disconnected => Vec::new(),
    };
    let gone = matches!(launcher_event.change, LauncherWatchEvent::Deleted(_));
    all.into_iter().filter_map(|instance| event(&launcher_event.node, instance, gone)).collect()
}

fn event(node: &NodeName, instance: &LauncherInstance, gone: bool) -> Option<PairingEvent> {
    let (node, engine, generation) = (node.clone(), engine_id(instance)?, instance.generation()?);
    if gone || !instance.running {
        // Processes of a stopped engine may still hold its memory. Deleting the instance ends them; it is gone only
        // then.
        return Some(PairingEvent::EngineDied { node, engine, generation, gone });
    }
    (instance.ready == Some(true)).then_some(PairingEvent::EngineReady { node, engine, generation })
}

/// Returns the message for a requester's user if an engine ended while it was starting.
pub(super) fn start_failure(
    launcher_event: &LauncherEvent,
    node: &PairingNode,
) -> Option<(RequesterId, String)> {
    let LauncherWatchEvent::Stopped { instance, exit_code } = &launcher_event.change else { return None };
    let engine_state = node.engines.get(&engine_id(instance)?)?;
    let starts = matches!(engine_state.state, PairingEngineState::Creating | PairingEngineState::Starting);
    let requester = engine_state
        .requester()
        .filter(|_| starts && instance.generation() == Some(engine_state.generation))?;
    let how = exit_code.map_or_else(String::new, |code| match code {
        0.. => format!(" with code {code}"),
        _ => format!(" by signal {}", code.unsigned_abs()),
    });
    let name = instance.config().unwrap_or("the server patch");
    let text = format!(
        "the engine of {name} exited{how} before it answered: see the log of {} in its launcher",
        instance.id
    );
    Some((requester.clone(), text))
}

/// Returns engines that ran and that a list lacks. The list may predate their launch, so each needs a query.
pub(super) fn missing(launcher_event: &LauncherEvent, node: &PairingNode) -> Vec<PairingEngineId> {
    let LauncherWatchEvent::Listed(all) = &launcher_event.change else { return Vec::new() };
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
    let lacking = node
        .engines_in(&launcher_event.launcher)
        .filter(|engine| runs(engine.state) && !listed.contains(&engine.id));
    lacking.map(|engine| engine.id.clone()).collect()
}

/// Returns the ids of running engines that the pairing logic does not know.
///
/// A former leader ordered them, and they started after this leader had listed the engines.
pub(super) fn orphans(launcher_event: &LauncherEvent, node: &PairingNode) -> Vec<String> {
    let all: &[LauncherInstance] = match &launcher_event.change {
        LauncherWatchEvent::Listed(all) => all,
        LauncherWatchEvent::Created(instance) => std::slice::from_ref(instance),
        _ => &[],
    };
    let unknown = |instance: &&LauncherInstance| {
        instance.generation().is_some()
            && engine_id(instance).is_some_and(|id| !node.engines.contains_key(&id))
    };
    all.iter().filter(unknown).map(|instance| instance.id.clone()).collect()
}

/// Queries a missing engine; returns `None` if it exists or the launcher does not answer.
pub(super) async fn verify(
    launcher: Arc<LauncherClient>,
    node: NodeName,
    engine: PairingEngineId,
    generation: rouse::units::Generation,
) -> Option<PairingEvent> {
    let id = crate::platform::launcher::instance_id(engine.fingerprint, &engine.accelerators);
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
    use crate::platform::launcher::instance_id;

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

    fn launcher_event(event: LauncherWatchEvent) -> LauncherEvent {
        let launcher = ProviderId::launcher("GPU-0".into());
        LauncherEvent { node: "n".into(), launcher, uid: "u".into(), term: 0, change: event }
    }

    #[test]
    fn an_engine_keeps_its_port_and_no_other_of_its_node_gets_it() {
        let (mut ports, mut node) = (EnginePorts::default(), PairingNode::new("n".into()));
        let (one, two, three) = (engine(1), engine(2), engine(3));
        assert_eq!(ports.allocate(&node, &one, [(&two, 8101)].into_iter()), 8100);
        // The core does the same with its command to bind.
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
