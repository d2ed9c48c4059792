//! Settings of pairing, the same for every node.

use serde::{Deserialize, Serialize};

use super::event::MemorySizes;
use crate::units::{Bytes, Millis};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PairingSettings {
    /// How far the meter lags. A reading counts only if taken this long after the last sleep or end of an engine on the
    /// accelerator. No sleeper is deleted for the budget within this time after the last sleep.
    pub meter_lag: Millis,
    /// From the gate's closing until the remaining requests are cut.
    pub drain_timeout: Millis,
    /// Minimum timeout of `/sleep`: see [`Self::sleep_timeout_for`].
    pub sleep_timeout: Millis,
    /// Minimum timeout of `/wake_up`: see [`Self::wake_timeout_for`]. Also the timeout of the canary.
    pub wake_timeout: Millis,
    /// Bytes per second that the slowest machine moves when an engine falls asleep or wakes. `transfer_startup` is the
    /// time before it moves anything.
    pub min_transfer_rate: Bytes,
    pub transfer_startup: Millis,
    /// From the order until the engine, or a launcher, answers.
    pub start_timeout: Millis,
    /// From the order until an engine must have stopped. After it, a launcher that still holds the engine is deleted,
    /// and the deletion of a direct provider's Pod is repeated.
    pub stop_timeout: Millis,
    /// Pause after a failed launcher before the next is created on its accelerator. Doubles with each further failure,
    /// up to 32 times. An engine that has lived in the launcher for `launcher_proven_after` resets the count.
    pub launcher_backoff: Millis,
    pub launcher_proven_after: Millis,
    /// How long an unneeded launcher is kept.
    pub launcher_idle_timeout: Millis,
    /// Timeout of any other call.
    pub call_timeout: Millis,
    /// How long a requester may be held beyond drain and sleep.
    pub hold_margin: Millis,
    /// How long a requester that was deleted for a faulty accelerator keeps it, so that its replacement gets another.
    pub replacement_time: Millis,
    /// How long the memory of a vanished Pod stays reserved, unless the Pod is seen ended before. A reporting kubelet
    /// has stopped the Pod by then. Must exceed a provider's grace period plus the time to notice a silent kubelet.
    pub vanished_retention: Millis,
}

impl PairingSettings {
    /// How long an engine of this size may take to fall asleep: as configured, or longer if it has more to move.
    #[must_use]
    pub fn sleep_timeout_for(&self, sizes: &MemorySizes) -> Millis {
        self.sleep_timeout.max(self.transfer_time(sizes))
    }

    /// How long an engine of this size may take to wake.
    #[must_use]
    pub fn wake_timeout_for(&self, sizes: &MemorySizes) -> Millis {
        self.wake_timeout.max(self.transfer_time(sizes))
    }

    /// Time to move the weights from or to host RAM or a disk. The share of weights in its memory is unknown, so all of
    /// it counts. Accelerators move in parallel.
    fn transfer_time(&self, sizes: &MemorySizes) -> Millis {
        let bytes = sizes.awake.max(sizes.host);
        self.transfer_startup + Millis(bytes.0.saturating_mul(1000) / self.min_transfer_rate.0.max(1))
    }

    /// The pause after this many failed launchers in a row.
    #[must_use]
    pub fn launcher_backoff_for(&self, crashes: u32) -> Millis {
        Millis(self.launcher_backoff.0 << crashes.saturating_sub(1).min(5))
    }

    /// The maximum hold of a requester that is being deleted and whose engine has this size.
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
            replacement_time: Millis::secs(10),
            vanished_retention: Millis::secs(120),
        }
    }
}
