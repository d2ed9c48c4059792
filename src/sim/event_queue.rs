//! A heap of future events: the clock of the world.

use std::{
    cmp::{Ordering, Reverse},
    collections::BinaryHeap,
};

use crate::units::Tick;

/// Future events, ordered by time, then by insertion.
#[derive(Clone, Debug)]
pub(super) struct EventQueue<T> {
    heap: BinaryHeap<Reverse<QueuedEvent<T>>>,
    last_sequence: u64,
}

#[derive(Clone, Debug)]
struct QueuedEvent<T> {
    at: Tick,
    sequence: u64,
    event: T,
}

impl<T> EventQueue<T> {
    pub(super) fn schedule(&mut self, at: Tick, thing: T) {
        self.last_sequence += 1;
        self.heap.push(Reverse(QueuedEvent { at, sequence: self.last_sequence, event: thing }));
    }

    pub(super) fn next_at(&self) -> Option<Tick> {
        self.heap.peek().map(|Reverse(entry)| entry.at)
    }

    pub(super) fn pop_due(&mut self, now: Tick) -> Option<T> {
        if self.next_at()? > now {
            return None;
        }
        self.heap.pop().map(|Reverse(entry)| entry.event)
    }

    pub(super) fn retain(&mut self, keep: impl Fn(&T) -> bool) {
        self.heap.retain(|Reverse(entry)| keep(&entry.event));
    }
}

impl<T> Default for EventQueue<T> {
    fn default() -> Self {
        Self { heap: BinaryHeap::new(), last_sequence: 0 }
    }
}

impl<T> Ord for QueuedEvent<T> {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at, self.sequence).cmp(&(other.at, other.sequence))
    }
}

impl<T> PartialOrd for QueuedEvent<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> PartialEq for QueuedEvent<T> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<T> Eq for QueuedEvent<T> {}
