//! Polls the accelerator memory of an engine while it serves.
//!
//! The source is the engine's stub. If the stub cannot read, the source is Prometheus, for the accelerators that the
//! stub names. If the stub names none, the labels of DCGM's exporter name the Pod's accelerators. No step waits for a
//! reading and no decision depends on it: a failed reading is not a failure of the engine.

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
    dcgm::{DcgmClient, MemorySample, UntrustedSample, trusted_usage},
    engine_task::{EngineContext, PodReceiver},
    occupancy::AcceleratorOccupancy,
};
use crate::{
    metrics::MeterSource,
    stub_client::{StubClient, StubClientError},
};

/// Interval between polls.
pub(super) const POLL_INTERVAL: Duration = Duration::from_secs(30);
/// Maximum interval between polls while no reading is available.
const MAX_POLL_INTERVAL: Duration = Duration::from_secs(600);

/// Memory in use on each of an engine's accelerators, and when.
type AcceleratorUsage = (BTreeMap<AcceleratorId, Bytes>, Tick);

/// Outcome of a poll.
enum UsageReading {
    Read(MeterSource, AcceleratorUsage),
    /// Prometheus's samples are from before the engine served. Poll again after this delay.
    TooEarly(Duration),
    Unavailable,
}

/// Polls until dropped: at once, then every half minute, and ever less often while no reading is available.
///
/// `since`: when the engine began to serve.
pub(super) async fn poll(
    context: Arc<EngineContext>,
    pod: PodReceiver,
    occupancy: Arc<AcceleratorOccupancy>,
    since: Tick,
) {
    let mut pause = POLL_INTERVAL;
    loop {
        pause = match read(&context, &pod, since).await {
            UsageReading::Read(source, reading) => {
                report(&context, &occupancy, source, reading).await;
                POLL_INTERVAL
            }
            UsageReading::TooEarly(until) => until,
            UsageReading::Unavailable => (pause * 2).clamp(POLL_INTERVAL, MAX_POLL_INTERVAL),
        };
        time::sleep(pause).await;
    }
}

/// Reports the memory use, if the engine has these accelerators alone.
async fn report(
    context: &EngineContext,
    occupancy: &AcceleratorOccupancy,
    source: MeterSource,
    (used, at): AcceleratorUsage,
) {
    let (shared, common) = (&context.shared, &context.shared.common);
    let accelerators: BTreeSet<AcceleratorId> = used.keys().cloned().collect();
    let wanted = context.placement.variant.spec.accelerators.count() as usize;
    if accelerators.len() != wanted {
        let seen = accelerators.len();
        tracing::debug!(
            engine = %context.id, seen, wanted,
            "memory reading ignored: it does not cover exactly the engine's accelerators"
        );
        return shared.readings.read_partial(source);
    }
    if !occupancy.is_exclusive(&accelerators, context.placement.shared_accelerators) {
        tracing::debug!(engine = %context.id, "memory reading ignored: other engines may share the accelerators");
        return shared.readings.read_partial(source);
    }
    let Some(used) = used.into_values().max() else { return };
    let (engine, generation) = (context.id.clone(), context.generation);
    shared.status_inputs.record_usage(&engine, used, at);
    common.send_event(Event::UsageObserved { engine, generation, used }).await;
}

async fn read(context: &EngineContext, pod: &PodReceiver, since: Tick) -> UsageReading {
    let Some(stub) = context.proxy(pod).and_then(|proxy| context.stub(proxy)) else {
        return UsageReading::Unavailable;
    };
    let shared = &context.shared;
    match stub.usage().await {
        Ok(used) => {
            let now = shared.common.clock.now();
            shared.readings.read_succeeded(MeterSource::Stub, now);
            return UsageReading::Read(MeterSource::Stub, (used, now));
        }
        Err(error) => {
            shared.readings.read_failed(MeterSource::Stub);
            tracing::debug!(engine = %context.id, %error, "the stub did not report memory use");
        }
    }
    match &shared.dcgm {
        Some(dcgm) => read_prometheus(context, dcgm, &stub, pod, since).await,
        None => UsageReading::Unavailable,
    }
}

async fn read_prometheus(
    context: &EngineContext,
    dcgm: &DcgmClient,
    stub: &StubClient,
    pod: &PodReceiver,
    since: Tick,
) -> UsageReading {
    // The log already has the reason of a failed query.
    let (Ok(samples), Some(pod_name)) =
        (dcgm.samples().await, pod.borrow().as_ref().map(|pod| pod.name.clone()))
    else {
        return UsageReading::Unavailable;
    };
    let named = stub.accelerators().await;
    let its = |(id, sample): &(&AcceleratorId, &MemorySample)| match &named {
        Ok(named) => named.contains(id),
        Err(StubClientError::Refused { .. }) => sample.pod.as_ref() == Some(&pod_name),
        Err(_) => false,
    };
    let (now, settle) = (context.shared.common.clock.now(), context.placement.meter_lag);
    let (mut used, mut oldest) = (BTreeMap::new(), now);
    for (id, sample) in samples.used.iter().filter(its) {
        let untrusted = match trusted_usage(sample, Some(since), settle, now) {
            Ok(bytes) => {
                used.insert(id.clone(), bytes);
                oldest = oldest.min(sample.at);
                continue;
            }
            Err(untrusted) => untrusted,
        };
        tracing::debug!(engine = %context.id, accelerator = %id, reason = %untrusted, "memory sample ignored");
        context.shared.readings.read_partial(MeterSource::Prometheus);
        return match untrusted {
            UntrustedSample::TooEarly { .. } => UsageReading::TooEarly(settle.duration() + dcgm.interval()),
            UntrustedSample::TooOld { .. } => UsageReading::Unavailable,
        };
    }
    UsageReading::Read(MeterSource::Prometheus, (used, oldest))
}
