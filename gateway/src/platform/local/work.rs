//! What a life does with its engine, step by step. Each is a future that the life polls and may drop at any await.

use std::{pin::Pin, sync::Arc};

use rouse::{fault::Cause, fleet::event::Event, model::Level};

use super::{fit, life::Tenant, store::Phase};
use crate::platform::{
    ready,
    watch::{self, Known},
};

/// Something under way; tells whether the engine is to be watched afterwards.
pub(super) type Work = Pin<Box<dyn Future<Output = After> + Send>>;
pub(super) type Watch = Pin<Box<dyn Future<Output = ()> + Send>>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum After {
    Watch,
    AsBefore,
}

pub(super) async fn become_ready(tenant: Arc<Tenant>) -> After {
    let (engine, generation) = (tenant.contact.id.clone(), tenant.contact.generation);
    let profiled = Event::Profiled { engine: engine.clone(), generation };
    // Told its cache's size, an engine does not look at what is free: others may start beside it at once.
    let explicit = tenant.contact.explicit_memory();
    if explicit {
        tenant.contact.common.tell(profiled.clone()).await;
    }
    let expected = tenant.learned().and_then(|learned| learned.start);
    ready::up(&tenant.contact, expected).await;
    let fit = fit::fit(&tenant).await;
    if !explicit {
        tenant.contact.common.tell(profiled).await;
    }
    match fit {
        Ok(()) => {
            tenant.contact.common.tell(Event::Ready { engine, generation }).await;
            tenant.enter(Phase::Awake).await;
            After::Watch
        }
        Err(cause) => {
            let failed = Event::StartFailed { engine, generation, cause };
            tenant.contact.common.tell(failed).await;
            After::AsBefore
        }
    }
}

pub(super) async fn probe(tenant: Arc<Tenant>) -> After {
    watch::probe(&tenant.contact).await;
    After::AsBefore
}

pub(super) async fn sleep(tenant: Arc<Tenant>, level: Level) -> After {
    tenant.enter(Phase::Moving(level)).await;
    let outcome = tenant.contact.adapter.sleep(level).await;
    let (engine, generation) = (tenant.contact.id.clone(), tenant.contact.generation);
    let (event, after) = match outcome {
        Ok(()) => {
            tenant.enter(Phase::Asleep(level)).await;
            (Event::Slept { engine, generation, level }, After::AsBefore)
        }
        Err(cause) => {
            // It is awake as before, and may be given to those who wait for it.
            let awake = cause == Cause::StaysAwake;
            if awake {
                tenant.enter(Phase::Awake).await;
            }
            let after = if awake { After::Watch } else { After::AsBefore };
            (Event::SleepFailed { engine, generation, cause }, after)
        }
    };
    tenant.contact.common.tell(event).await;
    after
}

pub(super) async fn wake(tenant: Arc<Tenant>, level: Level) -> After {
    tenant.enter(Phase::Moving(level)).await;
    let outcome = tenant.contact.adapter.wake(level).await;
    let (engine, generation) = (tenant.contact.id.clone(), tenant.contact.generation);
    if let Err(cause) = outcome {
        let failed = Event::WakeFailed { engine, generation, cause };
        tenant.contact.common.tell(failed).await;
        return After::AsBefore;
    }
    // The orders return when they are carried out: what is left takes milliseconds.
    ready::up(&tenant.contact, None).await;
    tenant.contact.common.tell(Event::Ready { engine, generation }).await;
    tenant.enter(Phase::Awake).await;
    After::Watch
}

pub(super) async fn watch(tenant: Arc<Tenant>, held: bool) {
    let known = if held { Known::Held } else { Known::Well };
    watch::watch(&tenant.contact, known).await;
}
