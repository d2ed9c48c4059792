//! Which engines only former editions of their templates ask for.

use std::collections::{BTreeMap, BTreeSet};

use rouse::{
    pairing::{event::Standing, ids::Fingerprint},
    units::Tick,
};

use crate::controllers::dual::edition::Edition;

/// Namespace, and whose within it.
type Origin = (String, String);

#[derive(Debug, Default)]
pub(super) struct Editions {
    /// When the youngest requester of each was made, and its version.
    current: BTreeMap<Origin, (Tick, u64)>,
    /// Who has asked for each engine.
    asked: BTreeMap<Fingerprint, BTreeSet<(Origin, u64)>>,
}

impl Editions {
    /// A requester or a provider of this edition was seen; `made`: when, of a requester. True: that is news.
    pub(super) fn meet(
        &mut self,
        namespace: &str,
        edition: &Edition,
        fingerprint: Fingerprint,
        made: Option<Tick>,
    ) -> bool {
        let Edition { origin, version } = edition;
        let origin = (namespace.to_owned(), origin.clone());
        let mut news = false;
        if let Some(made) = made {
            let known = self.current.get(&origin);
            // Of those of one second the last that is seen counts: others may follow.
            if known.is_none_or(|(before, _)| *before <= made) {
                news |= known.is_none_or(|(_, before)| before != version);
                self.current.insert(origin.clone(), (made, *version));
            }
        }
        news | self.asked.entry(fingerprint).or_default().insert((origin, *version))
    }

    pub(super) fn len(&self) -> usize {
        self.asked.len()
    }

    /// Forgets engines that nobody has or asks for any more, and whose templates they were of alone.
    pub(super) fn retain(&mut self, is_used: impl Fn(&Fingerprint) -> bool) {
        self.asked.retain(|fingerprint, _| is_used(fingerprint));
        let left: BTreeSet<&Origin> = self.asked.values().flatten().map(|(origin, _)| origin).collect();
        self.current.retain(|origin, _| left.contains(origin));
    }

    pub(super) fn standings(&self) -> impl Iterator<Item = (Fingerprint, Standing)> {
        let former = |(origin, version): &(Origin, u64)| {
            self.current.get(origin).is_some_and(|(_, current)| current != version)
        };
        self.asked.iter().map(move |(fingerprint, all)| {
            let outdated = all.iter().all(former);
            (*fingerprint, if outdated { Standing::Outdated } else { Standing::Current })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_is_outdated_as_long_as_only_former_editions_ask_for_it() {
        let mut editions = Editions::default();
        let of = |origin: &str, version| Edition { origin: origin.to_owned(), version };
        let standing = |editions: &Editions, of: u64| {
            editions.standings().find(|(own, _)| *own == Fingerprint(of)).map(|(_, standing)| standing)
        };
        let (old, new) = (Fingerprint(1), Fingerprint(2));
        assert!(editions.meet("ns", &of("set/a", 1), old, None), "a sleeper");
        assert_eq!(standing(&editions, 1), Some(Standing::Current), "nothing is known of others");
        assert!(editions.meet("ns", &of("set/a", 2), new, Some(Tick(1000))));
        assert!(!editions.meet("ns", &of("set/a", 2), new, Some(Tick(1000))));
        assert_eq!(
            (standing(&editions, 1), standing(&editions, 2)),
            (Some(Standing::Outdated), Some(Standing::Current))
        );
        // An older requester that is seen late changes nothing, and neither does another namespace's.
        assert!(!editions.meet("ns", &of("set/a", 1), old, Some(Tick(0))));
        editions.meet("other", &of("set/a", 7), Fingerprint(7), Some(Tick(9000)));
        assert_eq!(standing(&editions, 1), Some(Standing::Outdated));
        // Somebody else asks for the same.
        assert!(editions.meet("ns", &of("set/b", 1), old, Some(Tick(500))));
        assert_eq!(standing(&editions, 1), Some(Standing::Current));
        // Rolled back.
        assert!(editions.meet("ns", &of("set/a", 1), old, Some(Tick(2000))));
        assert_eq!(standing(&editions, 2), Some(Standing::Outdated));
    }

    #[test]
    fn engines_that_are_no_more_are_forgotten_and_what_is_current_is_not_while_a_sleeper_depends_on_it() {
        let mut editions = Editions::default();
        let of = |version| Edition { origin: "set/a".to_owned(), version };
        for version in 1..=3 {
            editions.meet("ns", &of(version), Fingerprint(version), Some(Tick(version)));
        }
        editions.retain(|fingerprint| fingerprint.0 == 1);
        assert_eq!(editions.standings().collect::<Vec<_>>(), [(Fingerprint(1), Standing::Outdated)]);
        editions.retain(|_| false);
        assert_eq!((editions.len(), editions.current.len()), (0, 0));
    }
}
