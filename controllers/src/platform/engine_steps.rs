//! The steps of an engine task with its Pod, its stub and its engine.
//!
//! Each step is a future that the task polls and may drop at any await. Each can start again where another leader left
//! off.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use k8s_openapi::api::{apps::v1::Deployment, core::v1::Pod as PodObject};
use kube::Api;
use rouse::{
    fault::FailureCause,
    fleet::event::Event,
    pairing::event::WantedState,
    units::{Millis, Tick},
};
use rouse_platform::{engine_client::EngineClient, readiness};
use serde_json::{Value, json};
use tokio::time;

use super::{
    actuation, engine_location,
    engine_manager::ManagerRequest,
    engine_task::{EngineContext, PodReceiver, RetryBackoff, exit_cause},
};
use crate::{
    dual_pods::record,
    engine_pod::{EnginePod, PodFailure},
    stub_client::{StubClient, StubClientError},
    workload::{DELETION_COST, GENERATION, REPLICA, SPI_PORT, merge},
    writer::{Error, fence::Fence},
};

/// Outcome of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StepOutcome {
    /// The engine has bound a Pod that has an address.
    Started,
    Ready,
    Asleep,
    /// The stub of an adopted engine has accepted this leader.
    Confirmed,
    /// The stub of an adopted engine has not answered this leader yet.
    Unanswered,
    /// The stub was started with another key and obeys no orders.
    Unauthorized,
    /// The start failed and reported why, or this gateway no longer leads, or the Pod vanished.
    Failed,
}

/// A start fails if no node accepts its Pod within this time.
const UNSCHEDULABLE_TIMEOUT: Millis = Millis::secs(60);
/// While no Pod appears, check the Deployment for the reason after this time, and then after twice as long each time:
/// in the start of a large fleet, the controller of Deployments makes Pods for minutes, and thousands of engines wait.
const POD_CREATION_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest of these times.
const MAX_POD_CREATION_TIMEOUT: Duration = Duration::from_secs(30);
/// While an engine loads, set its stub up again at this interval.
const STUB_SETUP_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum wait for the Pod to become unready. A kubelet checks a stub's readiness every second.
const UNREADY_TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum wait for the ReplicaSet to delete a released Pod; the gateway then deletes the Pod itself.
const POD_RELEASE_TIMEOUT: Duration = Duration::from_secs(3);
/// A drain that cuts requests gives up after this time if the stub does not answer.
const STUB_SILENCE_TIMEOUT: Duration = Duration::from_secs(30);
/// Deletion costs: a ReplicaSet deletes Pods of bound engines last and those of leaving engines first.
const BOUND_DELETION_COST: &str = "100";
const LEAVING_DELETION_COST: &str = "-100";

/// Waits for a Pod and binds it to the engine.
pub(super) async fn acquire_pod(context: Arc<EngineContext>, mut pod: PodReceiver) -> StepOutcome {
    let mut pauses = RetryBackoff::new();
    loop {
        let (troubled, unmade) =
            (start_failure(&context, pod.clone()), pod_creation_failed(&context, pod.clone()));
        let found = tokio::select! {
            engine_pod = pod_with_address(&mut pod) => engine_pod,
            cause = troubled => {
                report_start_failed(&context, cause).await;
                return StepOutcome::Failed;
            }
            cause = unmade => {
                report_start_failed(&context, cause).await;
                return StepOutcome::Failed;
            }
        };
        let Some((engine_pod, address)) = found else { return StepOutcome::Failed };
        if bind_pod(&context, &engine_pod).await {
            let (engine, generation) = (context.id.clone(), context.generation);
            context.shared.status_inputs.set_pod(&engine, generation, &engine_pod.name.name);
            context.shared.request(ManagerRequest::Bound { engine: engine.clone(), generation }).await;
            context.shared.common.send_event(Event::Started { engine, generation, address }).await;
            return StepOutcome::Started;
        }
        // The Pod is gone. The manager assigns another as soon as it sees that.
        pauses.pause().await;
    }
}

/// Binds the Pod to the engine. Returns false if that Pod no longer exists.
async fn bind_pod(context: &EngineContext, engine_pod: &EnginePod) -> bool {
    let marks = json!({
        REPLICA: context.id.replica.to_string(),
        GENERATION: context.generation.to_string(),
        DELETION_COST: BOUND_DELETION_COST,
    });
    let mut pauses = RetryBackoff::new();
    while let Err(error) = annotate_pod(context, engine_pod, &marks).await {
        if matches!(error, Error::Gone | Error::Conflict) {
            return false;
        }
        tracing::debug!(pod = %engine_pod.name, %error, "cannot bind the Pod to the engine, retrying");
        pauses.pause().await;
    }
    true
}

/// Completes once the Deployment reports that no Pod can be created (a quota, an admission policy).
async fn pod_creation_failed(context: &EngineContext, mut pod: PodReceiver) -> FailureCause {
    let deployment = context.placement.deployment();
    let api: Api<Deployment> = Api::namespaced(context.shared.client.clone(), &deployment.namespace);
    let mut pause = POD_CREATION_TIMEOUT;
    loop {
        if pod.wait_for(Option::is_none).await.is_err() {
            return std::future::pending().await;
        }
        time::sleep(pause).await;
        if pod.borrow().is_some() {
            pause = POD_CREATION_TIMEOUT;
            continue;
        }
        pause = (pause * 2).min(MAX_POD_CREATION_TIMEOUT);
        let Ok(Some(found)) = context.shared.writer.get(&api, &deployment.name).await else { continue };
        let conditions = found.status.and_then(|status| status.conditions).unwrap_or_default();
        let fails = conditions.into_iter().find(|it| it.type_ == "ReplicaFailure" && it.status == "True");
        if let Some(fails) = fails {
            let message = fails.message.unwrap_or_default();
            tracing::warn!(engine = %context.id, reason = message, "the Deployment cannot create a Pod for the engine");
            context.shared.report_failure(&context.id, context.generation, &message).await;
            return FailureCause::PodNotRunnable;
        }
    }
}

/// Waits until the engine in the Pod answers, then reports it ready.
pub(super) async fn wait_ready(context: Arc<EngineContext>, pod: PodReceiver) -> StepOutcome {
    let Some(address) = context.proxy(&pod) else { return StepOutcome::Failed };
    let client = EngineClient::new(
        &context.shared.common,
        context.id.clone(),
        context.generation,
        address,
        Arc::clone(&context.placement.engine),
    );
    let fit = async {
        open_stub(&context, address).await?;
        if let Some(chosen) = context.placement.location() {
            engine_location::check_chosen(&context, &pod, address, chosen).await?;
        }
        actuation::order(&context, &pod, WantedState::Awake);
        tokio::select! {
            biased;
            // Biased: an engine that serves has its memory, even if the check expected no room.
            fit = async {
                while time::timeout(STUB_SETUP_INTERVAL, readiness::wait_until_ready(&client, None)).await.is_err() {
                    // A restarted stub container has lost its target and starts with a closed gate.
                    open_stub(&context, address).await?;
                }
                client.adapter.check_served_name(client.health_timeout()).await
            } => fit,
            cause = actuation::start_failure(&context, &pod) => Err(cause),
            cause = engine_location::check_location(&context, &pod, address) => Err(cause),
        }
    };
    let outcome = tokio::select! {
        fit = fit => fit,
        cause = start_failure(&context, pod.clone()) => Err(cause),
    };
    if let Err(cause) = outcome {
        report_start_failed(&context, cause).await;
        return StepOutcome::Failed;
    }
    let (engine, generation) = (context.id.clone(), context.generation);
    context.shared.common.send_event(Event::Ready { engine, generation }).await;
    set_readiness(&context, address, true).await;
    StepOutcome::Ready
}

/// Sends the stub its target and opens its gate. Fails if the stub has another key and so never obeys.
pub(super) async fn open_stub(context: &EngineContext, proxy: SocketAddr) -> Result<(), FailureCause> {
    if context.placement.dual_pods {
        // The pairing controller sets up a requester's stub.
        return Ok(());
    }
    open_gate(context, proxy).await
}

/// Opens the gate. Sends the stub its target first, unless the pairing controller has.
async fn open_gate(context: &EngineContext, proxy: SocketAddr) -> Result<(), FailureCause> {
    let target = SocketAddr::new(proxy.ip(), context.placement.pod_template.port);
    let mut pauses = RetryBackoff::new();
    loop {
        // A stale claim to lead is renewed or lost, and with the claim this task ends.
        let Some(stub) = context.stub(proxy) else {
            pauses.pause().await;
            continue;
        };
        let done = async {
            if !context.placement.dual_pods {
                stub.set_target(target).await?;
            }
            match context.of_gate(stub).await? {
                Some(stub) => stub.open().await,
                None => Ok(()),
            }
        };
        match done.await {
            // The stub has obeyed a later order, so this one must not be repeated.
            Ok(()) | Err(StubClientError::Overtaken) => return Ok(()),
            Err(error) if context.is_superseding(&error) => superseded(context).await,
            Err(StubClientError::Unauthorized(_)) => return Err(FailureCause::Refused),
            Err(error) => {
                tracing::debug!(engine = %context.id, %error, "cannot set up the stub yet, retrying")
            }
        }
        pauses.pause().await;
    }
}

/// Sets up a stub again after its container restarted. That of a requester is set up by the pairing controller.
pub(super) async fn restore(client: Arc<EngineClient>, context: Arc<EngineContext>) {
    if !context.placement.dual_pods {
        open(Arc::clone(&client), Arc::clone(&context)).await;
    }
    set_readiness(&context, client.address, true).await;
}

/// Closes the stub's gate and reports when no request is under way any more.
pub(super) async fn drain(client: Arc<EngineClient>, context: Arc<EngineContext>, cut: bool) {
    // Without slots, a requester's gate closes when its Pod is deleted, and its engine stays untouched until no request
    // is under way.
    if context.placement.has_gate() {
        close_and_drain(&client, &context, cut).await;
    }
    let (engine, generation) = (context.id.clone(), context.generation);
    context.shared.common.send_event(Event::Drained { engine, generation }).await;
}

pub(super) async fn close_and_drain(client: &EngineClient, context: &EngineContext, cut: bool) {
    let mut pauses = RetryBackoff::new();
    let given_up = time::Instant::now() + STUB_SILENCE_TIMEOUT;
    loop {
        let Some(stub) = context.stub(client.address) else {
            pauses.pause().await;
            continue;
        };
        let drained = async {
            match context.of_gate(stub).await? {
                Some(stub) => stub.drain(cut).await,
                None => Ok(true),
            }
        };
        match drained.await {
            // The drain need not wait for requests, and the stub is unreachable. They end with the Pod.
            Err(_) if cut && time::Instant::now() > given_up => break,
            // A stub with another key never obeys.
            Ok(true) | Err(StubClientError::Unauthorized(_)) => break,
            Ok(false) => continue,
            Err(error) if context.is_superseding(&error) => return superseded(context).await,
            Err(error) => {
                tracing::debug!(engine = %context.id, %error, "the stub did not drain, retrying")
            }
        }
        pauses.pause().await;
    }
}

pub(super) async fn open(client: Arc<EngineClient>, context: Arc<EngineContext>) {
    if !context.placement.has_gate() {
        return;
    }
    if let Err(cause) = open_gate(&context, client.address).await {
        tracing::warn!(engine = %context.id, %cause, "cannot open the stub's gate");
    }
}

/// Shuts the engine down: closes its stub, releases its Pod, and waits until that is gone. `has_stub`: it has a stub.
pub(super) async fn shut_down(context: Arc<EngineContext>, mut pod: PodReceiver, has_stub: bool) {
    actuation::withdraw_order(&context);
    context.shared.mark_releasing(&context.placement, context.id.replica).await;
    let engine_pod = pod.borrow().clone();
    if let Some(engine_pod) = &engine_pod {
        if has_stub && let Some(address) = context.proxy(&pod) {
            close_stub(&context, address).await;
        }
        if !engine_pod.terminating {
            // A ReplicaSet deletes an unready Pod before a ready one, whatever their deletion costs.
            if let Err(error) = annotate_pod(&context, engine_pod, &leaving_annotations(&context)).await {
                tracing::debug!(pod = %engine_pod.name, %error, "cannot mark the Pod as leaving");
            }
            let unready = |engine_pod: &Option<Arc<EnginePod>>| {
                engine_pod.as_ref().is_none_or(|engine_pod| !engine_pod.ready)
            };
            // After the timeout, go on regardless.
            let _late = time::timeout(UNREADY_TIMEOUT, pod.wait_for(unready)).await.is_err();
        }
    }
    context.release_pod().await;
    // The ReplicaSet deletes the Pod once its replica count drops. Deleting the Pod earlier would create a replacement.
    let ends = |engine_pod: &Option<Arc<EnginePod>>| {
        engine_pod.as_ref().is_none_or(|engine_pod| engine_pod.terminating)
    };
    let _itself = time::timeout(POD_RELEASE_TIMEOUT, pod.wait_for(ends)).await.is_ok();
    let mut pauses = RetryBackoff::new();
    loop {
        let engine_pod = pod.borrow().clone();
        let Some(engine_pod) = engine_pod.filter(|engine_pod| !engine_pod.terminating) else { break };
        if delete(&context, &engine_pod).await {
            break;
        }
        pauses.pause().await;
    }
    let is_gone = pod.wait_for(Option::is_none).await.is_ok();
    if !is_gone {
        std::future::pending::<()>().await;
    }
}

/// Builds the annotations of a Pod that leaves.
///
/// A requester may date from before its model's sleep policy changed. The model's current policy counts.
fn leaving_annotations(context: &EngineContext) -> Value {
    let mut marks = json!({DELETION_COST: LEAVING_DELETION_COST});
    if let Some(placement) = context.shared.placement(&context.id).filter(|placement| placement.dual_pods) {
        merge::into(&mut marks, &record::sleep_policy_annotations(placement.variant.spec.idle.into()));
    }
    marks
}

/// Closes the stub's gate and makes the Pod unready. One try: a stub that does not answer admits no request, and its
/// Pod goes.
async fn close_stub(context: &EngineContext, proxy: SocketAddr) {
    if !context.placement.dual_pods
        && let Some(stub) = context.stub(proxy)
        && let Err(error) = stub.close().await
    {
        tracing::debug!(engine = %context.id, %error, "cannot close the stub's gate");
    }
    set_readiness(context, proxy, false).await;
}

pub(super) async fn set_readiness(context: &EngineContext, proxy: SocketAddr, ready: bool) {
    if !(context.placement.dual_pods && ready)
        && let Some(stub) = context.stub(proxy)
        && let Err(error) = stub.set_ready(ready).await
    {
        tracing::debug!(engine = %context.id, %error, "cannot set the stub's readiness");
    }
}

async fn delete(context: &EngineContext, engine_pod: &EnginePod) -> bool {
    let api: Api<PodObject> = Api::namespaced(context.shared.client.clone(), &engine_pod.name.namespace);
    let fence = Fence::new(engine_pod.seen.clone(), context.epoch);
    let done = Box::pin(context.shared.writer.delete_fenced(&api, &engine_pod.name.name, &fence)).await;
    done.inspect_err(|error| tracing::debug!(pod = %engine_pod.name, %error, "cannot delete the Pod")).is_ok()
}

/// Writes annotations and the leader's epoch to this one Pod.
pub(super) async fn annotate_pod(
    context: &EngineContext,
    engine_pod: &EnginePod,
    marks: &Value,
) -> Result<(), Error> {
    let fence = Fence::new(engine_pod.seen.clone(), context.epoch);
    let api: Api<PodObject> = Api::namespaced(context.shared.client.clone(), &engine_pod.name.namespace);
    let patch = json!({"metadata": {"annotations": marks}});
    Box::pin(context.shared.writer.patch_fenced(&api, &engine_pod.name.name, &fence, &patch)).await
}

/// Returns the Pod and its stub's address once it has one; `None` when this gateway no longer leads.
async fn pod_with_address(pod: &mut PodReceiver) -> Option<(Arc<EnginePod>, SocketAddr)> {
    let has_address = |engine_pod: &Option<Arc<EnginePod>>| {
        engine_pod.as_ref().is_some_and(|engine_pod| engine_pod.address.is_some())
    };
    let engine_pod = pod.wait_for(has_address).await.ok()?.clone()?;
    let address = SocketAddr::new(engine_pod.address?, crate::workload::PROXY_PORT);
    Some((engine_pod, address))
}

/// Completes once this start can no longer succeed.
async fn start_failure(context: &EngineContext, mut pod: PodReceiver) -> FailureCause {
    loop {
        let (cause, recheck_after) =
            classify_failure(pod.borrow_and_update().as_deref(), context.shared.common.clock.now());
        if let Some(cause) = cause {
            context.report_pod_failure(&pod).await;
            return cause;
        }
        let recheck = async {
            match recheck_after {
                Some(pause) => time::sleep(pause.duration()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            changed = pod.changed() => {
                if changed.is_err() {
                    return std::future::pending().await;
                }
            }
            () = recheck => {}
        }
    }
}

/// Returns why the start failed, or when to check again.
fn classify_failure(engine_pod: Option<&EnginePod>, now: Tick) -> (Option<FailureCause>, Option<Millis>) {
    match engine_pod.and_then(|engine_pod| engine_pod.failure.as_ref()) {
        None => (None, None),
        Some(PodFailure::Crashed { code, signal, .. }) => (Some(exit_cause(*code, *signal)), None),
        // A registry may answer on the next try. The kubelet reports another reason once it backs off longer.
        Some(PodFailure::ContainerWaiting { reason, .. }) if reason == "ErrImagePull" => (None, None),
        Some(PodFailure::ContainerWaiting { .. } | PodFailure::RequesterErrors { .. }) => {
            (Some(FailureCause::PodNotRunnable), None)
        }
        Some(PodFailure::Unschedulable { since, .. }) => {
            let by = *since + UNSCHEDULABLE_TIMEOUT;
            if by <= now { (Some(FailureCause::Unschedulable), None) } else { (None, Some(by.since(now))) }
        }
    }
}

async fn report_start_failed(context: &EngineContext, cause: FailureCause) {
    let (engine, generation) = (context.id.clone(), context.generation);
    tracing::warn!(%engine, %generation, %cause, "engine start failed");
    context.shared.common.send_event(Event::StartFailed { engine, generation, cause }).await;
}

/// Handles a stub that obeys a newer leader: this gateway has been replaced and is about to learn that.
pub(super) async fn superseded(context: &EngineContext) {
    tracing::warn!(engine = %context.id, "the stub rejected the epoch: a newer leader is active");
    std::future::pending().await
}

impl EngineContext {
    /// Returns a client for orders about the gate; `None` if the gate of a requester is closed since its stub started.
    ///
    /// The gate of a requester has the generation of the pairing controller, which also opens it for the first time.
    async fn of_gate(&self, stub: StubClient) -> Result<Option<StubClient>, StubClientError> {
        if self.placement.dual_pods { stub.for_gate_generation().await } else { Ok(Some(stub)) }
    }

    /// Whether the refusal of an order about the gate shows a newer leader.
    ///
    /// The pairing controller may have opened a requester's gate for a newer generation meanwhile.
    fn is_superseding(&self, error: &StubClientError) -> bool {
        matches!(error, StubClientError::Conflict { newer_epoch, .. } if *newer_epoch || !self.placement.dual_pods)
    }

    /// Returns a client of the Pod's stub; `None` if this gateway's claim to lead is not fresh, or is that of another term.
    pub(super) fn stub(&self, proxy: SocketAddr) -> Option<StubClient> {
        let epoch = self.shared.writer.leadership_in(self.epoch).ok()?.epoch;
        let token = self.shared.sidecar.key.token(&self.placement.owner);
        Some(StubClient::new(SocketAddr::new(proxy.ip(), SPI_PORT), Some(token), epoch, self.generation))
    }
}
