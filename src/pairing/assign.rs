//! Plans the steps for requesters and launchers, and binds requesters to engines.

use super::{
    assignment_queue::{AssignmentWait, WaitClaim},
    command::{EngineStep, LauncherDeleteReason, ProviderStep, RequesterDeleteReason, RequesterStep},
    event::{EngineRecord, ProviderPhase},
    ids::{LauncherBuild, PairingEngineId, ProviderId, ProviderMode, RequesterId},
    node::{PairingAccelerator, PairingEngine, PairingEngineState, PairingRequester},
    node_plan::NodePlanBuilder,
};
use crate::{model::AcceleratorId, units::Tick};

impl NodePlanBuilder<'_> {
    pub(super) fn plan_requesters(&mut self) {
        let ids: Vec<RequesterId> = self.node.requesters.keys().cloned().collect();
        for id in ids {
            let step =
                self.node.requesters.get(&id).and_then(|requester| self.next_requester_step(&id, requester));
            if let Some(step) = step {
                self.push_requester_step(&id, step);
            }
        }
    }

    fn next_requester_step(&self, id: &RequesterId, requester: &PairingRequester) -> Option<RequesterStep> {
        let busy = requester.pending.as_ref().is_some_and(|call| call.until > self.now());
        if busy || requester.retry.at > self.now() {
            return None;
        }
        let going = requester.observed.deleting_since.is_some() || requester.observed.terminated;
        if let Some(reason) =
            requester.delete_issued.or_else(|| self.requester_delete_reason(id, requester)).filter(|_| !going)
        {
            return Some(RequesterStep::Delete { reason });
        }
        let wants_finalizer = self.needs_finalizer(id);
        if requester.observed.finalizer != wants_finalizer
            && (!wants_finalizer || requester.observed.deleting_since.is_none())
        {
            return Some(RequesterStep::SetFinalizer { present: wants_finalizer });
        }
        if requester.observed.deleting_since.is_some()
            && !wants_finalizer
            && requester.is_stub_reachable()
            && !requester.released
            && requester.held_until(self.context.settings).is_none_or(|until| until <= self.now())
        {
            return Some(RequesterStep::Release);
        }
        if !requester.is_stub_reachable() || !requester.stays() {
            return None;
        }
        let engine = self.node.engine_of(id);
        let has_none = engine.is_none();
        if requester.accelerators.is_empty() {
            return Some(RequesterStep::QueryAccelerators { close_gate: has_none });
        }
        // The order also announces this leader to a new stub, before a bound sleeper is woken through it.
        let is_closed = has_none || engine.is_some_and(|engine| engine.awaits_want);
        (is_closed && !requester.is_gated()).then_some(RequesterStep::CloseGate)
    }

    /// Why the requester must be deleted, so that another one replaces it.
    fn requester_delete_reason(
        &self,
        id: &RequesterId,
        requester: &PairingRequester,
    ) -> Option<RequesterDeleteReason> {
        let faulty = |a: &AcceleratorId| {
            self.node.accelerators.get(a).is_some_and(|accelerator| !accelerator.facts.healthy)
        };
        match requester.delete_reason {
            Some(reason) => Some(reason),
            None if !self.node.exists => Some(RequesterDeleteReason::NodeGone),
            None if requester.accelerators.iter().any(faulty) => {
                Some(RequesterDeleteReason::AcceleratorFaulty)
            }
            None if self.node.facts.cordoned && self.node.engine_of(id).is_none() => {
                Some(RequesterDeleteReason::Cordoned)
            }
            None => None,
        }
    }

    /// Whether the requester needs our finalizer: its bound engine has a running container. The need ends when the
    /// requester is overdue or the node is gone. A sleeper's binding is written first because its wake waits for that;
    /// the finalizer is written meanwhile.
    fn needs_finalizer(&self, id: &RequesterId) -> bool {
        let unwritten =
            |engine: &PairingEngine| engine.binding.as_ref().is_some_and(|binding| !binding.written);
        self.node.exists
            && self.node.engine_of(id).is_some_and(|engine| {
                let sleeps = matches!(engine.state, PairingEngineState::Asleep { .. }) && unwritten(engine);
                !sleeps
                    && engine.state != PairingEngineState::Gone
                    && self.is_container_running(engine)
                    && !self.is_overdue(engine)
            })
    }

    /// Ensures that a launcher exists and is ready. Of a direct provider, ensures that no Pod with its name exists.
    /// Returns the reason if the engine must wait.
    pub(super) fn ensure_provider(
        &mut self,
        provider: &ProviderId,
        requester: &RequesterId,
    ) -> Option<String> {
        let requested_build =
            self.node.requesters.get(requester).and_then(|record| record.observed.requested.build);
        let provider_record = self.node.providers.get(provider);
        if !provider.is_launcher() {
            return provider_record.map(|_| "the former Pod of the same name still exists".to_owned());
        }
        match provider_record {
            None => Some(self.launcher_backoff_reason(provider, requested_build).unwrap_or_else(|| {
                self.push_provider_step(
                    provider,
                    ProviderStep::Create { requester: Some(requester.clone()) },
                );
                "the launcher is being created".to_owned()
            })),
            Some(provider_record) if provider_record.deleting => {
                Some("the launcher is being deleted".to_owned())
            }
            Some(provider_record) if provider_record.phase != ProviderPhase::Ready => {
                Some("the launcher is not ready".to_owned())
            }
            Some(_) => None,
        }
    }

    /// Deletes a launcher whose build differs from the requested one. A launcher with a bound engine stays. Returns the
    /// reason if the builds differ.
    pub(super) fn replace_other_build(
        &mut self,
        id: &ProviderId,
        requested_build: Option<LauncherBuild>,
    ) -> Option<AssignmentWait> {
        let launcher = self.node.providers.get(id).filter(|launcher| !launcher.deleting)?;
        if launcher.build? == requested_build? {
            return None;
        }
        let cause = "the launcher was created from another LauncherConfig or from an older version of it";
        if let Some(bound) = self.node.bound_in(id) {
            let reason = format!("{cause}, and {} is {} there", bound.id, bound.state);
            return Some(AssignmentWait { reason, claim: WaitClaim::Nothing });
        }
        let uid = launcher.uid.clone();
        self.push_provider_step(id, ProviderStep::Delete { uid, reason: LauncherDeleteReason::Replaced });
        let reason = format!("{cause}, and is being replaced");
        Some(AssignmentWait { reason, claim: WaitClaim::Provider(id.clone()) })
    }

    pub(super) fn bind_engine(
        &mut self,
        id: &RequesterId,
        requester: &PairingRequester,
        engine: PairingEngineId,
    ) {
        let requested = &requester.observed.requested;
        let record = if let Some(sleeper) = self.node.engines.get(&engine) {
            // The present requester decides how the engine sleeps next time.
            let (requester, level, stop_after) = (Some(id.clone()), requested.level, requested.stop_after);
            EngineRecord { requester, level, stop_after, ..sleeper.record(sleeper.last_used) }
        } else {
            EngineRecord {
                engine: engine.clone(),
                generation: self.next_generation(),
                sizes: requested.sizes,
                level: requested.level,
                stop_after: requested.stop_after,
                requester: Some(id.clone()),
                last_used: self.now(),
            }
        };
        let creates_pod = !self.node.engines.contains_key(&engine) && engine.mode != ProviderMode::Launcher;
        self.push_engine_step(
            &engine,
            if creates_pod { EngineStep::Create { record } } else { EngineStep::Bind { record } },
        );
    }

    /// Why no launcher is created there yet. A failure of one build does not delay another.
    fn launcher_backoff_reason(
        &self,
        id: &ProviderId,
        requested_build: Option<LauncherBuild>,
    ) -> Option<String> {
        let accelerator = id.accelerators.iter().find_map(|a| self.node.accelerators.get(a))?;
        let other = accelerator.crashed_build.is_some_and(|crashed| {
            requested_build.is_some_and(|requested| requested != crashed)
                || self.context.build_policies.get(&crashed).is_some_and(|policy| policy.obsolete)
        });
        let last =
            if accelerator.never_ready { "was never ready" } else { "had an engine that did not stop" };
        (accelerator.not_before > self.now() && !other).then(|| {
            let next = accelerator.not_before;
            let failed = match accelerator.crashes {
                1 => "1 launcher failed: it".to_owned(),
                n => format!("{n} launchers failed, the last"),
            };
            format!("{failed} {last}; the next is created at {next}")
        })
    }

    /// Creates a launcher on each accelerator that wants one, and deletes useless launchers.
    pub(super) fn plan_launchers(&mut self) {
        let takes = self.node.exists && !self.node.facts.cordoned;
        let wants_launcher = |accelerator: &PairingAccelerator| {
            takes && accelerator.facts.wants_launcher && accelerator.facts.healthy
        };
        let missing = self.node.accelerators.iter().filter(|(_, accelerator)| wants_launcher(accelerator));
        let missing = missing.map(|(a, _)| ProviderId::launcher(a.clone()));
        let missing = missing.filter(|id| !self.node.providers.contains_key(id));
        for id in missing.collect::<Vec<_>>() {
            let requester = self.node.first_waiting_requester(&id).cloned();
            let requester_record =
                requester.as_ref().and_then(|requester| self.node.requesters.get(requester));
            if self
                .launcher_backoff_reason(
                    &id,
                    requester_record.and_then(|requester| requester.observed.requested.build),
                )
                .is_some()
            {
                continue;
            }
            self.push_provider_step(&id, ProviderStep::Create { requester });
        }
        let launchers = self.node.providers.keys().filter(|id| id.is_launcher());
        for id in launchers.cloned().collect::<Vec<_>>() {
            if let Some(step) = self.next_launcher_step(&id) {
                self.push_provider_step(&id, step);
            }
        }
    }

    fn next_launcher_step(&self, id: &ProviderId) -> Option<ProviderStep> {
        let launcher = self.node.providers.get(id)?;
        let busy = launcher.pending.as_ref().is_some_and(|call| call.until > self.now());
        if busy || launcher.retry.at > self.now() {
            return None;
        }
        if launcher.deleting {
            // Orders the deletion again if it failed or timed out. Also repeats it for a launcher that no watch
            // reported, because no watch may report its end either.
            let unseen = launcher.uid.is_none()
                && launcher.retry.at + self.context.settings.stop_timeout <= self.now();
            let must_repeat = launcher.retry.failures > 0 || launcher.pending.is_some() || unseen;
            let reason = self.launcher_delete_reason(id).unwrap_or(LauncherDeleteReason::Useless);
            return must_repeat.then(|| ProviderStep::Delete { uid: launcher.uid.clone(), reason });
        }
        if launcher.uid.is_none() && launcher.retry.failures > 0 {
            return Some(ProviderStep::Create { requester: self.node.first_waiting_requester(id).cloned() });
        }
        let reason = self.launcher_delete_reason(id).filter(|_| self.node.bound_in(id).is_none())?;
        Some(ProviderStep::Delete { uid: launcher.uid.clone(), reason })
    }

    /// Since when this launcher is unneeded: it holds no engine, no requester could use it, and the accelerator does
    /// not want one.
    fn unneeded_since(&self, id: &ProviderId) -> Option<Tick> {
        let may_request = |requester: &PairingRequester| {
            requester.stays()
                && requester.observed.requested.mode == ProviderMode::Launcher
                && (requester.accelerators.is_empty()
                    || self.node.provider_for(&self.node.requested_engine_id(requester)) == *id)
        };
        let wants_launcher = |a: &AcceleratorId| {
            self.node.accelerators.get(a).is_some_and(|accelerator| accelerator.facts.wants_launcher)
        };
        let needed = id.accelerators.iter().any(wants_launcher)
            || self.node.engines_in(id).next().is_some()
            || self.node.requesters.values().any(may_request);
        self.node.idle_since(id).filter(|_| !needed)
    }

    /// Why this launcher must be deleted once no requester is bound to an engine in it.
    fn launcher_delete_reason(&self, id: &ProviderId) -> Option<LauncherDeleteReason> {
        let launcher = self.node.providers.get(id)?;
        if self.context.build_policy(launcher).obsolete {
            return Some(LauncherDeleteReason::Replaced);
        }
        let settings = self.context.settings;
        let faulty = |a: &AcceleratorId| {
            self.node.accelerators.get(a).is_some_and(|accelerator| !accelerator.facts.healthy)
        };
        let unready =
            launcher.phase != ProviderPhase::Ready && launcher.since + settings.start_timeout <= self.now();
        let mut inside = self.node.engines_in(id);
        let stuck = inside.any(|e| {
            matches!(e.state, PairingEngineState::Stopping { .. })
                && e.since + settings.stop_timeout <= self.now()
        });
        let must_go = unready
            || stuck
            || matches!(launcher.phase, ProviderPhase::Crashed | ProviderPhase::Terminated)
            || !self.node.exists
            || id.accelerators.iter().any(faulty)
            || self
                .unneeded_since(id)
                .is_some_and(|since| since + settings.launcher_idle_timeout <= self.now());
        must_go.then_some(LauncherDeleteReason::Useless)
    }
}
