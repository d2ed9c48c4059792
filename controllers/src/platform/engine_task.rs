//! Runs one engine generation in a cluster, from its first Pod until that Pod is gone.
//!
//! As on one machine, work is a future that this task polls, and a superseding command drops it. The task ends when the
//! engine's Pod is gone and its memory is released. It is dropped when this gateway no longer leads; the next leader
//! then finds everything that the task has changed.

use std::{
    future::{pending, ready},
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, OnceLock, atomic::AtomicBool},
    time::Duration,
};

use rouse::{
    fault::FailureCause,
    fleet::event::Event,
    model::{EngineId, SleepLevel},
    pairing::ids::{NodeName, RequesterId},
    units::{Generation, Millis},
};
use rouse_net::stub_api::Epoch;
use rouse_platform::{
    engine_client::EngineClient,
    health::{self as health, InitialHealth},
    poll_if_some,
};
use tokio::{
    sync::{mpsc, oneshot, watch},
    time,
};

use super::{
    KubernetesContext, ModelPlacement, actuation, confirmation, engine_location,
    engine_manager::ManagerRequest,
    engine_steps::{self, StepOutcome},
    observe,
    occupancy::AcceleratorOccupancy,
};
use crate::{
    engine_pod::{EnginePod, PodFailure},
    workload::PROXY_PORT,
};

/// A command to an engine task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EngineTaskCommand {
    Probe,
    /// Set the stub up again: its gate is closed, and not by this leader's order.
    Hold,
    /// Let no more requests in; outcome: `Drained`.
    CloseGate,
    /// Let no more requests in and cut those under way; outcome: `Drained`.
    Revoke,
    OpenGate,
    /// Sleep at this level while no request is under way; outcome: `Slept`.
    Sleep(SleepLevel),
    /// Wake from this level; outcome: `Ready`.
    Wake(SleepLevel),
    Stop,
}

/// Where an engine task begins under this leader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EngineTaskStart {
    /// The engine needs a Pod.
    Launch,
    /// The engine has a Pod and was not seen ready.
    Starting,
    Awake,
    /// The former leader saw the engine awake, and this leader has no answer of it yet.
    Unconfirmed,
    Asleep,
    /// The former leader ordered the engine to sleep and did not see it asleep.
    FallingAsleep(SleepLevel),
}

impl EngineTaskStart {
    /// Whether a former leader's order to the pairing controller stands, so that the task repeats it at once.
    ///
    /// An engine that starts gets its order only once its Pod is known to have the chosen accelerators, and one that is
    /// to be stopped gets none.
    const fn repeats_order(self) -> bool {
        match self {
            Self::Launch | Self::Starting => false,
            Self::Awake | Self::Unconfirmed | Self::Asleep | Self::FallingAsleep(_) => true,
        }
    }
}

/// One engine generation and its placement.
pub(super) struct EngineContext {
    pub(super) shared: Arc<KubernetesContext>,
    pub(super) id: EngineId,
    pub(super) generation: Generation,
    pub(super) placement: Arc<ModelPlacement>,
    /// That of the term in which this gateway decided on the engine: no order of one term is sent in the next.
    pub(super) epoch: Epoch,
    /// The engine's stub has reported its Pod's accelerators. Of no meaning if the leader chose them.
    pub(super) located: AtomicBool,
    /// The requester that the pairing controller got orders for, with its node. A generation has one Pod.
    pub(super) ordered: OnceLock<(NodeName, RequesterId)>,
}

/// The engine's Pod; `None` before it has one and once it is gone.
pub(super) type PodReceiver = watch::Receiver<Option<Arc<EnginePod>>>;

type StepFuture<T> = Option<Pin<Box<dyn Future<Output = T> + Send>>>;

/// Runs until the engine's Pod is gone, or until this gateway no longer leads.
pub(super) async fn run(
    context: Arc<EngineContext>,
    mut commands: mpsc::Receiver<EngineTaskCommand>,
    mut pod: PodReceiver,
    start: EngineTaskStart,
) {
    let mut client = match start {
        EngineTaskStart::Launch => None,
        _ => context.contact(&pod),
    };
    if start.repeats_order() {
        actuation::repeat_order(&context, &pod);
    }
    let mut starting: StepFuture<StepOutcome> = Some(match (start, &client) {
        (EngineTaskStart::Launch, _) => {
            Box::pin(engine_steps::acquire_pod(Arc::clone(&context), pod.clone()))
        }
        (EngineTaskStart::Starting, _) => {
            Box::pin(engine_steps::wait_ready(Arc::clone(&context), pod.clone()))
        }
        (EngineTaskStart::Awake, _) => Box::pin(ready(StepOutcome::Ready)),
        (EngineTaskStart::Unconfirmed, _) => {
            Box::pin(confirmation::confirm(Arc::clone(&context), pod.clone()))
        }
        (EngineTaskStart::FallingAsleep(level), Some(client)) => {
            Box::pin(actuation::resume_sleep(Arc::clone(client), Arc::clone(&context), pod.clone(), level))
        }
        (EngineTaskStart::Asleep | EngineTaskStart::FallingAsleep(_), _) => {
            Box::pin(ready(StepOutcome::Asleep))
        }
    });
    let (mut probe, mut drain, mut health_watch, mut shutdown): (
        StepFuture<()>,
        StepFuture<()>,
        StepFuture<()>,
        StepFuture<()>,
    ) = (None, None, None, None);
    let mut usage_poll: StepFuture<()> = None;
    let mut occupancy = client.is_some().then(|| context.occupy(&pod));
    let mut cause = FailureCause::Stopped;
    loop {
        tokio::select! {
            biased;
            end_cause = pod_lost(&mut pod, client.is_some(), shutdown.is_some()) => {
                (starting, probe, drain, health_watch, usage_poll) = (None, None, None, None, None);
                cause = end_cause;
                context.report_terminating(&pod).await;
                context.report_pod_failure(&pod).await;
                shutdown = Some(Box::pin(engine_steps::shut_down(Arc::clone(&context), pod.clone(), client.is_some())));
            }
            () = poll_if_some(&mut shutdown) => break,
            command = commands.recv() => match command {
                None => return,
                Some(_) if shutdown.is_some() => {}
                Some(EngineTaskCommand::Stop) => {
                    (starting, probe, drain, health_watch, usage_poll) = (None, None, None, None, None);
                    shutdown = Some(Box::pin(engine_steps::shut_down(Arc::clone(&context), pod.clone(), client.is_some())));
                }
                Some(order) => {
                    let Some(contact) = client.clone() else { continue };
                    match order {
                        EngineTaskCommand::Probe => probe = Some(Box::pin(async move { health::run_canary(&contact).await })),
                        EngineTaskCommand::CloseGate => drain = Some(Box::pin(engine_steps::drain(contact, Arc::clone(&context), false))),
                        EngineTaskCommand::Revoke => drain = Some(Box::pin(engine_steps::drain(contact, Arc::clone(&context), true))),
                        EngineTaskCommand::OpenGate => drain = Some(Box::pin(engine_steps::open(contact, Arc::clone(&context)))),
                        EngineTaskCommand::Hold => {
                            let opened = engine_steps::restore(Arc::clone(&contact), Arc::clone(&context));
                            health_watch = Some(Box::pin(async move {
                                opened.await;
                                health::watch_health(&contact, InitialHealth::StubGateClosed).await;
                            }));
                        }
                        EngineTaskCommand::Sleep(level) => {
                            (probe, health_watch, usage_poll) = (None, None, None);
                            starting = Some(Box::pin(actuation::sleep(contact, Arc::clone(&context), pod.clone(), level)));
                        }
                        EngineTaskCommand::Wake(level) => {
                            starting = Some(Box::pin(actuation::wake(contact, Arc::clone(&context), pod.clone(), level)));
                        }
                        EngineTaskCommand::Stop => {}
                    }
                }
            },
            done = poll_if_some(&mut starting) => {
                starting = None;
                match done {
                    // From here on this Pod belongs to this generation, which gets no other.
                    StepOutcome::Started => {
                        client = context.contact(&pod);
                        occupancy = Some(context.occupy(&pod));
                        starting = Some(Box::pin(engine_steps::wait_ready(Arc::clone(&context), pod.clone())));
                    }
                    StepOutcome::Ready | StepOutcome::Confirmed | StepOutcome::Unanswered => {
                        let answered = done == StepOutcome::Ready;
                        if done == StepOutcome::Unanswered {
                            starting = Some(Box::pin(confirmation::confirm_later(Arc::clone(&context), pod.clone())));
                        }
                        // A watch that waits for the stub's gate, or that began before the stub answered, goes on.
                        if let Some(contact) = client.clone().filter(|_| answered || health_watch.is_none()) {
                            let known = if answered { InitialHealth::Healthy } else { InitialHealth::Unconfirmed };
                            health_watch = Some(Box::pin(async move { health::watch_health(&contact, known).await }));
                        }
                        if let Some(occupancy) = occupancy.clone().filter(|_| answered || usage_poll.is_none()) {
                            usage_poll = Some(Box::pin(context.observe(&pod, occupancy, start)));
                        }
                    }
                    StepOutcome::Unauthorized => {
                        tracing::warn!(
                            engine = %context.id,
                            "replacing the engine: its stub was started with another key"
                        );
                        (probe, drain, health_watch, usage_poll) = (None, None, None, None);
                        cause = FailureCause::Refused;
                        context.report_gate_closed().await;
                        let leaving = Arc::clone(&context);
                        shutdown = Some(Box::pin(engine_steps::shut_down(leaving, pod.clone(), client.is_some())));
                    }
                    StepOutcome::Asleep | StepOutcome::Failed => {}
                }
            }
            () = poll_if_some(&mut probe) => probe = None,
            () = poll_if_some(&mut drain) => drain = None,
            () = poll_if_some(&mut health_watch) => health_watch = None,
            () = poll_if_some(&mut usage_poll) => usage_poll = None,
        }
    }
    drop((starting, probe, drain, health_watch, usage_poll, shutdown, occupancy));
    context.finish(cause).await;
}

impl EngineContext {
    /// Returns the engine's client, which goes through its stub, once the Pod has an address.
    fn contact(&self, pod: &PodReceiver) -> Option<Arc<EngineClient>> {
        let address = self.proxy(pod)?;
        let client = EngineClient::new(
            &self.shared.common,
            self.id.clone(),
            self.generation,
            address,
            Arc::clone(&self.placement.engine),
        );
        Some(Arc::new(client))
    }

    pub(super) fn proxy(&self, pod: &PodReceiver) -> Option<SocketAddr> {
        let address = pod.borrow().as_ref()?.address?;
        Some(SocketAddr::new(address, PROXY_PORT))
    }

    /// Reports a closed gate if another client deleted the Pod: new requests then wait for the next Pod.
    async fn report_terminating(&self, pod: &PodReceiver) {
        if pod.borrow().as_ref().is_some_and(|pod| pod.terminating && !pod.finished) {
            self.report_gate_closed().await;
        }
    }

    /// Reports that the engine takes no more requests.
    async fn report_gate_closed(&self) {
        let (engine, generation) = (self.id.clone(), self.generation);
        self.shared.common.send_event(Event::StubGateClosed { engine, generation }).await;
    }

    /// Reports the Pod's failure, if it has one.
    pub(super) async fn report_pod_failure(&self, pod: &PodReceiver) {
        let failure =
            pod.borrow().as_ref().and_then(|engine_pod| engine_pod.failure.as_ref().map(ToString::to_string));
        if let Some(failure) = failure {
            self.shared.report_failure(&self.id, self.generation, &failure).await;
        }
    }

    /// Marks the engine as present on this Pod's node until the guard is dropped.
    fn occupy(&self, pod: &PodReceiver) -> Arc<AcceleratorOccupancy> {
        let node = pod.borrow().as_ref().and_then(|pod| pod.node.clone());
        let chosen =
            self.placement.location().map(|location| location.accelerators.iter().cloned().collect());
        Arc::new(self.shared.occupancy.occupy(self.id.clone(), node, chosen))
    }

    /// Polls the engine's memory use while it serves. Locates the engine if its start did not.
    fn observe(
        self: &Arc<Self>,
        pod: &PodReceiver,
        occupancy: Arc<AcceleratorOccupancy>,
        start: EngineTaskStart,
    ) -> impl Future<Output = ()> + use<> {
        let (context, pod) = (Arc::clone(self), pod.clone());
        let since = self.shared.common.clock.now();
        async move {
            if matches!(start, EngineTaskStart::Awake | EngineTaskStart::Unconfirmed) {
                // For an adopted engine, the other engines on its accelerators are not known at once.
                time::sleep(observe::POLL_INTERVAL).await;
            }
            let memory = async {
                // Asleep engines share a requester's accelerators, so their memory use is not this engine's alone.
                if !context.placement.dual_pods {
                    observe::poll(Arc::clone(&context), pod.clone(), occupancy, since).await;
                }
            };
            tokio::join!(engine_location::locate(&context, &pod), memory);
        }
    }

    /// Releases the engine's memory, and only then reports the engine gone.
    async fn finish(&self, cause: FailureCause) {
        tracing::debug!(engine = %self.id, generation = %self.generation, %cause, "gone");
        self.shared.release(&self.placement, self.id.replica).await;
        self.shared.status_inputs.forget_engine(&self.id);
        actuation::forget_orders(self);
        let (engine, generation) = (self.id.clone(), self.generation);
        self.shared.request(ManagerRequest::Ended { engine: engine.clone(), generation }).await;
        self.shared.common.send_event(Event::Gone { engine, generation, cause }).await;
    }

    /// Releases the engine's Pod; returns after the scale-down is applied and no surplus Pod remains.
    pub(super) async fn release_pod(&self) {
        let (done, released) = oneshot::channel();
        let (engine, generation) = (self.id.clone(), self.generation);
        self.shared.request(ManagerRequest::ReleasePod { engine, generation, done }).await;
        if released.await.is_err() {
            // This gateway no longer leads: the task is about to be dropped.
            pending().await
        }
    }
}

/// Completes when the Pod ends without an order. `is_bound`: the Pod is bound; an unbound Pod is just replaced.
async fn pod_lost(pod: &mut PodReceiver, is_bound: bool, is_leaving: bool) -> FailureCause {
    if !is_bound || is_leaving {
        return pending().await;
    }
    let over = |pod: &Option<Arc<EnginePod>>| {
        let crashed = |pod: &EnginePod| matches!(pod.failure, Some(PodFailure::Crashed { .. }));
        pod.as_ref().is_none_or(|pod| pod.finished || pod.terminating || crashed(pod))
    };
    let Ok(engine_pod) = pod.wait_for(over).await else {
        return pending().await;
    };
    match engine_pod.as_ref().and_then(|engine_pod| engine_pod.failure.as_ref()) {
        Some(PodFailure::Crashed { code, signal, .. }) => exit_cause(*code, *signal),
        _ => FailureCause::Unreachable,
    }
}

pub(super) fn exit_cause(code: i32, signal: Option<i32>) -> FailureCause {
    /// Exit codes above this are signals, as shells and container runtimes report them.
    const SIGNALLED: i32 = 128;
    match (code, signal) {
        (_, Some(signal)) => FailureCause::Killed(signal),
        (code, None) if code > SIGNALLED && code < SIGNALLED + 65 => FailureCause::Killed(code - SIGNALLED),
        (code, None) => FailureCause::Exited(code),
    }
}

/// Backoff between retries of an operation that must succeed.
pub(super) struct RetryBackoff(Duration);

impl RetryBackoff {
    pub(super) const fn new() -> Self {
        Self(Duration::from_millis(20))
    }

    pub(super) async fn pause(&mut self) {
        time::sleep(self.0).await;
        self.0 = (self.0 * 2).min(Millis::secs(1).duration());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_that_starts_or_is_to_stop_gets_no_order_before_its_pod_is_checked() {
        assert!(!EngineTaskStart::Launch.repeats_order() && !EngineTaskStart::Starting.repeats_order());
        let adopted = [
            EngineTaskStart::Awake,
            EngineTaskStart::Unconfirmed,
            EngineTaskStart::Asleep,
            EngineTaskStart::FallingAsleep(SleepLevel::Two),
        ];
        assert!(adopted.into_iter().all(EngineTaskStart::repeats_order));
    }
}
