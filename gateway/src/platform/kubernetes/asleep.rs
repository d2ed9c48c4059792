//! Sleep and wake of an engine through the stub beside it. Its Pod stays, and keeps its accelerators.
//!
//! Engines do not say how deep they sleep, and whoever leads next must send no request to one that does. So the level is written on
//! the Pod before the order to sleep, and taken off once the engine is awake again.

use std::{future::pending, net::SocketAddr, sync::Arc};

use rouse::{fault::Cause, fleet::event::Event, model::Level};
use serde_json::json;

use super::{
    life::{Berth, Pauses, Pod},
    stub,
    work::{self, Done},
};
use crate::{
    controllers::{workload::ASLEEP, writer::Error},
    platform::{contact::Contact, ready},
};

pub(super) async fn sleep(contact: Arc<Contact>, berth: Arc<Berth>, pod: Pod, level: Level) -> Done {
    note(&berth, &pod, Some(level)).await;
    let (engine, generation) = (berth.id.clone(), berth.generation);
    let (event, done) = match actuated(&contact, &berth, false, level).await {
        Ok(()) => (Event::Slept { engine, generation, level }, Done::Asleep),
        Err(cause) => {
            let awake = cause == Cause::StaysAwake;
            if awake {
                // Before requests may be let in again.
                note(&berth, &pod, None).await;
            }
            let done = if awake { Done::Ready } else { Done::Asleep };
            (Event::SleepFailed { engine, generation, cause }, done)
        }
    };
    berth.shared.common.tell(event).await;
    done
}

/// Where whoever led before left off. The stub obeys again what it has carried out, and lets go who is still inside.
pub(super) async fn again(contact: Arc<Contact>, berth: Arc<Berth>, pod: Pod, level: Level) -> Done {
    work::closed(&contact, &berth, true).await;
    sleep(contact, berth, pod, level).await
}

pub(super) async fn wake(contact: Arc<Contact>, berth: Arc<Berth>, pod: Pod, level: Level) -> Done {
    let (engine, generation) = (berth.id.clone(), berth.generation);
    let woken = async {
        actuated(&contact, &berth, true, level).await?;
        note(&berth, &pod, None).await;
        work::enter(&berth, contact.address).await
    };
    if let Err(cause) = woken.await {
        berth.shared.common.tell(Event::WakeFailed { engine, generation, cause }).await;
        return Done::Asleep;
    }
    ready::up(&contact, None).await;
    berth.shared.common.tell(Event::Ready { engine, generation }).await;
    work::told_ready(&berth, contact.address, true).await;
    Done::Ready
}

/// Until the stub has carried it out. One that does not answer is asked again: it goes on where it was, and the decisions say for how
/// long.
async fn actuated(contact: &Contact, berth: &Berth, wake: bool, level: Level) -> Result<(), Cause> {
    let target = SocketAddr::new(contact.address.ip(), berth.place.pods.port);
    let mut pauses = Pauses::new();
    loop {
        if let Some(stub) = berth.stub(contact.address) {
            let done = async {
                // A stub whose container was started anew knows no engine.
                stub.target(target).await?;
                stub.actuate(wake, level).await
            };
            match done.await {
                Ok(()) => return Ok(()),
                Err(stub::Error::Older) => work::overruled(berth).await,
                Err(stub::Error::StaysAwake) => return Err(Cause::StaysAwake),
                Err(error @ (stub::Error::Stranger | stub::Error::Refused { .. })) => {
                    tracing::warn!(engine = %berth.id, wake, %error, "it neither sleeps nor wakes by its stub");
                    return Err(Cause::Refused);
                }
                Err(error) => tracing::debug!(engine = %berth.id, %error, "its stub is not there yet"),
            }
        }
        pauses.pause().await;
    }
}

async fn note(berth: &Berth, pod: &Pod, level: Option<Level>) {
    let mut pauses = Pauses::new();
    loop {
        let seen = pod.borrow().clone();
        let Some(seen) = seen else {
            // That it is gone is about to be heard.
            return pending().await;
        };
        let text = level.map(|level| level.number().to_string());
        match work::mark(berth, &seen, json!({ ASLEEP: text })).await {
            Ok(()) => return,
            Err(Error::Gone) => return pending().await,
            Err(error) => {
                tracing::debug!(pod = %seen.name, %error, "the Pod was not marked; it is tried again")
            }
        }
        pauses.pause().await;
    }
}
