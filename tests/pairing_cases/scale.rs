//! Five thousand nodes: an event is decided by looking at its own.

use rouse::{
    model::LevelPolicy,
    pairing::{
        Pairing,
        event::{AcceleratorFacts, Answer, Ask, Epoch, Event, NodeFacts, SeenRequester, Sizes},
        ids::{Fingerprint, Mode, NodeName},
        settings::Settings,
    },
    units::{Bytes, Tick},
};

const NODES: usize = 5000;
const NOW: Tick = Tick(1_000_000);

#[test]
fn one_event_looks_at_one_node_of_five_thousand() {
    let mut pairing = Pairing::new(Settings::default());
    pairing.on(&Event::Led { epoch: Epoch(1) }, NOW);
    for node in 0..NODES {
        let name = NodeName::from(format!("node-{node}"));
        let facts = NodeFacts { cordoned: false, host: Bytes::gib(500) };
        pairing.on(&Event::Node { node: name.clone(), facts }, NOW);
        for index in 0..8 {
            let capacity = Bytes::gib(80);
            let facts = AcceleratorFacts { index, capacity, healthy: true, sleeping: None, launcher: false };
            let accelerator = format!("gpu-{index}").into();
            pairing.on(&Event::Accelerator { node: name.clone(), accelerator, facts }, NOW);
            pairing.on(&requester(&name, node, index), NOW);
        }
    }
    pairing.on(&Event::Listed, NOW);
    let first = pairing.plan(NOW);
    assert_eq!(first.looked.len(), NODES, "each node once");
    assert_eq!(first.commands.len(), NODES * 8);
    pairing.issued(&first, NOW);
    assert!(pairing.plan(NOW).looked.is_empty(), "nothing happened since");
    for node in [0, 17, NODES - 1] {
        let name = NodeName::from(format!("node-{node}"));
        let command = first.commands.iter().find(|command| command.node == name).expect("its first");
        let (target, serial) = (command.order.target(), command.serial);
        pairing.on(&Event::Outcome { node: name.clone(), target, serial, result: Ok(Answer::Done) }, NOW);
        let plan = pairing.plan(NOW);
        assert_eq!(plan.looked, [name], "nothing but its node");
        assert!(!plan.commands.is_empty());
        pairing.issued(&plan, NOW);
    }
}

fn requester(node: &NodeName, number: usize, index: u32) -> Event {
    let sizes = Sizes { awake: Bytes::gib(60), asleep: Bytes::gib(2), host: Bytes::gib(20) };
    let ask = Ask {
        mode: Mode::Sleep,
        fingerprint: Fingerprint(1),
        build: None,
        sizes,
        level: LevelPolicy::One,
        stop_after: None,
    };
    let seen = SeenRequester {
        ask,
        created: NOW,
        stub: Some("stub".into()),
        accelerators: vec![format!("gpu-{index}").into()],
        deleting: None,
        grace: None,
        ended: false,
        finalizer: false,
    };
    Event::SeenRequester { node: node.clone(), requester: format!("{number}-{index}").into(), seen }
}
