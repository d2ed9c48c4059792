//! Which epochs can be a leader's.
//!
//! A stub that obeys an epoch refuses every lower one from then on, so one number that no leader will ever reach would shut all
//! leaders out until its container is started anew. A gateway's epoch is the number of its Lease, which Kubernetes keeps in 32
//! bits, and at least the tens of seconds since 1970 (`election::floor` in the gateway). So what comes after another epoch is not
//! far beyond both that one and the time. The first one is taken as it is: a cluster whose clock was once ahead has higher ones.

use std::time::SystemTime;

use rouse::wire::Epoch;

/// `leaseTransitions` of a Lease is a signed number of 32 bits.
const LARGEST: Epoch = 0x7FFF_FFFF;
/// Seconds of one epoch's growth.
const STEP: u64 = 10;
/// What clocks may differ by, or leaders change without a word to this stub: as many as a day has steps.
const AHEAD: u64 = 24 * 3600 / STEP;

/// No leader has this epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "epoch {told} is further ahead than any leader's can be, the highest that is believed is {most}: look at the clocks, and at \
     leaseTransitions of the Lease rouse-controller; what was believed so far is forgotten when this container is started anew"
)]
pub(crate) struct TooFar {
    told: Epoch,
    most: Epoch,
}

/// Whether `told` can be a leader's after `newest`, which is 0 before any was heard.
pub(crate) fn believe(told: Epoch, newest: Epoch) -> Result<(), TooFar> {
    believe_at(told, newest, seconds())
}

fn believe_at(told: Epoch, newest: Epoch, seconds: u64) -> Result<(), TooFar> {
    let most = if newest == 0 { LARGEST } else { (newest.max(seconds / STEP) + AHEAD).min(LARGEST) };
    if told > most { Err(TooFar { told, most }) } else { Ok(()) }
}

/// Since 1970.
#[expect(
    clippy::disallowed_methods,
    reason = "leaders count by the world's time, which no other clock tells"
)]
fn seconds() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_may_be_ahead_by_a_day_of_the_last_one_and_of_the_time() {
        let now = 1_800_000_000;
        let time = now / STEP;
        for (told, newest, believed) in [
            // The first of all.
            (7, 0, true),
            (LARGEST, 0, true),
            (LARGEST + 1, 0, false),
            (Epoch::MAX, 0, false),
            // A small Lease's next, also after a long silence, in which the time went on.
            (8, 7, true),
            (time, 7, true),
            (time + AHEAD, 7, true),
            (time + AHEAD + 1, 7, false),
            (Epoch::MAX, 7, false),
            // Of a cluster whose clock was ahead.
            (2_000_000_008, 2_000_000_007, true),
            (2_000_000_007 + AHEAD + 1, 2_000_000_007, false),
            (LARGEST, LARGEST - 1, true),
            // An older one is somebody else's to refuse.
            (6, 7, true),
        ] {
            assert_eq!(believe_at(told, newest, now).is_ok(), believed, "{told} after {newest}");
        }
    }
}
