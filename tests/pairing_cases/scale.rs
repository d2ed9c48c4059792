//! Five thousand nodes: handling an event inspects only the event's own node.

use rouse::{
    model::SleepLevelPolicy,
    pairing::{
        Pairing,
        event::{
            AcceleratorFacts, CommandReply, LeaderEpoch, MemorySizes, ObservedRequester, PairingEvent,
            PairingNodeFacts, RequestedEngine,
        },
        ids::{EngineFingerprint, NodeName, ProviderMode},
        settings::PairingSettings,
    },
    units::{Bytes, Tick},
};

const NODES: usize = 5000;
const NOW: Tick = Tick(1_000_000);

#[test]
fn one_event_looks_at_one_node_of_five_thousand() {
    let mut pairing = Pairing::new(PairingSettings::default());
    pairing.on(&PairingEvent::LeadershipGained { epoch: LeaderEpoch(1) }, NOW);
    for node in 0..NODES {
        let name = NodeName::from(format!("node-{node}"));
        let facts = PairingNodeFacts { cordoned: false, host_sleep_memory: Bytes::gib(500) };
        pairing.on(&PairingEvent::Node { node: name.clone(), facts }, NOW);
        for index in 0..8 {
            let capacity = Bytes::gib(80);
            let facts = AcceleratorFacts {
                index,
                capacity,
                healthy: true,
                sleeping_memory: None,
                wants_launcher: false,
            };
            let accelerator = format!("gpu-{index}").into();
            pairing.on(&PairingEvent::Accelerator { node: name.clone(), accelerator, facts }, NOW);
            pairing.on(&requester(&name, node, index), NOW);
        }
    }
    pairing.on(&PairingEvent::Listed, NOW);
    let first = pairing.plan(NOW);
    assert_eq!(first.planned_nodes.len(), NODES, "each node once");
    assert_eq!(first.commands.len(), NODES * 8);
    pairing.issued(&first, NOW);
    assert!(pairing.plan(NOW).planned_nodes.is_empty(), "nothing happened since");
    for node in [0, 17, NODES - 1] {
        let name = NodeName::from(format!("node-{node}"));
        let command = first.commands.iter().find(|command| command.node == name).expect("its first");
        let (target, serial) = (command.action.target(), command.serial);
        pairing.on(
            &PairingEvent::Outcome { node: name.clone(), target, serial, result: Ok(CommandReply::Done) },
            NOW,
        );
        let plan = pairing.plan(NOW);
        assert_eq!(plan.planned_nodes, [name], "nothing but its node");
        assert!(!plan.commands.is_empty());
        pairing.issued(&plan, NOW);
    }
}

fn requester(node: &NodeName, number: usize, index: u32) -> PairingEvent {
    let sizes = MemorySizes { awake: Bytes::gib(60), asleep: Bytes::gib(2), host: Bytes::gib(20) };
    let ask = RequestedEngine {
        mode: ProviderMode::Sleep,
        fingerprint: EngineFingerprint(1),
        build: None,
        sizes,
        level: SleepLevelPolicy::One,
        stop_after: None,
    };
    let observed = ObservedRequester {
        requested: ask,
        created: NOW,
        stub_container: Some("stub".into()),
        accelerators: vec![format!("gpu-{index}").into()],
        deleting_since: None,
        grace: None,
        terminated: false,
        finalizer: false,
        actuated: false,
    };
    PairingEvent::RequesterObserved {
        node: node.clone(),
        requester: format!("{number}-{index}").into(),
        observed,
    }
}
