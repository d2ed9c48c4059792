//! Host RAM of level-1 sleepers: one sum over all Pods and launchers of a node, and one within each Pod's memory limit.
//! The complete reports are snapshots.

use rouse::{
    model::SleepLevelPolicy::{self, Auto, One, Two},
    pairing::{
        event::{CommandReply, PairingEvent, PairingNodeFacts, ProviderPhase, RequestedEngine},
        ids::{PairingEngineId, ProviderId, ProviderMode},
        node::HostMemoryShortage,
    },
    units::{Bytes, Millis},
};

use crate::harness::*;

/// The sleepers' budget of host RAM. Each sleeper here keeps 20 GiB at level 1.
const HOST: Bytes = Bytes::gib(50);

/// An awake engine of this kind in its own Pod, or in its accelerator's launcher.
fn awake(
    case: &mut PairingCase,
    mode: ProviderMode,
    number: u64,
    on: &str,
    level: SleepLevelPolicy,
) -> PairingEngineId {
    case.started(&format!("of-{number}"), RequestedEngine { level, ..ask(mode, number) }, &[on])
}

/// A node with five awake engines.
fn all_awake() -> (PairingCase, Vec<(PairingEngineId, SleepLevelPolicy)>) {
    let mut case = PairingCase::new(5);
    case.on(PairingEvent::Node {
        node: node(),
        facts: PairingNodeFacts { cordoned: false, host_sleep_memory: HOST },
    });
    let all = [
        (ProviderMode::Sleep, "a", One),
        (ProviderMode::Launcher, "b", One),
        (ProviderMode::Launcher, "c", Auto),
        (ProviderMode::Launcher, "d", One),
        (ProviderMode::Sleep, "e", Two),
    ];
    let awake = (1..).zip(all).map(|(number, (mode, on, level))| {
        let id = awake(&mut case, mode, number, on, level);
        (id, level)
    });
    let awake = awake.collect();
    (case, awake)
}

/// Deletes the engine's requester, and describes the engine's outcome.
fn goes(case: &mut PairingCase, id: &PairingEngineId) -> String {
    let name = format!("of-{}", id.fingerprint.0);
    case.delete(&name);
    case.done(closes_gate(id));
    let level = case.ordered(sleeps(id)).and_then(level_of).expect("there is a level for everybody");
    case.complete(sleeps(id), Ok(CommandReply::Asleep { residue: None }));
    case.done(unbinds(id));
    format!("sleeps at level {level}")
}

#[test]
fn over_all_pods_and_launchers_of_a_node() {
    let (mut case, all) = all_awake();
    let mut lines = vec![format!("sleepers may keep {HOST}")];
    for (id, level) in &all {
        let provider = case.known(id).provider.clone();
        let outcome = goes(&mut case, id);
        case.advance(Millis::secs(61));
        lines.push(format!(
            "{id} in {provider}, level {level:?}: {outcome}; {} are kept",
            case.node().reserved_host()
        ));
        assert!(case.node().reserved_host() <= HOST);
    }
    for (number, on, level) in [(98, "d", Two), (99, "e", Auto)] {
        let mut requested = ask(ProviderMode::Launcher, number);
        requested.level = level;
        let id = engine(ProviderMode::Launcher, number, &[on]);
        case.launcher_ready(on);
        case.requester(&format!("of-{number}"), requested, &[on], |_| ());
        let evicted = all.iter().filter(|(id, _)| case.has(ends(id))).map(|(id, _)| id.to_string());
        let gone: Vec<String> = evicted.collect();
        assert!(gone.is_empty(), "an engine that is awake takes none of the sleepers' host RAM: {gone:?}");
        assert!(
            case.has(binds(&id)),
            "no launch waits for host RAM: {}",
            case.reason(&format!("of-{number}"))
        );
        lines.push(format!("{id} is launched, level {level:?}"));
    }
    insta::assert_snapshot!(lines.join("\n"));
}

/// Sets the observed memory limit of a provider's Pod.
fn limited(case: &mut PairingCase, provider: &ProviderId, limit: Bytes) {
    case.provider(provider, ProviderPhase::Ready, |observed| observed.memory_limit = Some(limit));
}

/// What keeps this engine from a sleep at level 1.
fn shortage(case: &PairingCase, id: &PairingEngineId) -> Option<HostMemoryShortage> {
    case.node().host_memory_shortage(case.known(id))
}

#[test]
fn a_shortage_names_the_limit_that_is_too_small_and_what_is_left_of_it() {
    let (mut case, all) = all_awake();
    let [(first, _), (second, _), .., (last, _)] = &all[..] else { panic!("{all:?}") };
    for sleeper in [first, second] {
        assert_eq!(shortage(&case, sleeper), None);
        goes(&mut case, sleeper);
        case.advance(Millis::secs(61));
    }
    let on_node = HostMemoryShortage::Node { budget: HOST, left: Bytes::gib(10) };
    assert_eq!(shortage(&case, last), Some(on_node));
    case.on(PairingEvent::Node {
        node: node(),
        facts: PairingNodeFacts { cordoned: false, host_sleep_memory: Bytes::gib(60) },
    });
    assert_eq!(shortage(&case, last), None);
    let limit = Bytes::gib(19);
    limited(&mut case, &ProviderId::direct(last), limit);
    assert_eq!(shortage(&case, last), Some(HostMemoryShortage::Pod { limit, left: limit }));
}

#[test]
fn within_the_memory_limit_of_a_pod() {
    let mut case = PairingCase::new(2);
    case.on(PairingEvent::Node {
        node: node(),
        facts: PairingNodeFacts { cordoned: false, host_sleep_memory: Bytes::gib(200) },
    });
    let mut lines = vec![];
    for (number, limit) in [(1, 20), (2, 19)] {
        let id = awake(&mut case, ProviderMode::Sleep, number, "a", One);
        limited(&mut case, &ProviderId::direct(&id), Bytes::gib(limit));
        let what = goes(&mut case, &id);
        case.advance(Millis::secs(61));
        lines.push(format!("{id}, whose weights are 20Gi, in a Pod of {limit}Gi: {what}"));
    }
    let launcher = case.launcher_ready("b");
    limited(&mut case, &launcher, Bytes::gib(50));
    for number in 3..=5 {
        let id = engine(ProviderMode::Launcher, number, &["b"]);
        case.requester(&format!("of-{number}"), ask(ProviderMode::Launcher, number), &["b"], |_| ());
        case.launched(&id);
        case.finalized(&format!("of-{number}"));
        let what = goes(&mut case, &id);
        case.advance(Millis::secs(61));
        lines.push(format!("{id}, the same, in a launcher of 50Gi: {what}"));
    }
    insta::assert_snapshot!(lines.join("\n"));
}
