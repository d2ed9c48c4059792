use k8s_openapi::api::core::v1::{NodeCondition, NodeStatus};
use rouse::{
    pairing::{Pairing, event::Standing},
    units::Tick,
};

use super::{told::FEW, *};
use crate::{controllers::crd::ledger::ObjectName, platform::kubernetes::dcgm::Samples};

fn node(ready: &str) -> Change<Node> {
    let condition = |type_: &str, status: &str| NodeCondition {
        type_: type_.to_owned(),
        status: status.to_owned(),
        ..NodeCondition::default()
    };
    let mut node = Node::default();
    node.metadata.name = Some("a".to_owned());
    let conditions = Some(vec![condition("MemoryPressure", "Unknown"), condition("Ready", ready)]);
    node.status = Some(NodeStatus { conditions, ..NodeStatus::default() });
    Change::Applied(Box::new(Found::Good(node)))
}

fn heard(facts: &mut Facts) -> Vec<bool> {
    let mut all = Vec::new();
    facts.tell(&mut |event| {
        if let Event::Heard { reports, .. } = event {
            all.push(reports);
        }
    });
    all
}

#[test]
fn a_kubelet_that_falls_silent_is_told_of_and_so_is_its_return() {
    let mut facts = Facts::default();
    let mut after = |change: Option<Change<Node>>| {
        change.into_iter().for_each(|change| facts.nodes(change));
        heard(&mut facts)
    };
    assert!(after(Some(node("True"))).is_empty(), "one of which nothing is told reports");
    assert_eq!(after(Some(node("Unknown"))), [false]);
    assert!(after(None).is_empty(), "it is said once");
    assert!(after(Some(node("Unknown"))).is_empty());
    assert_eq!(after(Some(node("False"))), [true], "it reports, if nothing good");
    after(Some(node("Unknown")));
    let gone = Change::Deleted(ObjectName::new("", "a"));
    assert_eq!(after(Some(gone)), [true], "of what is not there nothing is told");
    facts.nodes(node("Unknown"));
    heard(&mut facts);
    facts.forget_told();
    assert_eq!(heard(&mut facts), [false], "a new leader is told again");
}

#[test]
fn a_fault_lasts_until_its_series_says_nothing_of_the_kind() {
    let mut facts = Facts::default();
    let id = AcceleratorId::from("GPU-1");
    let mut after = |faulty: bool, erred: bool| {
        let faults = faulty.then(|| (id.clone(), "Xid 79".to_owned())).into_iter().collect();
        let erred = erred.then(|| id.clone()).into_iter().collect();
        facts.sampled(&Samples { faults, erred, ..Samples::default() });
        (facts.faults.contains_key(&id), std::mem::take(&mut facts.news))
    };
    assert_eq!(after(false, true), (false, false), "a program that erred");
    assert_eq!(after(true, true), (true, true));
    assert_eq!(after(true, true), (true, false), "it is no news");
    assert_eq!(after(false, true), (true, false), "the last Xid is another, harmless one");
    assert_eq!(after(false, false), (false, true));
}

#[test]
fn engines_that_nobody_has_any_more_are_forgotten_here_and_by_the_decisions() {
    let (mut facts, mut core) =
        (Facts::default(), Pairing::new(rouse::pairing::settings::Settings::default()));
    let many = u64::try_from(FEW).unwrap();
    let tell = |facts: &mut Facts, core: &mut Pairing| {
        facts.tell(&mut |event| core.on(&event, Tick(1)));
        (0..2 * many).filter(|own| core.standing(Fingerprint(*own)) == Standing::Outdated).count()
    };
    // Each edition is of another engine, and makes the one before outdated.
    for version in 0..many {
        let edition = crate::controllers::dual::edition::Edition { origin: "set/a".to_owned(), version };
        facts.editions.meet("ns", &edition, Fingerprint(version), Some(Tick(version)));
    }
    facts.news = true;
    assert_eq!(tell(&mut facts, &mut core), FEW - 1);
    facts.forget_unused(&core);
    assert_eq!(tell(&mut facts, &mut core), 0);
    assert_eq!((facts.editions.len(), facts.told.standings.len()), (0, 0));
}
