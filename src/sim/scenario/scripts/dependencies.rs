//! Models that depend on others.

use super::{ScriptedScenario, base_scenario, engine, model, with_request};
use crate::{fleet::event::OperatorAction, model::ModelSpec, sim::scenario::ScenarioAction, units::Millis};

pub(super) fn all() -> Vec<ScriptedScenario> {
    vec![
        a_chain_of_three_from_cold(),
        a_closure_that_must_evict(),
        a_closure_that_cannot_fit(),
        a_dependency_that_dies(),
    ]
}

fn model_with_dependencies(name: &str, gib: u64, dependencies: &[&str]) -> ModelSpec {
    ModelSpec { dependencies: dependencies.iter().map(|name| (*name).into()).collect(), ..model(name, gib) }
}

/// All three models are reserved at once and start one after the other, the dependent one last. Its dependencies stay
/// awake with it although unused, and may sleep once it is asleep.
fn a_chain_of_three_from_cold() -> ScriptedScenario {
    let mut models = vec![
        model_with_dependencies("base", 6, &[]),
        model_with_dependencies("middle", 6, &["base"]),
        model_with_dependencies("top", 6, &["middle"]),
    ];
    for spec in &mut models {
        spec.idle.sleep_after = Some(Millis::secs(10));
    }
    let scenario = base_scenario("a-chain-of-three-from-cold", 1, models);
    (with_request(scenario, 1, "top", 15), Millis::secs(70))
}

/// There is room for only one of two models that are needed together. No model is evicted for one alone. Both are
/// reserved only when the model in the way has had its time.
fn a_closure_that_must_evict() -> ScriptedScenario {
    let models = vec![
        model_with_dependencies("base", 7, &[]),
        model("other", 14),
        model_with_dependencies("top", 7, &["base"]),
    ];
    let scenario = base_scenario("a-closure-that-must-evict", 1, models);
    let scenario = with_request(scenario, 1, "other", 6);
    (with_request(scenario, 11, "top", 1), Millis::secs(50))
}

/// Each of the two would fit alone. A request for the dependent model is refused at once because both never fit
/// together. The other model is served.
fn a_closure_that_cannot_fit() -> ScriptedScenario {
    let scenario = base_scenario(
        "a-closure-that-cannot-fit",
        1,
        vec![model_with_dependencies("base", 14, &[]), model_with_dependencies("top", 12, &["base"])],
    );
    let scenario = with_request(scenario, 1, "top", 1);
    let scenario =
        scenario.at(Millis(1500), ScenarioAction::OperatorAction("top".into(), OperatorAction::Wake));
    (with_request(scenario, 2, "base", 1), Millis::secs(20))
}

/// The dependency is started again while the dependent model continues its stream. If both died, the dependent model
/// starts only after its dependency.
fn a_dependency_that_dies() -> ScriptedScenario {
    let scenario = base_scenario(
        "a-dependency-that-dies",
        1,
        vec![model_with_dependencies("base", 8, &[]), model_with_dependencies("top", 8, &["base"])],
    );
    let scenario = with_request(scenario, 1, "top", 30);
    let scenario = scenario.at(Millis::secs(30), ScenarioAction::KillEngine(engine("base")));
    let scenario = scenario
        .at(Millis::secs(60), ScenarioAction::KillEngine(engine("base")))
        .at(Millis::secs(60), ScenarioAction::KillEngine(engine("top")));
    (with_request(scenario, 61, "top", 1), Millis::secs(90))
}
