//! What is asked of an engine that serves, or is about to: its one token, and its health.
//!
//! There are engines that answer their health request and nothing else: the server lives, what generates behind it does
//! not. Nobody but those who send requests sees that, and what they see may be load. So when several requests in a row got
//! no byte in their time, and neither did anybody else, nor did the engine's own counters move, it is asked for one token.
//! While it owes that, its health is no health: the decisions then replace it as any other that hangs.

use std::{pin::Pin, sync::Arc, time::Duration};

use rouse::{
    adapter::Health,
    fault::Cause,
    fleet::event::{Event, Verdict},
};
use tokio::time;

use super::{contact::Contact, ready};
use crate::routes::Reported;

/// So many requests in a row without a byte, and the engine is asked for a token.
const UNANSWERED: u32 = 3;
/// How long it may take for that at most: there is nothing that it would have to wait for.
const TOKEN: Duration = Duration::from_secs(60);

/// Asks for one token and tells how that went.
pub(super) async fn probe(contact: &Contact) {
    let patience = contact.common.config.load().timeouts.first_byte.duration();
    let verdict = contact.adapter.probe(patience).await;
    let (engine, generation) = (contact.id.clone(), contact.generation);
    let verdict = match verdict {
        Verdict::Inconclusive if contact.model.stub => {
            contact.common.tell(Event::Gated { engine: engine.clone(), generation }).await;
            Verdict::Inconclusive
        }
        // An engine without a stub that calls itself one.
        Verdict::Inconclusive => Verdict::Failed(Cause::Unhealthy),
        verdict => verdict,
    };
    contact.common.tell(Event::Canary { engine, generation, verdict }).await;
}

/// What is known of an engine when its watch begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Known {
    /// It has just answered.
    Well,
    /// Its stub lets nobody in.
    Held,
    /// It serves, and did not answer the last time: it is asked at once, and what it answers is told.
    Doubtful,
}

/// Asks an awake engine for its health, for as long as it is polled. See the platform's header for what is sent.
///
/// Of one that is held it is waited first until its stub lets requests in. While a stub lets nobody in, nothing is known of the
/// engine's health, and nothing is held against it; the stub is asked often, by this one for all who wait.
pub(super) async fn watch(contact: &Contact, known: Known) {
    let mut held = known == Known::Held;
    let mut at_once = known == Known::Doubtful;
    let (mut was_ok, mut tokens) = (!at_once, None);
    // The request for one token that is under way, and whether the last one failed.
    let mut asked: Option<Pin<Box<dyn Future<Output = Verdict> + Send + '_>>> = None;
    let mut mute = false;
    let reports = Reports(contact.common.reported(&contact.id, contact.generation));
    loop {
        if std::mem::take(&mut held) {
            ready::ungated(contact).await;
            let (engine, generation) = (contact.id.clone(), contact.generation);
            contact.common.tell(Event::Ungated { engine, generation }).await;
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
                mute = matches!(verdict, Verdict::Failed(_));
                if mute {
                    tracing::warn!(engine = %contact.id, ?verdict, "answered no request and gave no token: its health counts as failed");
                } else {
                    reports.0.answers();
                }
            }
        }
        let within = contact.health_timeout();
        let (health, counters) =
            tokio::join!(contact.adapter.health(within), contact.adapter.counters(within));
        if health == Health::Gated && contact.model.stub {
            let (engine, generation) = (contact.id.clone(), contact.generation);
            contact.common.tell(Event::Gated { engine, generation }).await;
            held = true;
            continue;
        }
        match counters {
            Some(counters) => reports.0.waits(counters.waiting),
            None => reports.0.silent(),
        }
        let now = counters.map(|counters| counters.tokens);
        let progressed = matches!((tokens, now), (Some(before), Some(now)) if now != before);
        tokens = now.or(tokens);
        if progressed {
            reports.0.progressed(contact.common.clock.now());
            reports.0.answers();
            mute = false;
        }
        if asked.is_none() && reports.0.unanswered_in_a_row() >= UNANSWERED {
            let patience = contact.common.config.load().timeouts.first_byte.duration().min(TOKEN);
            asked = Some(Box::pin(contact.adapter.probe(patience)));
        }
        let ok = health == Health::Good && !mute;
        if !ok || !was_ok {
            let (engine, generation) = (contact.id.clone(), contact.generation);
            contact.common.tell(Event::Health { engine, generation, ok, progressed }).await;
        }
        was_ok = ok;
    }
}

/// What is no longer watched is no longer said to have a queue.
struct Reports(Arc<Reported>);

impl Drop for Reports {
    fn drop(&mut self) {
        self.0.silent();
    }
}
