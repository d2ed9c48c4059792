//! Puts an engine to sleep and wakes it. The Pod stays and keeps its accelerators.
//!
//! In mode deployment the stub beside the engine executes the orders. In mode dualPods, in a pool of slots, they go to
//! the pairing controller, which knows where the engine of the requester is and reports what became of them.
//!
//! Engines do not report how deep they sleep, and the next leader must send no request to a sleeping engine. So this
//! gateway writes the level on the Pod before it orders a stub to put the engine to sleep, and removes it once the
//! engine is awake again. The pairing controller keeps the gate closed until it has asked the engine, so with it the
//! level is written and removed while the engine falls asleep or wakes. Meanwhile all its memory stays reserved, and a
//! leader that finds no level wakes it.

use std::{
    collections::BTreeMap, convert::Infallible, future::pending, net::SocketAddr, sync::Arc, time::Duration,
};

use rouse::{
    fault::FailureCause,
    fleet::event::Event,
    model::{AcceleratorId, SleepLevel},
    pairing::{
        EngineReport,
        command::EngineStopReason,
        event::WantedState,
        ids::{NodeName, RequesterId},
    },
    units::Bytes,
};
use rouse_net::stub_api::ActuationResult;
use rouse_platform::{engine_client::EngineClient, readiness};
use serde_json::json;
use tokio::sync::watch;

use super::{
    engine_steps::{self, StepOutcome},
    engine_task::{EngineContext, PodReceiver, RetryBackoff},
};
use crate::{
    dual_pods::engine_orders::EngineOrder, stub_client::StubClientError, workload::ASLEEP, writer::Error,
};

/// Timeout of a sleep or wake. Longer than any deadline of the fleet, which limits both.
const ACTUATION_TIMEOUT: Duration = Duration::from_secs(15 * 60);

pub(super) async fn sleep(
    client: Arc<EngineClient>,
    context: Arc<EngineContext>,
    pod: PodReceiver,
    level: SleepLevel,
) -> StepOutcome {
    let (engine, generation) = (context.id.clone(), context.generation);
    let slept = if context.placement.is_actuated_by_pairing() {
        sleep_by_pairing(&context, &pod, level).await
    } else {
        record_level(&context, &pod, Some(level)).await;
        sleep_by_stub(&client, &context, level).await
    };
    let (event, done) = match slept {
        Ok(level) => (Event::Slept { engine, generation, level }, StepOutcome::Asleep),
        Err(cause) => {
            let awake = cause == FailureCause::SleepDenied;
            if awake {
                // Must precede reopening the gate.
                record_level(&context, &pod, None).await;
            }
            let done = if awake { StepOutcome::Ready } else { StepOutcome::Asleep };
            (Event::SleepFailed { engine, generation, cause }, done)
        }
    };
    context.shared.common.send_event(event).await;
    done
}

/// Resumes a sleep that a former leader ordered.
///
/// The stub accepts an order again that it has already executed. The drain cuts requests that are still inside.
pub(super) async fn resume_sleep(
    client: Arc<EngineClient>,
    context: Arc<EngineContext>,
    pod: PodReceiver,
    level: SleepLevel,
) -> StepOutcome {
    engine_steps::close_and_drain(&client, &context, true).await;
    sleep(client, context, pod, level).await
}

pub(super) async fn wake(
    client: Arc<EngineClient>,
    context: Arc<EngineContext>,
    pod: PodReceiver,
    level: SleepLevel,
) -> StepOutcome {
    let (engine, generation) = (context.id.clone(), context.generation);
    let woken = async {
        if context.placement.is_actuated_by_pairing() {
            return wake_by_pairing(&context, &pod).await;
        }
        actuate(&client, &context, true, level).await?;
        record_level(&context, &pod, None).await;
        engine_steps::open_stub(&context, client.address).await?;
        readiness::wait_until_ready(&client, None).await;
        Ok::<(), FailureCause>(())
    };
    if let Err(cause) = woken.await {
        if context.placement.is_actuated_by_pairing() {
            // The engine may still sleep.
            record_level(&context, &pod, Some(level)).await;
        }
        context.shared.common.send_event(Event::WakeFailed { engine, generation, cause }).await;
        return StepOutcome::Asleep;
    }
    context.shared.common.send_event(Event::Ready { engine, generation }).await;
    engine_steps::set_readiness(&context, client.address, true).await;
    StepOutcome::Ready
}

/// Orders the pairing controller to keep the engine in this state, if it executes this engine's orders.
pub(super) fn order(context: &EngineContext, pod: &PodReceiver, wanted: WantedState) {
    if context.placement.is_actuated_by_pairing()
        && let Some(orders) = &context.shared.engine_orders
        && let Some((node, requester)) = requester(pod)
    {
        context.ordered.get_or_init(|| (node.clone(), requester.clone()));
        orders.order(EngineOrder { node, requester, wanted: Some(wanted) });
    }
}

/// Withdraws an order to wake this engine, which is to stop.
///
/// Otherwise the pairing controller would wake it, or keep memory for it, until the requester is deleted.
pub(super) fn withdraw_order(context: &EngineContext) {
    if let (Some(orders), Some((node, requester))) = (&context.shared.engine_orders, context.ordered.get()) {
        orders.order(EngineOrder { node: node.clone(), requester: requester.clone(), wanted: None });
    }
}

/// Forgets the orders for this engine, whose Pod is gone.
///
/// The pairing controller may have seen that before the last order came, and so not forget that one.
pub(super) fn forget_orders(context: &EngineContext) {
    if let (Some(orders), Some((node, requester))) = (&context.shared.engine_orders, context.ordered.get()) {
        orders.forget(node, requester);
    }
}

/// Repeats the order of a former leader, which the engine's Pod records: the pairing controller begins without any.
pub(super) fn repeat_order(context: &EngineContext, pod: &PodReceiver) {
    let asleep = pod.borrow().as_ref().and_then(|pod| pod.asleep);
    let wanted = asleep.map_or(WantedState::Awake, |level| WantedState::Asleep { level });
    order(context, pod, wanted);
}

/// Returns the level at which the engine sleeps: another one if the node's RAM has no room for the weights.
///
/// Reports first what the engine keeps of its accelerators. The pairing controller reserves that much, so the decisions
/// must know it: they would order a wake for which it sees no room.
async fn sleep_by_pairing(
    context: &EngineContext,
    pod: &PodReceiver,
    level: SleepLevel,
) -> Result<SleepLevel, FailureCause> {
    let slept = wait_for(context, pod, WantedState::Asleep { level }, asleep);
    let (slept, ()) = tokio::join!(slept, record_level(context, pod, Some(level)));
    let (reached, residue) = slept?;
    if reached != level {
        record_level(context, pod, Some(reached)).await;
    }
    let (engine, generation) = (context.id.clone(), context.generation);
    context.shared.common.send_event(Event::ResidueMeasured { engine, generation, bytes: residue }).await;
    Ok(reached)
}

/// Puts the engine to sleep through its stub.
///
/// Reports first what is in use on its accelerators then, where the leader chose them: the decisions know how much of
/// that is reserved for others.
async fn sleep_by_stub(
    client: &EngineClient,
    context: &EngineContext,
    level: SleepLevel,
) -> Result<SleepLevel, FailureCause> {
    let done = actuate(client, context, false, level).await?;
    let chosen = context.placement.location().map(|location| location.accelerators.as_slice());
    if let Some(used) = usage_after_sleep(chosen.unwrap_or_default(), done) {
        let (engine, generation) = (context.id.clone(), context.generation);
        context.shared.common.send_event(Event::UsageAfterSleep { engine, generation, used }).await;
    }
    Ok(level)
}

/// Returns the memory in use on these accelerators; `None` if there are none, or if the stub has not read each of them.
fn usage_after_sleep(
    accelerators: &[AcceleratorId],
    done: Option<ActuationResult>,
) -> Option<BTreeMap<AcceleratorId, Bytes>> {
    let mib = done?.memory?;
    let used = |id: &AcceleratorId| Some((id.clone(), Bytes::mib(*mib.get(id.as_str())?)));
    accelerators.iter().map(used).collect::<Option<BTreeMap<_, _>>>().filter(|used| !used.is_empty())
}

/// Wakes the engine. The stub has then seen that it serves, and the pairing controller has opened the gate.
async fn wake_by_pairing(context: &EngineContext, pod: &PodReceiver) -> Result<(), FailureCause> {
    let woken = wait_for(context, pod, WantedState::Awake, is_awake);
    let (woken, ()) = tokio::join!(woken, record_level(context, pod, None));
    woken
}

/// Gives the order and waits for the report that it is executed, from which `reached` reads what came of it.
async fn wait_for<T>(
    context: &EngineContext,
    pod: &PodReceiver,
    wanted: WantedState,
    reached: impl Fn(EngineReport) -> Option<T>,
) -> Result<T, FailureCause> {
    let Some(orders) = &context.shared.engine_orders else { return Err(FailureCause::Refused) };
    let Some((_, requester)) = requester(pod) else {
        // The Pod is gone; the engine task is about to learn that.
        return pending().await;
    };
    let reports = orders.reports(&requester);
    order(context, pod, wanted);
    wait_for_report(reports, reached).await.map_err(|reason| {
        tracing::warn!(engine = %context.id, %reason, "the pairing controller stopped the engine");
        cause_of(reason)
    })
}

/// Completes once the pairing controller reports that an engine which it was ordered to start has failed.
///
/// The pairing controller would start the engine again for the same Pod. The fleet does so instead, perhaps with a Pod
/// on another node.
pub(super) async fn start_failure(context: &EngineContext, pod: &PodReceiver) -> FailureCause {
    let orders = context.shared.engine_orders.as_ref().filter(|_| context.placement.is_actuated_by_pairing());
    let (Some(orders), Some((_, requester))) = (orders, requester(pod)) else { return pending().await };
    let Err(reason) = wait_for_report(orders.reports(&requester), |_| None::<Infallible>).await;
    context.shared.report_failure(&context.id, context.generation, &reason.to_string()).await;
    cause_of(reason)
}

/// Waits for a report from which `reached` reads something, or that the engine has failed.
async fn wait_for_report<T>(
    mut reports: watch::Receiver<Option<EngineReport>>,
    reached: impl Fn(EngineReport) -> Option<T>,
) -> Result<T, EngineStopReason> {
    loop {
        let report = *reports.borrow_and_update();
        if let Some(EngineReport::Failed { reason }) = report {
            return Err(reason);
        }
        if let Some(reached) = report.and_then(&reached) {
            return Ok(reached);
        }
        if reports.changed().await.is_err() {
            // The requester is gone, or this gateway no longer leads.
            return pending().await;
        }
    }
}

/// Returns the requester that the engine's Pod is, and its node.
fn requester(pod: &PodReceiver) -> Option<(NodeName, RequesterId)> {
    let pod = pod.borrow();
    let pod = pod.as_ref()?;
    Some((NodeName::from(pod.node.as_deref()?), RequesterId::from(pod.uid.as_str())))
}

fn is_awake(report: EngineReport) -> Option<()> {
    (report == EngineReport::Awake).then_some(())
}

const fn asleep(report: EngineReport) -> Option<(SleepLevel, Bytes)> {
    match report {
        EngineReport::Asleep { level, residue } => Some((level, residue)),
        _ => None,
    }
}

/// Returns the cause of a failed order, given why the pairing controller stopped the engine.
const fn cause_of(reason: EngineStopReason) -> FailureCause {
    match reason {
        EngineStopReason::StartFailed
        | EngineStopReason::WakeFailed
        | EngineStopReason::CanaryFailed
        | EngineStopReason::SleepFailed => FailureCause::Unhealthy,
        EngineStopReason::LoraAdapters | EngineStopReason::CannotSleep => FailureCause::Refused,
        EngineStopReason::Lost => FailureCause::Unreachable,
        EngineStopReason::Leaving => FailureCause::AcceleratorLost,
        EngineStopReason::Unneeded
        | EngineStopReason::Idle
        | EngineStopReason::Evicted
        | EngineStopReason::Displaced
        | EngineStopReason::Obsolete
        | EngineStopReason::Overdue => FailureCause::Stopped,
    }
}

/// Sends the order until the stub has executed it.
///
/// A silent stub gets the order again and continues where it was; the fleet sets the deadline. Returns what the stub
/// reports, if it does.
async fn actuate(
    client: &EngineClient,
    context: &EngineContext,
    wake: bool,
    level: SleepLevel,
) -> Result<Option<ActuationResult>, FailureCause> {
    let target = SocketAddr::new(client.address.ip(), context.placement.pod_template.port);
    let mut pauses = RetryBackoff::new();
    loop {
        if let Some(stub) = context.stub(client.address) {
            let done = async {
                // A restarted stub container has no target.
                stub.set_target(target).await?;
                stub.actuate(wake, level, ACTUATION_TIMEOUT).await
            };
            match done.await {
                Ok(done) => return Ok(done),
                Err(StubClientError::Conflict { .. }) => engine_steps::superseded(context).await,
                Err(StubClientError::StaysAwake(_)) => return Err(FailureCause::SleepDenied),
                Err(error @ (StubClientError::Unauthorized(_) | StubClientError::Refused { .. })) => {
                    tracing::warn!(engine = %context.id, wake, %error, "the stub rejected the sleep or wake order");
                    return Err(FailureCause::Refused);
                }
                Err(error) => {
                    tracing::debug!(engine = %context.id, %error, "the stub did not execute the order, retrying")
                }
            }
        }
        pauses.pause().await;
    }
}

async fn record_level(context: &EngineContext, pod: &PodReceiver, level: Option<SleepLevel>) {
    let mut pauses = RetryBackoff::new();
    loop {
        let engine_pod = pod.borrow().clone();
        let Some(engine_pod) = engine_pod else {
            // The Pod is gone; the engine task is about to learn that.
            return pending().await;
        };
        let text = level.map(|level| level.number().to_string());
        match engine_steps::annotate_pod(context, &engine_pod, &json!({ ASLEEP: text })).await {
            Ok(()) => return,
            Err(Error::Gone) => return pending().await,
            Err(error) => {
                tracing::debug!(pod = %engine_pod.name, %error, "cannot record the sleep level on the Pod, retrying")
            }
        }
        pauses.pause().await;
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn a_wait_ends_with_what_it_waits_for_or_with_the_reason_of_a_failure() {
        let (reports, received) = watch::channel(None);
        let mut awake = pin!(wait_for_report(received.clone(), is_awake));
        let mut failure = pin!(wait_for_report(received, |_| None::<Infallible>));
        for report in [EngineReport::Waiting, EngineReport::Starting, EngineReport::Moving] {
            reports.send_replace(Some(report));
            assert!(awake.as_mut().now_or_never().is_none(), "{report:?}");
        }
        reports.send_replace(Some(EngineReport::Awake));
        assert_eq!(awake.as_mut().now_or_never(), Some(Ok(())));
        assert!(failure.as_mut().now_or_never().is_none(), "a start may still fail");
        let reason = EngineStopReason::StartFailed;
        reports.send_replace(Some(EngineReport::Failed { reason }));
        assert_eq!(failure.as_mut().now_or_never(), Some(Err(reason)));
        let mut late = pin!(wait_for_report(reports.subscribe(), is_awake));
        assert_eq!(late.as_mut().now_or_never(), Some(Err(reason)));
    }

    #[test]
    fn what_is_in_use_after_a_sleep_is_known_only_if_the_stub_has_read_each_accelerator() {
        let done = |memory: &[(&str, u64)]| {
            let memory = memory.iter().map(|(id, mib)| ((*id).to_owned(), *mib)).collect();
            Some(ActuationResult { asleep: true, took: 900, memory: Some(memory) })
        };
        let used = |accelerators: &[&str], done| {
            let accelerators: Vec<AcceleratorId> = accelerators.iter().map(|id| (*id).into()).collect();
            usage_after_sleep(&accelerators, done).map(|used| used.into_values().collect::<Vec<_>>())
        };
        let both = done(&[("GPU-1", 1024), ("GPU-2", 3072)]);
        assert_eq!(used(&["GPU-2", "GPU-1"], both.clone()), Some(vec![Bytes::gib(1), Bytes::gib(3)]));
        assert_eq!(used(&["GPU-2"], both.clone()), Some(vec![Bytes::gib(3)]));
        assert_eq!(used(&["GPU-1", "GPU-3"], both.clone()), None);
        assert_eq!(used(&[], both), None, "the kubelet has chosen them");
        assert_eq!(used(&["GPU-1"], Some(ActuationResult { asleep: true, took: 1, memory: None })), None);
        assert_eq!(used(&["GPU-1"], None), None);
    }

    #[tokio::test]
    async fn a_requester_that_is_gone_has_neither_failed_nor_started() {
        let (reports, received) = watch::channel(Some(EngineReport::Starting));
        drop(reports);
        assert_eq!(wait_for_report(received, is_awake).now_or_never(), None);
    }
}
