//! Snapshots of whole stories: a leader's events and orders, in a simulated cluster with only scripted events.
//!
//! `cargo insta review` shows the differences when a decision changes on purpose.

use rouse::{
    pairing::ids::ProviderMode,
    sim::cluster::{
        ClusterAction, ClusterFault, ClusterScenario, SimulatedCluster, SimulatedOwner, TimedClusterAction,
    },
    units::Millis,
};

use crate::harness::ask;

fn owner(fingerprint: u64, mode: ProviderMode) -> SimulatedOwner {
    SimulatedOwner {
        requested: ask(mode, fingerprint),
        accelerator_count: 1,
        node: None,
        wants_requester: false,
    }
}

fn after(seconds: u64, script: ClusterAction) -> TimedClusterAction {
    TimedClusterAction { after: Millis::secs(seconds), action: script }
}

fn story(plot: ClusterScenario, lasts: u64) -> String {
    let mut cluster = SimulatedCluster::new(plot).with_transcript();
    cluster.run_until(cluster.now() + Millis::secs(lasts)).unwrap_or_else(|broken| panic!("{broken}"));
    cluster.transcript()
}

#[test]
fn an_accelerator_is_handed_on_while_its_engine_is_awake() {
    let owners = vec![owner(1, ProviderMode::Sleep), owner(2, ProviderMode::Sleep)];
    let deeds = vec![
        after(1, ClusterAction::SetWanted(0, true)),
        after(20, ClusterAction::SetWanted(1, true)),
        after(21, ClusterAction::SetWanted(0, false)),
        after(21, ClusterAction::KillRequester(0)),
        after(60, ClusterAction::SetWanted(1, false)),
        after(65, ClusterAction::SetWanted(0, true)),
    ];
    insta::assert_snapshot!(story(ClusterScenario::quiet(1, owners, deeds), 90));
}

#[test]
fn a_leader_is_lost_while_a_requester_is_being_deleted() {
    let owners = vec![owner(1, ProviderMode::Launcher)];
    let deeds = vec![
        after(1, ClusterAction::SetWanted(0, true)),
        after(30, ClusterAction::SetWanted(0, false)),
        after(30, ClusterAction::InjectFault(ClusterFault::LoseLeader)),
    ];
    insta::assert_snapshot!(story(ClusterScenario::quiet(1, owners, deeds), 90));
}
