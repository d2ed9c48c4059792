//! What a life does with its engine, step by step. Each is a future that the life polls and may drop at any await.

use std::{pin::Pin, sync::Arc};

use rouse::{
    adapter::Health,
    fault::Cause,
    fleet::event::{Event, Verdict},
    model::Level,
};
use tokio::time;

use super::{life::Contact, ready, store::Phase};
use crate::routes::Reported;

/// Something under way; tells whether the engine is to be watched afterwards.
pub(super) type Work = Pin<Box<dyn Future<Output = After> + Send>>;
pub(super) type Watch = Pin<Box<dyn Future<Output = ()> + Send>>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum After {
    Watch,
    AsBefore,
}

pub(super) async fn become_ready(contact: Arc<Contact>) -> After {
    let (engine, generation) = (contact.id.clone(), contact.generation);
    let profiled = Event::Profiled { engine: engine.clone(), generation };
    // Told its cache's size, an engine does not look at what is free: others may start beside it at once.
    let explicit = contact.explicit_memory();
    if explicit {
        contact.shared.tell(profiled.clone()).await;
    }
    let expected = contact.learned().and_then(|learned| learned.start);
    ready::up(&contact, expected).await;
    let fit = ready::fit(&contact).await;
    if !explicit {
        contact.shared.tell(profiled).await;
    }
    match fit {
        Ok(()) => {
            contact.shared.tell(Event::Ready { engine, generation }).await;
            contact.enter(Phase::Awake).await;
            After::Watch
        }
        Err(cause) => {
            let failed = Event::StartFailed { engine, generation, cause };
            contact.shared.tell(failed).await;
            After::AsBefore
        }
    }
}

pub(super) async fn probe(contact: Arc<Contact>) -> After {
    let patience = contact.shared.config.load().timeouts.first_byte.duration();
    let verdict = contact.adapter.probe(patience).await;
    let (engine, generation) = (contact.id.clone(), contact.generation);
    let verdict = match verdict {
        Verdict::Inconclusive if contact.model.stub => {
            contact.shared.tell(Event::Gated { engine: engine.clone(), generation }).await;
            Verdict::Inconclusive
        }
        // An engine without a stub that calls itself one.
        Verdict::Inconclusive => Verdict::Failed(Cause::Unhealthy),
        verdict => verdict,
    };
    contact.shared.tell(Event::Canary { engine, generation, verdict }).await;
    After::AsBefore
}

pub(super) async fn sleep(contact: Arc<Contact>, level: Level) -> After {
    contact.enter(Phase::Moving(level)).await;
    let outcome = contact.adapter.sleep(level).await;
    let (engine, generation) = (contact.id.clone(), contact.generation);
    let event = match outcome {
        Ok(()) => {
            contact.enter(Phase::Asleep(level)).await;
            Event::Slept { engine, generation, level }
        }
        Err(cause) => Event::SleepFailed { engine, generation, cause },
    };
    contact.shared.tell(event).await;
    After::AsBefore
}

pub(super) async fn wake(contact: Arc<Contact>, level: Level) -> After {
    contact.enter(Phase::Moving(level)).await;
    let outcome = contact.adapter.wake(level).await;
    let (engine, generation) = (contact.id.clone(), contact.generation);
    if let Err(cause) = outcome {
        let failed = Event::WakeFailed { engine, generation, cause };
        contact.shared.tell(failed).await;
        return After::AsBefore;
    }
    // The orders return when they are carried out: what is left takes milliseconds.
    ready::up(&contact, None).await;
    contact.shared.tell(Event::Ready { engine, generation }).await;
    contact.enter(Phase::Awake).await;
    After::Watch
}

/// Asks an awake engine for its health, for as long as it is polled. See the platform's header for what is sent.
///
/// `held`: begins by waiting for its stub to let requests in. While a stub lets nobody in, nothing is known of the engine's
/// health, and nothing is held against it; the stub is asked often, by this one for all who wait.
pub(super) async fn watch(contact: Arc<Contact>, mut held: bool) {
    let (mut was_ok, mut tokens) = (true, None);
    let reports = Reports(contact.shared.reported(&contact.id, contact.generation));
    loop {
        if std::mem::take(&mut held) {
            ready::ungated(&contact).await;
            let (engine, generation) = (contact.id.clone(), contact.generation);
            contact.shared.tell(Event::Ungated { engine, generation }).await;
        }
        let every = contact.shared.config.load().timeouts.health_every;
        time::sleep(every.duration()).await;
        let within = contact.health_timeout();
        let (health, counters) =
            tokio::join!(contact.adapter.health(within), contact.adapter.counters(within));
        if health == Health::Gated && contact.model.stub {
            let (engine, generation) = (contact.id.clone(), contact.generation);
            contact.shared.tell(Event::Gated { engine, generation }).await;
            held = true;
            continue;
        }
        let ok = health == Health::Good;
        match counters {
            Some(counters) => reports.0.waits(counters.waiting),
            None => reports.0.silent(),
        }
        let now = counters.map(|counters| counters.tokens);
        let progressed = matches!((tokens, now), (Some(before), Some(now)) if now != before);
        tokens = now.or(tokens);
        if progressed {
            reports.0.progressed(contact.shared.clock.now());
        }
        if !ok || !was_ok {
            let (engine, generation) = (contact.id.clone(), contact.generation);
            contact.shared.tell(Event::Health { engine, generation, ok, progressed }).await;
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
