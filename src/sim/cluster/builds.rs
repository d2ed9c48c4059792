//! LauncherConfigs: what launchers are created from, and how many engines each may hold.

use super::{SimulatedCluster, pods::ProviderKey};
use crate::pairing::{
    event::{LauncherBuildPolicy, PairingEvent},
    ids::{LauncherBuild, PairingEngineId, RequesterId},
};

/// Number of build ids per LauncherConfig; the offset within them is the revision.
const REVISIONS_PER_CONFIG: u64 = 1 << 32;

/// The first build of the LauncherConfig with this number.
#[must_use]
pub(super) const fn first_build(config: u64) -> LauncherBuild {
    LauncherBuild(config * REVISIONS_PER_CONFIG)
}

impl SimulatedCluster {
    /// The current build of the same LauncherConfig.
    pub(super) fn current_build(&self, of: LauncherBuild) -> LauncherBuild {
        let config = of.0 / REVISIONS_PER_CONFIG;
        let edition =
            usize::try_from(config).ok().and_then(|config| self.launcher_config_revisions.get(config));
        LauncherBuild(config * REVISIONS_PER_CONFIG + edition.copied().unwrap_or_default())
    }

    fn build_policy(&self, of: LauncherBuild) -> LauncherBuildPolicy {
        let config = usize::try_from(of.0 / REVISIONS_PER_CONFIG).unwrap_or(usize::MAX);
        let most = self.scenario.launcher_max_engines.get(config).copied().flatten();
        LauncherBuildPolicy { obsolete: self.current_build(of) != of, max_engines: most }
    }

    /// The build of a launcher that is created for this requester.
    pub(super) fn build_for(&self, requester: Option<&RequesterId>) -> LauncherBuild {
        let requested_build = requester.and_then(|requester| self.requesters.get(requester)?.requested.build);
        self.current_build(requested_build.unwrap_or(first_build(0)))
    }

    /// The policies of all builds so far.
    pub(super) fn build_events(&self) -> Vec<PairingEvent> {
        let all = (0_u64..).zip(&self.launcher_config_revisions).flat_map(|(config, revision)| {
            (0..=*revision).map(move |revision| LauncherBuild(first_build(config).0 + revision))
        });
        all.map(|build| PairingEvent::LauncherBuild { build, policy: self.build_policy(build) }).collect()
    }

    /// Edits a LauncherConfig. Requesters of its launchers request the new build from now on.
    pub(super) fn edit_launcher_config(&mut self) {
        let configs: Vec<usize> = (0..self.launcher_config_revisions.len()).collect();
        let Some(config) = self.random.pick(&configs).copied() else { return };
        self.count("launchers edited");
        self.launcher_config_revisions.get_mut(config).into_iter().for_each(|revision| *revision += 1);
        self.emit_builds();
        for id in self.requesters.keys().cloned().collect::<Vec<_>>() {
            self.emit_requester(&id);
        }
    }

    /// No launcher holds more engines than allowed.
    pub(super) fn check_launcher_capacity(&mut self, key: &ProviderKey, engine: &PairingEngineId) {
        let Some(launcher) = self.providers.get(key) else { return };
        let Some(most) = launcher.build.and_then(|build| self.build_policy(build).max_engines) else {
            return;
        };
        let engine_count = launcher.processes.len();
        if usize::try_from(most).is_ok_and(|most| engine_count > most) {
            self.record_violation(format!(
                "with {engine} there are {engine_count} engines in {}, whose limit is {most}",
                key.1
            ));
        }
    }

    /// A launcher without a bound engine is of a current build.
    pub(super) fn check_builds(&self) -> Vec<String> {
        let old = self.providers.iter().filter(|(_, launcher)| {
            launcher.build.is_some_and(|build| self.build_policy(build).obsolete) && !launcher.has_finalizer()
        });
        old.map(|((node, launcher), _)| format!("{launcher} of {node} has an outdated LauncherConfig"))
            .collect()
    }
}
