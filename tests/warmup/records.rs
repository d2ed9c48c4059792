//! The packed record of outcomes.

use rouse::{
    pairing::ids::NodeName,
    warmup::{
        NodeKey, NodeUidKey, RecordError, RecordGroup, RecordState, RecordedNode, RecordedOutcome,
        WarmupRecord,
    },
};

/// The key of a node as a status has it.
fn key(name: &str) -> String {
    let group = |nodes: &str| RecordGroup {
        state: RecordState::Done,
        items: 1,
        attempts: 0,
        cause: None,
        nodes: nodes.to_owned(),
        uids: None,
    };
    // No function shows a single key: the one that is found among all of one digit each is the node's.
    let mut digits = String::new();
    let alphabet: Vec<char> = ('A'..='Z').chain('a'..='z').chain('0'..='9').chain(['-', '_']).collect();
    let wanted = NodeKey::new(&NodeName::from(name));
    for place in 0..8 {
        let smaller = |digit: &&char| {
            let rest = "A".repeat(7 - place);
            let record = WarmupRecord::from_groups(&[group(&format!("{digits}{digit}{rest}"))]).unwrap();
            record.iter().all(|(key, _)| key <= wanted)
        };
        let digit = alphabet.iter().rfind(smaller).copied().unwrap();
        digits.push(digit);
    }
    digits
}

#[test]
fn a_record_is_read_as_it_was_written() {
    let groups = [
        RecordGroup {
            state: RecordState::Done,
            items: 7,
            attempts: 0,
            cause: None,
            nodes: key("n1") + &key("n2"),
            uids: None,
        },
        RecordGroup {
            state: RecordState::Failed,
            items: 7,
            attempts: 3,
            cause: Some("Auth".to_owned()),
            nodes: key("n3"),
            uids: None,
        },
        RecordGroup {
            state: RecordState::Retried,
            items: 8,
            attempts: 2,
            cause: None,
            nodes: key("n4"),
            uids: None,
        },
    ];
    let record = WarmupRecord::from_groups(&groups).unwrap();
    assert_eq!(record.len(), 4);
    let outcome = |name: &str| record.get(NodeKey::new(&NodeName::from(name))).copied();
    let uid = NodeUidKey::default();
    for name in ["n1", "n2"] {
        let done = RecordedNode { outcome: RecordedOutcome::Done, items: 7, attempts: 0, uid };
        assert_eq!(outcome(name), Some(done));
    }
    let failed = RecordedNode { outcome: RecordedOutcome::Failed("Auth"), items: 7, attempts: 3, uid };
    assert_eq!(outcome("n3"), Some(failed));
    assert_eq!(outcome("n4").map(|node| node.outcome), Some(RecordedOutcome::Retried));
    assert_eq!(outcome("n5"), None);
    assert_eq!(WarmupRecord::from_groups(&record.groups()), Ok(record));
}

#[test]
fn a_damaged_record_is_refused() {
    let damaged = |nodes: &str| {
        let group = RecordGroup {
            state: RecordState::Done,
            items: 1,
            attempts: 0,
            cause: None,
            nodes: nodes.to_owned(),
            uids: None,
        };
        WarmupRecord::from_groups(&[group]).unwrap_err()
    };
    assert_eq!(damaged("AAAAAAA"), RecordError::Length(7));
    assert_eq!(damaged("AAAAAAA!"), RecordError::Digit);
    assert_eq!(damaged("AAAAAAÄ"), RecordError::Digit);
}

#[test]
fn the_uids_of_a_record_are_in_the_order_of_its_nodes() {
    let group = |nodes: String, uids: &str| RecordGroup {
        state: RecordState::Done,
        items: 7,
        attempts: 0,
        cause: None,
        nodes,
        uids: Some(uids.to_owned()),
    };
    let read = |nodes, uids| WarmupRecord::from_groups(&[group(nodes, uids)]);
    let record = read(key("n2") + &key("n1") + &key("n3"), "AABAACAAA").unwrap();
    let uid = |name: &str| record.get(NodeKey::new(&NodeName::from(name))).unwrap().uid;
    assert!(uid("n1").differs_from(uid("n2")));
    assert!(!uid("n3").is_known(), "it may be any");
    assert!(!uid("n3").differs_from(uid("n1")) && !uid("n1").differs_from(uid("n3")));
    let groups = record.groups();
    assert_eq!(groups.len(), 1, "nodes of one outcome are together");
    assert_eq!(WarmupRecord::from_groups(&groups), Ok(record.clone()));
    assert_eq!(read(key("n1"), "AA"), Err(RecordError::Uids(2)));
    assert_eq!(read(key("n1") + &key("n2"), "AAB"), Err(RecordError::Uids(3)));
    assert_eq!(read(key("n1"), "AA!"), Err(RecordError::Digit));
    let uids: std::collections::BTreeSet<NodeUidKey> =
        (0..100).map(|number| NodeUidKey::new(&format!("7d1c3a52-{number}"))).collect();
    assert!(uids.len() > 98 && uids.iter().all(|uid| uid.is_known()));
}

#[test]
fn a_cause_that_a_later_version_wrote_is_read_as_unknown() {
    let group = RecordGroup {
        state: RecordState::Failed,
        items: 1,
        attempts: 1,
        cause: Some("Meteorite".to_owned()),
        nodes: key("n1"),
        uids: None,
    };
    let record = WarmupRecord::from_groups(&[group]).unwrap();
    assert_eq!(record.groups()[0].cause.as_deref(), Some("Unknown"));
}

#[test]
fn names_of_many_nodes_have_keys_of_their_own() {
    let patterns = ["node-{}", "gke-pool-a-{}.internal", "ip-10-0-{}"];
    let names =
        patterns.iter().flat_map(|pattern| (0..20_000).map(move |n| pattern.replace("{}", &n.to_string())));
    let keys: std::collections::BTreeSet<NodeKey> =
        names.map(|name| NodeKey::new(&name.as_str().into())).collect();
    assert_eq!(keys.len(), 60_000);
}
