//! Checks engines that serve or are about to: the one-token canary and the health watch.
//!
//! Some engines answer health requests and nothing else: the server runs, but the generator behind it hangs. Only
//! requests reveal that, and slow requests may just mean load. So the watch sends a one-token request after several
//! requests in a row got no byte in their time, no other request got one, and the engine's own counters did not move.
//! While that token fails to come, the engine counts as unhealthy, and the fleet replaces the engine like any other
//! that hangs.

use std::{pin::Pin, sync::Arc, time::Duration};

use rouse::{
    fault::FailureCause,
    fleet::event::{CanaryVerdict, Event},
};
use rouse_net::adapter::EngineHealth;
use tokio::time;

use crate::{EngineActivity, engine_client::EngineClient, load_reader, readiness};

/// This many requests in a row without a byte trigger the one-token request.
const UNANSWERED_BEFORE_PROBE: u32 = 3;
/// Maximum wait for that token: the request has no queue to wait in.
const MAX_TOKEN_WAIT: Duration = Duration::from_secs(60);

/// Sends the one-token canary and reports its verdict.
pub async fn run_canary(contact: &EngineClient) {
    let patience = contact.common.config.load().timeouts.first_byte.duration();
    let verdict = contact.adapter.probe(patience).await;
    let (engine, generation) = (contact.id.clone(), contact.generation);
    let verdict = match verdict {
        CanaryVerdict::Inconclusive if contact.model.stub => {
            contact.common.send_event(Event::StubGateClosed { engine: engine.clone(), generation }).await;
            CanaryVerdict::Inconclusive
        }
        // An engine without a stub claims that its gate is closed.
        CanaryVerdict::Inconclusive => CanaryVerdict::Failed(FailureCause::Unhealthy),
        verdict => verdict,
    };
    contact.common.send_event(Event::Canary { engine, generation, verdict }).await;
}

/// State of an engine when its health watch begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InitialHealth {
    /// The engine has just answered.
    Healthy,
    /// The gate of the engine's stub is closed.
    StubGateClosed,
    /// The engine serves, but failed its last check. The watch checks at once and reports the result.
    Unconfirmed,
}

/// Polls an awake engine's health until dropped. `gateway/src/platform/local.rs` says which results it sends.
///
/// If the engine is held, the watch first waits until the stub's gate opens. While the gate is closed, the engine's
/// health is unknown, and no failure counts. The watch polls the stub often, on behalf of all waiters.
///
/// Meanwhile also reads the load of an engine without a stub.
pub async fn watch_health(contact: &EngineClient, known: InitialHealth) {
    let activity = ActivityGuard(contact.common.engine_activity(&contact.id, contact.generation));
    tokio::select! {
        () = Box::pin(load_reader::run(contact, &activity.0)) => {}
        () = poll_health(contact, known, &activity.0) => {}
    }
}

async fn poll_health(contact: &EngineClient, known: InitialHealth, activity: &EngineActivity) {
    let mut is_gated = known == InitialHealth::StubGateClosed;
    let mut at_once = known == InitialHealth::Unconfirmed;
    let (mut was_ok, mut tokens) = (!at_once, None);
    // The one-token request under way, and whether the last one failed.
    let mut canary: Option<Pin<Box<dyn Future<Output = CanaryVerdict> + Send + '_>>> = None;
    let mut mute = false;
    loop {
        if std::mem::take(&mut is_gated) {
            readiness::wait_until_ungated(contact).await;
            let (engine, generation) = (contact.id.clone(), contact.generation);
            contact.common.send_event(Event::StubGateOpened { engine, generation }).await;
        }
        if !std::mem::take(&mut at_once) {
            let every = contact.common.config.load().timeouts.health_every.duration();
            let verdict = match &mut canary {
                None => {
                    time::sleep(every).await;
                    None
                }
                Some(answer) => time::timeout(every, answer).await.ok(),
            };
            if let Some(verdict) = verdict {
                canary = None;
                mute = matches!(verdict, CanaryVerdict::Failed(_));
                if mute {
                    tracing::warn!(
                        engine = %contact.id, ?verdict,
                        "engine left requests unanswered and failed a one-token probe, counted as unhealthy"
                    );
                } else {
                    activity.clear_unanswered();
                }
            }
        }
        let timeout = contact.health_timeout();
        let (health, counters) =
            tokio::join!(contact.adapter.health(timeout), contact.adapter.counters(timeout));
        if health == EngineHealth::Gated && contact.model.stub {
            let (engine, generation) = (contact.id.clone(), contact.generation);
            contact.common.send_event(Event::StubGateClosed { engine, generation }).await;
            is_gated = true;
            continue;
        }
        load_reader::store(activity, counters.map(|counters| counters.load), contact.common.clock.now());
        let now = counters.map(|counters| counters.tokens);
        let progressed = matches!((tokens, now), (Some(before), Some(now)) if now != before);
        tokens = now.or(tokens);
        if progressed {
            activity.note_progress(contact.common.clock.now());
            activity.clear_unanswered();
            mute = false;
        }
        if canary.is_none() && activity.unanswered_in_a_row() >= UNANSWERED_BEFORE_PROBE {
            let patience = contact.common.config.load().timeouts.first_byte.duration().min(MAX_TOKEN_WAIT);
            canary = Some(Box::pin(contact.adapter.probe(patience)));
        }
        let ok = health == EngineHealth::Healthy && !mute;
        if !ok || !was_ok {
            let (engine, generation) = (contact.id.clone(), contact.generation);
            contact.common.send_event(Event::Health { engine, generation, ok, progressed }).await;
        }
        was_ok = ok;
    }
}

/// Clears the engine's load when its watch ends.
struct ActivityGuard(Arc<EngineActivity>);

impl Drop for ActivityGuard {
    fn drop(&mut self) {
        self.0.clear_load();
    }
}
