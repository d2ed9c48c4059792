//! What is asked of an engine that serves, or is about to: its one token, and its health.
//!
//! There are engines that answer their health request and nothing else: the server lives, what generates behind it does
//! not. Nobody but those who send requests sees that, and what they see may be load. So when several requests in a row got
//! no byte in their time, and neither did anybody else, nor did the engine's own counters move, it is asked for one token.
//! While it owes that, its health is no health: the decisions then replace it as any other that hangs.

use std::{pin::Pin, sync::Arc, time::Duration};

use rouse::{
    fault::FailureCause,
    fleet::event::{CanaryVerdict, Event},
};
use rouse_net::adapter::EngineHealth;
use tokio::time;

use super::{engine_client::EngineClient, readiness};
use crate::routing::EngineActivity;

/// So many requests in a row without a byte, and the engine is asked for a token.
const UNANSWERED_BEFORE_PROBE: u32 = 3;
/// How long it may take for that at most: there is nothing that it would have to wait for.
const MAX_TOKEN_WAIT: Duration = Duration::from_secs(60);

/// Asks for one token and tells how that went.
pub(super) async fn run_canary(contact: &EngineClient) {
    let patience = contact.common.config.load().timeouts.first_byte.duration();
    let verdict = contact.adapter.probe(patience).await;
    let (engine, generation) = (contact.id.clone(), contact.generation);
    let verdict = match verdict {
        CanaryVerdict::Inconclusive if contact.model.stub => {
            contact.common.send_event(Event::StubGateClosed { engine: engine.clone(), generation }).await;
            CanaryVerdict::Inconclusive
        }
        // An engine without a stub that calls itself one.
        CanaryVerdict::Inconclusive => CanaryVerdict::Failed(FailureCause::Unhealthy),
        verdict => verdict,
    };
    contact.common.send_event(Event::Canary { engine, generation, verdict }).await;
}

/// What is known of an engine when its watch begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InitialHealth {
    /// It has just answered.
    Healthy,
    /// Its stub lets nobody in.
    StubGateClosed,
    /// It serves, and did not answer the last time: it is asked at once, and what it answers is told.
    Unconfirmed,
}

/// Asks an awake engine for its health, for as long as it is polled. See the platform's header for what is sent.
///
/// Of one that is held it is waited first until its stub lets requests in. While a stub lets nobody in, nothing is known of the
/// engine's health, and nothing is held against it; the stub is asked often, by this one for all who wait.
pub(super) async fn watch_health(contact: &EngineClient, known: InitialHealth) {
    let mut held = known == InitialHealth::StubGateClosed;
    let mut at_once = known == InitialHealth::Unconfirmed;
    let (mut was_ok, mut tokens) = (!at_once, None);
    // The request for one token that is under way, and whether the last one failed.
    let mut asked: Option<Pin<Box<dyn Future<Output = CanaryVerdict> + Send + '_>>> = None;
    let mut mute = false;
    let reports = ActivityGuard(contact.common.engine_activity(&contact.id, contact.generation));
    loop {
        if std::mem::take(&mut held) {
            readiness::wait_until_ungated(contact).await;
            let (engine, generation) = (contact.id.clone(), contact.generation);
            contact.common.send_event(Event::StubGateOpened { engine, generation }).await;
        }
        if !std::mem::take(&mut at_once) {
            let every = contact.common.config.load().timeouts.health_every.duration();
            let verdict = match &mut asked {
                None => {
                    time::sleep(every).await;
                    None
                }
                Some(answer) => time::timeout(every, answer).await.ok(),
            };
            if let Some(verdict) = verdict {
                asked = None;
                mute = matches!(verdict, CanaryVerdict::Failed(_));
                if mute {
                    tracing::warn!(engine = %contact.id, ?verdict, "answered no request and gave no token: its health counts as failed");
                } else {
                    reports.0.clear_unanswered();
                }
            }
        }
        let within = contact.health_timeout();
        let (health, counters) =
            tokio::join!(contact.adapter.health(within), contact.adapter.counters(within));
        if health == EngineHealth::Gated && contact.model.stub {
            let (engine, generation) = (contact.id.clone(), contact.generation);
            contact.common.send_event(Event::StubGateClosed { engine, generation }).await;
            held = true;
            continue;
        }
        match counters {
            Some(counters) => reports.0.set_waiting(counters.waiting),
            None => reports.0.clear_waiting(),
        }
        let now = counters.map(|counters| counters.tokens);
        let progressed = matches!((tokens, now), (Some(before), Some(now)) if now != before);
        tokens = now.or(tokens);
        if progressed {
            reports.0.note_progress(contact.common.clock.now());
            reports.0.clear_unanswered();
            mute = false;
        }
        if asked.is_none() && reports.0.unanswered_in_a_row() >= UNANSWERED_BEFORE_PROBE {
            let patience = contact.common.config.load().timeouts.first_byte.duration().min(MAX_TOKEN_WAIT);
            asked = Some(Box::pin(contact.adapter.probe(patience)));
        }
        let ok = health == EngineHealth::Healthy && !mute;
        if !ok || !was_ok {
            let (engine, generation) = (contact.id.clone(), contact.generation);
            contact.common.send_event(Event::Health { engine, generation, ok, progressed }).await;
        }
        was_ok = ok;
    }
}

/// What is no longer watched is no longer said to have a queue.
struct ActivityGuard(Arc<EngineActivity>);

impl Drop for ActivityGuard {
    fn drop(&mut self) {
        self.0.clear_waiting();
    }
}
