//! What the status of a Warmup stores, and the next leader continues from.

use super::{ids::WarmupSpecHash, record::WarmupRecord};
use crate::units::{Millis, Tick};

/// Progress of a Warmup in one word.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum WarmupPhase {
    /// Nothing has begun.
    #[default]
    New,
    InProgress,
    Paused,
    Completed,
    Failed,
}

impl WarmupPhase {
    #[must_use]
    pub const fn is_finished(self) -> bool {
        matches!(self, Self::Completed | Self::Failed)
    }
}

/// Progress of a Warmup. Equal to what was written when it is read back.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WarmupProgress {
    pub phase: WarmupPhase,
    /// The generation of the request that this is the progress of.
    pub generation: u64,
    /// The generation of the request with which it began, or began anew. Pauses do not change it, so failures
    /// before them count.
    pub start_generation: u64,
    /// The spec of which this is the progress; `None` in the status of an earlier version.
    pub spec_hash: Option<WarmupSpecHash>,
    pub start: Option<Tick>,
    pub completion: Option<Tick>,
    pub paused_since: Option<Tick>,
    /// Duration of all earlier pauses.
    pub paused_for: Millis,
    pub record: WarmupRecord,
}

impl WarmupProgress {
    /// The time since the start, without pauses.
    #[must_use]
    pub fn elapsed(&self, now: Tick) -> Millis {
        let until = self.paused_since.unwrap_or(now);
        let whole = self.start.map_or(Millis::ZERO, |start| until.since(start));
        Millis(whole.0.saturating_sub(self.paused_for.0))
    }

    /// Begins or ends a pause.
    pub(super) fn set_paused(&mut self, paused: bool, now: Tick) {
        match (paused, self.paused_since) {
            (true, None) => self.paused_since = Some(now),
            (false, Some(since)) => {
                self.paused_for = self.paused_for + now.since(since);
                self.paused_since = None;
            }
            _ => {}
        }
    }
}
