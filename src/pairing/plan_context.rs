//! Applies a command to the state of a node. Only this code changes state for a command: planning applies it to a copy,
//! and recording to the node itself.

use std::collections::BTreeMap;

use super::{
    command::{
        EngineStep, EngineStopReason, LauncherDeleteReason, PairingAction, PairingCommand, ProviderStep,
        RequesterDeleteReason, RequesterStep,
    },
    event::{EngineRecord, LauncherBuildPolicy, ProviderPhase, TemplateStatus},
    fit::FitCheck,
    ids::{EngineFingerprint, LauncherBuild, PairingEngineId, ProviderId, Uid},
    node::{
        Binding, PairingEngine, PairingEngineState, PairingNode, PairingProvider, PendingCommand,
        PendingCommandKind, RetryState,
    },
    settings::PairingSettings,
};
use crate::{
    model::SleepLevel,
    units::{Bytes, Millis, Tick},
};

pub(super) struct PlanContext<'a> {
    pub(super) settings: &'a PairingSettings,
    pub(super) template_statuses: &'a BTreeMap<EngineFingerprint, TemplateStatus>,
    pub(super) build_policies: &'a BTreeMap<LauncherBuild, LauncherBuildPolicy>,
    pub(super) now: Tick,
}

impl PlanContext<'_> {
    pub(super) const fn fit_check<'b>(&'b self, node: &'b PairingNode) -> FitCheck<'b> {
        let Self { settings, template_statuses: standings, build_policies: builds, now } = self;
        FitCheck { node, settings, template_statuses: standings, build_policies: builds, now: *now }
    }

    /// The policy for this launcher's build.
    pub(super) fn build_policy(&self, launcher: &PairingProvider) -> LauncherBuildPolicy {
        build_policy_of(self.build_policies, launcher)
    }

    pub(super) fn apply(&self, node: &mut PairingNode, command: &PairingCommand) {
        let call = |kind, within: Millis| PendingCommand {
            serial: command.serial,
            kind,
            until: self.now + within,
            stub_container: None,
        };
        match &command.action {
            PairingAction::Engine { engine, step, .. } => self.step(node, engine, step, call),
            PairingAction::Requester { requester, step } => {
                let Some(requester_record) = node.requesters.get_mut(requester) else { return };
                let stub = requester_record.observed.stub_container.clone();
                let (kind, stub) = match step {
                    RequesterStep::QueryAccelerators { close_gate: gate } => {
                        (PendingCommandKind::QueryAccelerators, stub.filter(|_| *gate))
                    }
                    RequesterStep::CloseGate => (PendingCommandKind::CloseGate, stub),
                    RequesterStep::Delete { reason } => {
                        requester_record.delete_issued = Some(*reason);
                        (PendingCommandKind::Delete, None)
                    }
                    RequesterStep::SetFinalizer { present } => {
                        (PendingCommandKind::SetFinalizer(*present), None)
                    }
                    RequesterStep::Release => (PendingCommandKind::Release, None),
                };
                requester_record.pending =
                    Some(PendingCommand { stub_container: stub, ..call(kind, self.settings.call_timeout) });
            }
            PairingAction::Provider { provider, step } => match step {
                ProviderStep::Create { .. } => {
                    let fresh = || PairingProvider::pending_creation(self.now);
                    let provider_record = node.providers.entry(provider.clone()).or_insert_with(fresh);
                    provider_record.pending =
                        Some(call(PendingCommandKind::Create, self.settings.call_timeout));
                }
                ProviderStep::Delete { reason, .. } => {
                    if *reason == LauncherDeleteReason::Useless {
                        self.record_launcher_crash(node, provider);
                    }
                    stop_engines_in(node, provider, self.now);
                    if let Some(provider_record) = node.providers.get_mut(provider) {
                        provider_record.deleting = true;
                        provider_record.pending =
                            Some(call(PendingCommandKind::Delete, self.settings.call_timeout));
                    }
                }
            },
        }
    }

    fn step(
        &self,
        node: &mut PairingNode,
        id: &PairingEngineId,
        step: &EngineStep,
        call: impl Fn(PendingCommandKind, Millis) -> PendingCommand,
    ) {
        match step {
            EngineStep::Create { record } if !node.engines.contains_key(id) => {
                let provider = ProviderId::direct(id);
                node.providers.insert(provider.clone(), PairingProvider::pending_creation(self.now));
                self.insert_creating(node, record, provider);
            }
            EngineStep::Bind { record } if !node.engines.contains_key(id) => {
                let provider = node.provider_for(id);
                self.insert_creating(node, record, provider);
            }
            EngineStep::Stop { reason: EngineStopReason::Evicted } => self.mark_needs_reading(node, id),
            EngineStep::Stop { reason } => self.record_engine_end(node, id, *reason),
            _ => {}
        }
        if let EngineStep::Create { record } | EngineStep::Bind { record } = step
            && let Some(requester) = record.requester.as_ref().and_then(|id| node.requesters.get_mut(id))
        {
            requester.engine_ended = None;
        }
        let stub_container = called_stub(node, step);
        let Some(engine) = node.engines.get_mut(id) else { return };
        let settings = self.settings;
        if matches!(step, EngineStep::Create { .. } | EngineStep::Launch) {
            engine.relaunched = engine.may_start_until > Tick(0);
            engine.may_start_until = self.now + settings.call_timeout + settings.call_timeout;
        }
        let pending = match step {
            EngineStep::Create { .. } => call(PendingCommandKind::Create, settings.call_timeout),
            EngineStep::Bind { record } => {
                // A binding that is written again keeps its reservation: the engine may sleep until a want wakes it.
                if engine.binding.is_none() {
                    engine.reserved = engine.sizes.awake;
                }
                if let Some(requester) = record.requester.clone() {
                    engine.binding = Some(Binding { requester, written: false });
                }
                (engine.level, engine.stop_after) = (record.level, record.stop_after);
                call(PendingCommandKind::Bind, settings.call_timeout)
            }
            EngineStep::Launch => call(PendingCommandKind::Launch, settings.call_timeout),
            EngineStep::SendCanary => call(PendingCommandKind::SendCanary, settings.wake_timeout),
            EngineStep::OpenGate { .. } => {
                // The gate opens for the last time: the cancelled close had no outcome in time.
                engine.cancelled_close = engine.cancelled_close.take().filter(|close| close.until > self.now);
                PendingCommand { stub_container, ..call(PendingCommandKind::OpenGate, settings.call_timeout) }
            }
            EngineStep::CloseGate { deadline, .. } => {
                if engine.state == PairingEngineState::Awake {
                    engine.last_used = self.now;
                    engine.enter(PairingEngineState::Draining { until: *deadline, drained: false }, self.now);
                }
                let left = deadline.since(self.now);
                PendingCommand { stub_container, ..call(PendingCommandKind::CloseGate, left) }
            }
            EngineStep::Sleep { level, .. } => {
                if engine.state == PairingEngineState::Awake {
                    engine.last_used = self.now;
                }
                engine.reserved_host =
                    if *level == SleepLevel::One { engine.sizes.host } else { Bytes::ZERO };
                engine.enter(PairingEngineState::FallingAsleep { level: *level }, self.now);
                call(PendingCommandKind::Sleep, settings.sleep_timeout_for(&engine.sizes))
            }
            EngineStep::Wake { .. } => {
                engine.proven_by_gateway = engine.awaits_want;
                engine.enter(PairingEngineState::Waking, self.now);
                engine.reserved = engine.sizes.awake;
                engine.ready = false;
                engine.opened_stub = None;
                engine.last_used = self.now;
                call(PendingCommandKind::Wake, settings.wake_timeout_for(&engine.sizes))
            }
            EngineStep::Unbind { forget, .. } => call(
                if *forget { PendingCommandKind::Forget } else { PendingCommandKind::Unbind },
                settings.call_timeout,
            ),
            EngineStep::Stop { reason } => {
                engine.begin_stop(*reason, self.now);
                call(PendingCommandKind::Stop, settings.call_timeout)
            }
            EngineStep::Query => call(PendingCommandKind::Query, settings.call_timeout),
        };
        engine.pending = Some(pending);
    }

    /// Counts a deleted launcher as crashed if it is not ready or still has engines. A launcher on a vanished node or a
    /// faulty accelerator does not count.
    fn record_launcher_crash(&self, node: &mut PairingNode, id: &ProviderId) {
        let Some(launcher) = node.providers.get(id).filter(|launcher| !launcher.deleting) else { return };
        let unready = launcher.phase != ProviderPhase::Ready;
        let useless = unready || node.engines_in(id).next().is_some();
        let (build, proved, exists) = (launcher.build, launcher.proven_since, node.exists);
        for accelerator in id.accelerators.iter().filter(|_| useless && exists) {
            let accelerator_record = node
                .accelerators
                .get_mut(accelerator)
                .filter(|accelerator_record| accelerator_record.facts.healthy);
            if let Some(accelerator_record) = accelerator_record {
                accelerator_record.never_ready = unready;
                accelerator_record.launcher_crashed(build, proved, self.settings, self.now);
            }
        }
    }

    fn insert_creating(&self, node: &mut PairingNode, record: &EngineRecord, provider: ProviderId) {
        let mut engine = PairingEngine::from_record(record, provider, PairingEngineState::Creating, self.now);
        if let Some(binding) = &mut engine.binding {
            binding.written = false;
        }
        node.engines.insert(record.engine.clone(), engine);
    }

    /// Requires a new reading after an eviction that an excessive reading caused.
    fn mark_needs_reading(&self, node: &mut PairingNode, id: &PairingEngineId) {
        let fit_check = self.fit_check(node);
        let exceeding: Vec<_> =
            id.accelerators.iter().filter(|a| fit_check.reading_exceeds_known(a, None)).cloned().collect();
        for accelerator in exceeding {
            if let Some(accelerator_record) = node.accelerators.get_mut(&accelerator) {
                accelerator_record.needs_reading = true;
            }
        }
    }

    /// Records for the requester why its engine is stopped. The delay before the next start grows with each failed one.
    fn record_engine_end(&self, node: &mut PairingNode, id: &PairingEngineId, reason: EngineStopReason) {
        let Some(engine) = node.engines.get(id) else { return };
        let first = !engine.state.is_stopping_or_gone();
        // The gate is open, or may be open since before a restart. So the requester cannot get another engine behind
        // it.
        let open = matches!(
            engine.state,
            PairingEngineState::Unknown | PairingEngineState::Awake | PairingEngineState::Draining { .. }
        );
        let is_relied_on = node.is_relied_on(engine);
        let failed = matches!(
            reason,
            EngineStopReason::StartFailed | EngineStopReason::WakeFailed | EngineStopReason::CanaryFailed
        );
        let requester = engine.requester().cloned().and_then(|r| node.requesters.get_mut(&r));
        let Some(requester) = requester else { return };
        if first {
            requester.engine_ended = Some(reason);
        }
        if open || is_relied_on {
            requester.delete_reason.get_or_insert(RequesterDeleteReason::EngineGone);
        }
        if failed && first {
            requester.start_failed(reason, self.now);
        }
    }
}

/// The stub container whose gate this step opens or closes. A gate that is to open counts as closed no longer.
fn called_stub(node: &mut PairingNode, step: &EngineStep) -> Option<Uid> {
    let (EngineStep::OpenGate { requester } | EngineStep::CloseGate { requester, .. }) = step else {
        return None;
    };
    let requester = node.requesters.get_mut(requester)?;
    if matches!(step, EngineStep::OpenGate { .. }) {
        requester.gated_stub = None;
    }
    requester.observed.stub_container.clone()
}

/// The policy for this launcher's build; the default if the build is unknown.
pub(super) fn build_policy_of(
    builds: &BTreeMap<LauncherBuild, LauncherBuildPolicy>,
    launcher: &PairingProvider,
) -> LauncherBuildPolicy {
    launcher.build.and_then(|build| builds.get(&build)).copied().unwrap_or_default()
}

/// Stops every engine of a provider whose Pod is being deleted.
pub(super) fn stop_engines_in(node: &mut PairingNode, provider: &ProviderId, now: Tick) {
    for engine in node.engines.values_mut().filter(|engine| engine.provider == *provider) {
        if !engine.state.is_stopping_or_gone() {
            engine.begin_stop(EngineStopReason::Leaving, now);
            engine.pending = None;
        }
        engine.stop_accepted = true;
    }
}

impl PairingProvider {
    pub(super) fn pending_creation(now: Tick) -> Self {
        Self {
            uid: None,
            phase: ProviderPhase::Pending,
            deleting: false,
            restarts: 0,
            build: None,
            memory_limit: None,
            since: now,
            proven_since: None,
            created: false,
            name_taken: false,
            name_holder: None,
            pending: None,
            retry: RetryState::default(),
        }
    }
}

impl PairingEngine {
    /// Enters `Stopping`. Earlier failures no longer matter.
    pub(super) fn begin_stop(&mut self, reason: EngineStopReason, now: Tick) {
        if !self.state.is_stopping_or_gone() {
            let asleep = !self.may_hold_full_memory();
            self.enter(PairingEngineState::Stopping { asleep, reason }, now);
            self.failure = None;
            self.stop_accepted = false;
        }
    }
}
