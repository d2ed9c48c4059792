//! Policy, the same for every node.

use serde::{Deserialize, Serialize};

use crate::units::Millis;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// No sleeper is deleted, and no reading of the meter believed, before the last sleep on the accelerator is so long ago:
    /// the meter lags.
    pub settle: Millis,
    /// From the gate's closing until what is still under way is cut.
    pub drain: Millis,
    /// For `/sleep`.
    pub sleep: Millis,
    /// For `/wake_up`, and then for the canary.
    pub wake: Millis,
    /// From the order until the engine, or a launcher, answers.
    pub start: Millis,
    /// From the order to end an engine until it is given more room for doubt: a launcher that does not get rid of it goes itself.
    pub end: Millis,
    /// For any other call.
    pub call: Millis,
    /// What a requester is held beyond drain and sleep at most.
    pub spare: Millis,
    /// What a Pod whose object vanished held stays reserved for so long, unless it is seen ended before: a kubelet that reports has
    /// ended it by then. More than a provider's grace and the time after which a silent kubelet is noticed.
    pub remains: Millis,
}

impl Settings {
    /// How long a requester that is being deleted is held at most.
    #[must_use]
    pub fn hold(&self) -> Millis {
        self.drain + self.sleep + self.spare
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            settle: Millis::secs(60),
            drain: Millis::secs(30),
            sleep: Millis::secs(30),
            wake: Millis::secs(60),
            start: Millis::secs(600),
            end: Millis::secs(60),
            call: Millis::secs(10),
            spare: Millis::secs(10),
            remains: Millis::secs(120),
        }
    }
}
