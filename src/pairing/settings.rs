//! Policy, the same for every node.

use serde::{Deserialize, Serialize};

use super::event::Sizes;
use crate::units::{Bytes, Millis};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// No sleeper is deleted, and no reading of the meter believed, before the last sleep on the accelerator is so long ago:
    /// the meter lags.
    pub settle: Millis,
    /// From the gate's closing until what is still under way is cut.
    pub drain: Millis,
    /// For `/sleep`, at least: see [`Self::sleep_within`].
    pub sleep: Millis,
    /// For `/wake_up`, at least: see [`Self::wake_within`]. Then for the canary.
    pub wake: Millis,
    /// For the slowest machine: what an engine moves in a second when it falls asleep or wakes, after so long in which it moves
    /// nothing.
    pub rate: Bytes,
    pub base: Millis,
    /// From the order until the engine, or a launcher, answers.
    pub start: Millis,
    /// From the order to end an engine until it is given more room for doubt: a launcher that does not get rid of it goes itself.
    pub end: Millis,
    /// After a launcher that failed none is made on its accelerator for so long; twice as long after each further one, up to 32
    /// times. An engine that has lived in it for `lived` lets that begin anew.
    pub relaunch: Millis,
    pub lived: Millis,
    /// A launcher that nobody needs is ended after this.
    pub idle: Millis,
    /// For any other call.
    pub call: Millis,
    /// What a requester is held beyond drain and sleep at most.
    pub spare: Millis,
    /// What a Pod whose object vanished held stays reserved for so long, unless it is seen ended before: a kubelet that reports has
    /// ended it by then. More than a provider's grace and the time after which a silent kubelet is noticed.
    pub remains: Millis,
}

impl Settings {
    /// How long an engine of this size may take to fall asleep: what was configured, or longer if it has more to move.
    #[must_use]
    pub fn sleep_within(&self, sizes: &Sizes) -> Millis {
        self.sleep.max(self.moves(sizes))
    }

    /// How long it may take to wake.
    #[must_use]
    pub fn wake_within(&self, sizes: &Sizes) -> Millis {
        self.wake.max(self.moves(sizes))
    }

    /// Its weights come from host RAM or a disk, and go there; how much of what it holds these are is not known, so all of it
    /// counts. Its accelerators do it side by side.
    fn moves(&self, sizes: &Sizes) -> Millis {
        let bytes = sizes.awake.max(sizes.host);
        self.base + Millis(bytes.0.saturating_mul(1000) / self.rate.0.max(1))
    }

    /// The pause after so many launchers in a row that failed.
    #[must_use]
    pub fn relaunch_after(&self, crashes: u32) -> Millis {
        Millis(self.relaunch.0 << crashes.saturating_sub(1).min(5))
    }

    /// How long a requester that is being deleted, and whose engine has this size, is held at most.
    #[must_use]
    pub fn hold(&self, sizes: &Sizes) -> Millis {
        self.drain + self.sleep_within(sizes) + self.spare
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            settle: Millis::secs(60),
            drain: Millis::secs(30),
            sleep: Millis::secs(30),
            wake: Millis::secs(60),
            rate: Bytes::gib(1),
            base: Millis::secs(10),
            start: Millis::secs(600),
            end: Millis::secs(60),
            relaunch: Millis::secs(10),
            lived: Millis::secs(600),
            idle: Millis::secs(300),
            call: Millis::secs(10),
            spare: Millis::secs(10),
            remains: Millis::secs(120),
        }
    }
}
