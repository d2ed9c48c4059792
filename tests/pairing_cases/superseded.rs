//! A write is refused because its receiver knows a newer leader: this leader stops deciding.

use rouse::{
    pairing::{
        event::{LeaderEpoch, PairingEvent},
        ids::{ProviderId, ProviderMode},
        node::PairingEngineState,
    },
    units::{Bytes, Millis},
};

use crate::harness::*;

#[test]
fn who_is_deposed_ends_nothing_and_orders_nothing() {
    let mut case = PairingCase::new(1);
    let id = case.cold_start("one", ask(ProviderMode::Sleep, 1), &["a"]);
    case.put_to_sleep("one", &id);
    case.requester("two", ask(ProviderMode::Sleep, 1), &["a"], |_| ());
    case.done(binds(&id));
    assert!(case.has(wakes(&id)));
    let ordered = case.story.len();
    case.on(PairingEvent::Superseded { epoch: LeaderEpoch(1) });
    // The wake's deadline and all other deadlines pass.
    case.advance(Millis::secs(3600));
    case.delete("two");
    case.provider_gone(&ProviderId::direct(&id));
    assert_eq!(case.story[ordered..], [""; 0], "another one leads");
    assert_eq!(case.pairing.next_deadline(), None, "and nothing is waited for");
    assert_eq!(case.state(&id), Some(PairingEngineState::Waking), "nor is anything judged");
}

#[test]
fn what_was_refused_to_a_leader_of_before_deposes_nobody() {
    let mut case = PairingCase::new(1);
    case.lead(1, 2);
    case.on(PairingEvent::Listed);
    case.on(PairingEvent::Superseded { epoch: LeaderEpoch(1) });
    case.cold_start("one", ask(ProviderMode::Sleep, 1), &["a"]);
}

#[test]
fn who_leads_again_begins_anew() {
    let mut case = PairingCase::new(1);
    let id = case.cold_start("one", ask(ProviderMode::Sleep, 1), &["a"]);
    case.on(PairingEvent::Superseded { epoch: LeaderEpoch(1) });
    case.lead(1, 3);
    case.on(PairingEvent::Listed);
    assert_eq!(case.state(&id), None);
    assert_eq!(case.node().reserved(&"a".into()), Bytes::ZERO);
    case.cold_start("two", ask(ProviderMode::Sleep, 2), &["a"]);
}
