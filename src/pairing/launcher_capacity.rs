//! Checks whether a launcher has a place for another engine.
//!
//! A launcher holds at most [`LauncherBuildPolicy::max_engines`] engines, asleep or awake. In a full launcher the least
//! recently used sleepers are deleted: outdated sleepers first, and sleepers that a requester waits for last. Bound
//! engines stay, asleep or awake, so if all are bound, the new engine waits. As with memory, the check is all or
//! nothing: no sleeper is deleted unless that admits the new engine.
//!
//! [`LauncherBuildPolicy::max_engines`]: super::event::LauncherBuildPolicy::max_engines

use super::{
    command::EngineStopReason,
    fit::{FitCheck, FitResult, IncomingEngine},
    ids::{PairingEngineId, ProviderId},
    node::{PairingEngine, PairingEngineState},
    plan_context::build_policy_of,
};

impl FitCheck<'_> {
    /// Checks memory and, for a launcher, a place for an engine to start in this provider.
    pub(super) fn start_fit(&self, new: &IncomingEngine<'_>, provider: &ProviderId) -> FitResult {
        let mut going = match self.memory_fit(new) {
            FitResult::Fits => Vec::new(),
            FitResult::Evict(sleepers) => sleepers,
            wait => return wait,
        };
        match self.launcher_evictions(provider, &going) {
            Ok(sleepers) => going.extend(sleepers.into_iter().map(|id| (id, EngineStopReason::Displaced))),
            Err(wait) => return wait,
        }
        if going.is_empty() { FitResult::Fits } else { FitResult::Evict(going) }
    }

    /// The sleepers of the launcher to delete besides `going`, or why the engine waits.
    fn launcher_evictions(
        &self,
        launcher: &ProviderId,
        going: &[(PairingEngineId, EngineStopReason)],
    ) -> Result<Vec<PairingEngineId>, FitResult> {
        let provider = self.node.providers.get(launcher).filter(|_| launcher.is_launcher());
        let Some(limit) =
            provider.and_then(|provider| build_policy_of(self.build_policies, provider).max_engines)
        else {
            return Ok(Vec::new());
        };
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let is_going =
            |e: &PairingEngine| e.state.is_stopping_or_gone() || going.iter().any(|(id, _)| *id == e.id);
        // A gone engine whose stop was accepted occupies no place in the launcher.
        let inside = self
            .node
            .engines_in(launcher)
            .filter(|e| e.state != PairingEngineState::Gone || !e.stop_accepted);
        let (leaving, staying): (Vec<&PairingEngine>, Vec<&PairingEngine>) =
            inside.partition(|e| is_going(e));
        let limit_reason = |engines: &[&PairingEngine]| {
            let each: Vec<String> = engines.iter().map(|e| format!("{} is {}", e.id, e.state)).collect();
            format!("the launcher's limit of {limit} is reached: {}", each.join(", "))
        };
        let excess = (staying.len() + 1).saturating_sub(limit);
        if excess == 0 {
            let waits = leaving.len() + staying.len() >= limit && going.is_empty();
            return if waits { Err(FitResult::Wait(limit_reason(&leaving))) } else { Ok(Vec::new()) };
        }
        let mut free: Vec<&PairingEngine> = staying.iter().filter(|e| e.is_evictable()).copied().collect();
        if free.len() < excess {
            return Err(FitResult::Unfit(limit_reason(&staying)));
        }
        free.sort_by_key(|e| (self.is_wanted(&e.id), !self.is_outdated(&e.id), e.last_used, &e.id));
        Ok(free.into_iter().take(excess).map(|e| e.id.clone()).collect())
    }
}
