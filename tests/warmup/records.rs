//! The packed record of outcomes.

use rouse::{
    pairing::ids::NodeName,
    warmup::{NodeKey, RecordError, RecordGroup, RecordState, RecordedNode, RecordedOutcome, WarmupRecord},
};

/// The key of a node as a status has it.
fn key(name: &str) -> String {
    let group = |nodes: &str| RecordGroup {
        state: RecordState::Done,
        items: 1,
        attempts: 0,
        cause: None,
        nodes: nodes.to_owned(),
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
        },
        RecordGroup {
            state: RecordState::Failed,
            items: 7,
            attempts: 3,
            cause: Some("Auth".to_owned()),
            nodes: key("n3"),
        },
        RecordGroup { state: RecordState::Retried, items: 8, attempts: 2, cause: None, nodes: key("n4") },
    ];
    let record = WarmupRecord::from_groups(&groups).unwrap();
    assert_eq!(record.len(), 4);
    let outcome = |name: &str| record.get(NodeKey::new(&NodeName::from(name))).copied();
    for name in ["n1", "n2"] {
        let done = RecordedNode { outcome: RecordedOutcome::Done, items: 7, attempts: 0 };
        assert_eq!(outcome(name), Some(done));
    }
    let failed = RecordedNode { outcome: RecordedOutcome::Failed("Auth"), items: 7, attempts: 3 };
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
        };
        WarmupRecord::from_groups(&[group]).unwrap_err()
    };
    assert_eq!(damaged("AAAAAAA"), RecordError::Length(7));
    assert_eq!(damaged("AAAAAAA!"), RecordError::Digit);
    assert_eq!(damaged("AAAAAAÄ"), RecordError::Digit);
}

#[test]
fn a_cause_that_a_later_version_wrote_is_read_as_unknown() {
    let group = RecordGroup {
        state: RecordState::Failed,
        items: 1,
        attempts: 1,
        cause: Some("Meteorite".to_owned()),
        nodes: key("n1"),
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
