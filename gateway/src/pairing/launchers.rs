//! The launchers that are there: what is heard of each, and where its engines listen.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use rouse::pairing::{
    event::{Epoch, Event},
    ids::{EngineId, NodeName, ProviderId, RequesterId, Uid},
    node::{Node, State},
};
use tokio::{
    sync::mpsc,
    task::{AbortHandle, JoinSet},
};

use super::directory::Directory;
use crate::{
    controllers::stub_key::StubKey,
    metrics::Duals,
    platform::kubernetes::launcher::{Instance, Launcher, Seen, engine},
};

/// Engines of launchers listen here and above.
const FIRST: u16 = 8100;
/// What was heard and not taken note of yet; more waits in the launchers.
const WAITING: usize = 256;

/// Where engines listen that were bound by this leader, and whose Pods may not have been seen with that yet. No two of a node
/// have the same port.
#[derive(Debug, Default)]
pub(super) struct Ports(BTreeMap<(NodeName, EngineId), u16>);

impl Ports {
    pub(super) fn get(&self, node: &NodeName, engine: &EngineId) -> Option<u16> {
        self.0.get(&(node.clone(), engine.clone())).copied()
    }

    /// The engine's own, or the lowest that none of the node's has. `there`: what the launchers' Pods say.
    pub(super) fn give<'a>(
        &mut self,
        node: &Node,
        engine: &EngineId,
        there: impl Iterator<Item = (&'a EngineId, u16)>,
    ) -> u16 {
        self.0.retain(|(at, known), _| *at != node.name || node.engines.contains_key(known));
        let there: BTreeMap<&EngineId, u16> = there.collect();
        let own = self.get(&node.name, engine).or_else(|| there.get(engine).copied());
        let given = self.0.iter().filter(|((at, _), _)| *at == node.name).map(|(_, port)| *port);
        let taken: BTreeSet<u16> = given.chain(there.values().copied()).collect();
        let free = || (FIRST..=u16::MAX).find(|port| !taken.contains(port)).unwrap_or(FIRST);
        let port = own.unwrap_or_else(free);
        self.0.insert((node.name.clone(), engine.clone()), port);
        port
    }
}

/// What a launcher tells.
#[derive(Debug)]
pub(super) struct Heard {
    pub(super) node: NodeName,
    pub(super) launcher: ProviderId,
    /// Of its Pod.
    uid: Uid,
    pub(super) seen: Seen,
}

/// One connection to each launcher that is ready, for as long as its Pod is there.
#[derive(Debug)]
pub(super) struct Ears {
    tell: mpsc::Sender<Heard>,
    pub(super) heard: mpsc::Receiver<Heard>,
    tasks: JoinSet<()>,
    of: BTreeMap<Uid, AbortHandle>,
}

impl Ears {
    pub(super) fn new() -> Self {
        let (tell, heard) = mpsc::channel(WAITING);
        Self { tell, heard, tasks: JoinSet::new(), of: BTreeMap::new() }
    }

    /// To nobody any more.
    pub(super) fn close(&mut self) {
        *self = Self::new();
    }

    /// To all that are there.
    pub(super) fn listen(&mut self, directory: &Directory, epoch: Epoch, key: &StubKey, metrics: &Duals) {
        let there: BTreeSet<&Uid> = directory.launcher_uids().collect();
        self.of.retain(|uid, task| {
            let stays = there.contains(uid);
            if !stays {
                task.abort();
            }
            stays
        });
        while self.tasks.try_join_next().is_some() {}
        for (node, id, own) in directory.launchers() {
            let (false, Some(address)) = (self.of.contains_key(&own.uid), own.orders()) else { continue };
            let calls = Arc::new(metrics.calls(&own.name.namespace, None));
            let token = key.launcher_token(&own.name);
            let launcher = Launcher::new(address, Some(token), epoch.0).observed(calls);
            let (node, id, uid) = (node.clone(), id.clone(), own.uid.clone());
            let (tell, of) = (self.tell.clone(), uid.clone());
            let wrap = move |seen| Heard { node: node.clone(), launcher: id.clone(), uid: of.clone(), seen };
            let task = self.tasks.spawn(async move { launcher.watch(tell, wrap).await });
            self.of.insert(uid, task);
        }
    }

    /// Whether it is of a launcher that is listened to: what was under way from one before is not.
    pub(super) fn knows(&self, heard: &Heard) -> bool {
        self.of.contains_key(&heard.uid)
    }
}

/// What follows from it for the decisions.
pub(super) fn events(heard: &Heard) -> Vec<Event> {
    let all: Vec<&Instance> = match &heard.seen {
        Seen::Listed(all) => all.iter().collect(),
        Seen::Created(instance)
        | Seen::Updated(instance)
        | Seen::Stopped { instance, .. }
        | Seen::Deleted(instance) => vec![instance],
        Seen::Lost => Vec::new(),
    };
    let gone = matches!(heard.seen, Seen::Deleted(_));
    all.into_iter().filter_map(|instance| event(&heard.node, instance, gone)).collect()
}

fn event(node: &NodeName, instance: &Instance, gone: bool) -> Option<Event> {
    let (node, engine, generation) = (node.clone(), engine(instance)?, instance.generation()?);
    if gone || !instance.running {
        // One that stopped may have left processes that hold its memory, which its deletion ends: until then it is not gone.
        return Some(Event::Died { node, engine, generation, gone });
    }
    (instance.ready == Some(true)).then_some(Event::Answers { node, engine, generation })
}

/// An engine that ended while it was starting: what the requester's user is told of it.
pub(super) fn failed(heard: &Heard, node: &Node) -> Option<(RequesterId, String)> {
    let Seen::Stopped { instance, exit_code } = &heard.seen else { return None };
    let known = node.engines.get(&engine(instance)?)?;
    let starts = matches!(known.state, State::Creating | State::Starting);
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
pub(super) fn missing(heard: &Heard, node: &Node) -> Vec<EngineId> {
    let Seen::Listed(all) = &heard.seen else { return Vec::new() };
    let listed: BTreeSet<EngineId> = all.iter().filter_map(engine).collect();
    let runs =
        |state| !matches!(state, State::Unknown | State::Creating | State::Ending { .. } | State::Gone);
    let ours = node.engines_in(&heard.launcher).filter(|own| runs(own.state) && !listed.contains(&own.id));
    ours.map(|own| own.id.clone()).collect()
}

/// Engines that run there and that nobody knows of, by the ids that the launcher has for them: a leader before ordered them, and
/// they came when this one had looked already.
pub(super) fn strays(heard: &Heard, node: &Node) -> Vec<String> {
    let all: &[Instance] = match &heard.seen {
        Seen::Listed(all) => all,
        Seen::Created(instance) => std::slice::from_ref(instance),
        _ => &[],
    };
    let unknown = |own: &&Instance| {
        own.generation().is_some() && engine(own).is_some_and(|id| !node.engines.contains_key(&id))
    };
    all.iter().filter(unknown).map(|own| own.id.clone()).collect()
}

/// Asks once more for one that is missing; nothing, where it is there or nobody answers.
pub(super) async fn verify(
    launcher: Arc<Launcher>,
    node: NodeName,
    engine: EngineId,
    generation: rouse::units::Generation,
) -> Option<Event> {
    let id = crate::platform::kubernetes::launcher::id(engine.fingerprint, &engine.accelerators);
    let found = launcher.get(&id).await.ok()?;
    found.is_none().then_some(Event::Died { node, engine, generation, gone: true })
}

#[cfg(test)]
mod tests {
    use rouse::{
        pairing::ids::{Fingerprint, Mode},
        units::Generation,
    };
    use serde_json::json;

    use super::*;
    use crate::platform::kubernetes::launcher::id;

    fn engine(fingerprint: u64) -> EngineId {
        EngineId {
            mode: Mode::Launcher,
            accelerators: ["GPU-0".into()].into(),
            fingerprint: Fingerprint(fingerprint),
        }
    }

    fn shown(status: &str, ready: bool, generation: &str) -> Instance {
        let own = engine(7);
        let instance = json!({
            "instance_id": id(own.fingerprint, &own.accelerators), "status": status, "ready": ready,
            "gpu_uuids": ["GPU-0"], "annotations": {"rouse.dev/generation": generation},
        });
        serde_json::from_value(instance).unwrap()
    }

    fn heard(seen: Seen) -> Heard {
        let launcher = ProviderId::launcher("GPU-0".into());
        Heard { node: "n".into(), launcher, uid: "u".into(), seen }
    }

    #[test]
    fn an_engine_keeps_its_port_and_no_other_of_its_node_gets_it() {
        let (mut ports, mut node) = (Ports::default(), Node::new("n".into()));
        let (one, two, three) = (engine(1), engine(2), engine(3));
        assert_eq!(ports.give(&node, &one, [(&two, 8101)].into_iter()), 8100);
        // What the core does with its order to bind.
        let record = rouse::pairing::event::Record {
            engine: one.clone(),
            generation: Generation(1),
            sizes: rouse::pairing::event::Sizes {
                awake: rouse::units::Bytes::ZERO,
                asleep: rouse::units::Bytes::ZERO,
                host: rouse::units::Bytes::ZERO,
            },
            level: rouse::model::LevelPolicy::Auto,
            stop_after: None,
            requester: None,
            last_used: rouse::units::Tick(0),
        };
        let seen = rouse::pairing::event::SeenProvider {
            uid: "u".into(),
            stage: rouse::pairing::event::Stage::Ready,
            deleting: false,
            restarts: 0,
            build: None,
            host: None,
            records: vec![record],
        };
        let mut core = rouse::pairing::Pairing::new(rouse::pairing::settings::Settings::default());
        let provider = ProviderId::launcher("GPU-0".into());
        core.on(&Event::SeenProvider { node: node.name.clone(), provider, seen }, rouse::units::Tick(0));
        node.engines.clone_from(&core.node(&node.name).unwrap().engines);
        assert_eq!(ports.give(&node, &three, [(&two, 8101)].into_iter()), 8102);
        assert_eq!(ports.give(&node, &one, std::iter::empty()), 8100);
        assert_eq!(ports.give(&node, &two, [(&two, 8101)].into_iter()), 8101);
    }

    #[test]
    fn an_engine_that_nobody_knows_of_is_a_stray_and_what_others_started_is_not() {
        let node = Node::new("n".into());
        let ours = shown("running", true, "3");
        let id = ours.id.clone();
        assert_eq!(
            strays(&heard(Seen::Listed(vec![ours.clone(), shown("running", true, "?")])), &node),
            [id]
        );
        assert_eq!(strays(&heard(Seen::Deleted(ours)), &node), Vec::<String>::new());
    }

    #[test]
    fn what_is_heard_is_of_one_life_and_what_stopped_is_not_gone() {
        let said = |seen| {
            let all = events(&heard(seen));
            all.into_iter().map(|event| match event {
                Event::Answers { generation, .. } => (generation.0, "answers"),
                Event::Died { generation, gone: true, .. } => (generation.0, "gone"),
                Event::Died { generation, .. } => (generation.0, "died"),
                other => panic!("{other:?}"),
            })
        };
        let said = |seen| said(seen).collect::<Vec<_>>();
        assert_eq!(said(Seen::Created(shown("running", false, "3"))), []);
        assert_eq!(said(Seen::Updated(shown("running", true, "3"))), [(3, "answers")]);
        let stopped = Seen::Stopped { instance: shown("stopped", false, "3"), exit_code: Some(-9) };
        assert_eq!(said(stopped), [(3, "died")]);
        assert_eq!(said(Seen::Deleted(shown("stopped", false, "3"))), [(3, "gone")]);
        assert_eq!(said(Seen::Listed(vec![shown("running", true, "4")])), [(4, "answers")]);
        assert_eq!(said(Seen::Updated(shown("running", true, "?"))), [], "none of ours");
        assert_eq!(said(Seen::Lost), []);
    }
}
