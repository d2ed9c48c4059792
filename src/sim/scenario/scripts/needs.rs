//! Models that need others.

use super::{Script, ask, engine, model, world};
use crate::{fleet::event::Order, model::ModelSpec, sim::scenario::Deed, units::Millis};

pub(super) fn all() -> Vec<Script> {
    vec![
        a_chain_of_three_from_cold(),
        a_closure_that_must_evict(),
        a_closure_that_cannot_fit(),
        a_dependency_that_dies(),
    ]
}

fn needs(name: &str, gib: u64, others: &[&str]) -> ModelSpec {
    ModelSpec { dependencies: others.iter().map(|name| (*name).into()).collect(), ..model(name, gib) }
}

/// All three are reserved for at once and start one after the other, the one that needs the others last. What it needs
/// stays for as long as it is awake, though nobody uses it, and goes when it is asleep.
fn a_chain_of_three_from_cold() -> Script {
    let mut models = vec![needs("base", 6, &[]), needs("middle", 6, &["base"]), needs("top", 6, &["middle"])];
    for spec in &mut models {
        spec.idle.sleep_after = Some(Millis::secs(10));
    }
    let scenario = world("a-chain-of-three-from-cold", 1, models);
    (ask(scenario, 1, "top", 15), Millis::secs(70))
}

/// There is room for one of the two that are needed together, and nobody goes for that one: only when the model in the
/// way has had its time both are reserved for.
fn a_closure_that_must_evict() -> Script {
    let models = vec![needs("base", 7, &[]), model("other", 14), needs("top", 7, &["base"])];
    let scenario = world("a-closure-that-must-evict", 1, models);
    let scenario = ask(scenario, 1, "other", 6);
    (ask(scenario, 11, "top", 1), Millis::secs(50))
}

/// Each of the two would fit alone: who asks for the one is told at once that both never will. The other is served.
fn a_closure_that_cannot_fit() -> Script {
    let scenario =
        world("a-closure-that-cannot-fit", 1, vec![needs("base", 14, &[]), needs("top", 12, &["base"])]);
    let scenario = ask(scenario, 1, "top", 1);
    let scenario = scenario.at(Millis(1500), Deed::Order("top".into(), Order::Wake));
    (ask(scenario, 2, "base", 1), Millis::secs(20))
}

/// It is started again while the one that needs it goes on with its stream; and before that one has another start, it
/// waits for it.
fn a_dependency_that_dies() -> Script {
    let scenario =
        world("a-dependency-that-dies", 1, vec![needs("base", 8, &[]), needs("top", 8, &["base"])]);
    let scenario = ask(scenario, 1, "top", 30);
    let scenario = scenario.at(Millis::secs(30), Deed::Die(engine("base")));
    let scenario = scenario
        .at(Millis::secs(60), Deed::Die(engine("base")))
        .at(Millis::secs(60), Deed::Die(engine("top")));
    (ask(scenario, 61, "top", 1), Millis::secs(90))
}
