//! A set that knows what was added to it and removed from it.

use std::collections::BTreeSet;

#[derive(Debug)]
pub(super) struct TrackedSet<T> {
    members: BTreeSet<T>,
    /// Members that were added or removed since [`Self::take_changed`].
    changed: BTreeSet<T>,
}

impl<T> Default for TrackedSet<T> {
    fn default() -> Self {
        Self { members: BTreeSet::new(), changed: BTreeSet::new() }
    }
}

impl<T: Copy + Ord> TrackedSet<T> {
    /// Returns true if the member is new.
    pub(super) fn insert(&mut self, member: T) -> bool {
        let is_new = self.members.insert(member);
        if is_new {
            self.changed.insert(member);
        }
        is_new
    }

    pub(super) fn retain(&mut self, stays: impl Fn(&T) -> bool) {
        self.changed.extend(self.members.iter().filter(|&member| !stays(member)));
        self.members.retain(stays);
    }

    pub(super) fn contains(&self, member: &T) -> bool {
        self.members.contains(member)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.members.iter()
    }

    pub(super) fn len(&self) -> usize {
        self.members.len()
    }

    pub(super) fn take_changed(&mut self) -> BTreeSet<T> {
        std::mem::take(&mut self.changed)
    }
}
