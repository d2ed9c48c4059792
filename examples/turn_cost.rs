//! Runs a fixed number of turns for counting instructions: `turn_cost ENGINES WHAT TIMES`. WHAT is the index of a state
//! in `benches/plan/worlds.rs`, or `on`, `deadline` or `turn`. Two runs that differ only in TIMES give the cost of one
//! turn.

use std::hint::black_box;

use worlds::{NOW, WaitingLoad, used_event};

#[path = "../benches/plan/worlds.rs"]
mod worlds;

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [engines, what, times] = arguments.as_slice() else {
        anyhow::bail!("turn_cost ENGINES WHAT TIMES");
    };
    let (engines, times): (usize, u32) = (engines.parse()?, times.parse()?);
    let waiting = what.parse().ok().and_then(|n: usize| WaitingLoad::ALL.get(n)).copied();
    let mut fleet = worlds::fleet(engines, waiting.unwrap_or(WaitingLoad::One));
    let mut commands = 0;
    for time in 0..times {
        match what.as_str() {
            "on" => fleet.on(&used_event(1, 2 + time % 2), NOW),
            "deadline" => drop(black_box(fleet.next_deadline())),
            "turn" => {
                fleet.on(&used_event(1, 2 + time % 2), NOW);
                let plan = fleet.plan(NOW);
                fleet.issued(&plan.commands, NOW);
            }
            _ => commands += black_box(fleet.plan(NOW)).commands.len(),
        }
    }
    println!("{commands} commands");
    Ok(())
}
