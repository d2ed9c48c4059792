//! Tests gates of a gateway that does not lead, and gates of stubs, which the requests of all gateways pass.

use rouse::fleet::event::{OperatorAction, PublishedEngine, PublishedEngineState};

use super::*;

/// Records its commands, and has stub gates.
#[derive(Default)]
struct StubGatePlatform(std::sync::Mutex<Vec<Command>>);

impl Platform for StubGatePlatform {
    fn submit(&self, command: Command) {
        self.0.lock().unwrap().push(command);
    }

    fn has_stub_gates(&self) -> bool {
        true
    }
}

fn published(state: PublishedEngineState) -> Event {
    let engine = EngineId::new(name(0), 0);
    let (address, accelerators) = (Some(([127, 0, 0, 1], 9).into()), vec![gpu(0)]);
    let published =
        PublishedEngine { state, address, fingerprint: 1, accelerators, since: START, failure: None };
    Event::Published { engine, generation: Generation(1), published: Some(published) }
}

#[tokio::test]
async fn the_gates_of_a_gateway_that_does_not_lead_are_as_is_published() {
    let mut harness = DriverHarness::new(2, 1);
    let gate = Arc::clone(&harness.routes().models.get(&name(0)).unwrap().endpoints[0].gate);
    let lease = harness.lease(0);
    harness.turn([Event::LeadershipChanged { leads: false }]);
    assert!(gate.is_open(), "what was awake goes on serving");
    harness.turn([published(PublishedEngineState::Draining)]);
    assert!(harness.routes().models.get(&name(0)).unwrap().endpoints.is_empty() && !gate.is_open());
    assert_eq!(gate.leases(), 1, "running requests stay");
    let waiting = harness.park(0);
    harness.step().await;
    assert!(!waiting.is_finished());
    drop(lease);
    harness.turn([published(PublishedEngineState::Awake)]);
    drop(waiting.await.unwrap());
    assert!(gate.is_open() && harness.routes().models.get(&name(0)).unwrap().endpoints.len() == 1);
    harness.turn([Event::LeadershipChanged { leads: true }]);
    assert!(gate.is_open() && harness.routes().ready, "and so does what is taken over");
    harness.turn([adopted(0), Event::AdoptionDone]);
    assert!(
        Arc::ptr_eq(&gate, &harness.routes().models.get(&name(0)).unwrap().endpoints[0].gate)
            && gate.is_open()
    );
}

#[tokio::test]
async fn a_gate_that_all_pass_is_moved_by_the_gateway_that_leads() {
    let platform = Arc::new(StubGatePlatform::default());
    let mut harness = DriverHarness::on(Arc::clone(&platform) as _, 2, 1);
    let take_calls = || std::mem::take(&mut *platform.0.lock().unwrap());
    assert!(matches!(take_calls()[..], [Command::OpenGate { .. }]));
    let operation = harness.driver.shared.begin(name(0), OperatorAction::Stop);
    harness.turn([Event::OperatorRequest { operation, model: name(0), action: OperatorAction::Stop }]);
    assert!(matches!(take_calls()[..], [Command::CloseGate { .. }, Command::RevokeLeases { .. }]));
    harness.turn([]);
    assert!(take_calls().is_empty(), "the platform reports the drain, for the requests of all gateways");
    harness.turn([Event::LeadershipChanged { leads: false }]);
    harness.turn([published(PublishedEngineState::Awake)]);
    harness.turn([published(PublishedEngineState::Draining)]);
    assert!(take_calls().is_empty(), "no other gateway's requests pass its own gate");
    harness.driver.platform.gates.sample(&mut harness.batch, false, START);
    assert!(matches!(harness.batch[..], [Event::Drained { .. }]), "{:?}", harness.batch);
}

/// Covers a stub that is drained while the gateway still sends the end of a stream.
#[tokio::test]
async fn an_engine_that_the_platform_drained_stops_after_its_last_lease_here() {
    let platform = Arc::new(StubGatePlatform::default());
    let mut harness = DriverHarness::on(Arc::clone(&platform) as _, 2, 1);
    let take_calls = || std::mem::take(&mut *platform.0.lock().unwrap());
    let lease = harness.lease(0);
    let operation = harness.driver.shared.begin(name(0), OperatorAction::Stop);
    harness.turn([Event::OperatorRequest { operation, model: name(0), action: OperatorAction::Stop }]);
    take_calls();
    let (engine, generation) = (EngineId::new(name(0), 0), Generation(1));
    harness.turn([Event::Drained { engine, generation }]);
    assert!(take_calls().is_empty());
    drop(lease);
    harness.turn([]);
    assert!(matches!(take_calls()[..], [Command::Stop { .. }]));
}
