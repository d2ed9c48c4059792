//! Policy, the same for every node.

use serde::{Deserialize, Serialize};

use super::event::MemorySizes;
use crate::units::{Bytes, Millis};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PairingSettings {
    /// No sleeper is deleted, and no reading of the meter believed, before the last sleep on the accelerator is so long ago:
    /// the meter lags.
    pub meter_lag: Millis,
    /// From the gate's closing until what is still under way is cut.
    pub drain_timeout: Millis,
    /// For `/sleep_timeout`, at least: see [`Self::sleep_timeout_for`].
    pub sleep_timeout: Millis,
    /// For `/wake_up`, at least: see [`Self::wake_timeout_for`]. Then for the canary.
    pub wake_timeout: Millis,
    /// For the slowest machine: what an engine moves in a second when it falls asleep or wakes, after so long in which it moves
    /// nothing.
    pub min_transfer_rate: Bytes,
    pub transfer_startup: Millis,
    /// From the order until the engine, or a launcher, answers.
    pub start_timeout: Millis,
    /// From the order to end an engine until it is given more room for doubt: a launcher that does not get rid of it goes itself.
    pub stop_timeout: Millis,
    /// After a launcher that failed none is made on its accelerator for so long; twice as long after each further one, up to 32
    /// times. An engine that has lived in it for `launcher_proven_after` lets that begin anew.
    pub launcher_backoff: Millis,
    pub launcher_proven_after: Millis,
    /// A launcher that nobody needs is ended after this.
    pub launcher_idle_timeout: Millis,
    /// For any other call.
    pub call_timeout: Millis,
    /// What a requester is held beyond drain and sleep at most.
    pub hold_margin: Millis,
    /// What a Pod whose object vanished held stays reserved for so long, unless it is seen ended before: a kubelet that reports has
    /// ended it by then. More than a provider's grace and the time after which a silent kubelet is noticed.
    pub vanished_retention: Millis,
}

impl PairingSettings {
    /// How long an engine of this size may take to fall asleep: what was configured, or longer if it has more to move.
    #[must_use]
    pub fn sleep_timeout_for(&self, sizes: &MemorySizes) -> Millis {
        self.sleep_timeout.max(self.transfer_time(sizes))
    }

    /// How long it may take to wake.
    #[must_use]
    pub fn wake_timeout_for(&self, sizes: &MemorySizes) -> Millis {
        self.wake_timeout.max(self.transfer_time(sizes))
    }

    /// Its weights come from host RAM or a disk, and go there; how much of what it holds these are is not known, so all of it
    /// counts. Its accelerators do it side by side.
    fn transfer_time(&self, sizes: &MemorySizes) -> Millis {
        let bytes = sizes.awake.max(sizes.host);
        self.transfer_startup + Millis(bytes.0.saturating_mul(1000) / self.min_transfer_rate.0.max(1))
    }

    /// The pause after so many launchers in a row that failed.
    #[must_use]
    pub fn launcher_backoff_for(&self, crashes: u32) -> Millis {
        Millis(self.launcher_backoff.0 << crashes.saturating_sub(1).min(5))
    }

    /// How long a requester that is being deleted, and whose engine has this size, is held at most.
    #[must_use]
    pub fn max_hold(&self, sizes: &MemorySizes) -> Millis {
        self.drain_timeout + self.sleep_timeout_for(sizes) + self.hold_margin
    }
}

impl Default for PairingSettings {
    fn default() -> Self {
        Self {
            meter_lag: Millis::secs(60),
            drain_timeout: Millis::secs(30),
            sleep_timeout: Millis::secs(30),
            wake_timeout: Millis::secs(60),
            min_transfer_rate: Bytes::gib(1),
            transfer_startup: Millis::secs(10),
            start_timeout: Millis::secs(600),
            stop_timeout: Millis::secs(60),
            launcher_backoff: Millis::secs(10),
            launcher_proven_after: Millis::secs(600),
            launcher_idle_timeout: Millis::secs(300),
            call_timeout: Millis::secs(10),
            hold_margin: Millis::secs(10),
            vanished_retention: Millis::secs(120),
        }
    }
}
