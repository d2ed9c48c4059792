//! The written scenarios: their events are recorded as journals, and the outcomes as stories.
//!
//! A journal is the joint output of the simulated world and the fleet at recording time. The world must still produce
//! the same journal, and replaying the file must still produce the same story. When a decision changes on purpose,
//! `ROUSE_RECORD=1 cargo test --test scenarios` records the journals again and `cargo insta review` shows the stories.

use std::path::PathBuf;

use rouse::{
    journal::{self, transcript::render_transcript},
    sim::{SimulatedWorld, scenario::scripts},
};

fn scenario_dir() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("gateway/tests/scenarios")
}

#[test]
fn every_scenario_tells_its_story() {
    let mut differ = Vec::new();
    for (scenario, lasts) in scripts::all() {
        let name = scenario.name.clone();
        let mut world = SimulatedWorld::new(scenario).with_journal();
        if let Err(failure) = world.run_until(lasts) {
            panic!("{failure}\n{}", render_transcript(world.journal()));
        }
        let lines = world.journal().iter().map(|line| journal::write(line).expect("a line is JSON") + "\n");
        let recorded: String = lines.collect();
        let path = scenario_dir().join(format!("{name}.journal"));
        if std::env::var_os("ROUSE_RECORD").is_some() {
            std::fs::write(&path, &recorded).expect("the journal is written");
        }
        let on_file = std::fs::read_to_string(&path).unwrap_or_default();
        if on_file != recorded {
            differ.push(name.clone());
            continue;
        }
        let lines = journal::read(&on_file).expect("the journal on file can be read");
        insta::with_settings!({ prepend_module_to_snapshot => false, omit_expression => true, snapshot_path => scenario_dir() }, {
            insta::assert_snapshot!(name, render_transcript(&lines));
        });
    }
    assert!(differ.is_empty(), "these now go differently: {differ:?}; ROUSE_RECORD=1 records them anew");
}
