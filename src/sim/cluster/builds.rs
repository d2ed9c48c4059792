//! LauncherConfigs: what launchers are made from, and how many engines each may hold.

use super::{Cluster, pods::ProviderKey};
use crate::pairing::{
    event::{Event, Terms},
    ids::{Build, EngineId, RequesterId},
};

/// Editions of one LauncherConfig are told apart by what is below.
const EDITIONS: u64 = 1 << 32;

/// Of the LauncherConfig with this number, as it is at first.
#[must_use]
pub(super) const fn build(config: u64) -> Build {
    Build(config * EDITIONS)
}

impl Cluster {
    /// Of the same LauncherConfig, as it is now.
    pub(super) fn current(&self, of: Build) -> Build {
        let config = of.0 / EDITIONS;
        let edition = usize::try_from(config).ok().and_then(|config| self.editions.get(config));
        Build(config * EDITIONS + edition.copied().unwrap_or_default())
    }

    fn terms(&self, of: Build) -> Terms {
        let config = usize::try_from(of.0 / EDITIONS).unwrap_or(usize::MAX);
        let most = self.plot.launchers_hold.get(config).copied().flatten();
        Terms { obsolete: self.current(of) != of, most }
    }

    /// What the launcher is made from that is made for this requester.
    pub(super) fn build_for(&self, asker: Option<&RequesterId>) -> Build {
        let asked = asker.and_then(|asker| self.requesters.get(asker)?.ask.build);
        self.current(asked.unwrap_or(build(0)))
    }

    /// Every edition that there was.
    pub(super) fn builds(&self) -> Vec<Event> {
        let all = (0_u64..).zip(&self.editions).flat_map(|(config, edition)| {
            (0..=*edition).map(move |edition| Build(build(config).0 + edition))
        });
        all.map(|build| Event::Build { build, terms: self.terms(build) }).collect()
    }

    /// A LauncherConfig becomes another one, and who asked for its launchers asks for other launchers.
    pub(super) fn edit_launchers(&mut self) {
        let configs: Vec<usize> = (0..self.editions.len()).collect();
        let Some(config) = self.random.pick(&configs).copied() else { return };
        self.count("launchers edited");
        self.editions.get_mut(config).into_iter().for_each(|edition| *edition += 1);
        self.show_builds();
        for id in self.requesters.keys().cloned().collect::<Vec<_>>() {
            self.show_requester(&id);
        }
    }

    /// No launcher has more engines than it may hold.
    pub(super) fn check_places(&mut self, key: &ProviderKey, engine: &EngineId) {
        let Some(launcher) = self.providers.get(key) else { return };
        let Some(most) = launcher.build.and_then(|build| self.terms(build).most) else { return };
        let there = launcher.processes.len();
        if usize::try_from(most).is_ok_and(|most| there > most) {
            self.violation(format!(
                "with {engine} there are {there} engines in {}, which holds {most}",
                key.1
            ));
        }
    }

    /// Where nobody is bound to an engine, launchers are of what is there now.
    pub(super) fn check_builds(&self) -> Vec<String> {
        let old = self.providers.iter().filter(|(_, launcher)| {
            launcher.build.is_some_and(|build| self.terms(build).obsolete) && !launcher.is_held()
        });
        old.map(|((node, launcher), _)| format!("{launcher} of {node} is of a LauncherConfig before"))
            .collect()
    }
}
