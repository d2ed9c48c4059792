//! Is there a place for another engine in its launcher?
//!
//! A launcher holds so many engines and no more, asleep or awake ([`LauncherBuildPolicy::max_engines`]). Where it is full, the sleepers that were used
//! longest ago go first; those that somebody waits for are the last of them, and those that are outdated the first. What somebody is
//! bound to stays, so that where all are, the newcomer waits. As with memory it is all or nothing: no sleeper goes unless that lets the
//! newcomer in.
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
    /// Room for an engine that is to be started in this provider: memory, and a place if it is a launcher.
    pub(super) fn start_fit(&self, new: &IncomingEngine<'_>, provider: &ProviderId) -> FitResult {
        let mut going = match self.memory_fit(new) {
            FitResult::Fits => Vec::new(),
            FitResult::Evict(sleepers) => sleepers,
            wait @ FitResult::Wait(_) => return wait,
        };
        match self.launcher_evictions(provider, &going) {
            Ok(sleepers) => going.extend(sleepers.into_iter().map(|id| (id, EngineStopReason::Displaced))),
            Err(reason) => return FitResult::Wait(reason),
        }
        if going.is_empty() { FitResult::Fits } else { FitResult::Evict(going) }
    }

    /// Which sleepers of the launcher go besides these, or whom or what has to be waited for.
    fn launcher_evictions(
        &self,
        launcher: &ProviderId,
        going: &[(PairingEngineId, EngineStopReason)],
    ) -> Result<Vec<PairingEngineId>, String> {
        let known = self.node.providers.get(launcher).filter(|_| launcher.is_launcher());
        let Some(most) = known.and_then(|known| build_policy_of(self.build_policies, known).max_engines)
        else {
            return Ok(Vec::new());
        };
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        let goes =
            |e: &PairingEngine| e.state.is_stopping_or_gone() || going.iter().any(|(id, _)| *id == e.id);
        // Of one that is gone and was taken away nothing is left in the launcher.
        let inside = self
            .node
            .engines_in(launcher)
            .filter(|e| e.state != PairingEngineState::Gone || !e.stop_accepted);
        let (leaving, staying): (Vec<&PairingEngine>, Vec<&PairingEngine>) = inside.partition(|e| goes(e));
        let full = |what: &[&PairingEngine]| {
            let each: Vec<String> = what.iter().map(|e| format!("{} is {}", e.id, e.state)).collect();
            format!("its launcher holds no more than {most}: {}", each.join(", "))
        };
        let over = (staying.len() + 1).saturating_sub(most);
        if over == 0 {
            let waits = leaving.len() + staying.len() >= most && going.is_empty();
            return if waits { Err(full(&leaving)) } else { Ok(Vec::new()) };
        }
        let mut free: Vec<&PairingEngine> = staying.iter().filter(|e| e.is_evictable()).copied().collect();
        if free.len() < over {
            return Err(full(&staying));
        }
        free.sort_by_key(|e| (self.is_wanted(&e.id), !self.is_outdated(&e.id), e.last_used, &e.id));
        Ok(free.into_iter().take(over).map(|e| e.id.clone()).collect())
    }
}
