//! Tracks which engines only former revisions of their templates request.

use std::collections::{BTreeMap, BTreeSet};

use rouse::{
    pairing::{event::TemplateStatus, ids::EngineFingerprint},
    units::Tick,
};

use crate::dual_pods::template_revision::TemplateRevision;

/// Namespace, and the template's origin in it.
type TemplateOrigin = (String, String);

#[derive(Debug, Default)]
pub(super) struct TemplateRevisions {
    /// For each origin, the creation time and version of its youngest requester.
    current: BTreeMap<TemplateOrigin, (Tick, u64)>,
    /// The revisions that have requested each engine.
    revisions_by_engine: BTreeMap<EngineFingerprint, BTreeSet<(TemplateOrigin, u64)>>,
    /// The engines that revisions of each origin have requested.
    engines_by_origin: BTreeMap<TemplateOrigin, BTreeSet<EngineFingerprint>>,
    /// Engines whose status may have changed since [`Self::take_changed`].
    changed: BTreeSet<EngineFingerprint>,
}

impl TemplateRevisions {
    /// Records a requester or provider of this revision. Returns true if that is new.
    ///
    /// `made`: creation time of a requester.
    pub(super) fn observe(
        &mut self,
        namespace: &str,
        revision: &TemplateRevision,
        fingerprint: EngineFingerprint,
        made: Option<Tick>,
    ) -> bool {
        let TemplateRevision { origin, version } = revision;
        let origin = (namespace.to_owned(), origin.clone());
        let mut changed = false;
        if let Some(made) = made {
            let known = self.current.get(&origin);
            // Among requesters of one second, the last observed counts, since others may follow.
            if known.is_none_or(|(before, _)| *before <= made) {
                changed |= known.is_none_or(|(_, before)| before != version);
                self.current.insert(origin.clone(), (made, *version));
            }
        }
        if changed {
            self.changed.extend(self.engines_by_origin.get(&origin).into_iter().flatten());
        }
        let revisions = self.revisions_by_engine.entry(fingerprint).or_default();
        if revisions.insert((origin.clone(), *version)) {
            self.engines_by_origin.entry(origin).or_default().insert(fingerprint);
            self.changed.insert(fingerprint);
            changed = true;
        }
        changed
    }

    /// Takes the engines whose status may have changed since the last call.
    pub(super) fn take_changed(&mut self) -> BTreeSet<EngineFingerprint> {
        std::mem::take(&mut self.changed)
    }

    pub(super) fn engines(&self) -> impl Iterator<Item = &EngineFingerprint> {
        self.revisions_by_engine.keys()
    }

    pub(super) fn len(&self) -> usize {
        self.revisions_by_engine.len()
    }

    /// Forgets unused engines, and origins without any other engine.
    pub(super) fn retain(&mut self, is_used: impl Fn(&EngineFingerprint) -> bool) {
        let unused = self.revisions_by_engine.keys().filter(|&fingerprint| !is_used(fingerprint));
        self.changed.extend(unused);
        self.revisions_by_engine.retain(|fingerprint, _| is_used(fingerprint));
        self.engines_by_origin.retain(|_, engines| {
            engines.retain(&is_used);
            !engines.is_empty()
        });
        self.current.retain(|origin, _| self.engines_by_origin.contains_key(origin));
    }

    /// Returns the status of an engine's template; `None` if no revision has requested the engine.
    pub(super) fn template_status(&self, fingerprint: EngineFingerprint) -> Option<TemplateStatus> {
        let is_former = |(origin, version): &(TemplateOrigin, u64)| {
            self.current.get(origin).is_some_and(|(_, current)| current != version)
        };
        let is_outdated = self.revisions_by_engine.get(&fingerprint)?.iter().all(is_former);
        Some(if is_outdated { TemplateStatus::Outdated } else { TemplateStatus::Current })
    }

    #[cfg(test)]
    fn template_statuses(&self) -> impl Iterator<Item = (EngineFingerprint, TemplateStatus)> {
        self.engines().filter_map(|fingerprint| Some((*fingerprint, self.template_status(*fingerprint)?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_is_outdated_as_long_as_only_former_editions_ask_for_it() {
        let mut revisions = TemplateRevisions::default();
        let of = |origin: &str, version| TemplateRevision { origin: origin.to_owned(), version };
        let status_of = |revisions: &TemplateRevisions, of: u64| {
            revisions
                .template_statuses()
                .find(|(own, _)| *own == EngineFingerprint(of))
                .map(|(_, status)| status)
        };
        let (old, new) = (EngineFingerprint(1), EngineFingerprint(2));
        assert!(revisions.observe("ns", &of("set/a", 1), old, None), "a sleeper");
        assert_eq!(status_of(&revisions, 1), Some(TemplateStatus::Current), "nothing is known of others");
        assert!(revisions.observe("ns", &of("set/a", 2), new, Some(Tick(1000))));
        assert!(!revisions.observe("ns", &of("set/a", 2), new, Some(Tick(1000))));
        assert_eq!(
            (status_of(&revisions, 1), status_of(&revisions, 2)),
            (Some(TemplateStatus::Outdated), Some(TemplateStatus::Current))
        );
        // An older requester that is observed late changes nothing, and neither does another namespace's requester.
        assert!(!revisions.observe("ns", &of("set/a", 1), old, Some(Tick(0))));
        revisions.observe("other", &of("set/a", 7), EngineFingerprint(7), Some(Tick(9000)));
        assert_eq!(status_of(&revisions, 1), Some(TemplateStatus::Outdated));
        // Another template requests the same engine.
        assert!(revisions.observe("ns", &of("set/b", 1), old, Some(Tick(500))));
        assert_eq!(status_of(&revisions, 1), Some(TemplateStatus::Current));
        // The template is rolled back.
        assert!(revisions.observe("ns", &of("set/a", 1), old, Some(Tick(2000))));
        assert_eq!(status_of(&revisions, 2), Some(TemplateStatus::Outdated));
    }

    #[test]
    fn engines_that_are_no_more_are_forgotten_and_what_is_current_is_not_while_a_sleeper_depends_on_it() {
        let mut revisions = TemplateRevisions::default();
        let of = |version| TemplateRevision { origin: "set/a".to_owned(), version };
        for version in 1..=3 {
            revisions.observe("ns", &of(version), EngineFingerprint(version), Some(Tick(version)));
        }
        revisions.retain(|fingerprint| fingerprint.0 == 1);
        assert_eq!(
            revisions.template_statuses().collect::<Vec<_>>(),
            [(EngineFingerprint(1), TemplateStatus::Outdated)]
        );
        revisions.retain(|_| false);
        assert_eq!((revisions.len(), revisions.current.len()), (0, 0));
    }
}
