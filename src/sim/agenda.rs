//! What will happen when: the heap that is the world's clock.

use std::{
    cmp::{Ordering, Reverse},
    collections::BinaryHeap,
};

use crate::units::Tick;

/// Things to come, in the order of their time, then of their making.
#[derive(Clone, Debug)]
pub(super) struct Agenda<T> {
    heap: BinaryHeap<Reverse<Entry<T>>>,
    made: u64,
}

#[derive(Clone, Debug)]
struct Entry<T> {
    at: Tick,
    number: u64,
    thing: T,
}

impl<T> Agenda<T> {
    pub(super) fn add(&mut self, at: Tick, thing: T) {
        self.made += 1;
        self.heap.push(Reverse(Entry { at, number: self.made, thing }));
    }

    pub(super) fn next_at(&self) -> Option<Tick> {
        self.heap.peek().map(|Reverse(entry)| entry.at)
    }

    pub(super) fn pop_due(&mut self, now: Tick) -> Option<T> {
        if self.next_at()? > now {
            return None;
        }
        self.heap.pop().map(|Reverse(entry)| entry.thing)
    }

    pub(super) fn retain(&mut self, keep: impl Fn(&T) -> bool) {
        self.heap.retain(|Reverse(entry)| keep(&entry.thing));
    }
}

impl<T> Default for Agenda<T> {
    fn default() -> Self {
        Self { heap: BinaryHeap::new(), made: 0 }
    }
}

impl<T> Ord for Entry<T> {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

impl<T> PartialOrd for Entry<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> PartialEq for Entry<T> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<T> Eq for Entry<T> {}
