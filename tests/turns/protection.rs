//! Protection of idle models: no client waits for a return that does not come, and a client's own history never delays
//! it.

use rouse::model::ProtectionPolicy;

use super::*;

/// A wait may exceed the engines' own time by a fifth plus this slack.
const WAIT_SLACK: Millis = Millis(100);
pub(super) const EXCHANGE_TIME: Millis = Millis(500);
/// Pause between a response's end and the client's next request.
const THINK_TIME: Millis = Millis(200);

/// Two models that each fill the accelerator and load slowly.
pub(super) fn two_models(name: &str, protect: ProtectionPolicy) -> Scenario {
    let mut settings = FleetSettings { host_memory: Bytes::gib(64), ..FleetSettings::default() };
    settings.turns.protection = protect;
    let mut scenario = Scenario::new(name, with_long_start_timeout(configuration(1, 2, settings)));
    scenario.hardware = HardwareProfile {
        start_time: (Millis::secs(60), Millis::secs(60)),
        wake_time: (Millis::secs(2), Millis::secs(2)),
        sleep_time: (Millis::secs(1), Millis::secs(1)),
        stop_time: (Millis::secs(1), Millis::secs(1)),
        first_byte: (Millis(5), Millis(5)),
        ..HardwareProfile::default()
    };
    scenario
}

/// Makes a start of a minute not count as a failure.
fn with_long_start_timeout(mut configuration: FleetConfig) -> FleetConfig {
    configuration.models.iter_mut().for_each(|spec| spec.start_timeout = Millis::secs(300));
    configuration
}

/// A request for model `n` by `client`. Its waits are recorded under the model's number.
pub(super) fn request_by(client: u64, n: u64) -> ScenarioAction {
    let stream = SimulatedRequest::stream(&format!("model-{n}"), EXCHANGE_TIME);
    ScenarioAction::SendRequest(SimulatedRequest { client, key: n.to_string(), ..stream })
}

/// One client alternates between both models, each time soon after the response. `swaps` is the time of a swap to each
/// model. Returns the longest wait for each, without the initial cold starts.
fn alternating_waits(mut scenario: Scenario, swaps: [Millis; 2]) -> [Millis; 2] {
    let mut at = Millis::secs(1);
    for round in 0..40_u64 {
        let model = round % 2;
        scenario = scenario.at(at, request_by(1, model));
        let first = if round < 2 { Millis::secs(62) } else { swaps[model as usize] };
        at = at + Millis(first.0 * 6 / 5) + WAIT_SLACK + EXCHANGE_TIME + THINK_TIME;
    }
    let mut world = SimulatedWorld::new(scenario);
    if let Err(failure) = world.run_until(at + Millis::secs(600)) {
        panic!("{failure}");
    }
    assert_eq!(world.tally().count("requests served"), 40);
    ["0", "1"].map(|key| {
        let waits = world.waits(key);
        assert_eq!(waits.len(), 20, "each of them is put away for the other");
        waits[1..].iter().copied().max().unwrap_or_default()
    })
}

fn assert_engine_bound(waits: [Millis; 2], swaps: [Millis; 2]) {
    for (wait, swap) in waits.into_iter().zip(swaps) {
        println!("waited at most {wait}, of which the engines took {swap}");
        assert!(wait <= Millis(swap.0 * 6 / 5) + WAIT_SLACK, "waited {wait}, and the engines take {swap}");
    }
}

#[test]
fn a_single_user_alternates_at_the_engines_own_pace() {
    let swaps = [Millis::secs(3); 2];
    let waits = alternating_waits(two_models("equal costs", ProtectionPolicy::default()), swaps);
    assert_engine_bound(waits, swaps);
}

/// Bringing the second model back takes a minute, and its client usually returns much sooner; but no other client would
/// return to it.
#[test]
fn a_single_user_is_not_held_up_by_what_he_used_himself() {
    let mut scenario = two_models("2 s beside 60 s", ProtectionPolicy::default());
    scenario.configuration.models[1].can_sleep = false;
    let swaps = [Millis::secs(3), Millis::secs(61)];
    let waits = alternating_waits(scenario, swaps);
    assert_engine_bound(waits, swaps);
}

/// One client requests the first model each second for half a minute; then another requests the second model. Returns
/// the second client's wait beyond the engines' time.
fn second_user_wait(protect: ProtectionPolicy) -> Millis {
    second_user_wait_in(two_models("two users", protect), Millis::secs(3))
}

/// Like [`second_user_wait`], with this swap time.
fn second_user_wait_in(mut scenario: Scenario, swap: Millis) -> Millis {
    scenario = scenario.at(Millis::secs(1), request_by(2, 1)).at(Millis::secs(70), request_by(1, 0));
    for n in 0..30 {
        scenario = scenario.at(Millis::secs(150 + n), request_by(1, 0));
    }
    // Half a second after the last response.
    scenario = scenario.at(Millis::secs(180), request_by(2, 1));
    let mut world = SimulatedWorld::new(scenario);
    if let Err(failure) = world.run_until(Millis::secs(400)) {
        panic!("{failure}");
    }
    let last = *world.waits("1").last().expect("it was asked for");
    Millis(last.0.saturating_sub(swap.0))
}

#[test]
fn a_model_whose_other_user_is_expected_back_stays_as_long_as_bringing_it_back_would_take() {
    let (expected, always, never) = (
        second_user_wait(ProtectionPolicy::Expected),
        second_user_wait(ProtectionPolicy::Always),
        second_user_wait(ProtectionPolicy::Never),
    );
    println!("expected {expected}, always {always}, never {never}");
    // No wake has been observed, so it is estimated at a second, half of which has passed.
    assert!((Millis(400)..Millis(1000)).contains(&expected), "{expected}");
    assert!((Millis::secs(29)..Millis::secs(31)).contains(&always), "the whole residency: {always}");
    assert!(never < WAIT_SLACK, "{never}");
}

/// Starting it again takes a minute, which may justify the wait for one client and not for the other.
#[test]
fn a_model_that_would_have_to_be_started_is_kept_no_longer_than_residency() {
    for residency in [30_u64, 5] {
        let mut scenario = two_models("two users of models that cannot sleep", ProtectionPolicy::Expected);
        scenario.configuration.settings.turns.residency = Millis::secs(residency);
        scenario.configuration.models.iter_mut().for_each(|spec| spec.can_sleep = false);
        let waited = second_user_wait_in(scenario, Millis::secs(61));
        println!("kept for {waited} of {residency} s");
        // Half a second of the residency has passed.
        assert!((Millis::secs(residency - 1)..Millis::secs(residency)).contains(&waited), "{waited}");
    }
}

/// Three clients, each of which requests its own model again as soon as it has read the response.
#[test]
fn three_users_of_three_models_take_turns_and_none_starves() {
    let mut settings = FleetSettings { host_memory: Bytes::gib(64), ..FleetSettings::default() };
    settings.turns.max_turn = Millis::secs(20);
    let turns = settings.turns;
    let mut scenario = Scenario::new("three users", with_long_start_timeout(configuration(1, 3, settings)));
    let nature = two_models("times", ProtectionPolicy::default()).hardware;
    scenario.hardware = nature;
    for n in 0..3 {
        let ScenarioAction::SendRequest(request) = request_by(n + 1, n) else { unreachable!("it asks") };
        scenario = scenario.at(
            Millis::secs(1 + n),
            ScenarioAction::SendRequest(SimulatedRequest { repeat_pauses: vec![THINK_TIME], ..request }),
        );
    }
    let mut world = SimulatedWorld::new(scenario);
    if let Err(failure) = world.run_until(Millis::secs(1800)) {
        panic!("{failure}");
    }
    // Both other models are brought up, have a whole turn and are put to sleep; then the model itself is brought up.
    let turn = turns.max_turn + EXCHANGE_TIME + nature.sleep_time.1 + SLACK;
    let bound = |up: Millis| Millis(2 * (up + turn).0) + up + SLACK;
    let longest = world.longest_wait();
    let swaps = world.tally().count("swaps");
    println!("{swaps} swaps in half an hour, longest wait {longest}, bound {}", bound(nature.start_time.1));
    assert!(
        longest <= bound(nature.start_time.1),
        "waited {longest}, the turns before allow {}",
        bound(nature.start_time.1)
    );
    // A request that arrives just as its own model's gate closes also waits for that model's sleep.
    let bound = bound(nature.wake_time.1) + nature.sleep_time.1;
    for key in ["0", "1", "2"] {
        let waits = world.waits(key);
        assert!(waits.len() >= 10, "model {key} had {} turns", waits.len());
        // Skip the first two waits, during which engines start instead of waking.
        let longest = *waits[2..].iter().max().expect("more than ten waits");
        assert!(longest <= bound, "model {key} waited {longest}, two turns and a swap take {bound}");
    }
    // A client that returns in 200 ms is worth waiting for: turns last as long as allowed, not one response each.
    assert!(swaps <= 1800 / 20, "{swaps} swaps");
}
