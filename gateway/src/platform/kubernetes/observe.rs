//! What an engine uses of its accelerators, looked at while it serves.
//!
//! The stub beside it is asked; where that cannot read, Prometheus is, about the accelerators that the stub names or, where it
//! names none, about those that DCGM's exporter says the Pod has. Nobody waits for any of this, and nothing is decided by it:
//! a reading that fails is no failure of the engine's.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use rouse::{
    fleet::event::Event,
    model::AcceleratorId,
    units::{Bytes, Tick},
};
use tokio::time;

use super::{
    dcgm::{Dcgm, Doubt, Sample, believable},
    life::{Berth, Pod},
    stub::{self, Stub},
    tenants::Tenancy,
};
use crate::metrics::Source;

/// It is looked so often, at most.
pub(super) const EVERY: Duration = Duration::from_secs(30);
/// And where nothing can be seen again and again, this seldom in the end.
const SELDOM: Duration = Duration::from_secs(600);

/// What is in use on each of an engine's accelerators, and when that was.
type Reading = (BTreeMap<AcceleratorId, Bytes>, Tick);

/// What came of a look.
enum Look {
    Seen(Source, Reading),
    /// What Prometheus has is from before the engine served. Soon it will not be.
    Early(Duration),
    Nothing,
}

/// Looks for as long as it is polled: at once and then every half minute, or more and more seldom while there is nothing to
/// see. `since`: from when on the engine serves.
pub(super) async fn watch(berth: Arc<Berth>, pod: Pod, tenancy: Arc<Tenancy>, since: Tick) {
    let mut pause = EVERY;
    loop {
        pause = match look(&berth, &pod, since).await {
            Look::Seen(source, reading) => {
                take(&berth, &tenancy, source, reading).await;
                EVERY
            }
            Look::Early(until) => until,
            Look::Nothing => (pause * 2).clamp(EVERY, SELDOM),
        };
        time::sleep(pause).await;
    }
}

/// What an engine of this life uses is known now, where it is its own.
async fn take(berth: &Berth, tenancy: &Tenancy, source: Source, (used, at): Reading) {
    let (shared, common) = (&berth.shared, &berth.shared.common);
    let accelerators: BTreeSet<AcceleratorId> = used.keys().cloned().collect();
    let wanted = berth.place.variant.spec.accelerators.count() as usize;
    if accelerators.len() != wanted {
        let seen = accelerators.len();
        tracing::debug!(engine = %berth.id, seen, wanted, "what was read is not of its accelerators alone");
        return shared.readings.left_out(source);
    }
    if !tenancy.is_alone(&accelerators, berth.place.shared) {
        tracing::debug!(engine = %berth.id, "others may be on its accelerators: what is in use there is not its own");
        return shared.readings.left_out(source);
    }
    let Some(used) = used.into_values().max() else { return };
    let (engine, generation) = (berth.id.clone(), berth.generation);
    shared.told.observed(&engine.model, used, at);
    common.tell(Event::Observed { engine, generation, used }).await;
}

async fn look(berth: &Berth, pod: &Pod, since: Tick) -> Look {
    let Some(stub) = berth.proxy(pod).and_then(|proxy| berth.stub(proxy)) else { return Look::Nothing };
    let shared = &berth.shared;
    match stub.usage().await {
        Ok(used) => {
            let now = shared.common.clock.now();
            shared.readings.done(Source::Stub, now);
            return Look::Seen(Source::Stub, (used, now));
        }
        Err(error) => {
            shared.readings.failed(Source::Stub);
            tracing::debug!(engine = %berth.id, %error, "its stub does not say what memory is in use");
        }
    }
    match &shared.dcgm {
        Some(dcgm) => by_prometheus(berth, dcgm, &stub, pod, since).await,
        None => Look::Nothing,
    }
}

async fn by_prometheus(berth: &Berth, dcgm: &Dcgm, stub: &Stub, pod: &Pod, since: Tick) -> Look {
    // That it could not be asked is in the log already.
    let (Ok(samples), Some(own)) = (dcgm.samples().await, pod.borrow().as_ref().map(|pod| pod.name.clone()))
    else {
        return Look::Nothing;
    };
    let named = stub.accelerators().await;
    let its = |(id, sample): &(&AcceleratorId, &Sample)| match &named {
        Ok(named) => named.contains(id),
        Err(stub::Error::Refused { .. }) => sample.pod.as_ref() == Some(&own),
        Err(_) => false,
    };
    let (now, settle) = (berth.shared.common.clock.now(), berth.place.settle);
    let (mut used, mut oldest) = (BTreeMap::new(), now);
    for (id, sample) in samples.used.iter().filter(its) {
        let doubt = match believable(sample, Some(since), settle, now) {
            Ok(bytes) => {
                used.insert(id.clone(), bytes);
                oldest = oldest.min(sample.at);
                continue;
            }
            Err(doubt) => doubt,
        };
        tracing::debug!(engine = %berth.id, accelerator = %id, %doubt, "not believed");
        berth.shared.readings.left_out(Source::Prometheus);
        return match doubt {
            Doubt::Early { .. } => Look::Early(settle.duration() + dcgm.interval()),
            Doubt::Old { .. } => Look::Nothing,
        };
    }
    Look::Seen(Source::Prometheus, (used, oldest))
}
