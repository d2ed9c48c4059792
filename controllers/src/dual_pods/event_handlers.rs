//! Turns the controller's inputs into pairing events: Pod changes, launcher events, readings, command results.

use std::{sync::Arc, time::Duration};

use k8s_openapi::api::core::v1::Pod;
use rouse::{
    pairing::{event::PairingEvent, ids::RequesterId},
    units::Tick,
};

use super::{
    FinishedTask, POLICY_STATUS_RETRY_DELAY, PairingController, PairingTasks,
    engine_orders::EngineOrder,
    execute::ExecutionResult,
    index,
    launcher_watches::{self, LauncherEvent},
    pairing_metrics::MetricsInputs,
    requester_status::STATUS_WRITE_INTERVAL,
};
use crate::{
    platform::{dcgm::DcgmSamples, launcher::LauncherClient},
    recorder::EventRequest,
    watch::Delta,
};

impl PairingController {
    /// Schedules a reading of the meter after this delay.
    pub(super) fn schedule_meter_read(&mut self, after: Duration, tasks: &mut PairingTasks) {
        if self.meter.is_some() {
            tasks.after(after, FinishedTask::MeterDue);
        }
    }

    fn read_meter(&self, tasks: &mut PairingTasks) {
        let Some(meter) = self.meter.clone() else { return };
        // The log already has the reason of a failure.
        tasks.spawn(async move { FinishedTask::MeterRead(meter.samples().await.ok()) });
    }

    fn handle_samples(&mut self, samples: Option<&DcgmSamples>, tasks: &mut PairingTasks) {
        if let Some(samples) = samples {
            self.facts.apply_samples(samples);
            let events = self.facts.readings(samples, &self.core);
            self.apply_events(events);
        }
        let interval = self.meter.as_ref().map(|meter| meter.interval());
        interval.into_iter().for_each(|interval| self.schedule_meter_read(interval, tasks));
    }

    /// Takes an order of the fleet. A controller that has not seen everything yet reads all orders once it has.
    ///
    /// The pairing logic forgets a want with its requester, so it gets none for a requester that was not seen yet, or
    /// that is gone. The order waits until the requester is seen.
    pub(super) fn handle_order(&mut self, order: EngineOrder) {
        if self.epoch.is_none() || self.index.requester(&order.requester).is_none() {
            return;
        }
        let node = order.node.clone();
        self.apply_events(vec![order_event(order)]);
        // A repeated order changes nothing, and its giver may have missed the last report.
        self.publish_reports(&[node]);
    }

    pub(super) fn handle_pods(&mut self, change: Delta<Pod>) {
        let mut events = Vec::new();
        // The pairing logic never sees a requester that requests the impossible, but its user gets a status.
        let one = match &change {
            Delta::Applied(found) => found.metadata().uid.clone().map(RequesterId::from),
            Delta::All { .. } | Delta::Deleted(_) => None,
        };
        let all = matches!(change, Delta::All { .. });
        if let Delta::All { namespace, .. } = &change {
            self.listed_namespaces.insert(namespace.clone());
        }
        let name = match &change {
            Delta::Applied(found) => Some(found.name()),
            Delta::Deleted(name) => Some(name.clone()),
            Delta::All { .. } => None,
        };
        self.index.apply(change, &self.facts, &mut |event| events.push(event));
        let inputs = MetricsInputs { index: &self.index, facts: &self.facts, now: self.executor.clock.now() };
        match name {
            Some(name) => self.pairing_metrics.recount(&name, inputs),
            None => self.pairing_metrics.recount_all(inputs),
        }
        let one = one.as_ref().and_then(|id| self.index.requester(id));
        let listed = all.then(|| self.index.requesters()).into_iter().flatten();
        listed.chain(one).for_each(|requester| self.requester_status.mark_due(requester.id.clone()));
        self.apply_events(events);
    }

    /// Handles an event of a launcher.
    pub(super) fn handle_launcher_event(&mut self, launcher_event: &LauncherEvent, tasks: &mut PairingTasks) {
        if !self.launcher_watches.is_watched(launcher_event) {
            return;
        }
        let failed = self
            .core
            .node(&launcher_event.node)
            .and_then(|node| launcher_watches::start_failure(launcher_event, node));
        if let Some((requester, error)) = failed.filter(|(id, _)| self.index.requester(id).is_some()) {
            self.requester_status.error(requester, error);
        }
        self.apply_events(launcher_watches::events(launcher_event));
        let provider = self.index.provider(&launcher_event.node, &launcher_event.launcher);
        let whole = provider.is_some_and(index::ProviderPod::is_fully_parsed);
        let address = provider.and_then(index::ProviderPod::launcher_address);
        let (Some(node), Some(address), Some(epoch)) =
            (self.core.node(&launcher_event.node), address, self.epoch)
        else {
            return;
        };
        let namespace = provider.map_or("", |pod| &pod.name.namespace);
        let call_observer = Arc::new(self.executor.metrics.call_observer(namespace, None));
        let token = provider.map(|pod| self.executor.settings.key.launcher_token(&pod.name));
        let launcher = Arc::new(LauncherClient::new(address, token, epoch).observed(call_observer));
        for engine in launcher_watches::missing(launcher_event, node) {
            let Some(engine_state) = node.engines.get(&engine) else { continue };
            let (launcher, generation) = (Arc::clone(&launcher), engine_state.generation);
            let verification =
                launcher_watches::verify(launcher, launcher_event.node.clone(), engine, generation);
            tasks.spawn(async move { FinishedTask::EngineVerified(verification.await) });
        }
        for id in launcher_watches::orphans(launcher_event, node).into_iter().filter(|_| whole) {
            tracing::warn!(node = %launcher_event.node, id, "unknown engine in a launcher, deleting it");
            let launcher = Arc::clone(&launcher);
            tasks.spawn(async move {
                // An engine that does not end appears again in the next list.
                drop(launcher.delete(&id).await);
                FinishedTask::EngineVerified(None)
            });
        }
    }

    pub(super) fn handle_finished(&mut self, finished: FinishedTask, tasks: &mut PairingTasks) {
        match finished {
            FinishedTask::Command(done) => {
                let (result, notices) = *done;
                self.handle_result(result, notices);
            }
            FinishedTask::EngineVerified(event) => self.apply_events(event.into_iter().collect()),
            FinishedTask::StatusWritten(id) => {
                tasks.after(STATUS_WRITE_INTERVAL, FinishedTask::StatusDue(id))
            }
            FinishedTask::StatusDue(id) => self.requester_status.may_write(id),
            FinishedTask::MeterDue => self.read_meter(tasks),
            FinishedTask::MeterRead(samples) => self.handle_samples(samples.as_deref(), tasks),
            FinishedTask::WaitElapsed { requester, wait } => {
                self.pod_events.report_waiting(requester, wait, &self.index, tasks);
            }
            FinishedTask::PolicyStatusWritten { retry: true } => {
                tasks.after(POLICY_STATUS_RETRY_DELAY, FinishedTask::PolicyStatusDue);
            }
            FinishedTask::PolicyStatusWritten { retry: false } => {}
            FinishedTask::PolicyStatusDue => self.facts.configs.mark_changed(),
        }
    }

    /// Takes a command's result, with the Events to send for it.
    fn handle_result(&mut self, result: ExecutionResult, notices: Vec<EventRequest>) {
        let ExecutionResult { event, requester, error, clears_error, served, baseline } = result;
        self.pod_events.send(notices);
        baseline.into_iter().for_each(|baseline| self.baselines.record(baseline));
        if let Some(id) = requester {
            let requester_pod = self.index.requester(&id).filter(|_| served);
            let now = self.executor.clock.now();
            if let Some((requester_pod, (path, took))) = requester_pod.and_then(|requester_pod| {
                Some((requester_pod, self.actuation_timer.engine_served(requester_pod, now)?))
            }) {
                self.pod_events.report_served(requester_pod, path, took);
            }
            match error {
                // No event would clear the error of a requester that is gone.
                Some(error) => {
                    if let Some(requester_pod) = self.index.requester(&id) {
                        self.pod_events.report_failed(requester_pod, &error);
                        self.requester_status.error(id, error);
                    }
                }
                None if clears_error => self.requester_status.clear_error(&id),
                None => {}
            }
        }
        self.apply_events(vec![event]);
    }

    /// Updates the facts with these events and, on the leader, sends them to the pairing logic.
    pub(super) fn apply_events(&mut self, events: Vec<PairingEvent>) {
        let now = self.executor.clock.now();
        for event in events {
            self.facts.observe_event(&event);
            match &event {
                PairingEvent::RequesterObserved { requester, observed, .. } => {
                    self.requester_status.mark_due(requester.clone());
                    let requester_pod = self.index.requester(requester);
                    if let Some(requester_pod) = requester_pod {
                        self.facts.observe_requester(requester_pod, &observed.requested);
                    }
                    if let Some(requester_pod) = requester_pod.filter(|_| observed.stub_container.is_some()) {
                        self.actuation_timer.stub_running(requester_pod, now);
                    }
                }
                PairingEvent::RequesterGone { node, requester } => {
                    self.orders.forget(node, requester);
                    self.requester_status.gone(requester);
                    self.actuation_timer.gone(requester);
                }
                PairingEvent::ProviderObserved { node, provider, observed } => {
                    let provider_pod = self.index.provider(node, provider);
                    provider_pod.into_iter().for_each(|provider_pod| {
                        self.facts.observe_provider(provider_pod, &observed.records)
                    });
                    if let Some(source) = provider_pod.and_then(|provider_pod| provider_pod.source.as_ref()) {
                        let used = !observed.records.is_empty();
                        self.facts.observe_launcher(node, provider, source, used);
                    }
                }
                _ => {}
            }
            if self.epoch.is_some() {
                self.core.on(&event, now);
                self.repeat_order(&event, now);
            }
        }
    }

    /// Passes on an order that came before its requester was seen. One that was passed on before changes nothing.
    fn repeat_order(&mut self, event: &PairingEvent, now: Tick) {
        if let PairingEvent::RequesterObserved { node, requester, observed } = event
            && observed.actuated
            && let Some(wanted) = self.orders.wanted(node, requester)
        {
            let (node, requester) = (node.clone(), requester.clone());
            self.core.on(&PairingEvent::Want { node, requester, wanted }, now);
        }
    }

    /// Sends changed facts, and replays the affected Pods: new facts of a node may complete the view of its Pods.
    pub(super) fn apply_facts(&mut self, tasks: &mut PairingTasks) {
        let mut events = Vec::new();
        let changes = self.facts.send_changes(&mut |event| events.push(event));
        for (policy, status) in
            changes.configured.then(|| self.facts.configs.changed_policy_statuses()).into_iter().flatten()
        {
            let executor = Arc::clone(&self.executor);
            tasks.spawn(async move {
                let retry = !executor.write_policy_status(&policy, &status).await;
                FinishedTask::PolicyStatusWritten { retry }
            });
        }
        if changes.configured {
            let now = self.executor.clock.now();
            self.pairing_metrics.recount_all(MetricsInputs { index: &self.index, facts: &self.facts, now });
        }
        self.index.replay(&changes, &self.facts, &mut |event| events.push(event));
        let requesters = self.index.affected(&changes).filter_map(index::IndexedPod::as_requester);
        requesters.for_each(|requester| self.requester_status.mark_due(requester.id.clone()));
        self.apply_events(events);
    }
}

/// Returns an order of the fleet as the pairing logic takes it.
pub(super) fn order_event(order: EngineOrder) -> PairingEvent {
    let EngineOrder { node, requester, wanted } = order;
    match wanted {
        Some(wanted) => PairingEvent::Want { node, requester, wanted },
        None => PairingEvent::WantWithdrawn { node, requester },
    }
}
