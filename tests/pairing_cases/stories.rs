//! Whole stories on file: what a leader is told and orders, in a simulated cluster in which only the script happens.
//!
//! `cargo insta review` shows what goes differently when a decision changes on purpose.

use rouse::{
    pairing::ids::Mode,
    sim::cluster::{Cluster, Deed, Owner, Plot, Script, Trouble},
    units::Millis,
};

use crate::driver::ask;

fn owner(fingerprint: u64, mode: Mode) -> Owner {
    Owner { ask: ask(mode, fingerprint), count: 1, node: None, wants: false }
}

fn after(seconds: u64, script: Script) -> Deed {
    Deed { after: Millis::secs(seconds), script }
}

fn story(plot: Plot, lasts: u64) -> String {
    let mut cluster = Cluster::new(plot).told();
    cluster.run_until(cluster.now() + Millis::secs(lasts)).unwrap_or_else(|broken| panic!("{broken}"));
    cluster.story()
}

#[test]
fn an_accelerator_is_handed_on_while_its_engine_is_awake() {
    let owners = vec![owner(1, Mode::Sleep), owner(2, Mode::Sleep)];
    let deeds = vec![
        after(1, Script::Want(0, true)),
        after(20, Script::Want(1, true)),
        after(21, Script::Want(0, false)),
        after(21, Script::Kill(0)),
        after(60, Script::Want(1, false)),
        after(65, Script::Want(0, true)),
    ];
    insta::assert_snapshot!(story(Plot::quiet(1, owners, deeds), 90));
}

#[test]
fn a_leader_is_lost_while_a_requester_is_being_deleted() {
    let owners = vec![owner(1, Mode::Launcher)];
    let deeds = vec![
        after(1, Script::Want(0, true)),
        after(30, Script::Want(0, false)),
        after(30, Script::Trouble(Trouble::LoseLeader)),
    ];
    insta::assert_snapshot!(story(Plot::quiet(1, owners, deeds), 90));
}
