//! Which epochs can be a leader's.
//!
//! A stub that obeys an epoch refuses every lower one from then on, so one number that no leader will ever reach would shut all
//! leaders out until its container is started anew. A gateway's epoch is the number of its Lease, which Kubernetes keeps in 32
//! bits, and at least the tens of seconds since 1970 (`election::floor` in the gateway). So what comes after another epoch is not
//! far beyond both that one and the time. The first one is taken as it is: a cluster whose clock was once ahead has higher ones.

use std::time::SystemTime;

use rouse_net::stub_api::Epoch;

/// `leaseTransitions` of a Lease is a signed number of 32 bits.
const MAX_EPOCH: Epoch = 0x7FFF_FFFF;
/// Seconds of one epoch's growth.
const SECONDS_PER_EPOCH: u64 = 10;
/// What clocks may differ by, or leaders change without a word to this stub: as many as a day has steps.
const MAX_EPOCHS_AHEAD: u64 = 24 * 3600 / SECONDS_PER_EPOCH;

/// No leader has this epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "epoch {epoch} is further ahead than any leader's can be, the highest that is believed is {highest_plausible}: look at the clocks, and at \
     leaseTransitions of the Lease rouse-controller; what was believed so far is forgotten when this container is started anew"
)]
pub(crate) struct EpochTooFarAhead {
    epoch: Epoch,
    highest_plausible: Epoch,
}

/// Whether `told` can be a leader's after `newest`, which is 0 before any was heard.
pub(crate) fn check_plausible(told: Epoch, newest: Epoch) -> Result<(), EpochTooFarAhead> {
    check_plausible_at(told, newest, unix_seconds())
}

fn check_plausible_at(told: Epoch, newest: Epoch, seconds: u64) -> Result<(), EpochTooFarAhead> {
    let most = if newest == 0 {
        MAX_EPOCH
    } else {
        (newest.max(seconds / SECONDS_PER_EPOCH) + MAX_EPOCHS_AHEAD).min(MAX_EPOCH)
    };
    if told > most { Err(EpochTooFarAhead { epoch: told, highest_plausible: most }) } else { Ok(()) }
}

/// Since 1970.
#[expect(
    clippy::disallowed_methods,
    reason = "leaders count by the world's time, which no other clock tells"
)]
fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_may_be_ahead_by_a_day_of_the_last_one_and_of_the_time() {
        let now = 1_800_000_000;
        let time = now / SECONDS_PER_EPOCH;
        for (told, newest, believed) in [
            // The first of all.
            (7, 0, true),
            (MAX_EPOCH, 0, true),
            (MAX_EPOCH + 1, 0, false),
            (Epoch::MAX, 0, false),
            // A small Lease's next, also after a long silence, in which the time went on.
            (8, 7, true),
            (time, 7, true),
            (time + MAX_EPOCHS_AHEAD, 7, true),
            (time + MAX_EPOCHS_AHEAD + 1, 7, false),
            (Epoch::MAX, 7, false),
            // Of a cluster whose clock was ahead.
            (2_000_000_008, 2_000_000_007, true),
            (2_000_000_007 + MAX_EPOCHS_AHEAD + 1, 2_000_000_007, false),
            (MAX_EPOCH, MAX_EPOCH - 1, true),
            // An older one is somebody else's to refuse.
            (6, 7, true),
        ] {
            assert_eq!(check_plausible_at(told, newest, now).is_ok(), believed, "{told} after {newest}");
        }
    }
}
