use rouse::fleet::event::Event;

use super::*;

/// Records a turn with these events.
fn turn(inputs: &StatusInputs, fleet: &mut Fleet, events: &[Event]) {
    let now = Tick(1);
    events.iter().for_each(|event| fleet.on(event, now));
    let (plan, changes) = (fleet.plan(now), fleet.take_routing_changes());
    inputs.record_turn(fleet, &plan, &changes);
}

/// The thread that writes statuses may be in the next term already, and must not write what was decided before.
#[test]
fn facts_of_a_former_own_term_count_in_no_other_term() {
    let (inputs, mut fleet) = (StatusInputs::default(), Fleet::new());
    let leads = |leads| Event::LeadershipChanged { leads };
    let floor = |epoch| Event::GenerationFloor { generation: generation_floor::of_epoch(epoch) };
    turn(&inputs, &mut fleet, &[leads(false)]);
    assert!(!inputs.decides_in(0));
    turn(&inputs, &mut fleet, &[leads(true), floor(7)]);
    assert!(!inputs.decides_in(7), "it does not know yet what runs");
    turn(&inputs, &mut fleet, &[Event::AdoptionDone]);
    assert!(inputs.decides_in(7) && !inputs.decides_in(8));
    turn(&inputs, &mut fleet, &[leads(false), leads(true), floor(8), Event::AdoptionDone]);
    assert!(inputs.decides_in(8) && !inputs.decides_in(7));
    turn(&inputs, &mut fleet, &[leads(false)]);
    assert!(!inputs.decides_in(8));
}
