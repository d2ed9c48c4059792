//! Decides which epochs a leader can plausibly have.
//!
//! A stub that accepts an epoch refuses every lower epoch from then on. A number that no leader will ever reach would
//! therefore lock out all leaders until the container restarts. A gateway's epoch is the number of its Lease, which
//! Kubernetes keeps in 32 bits, and at least the tens of seconds since 1970 (`election::floor` in the gateway). So a
//! later epoch cannot be far beyond both the epoch before it and the time. The first epoch is accepted up to
//! [`MAX_EPOCH`], because a cluster whose clock was once ahead has higher epochs.

use std::time::SystemTime;

use rouse_net::stub_api::Epoch;

/// The highest epoch: `leaseTransitions` of a Lease is a signed 32-bit number.
const MAX_EPOCH: Epoch = 0x7FFF_FFFF;
/// Seconds per step of the time-based epoch.
const SECONDS_PER_EPOCH: u64 = 10;
/// Tolerance for clock differences and for leader changes that this stub did not see: one day of epochs.
const MAX_EPOCHS_AHEAD: u64 = 24 * 3600 / SECONDS_PER_EPOCH;

/// No leader can have this epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "epoch {epoch} is further ahead than any leader's can be, the highest plausible epoch is {highest_plausible}: \
     check the clocks and leaseTransitions of the Lease rouse-controller; a restart of this container forgets the \
     epochs that it accepted so far"
)]
pub(crate) struct EpochTooFarAhead {
    epoch: Epoch,
    highest_plausible: Epoch,
}

/// Checks whether a leader after epoch `newest` can have epoch `epoch`. `newest` is 0 before the first epoch.
pub(crate) fn check_plausible(epoch: Epoch, newest: Epoch) -> Result<(), EpochTooFarAhead> {
    check_plausible_at(epoch, newest, unix_seconds())
}

fn check_plausible_at(epoch: Epoch, newest: Epoch, seconds: u64) -> Result<(), EpochTooFarAhead> {
    let highest_plausible = if newest == 0 {
        MAX_EPOCH
    } else {
        (newest.max(seconds / SECONDS_PER_EPOCH) + MAX_EPOCHS_AHEAD).min(MAX_EPOCH)
    };
    if epoch > highest_plausible { Err(EpochTooFarAhead { epoch, highest_plausible }) } else { Ok(()) }
}

/// Seconds since 1970.
#[expect(clippy::disallowed_methods, reason = "epochs derive from wall-clock time")]
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
        for (epoch, newest, believed) in [
            // The first epoch.
            (7, 0, true),
            (MAX_EPOCH, 0, true),
            (MAX_EPOCH + 1, 0, false),
            (Epoch::MAX, 0, false),
            // The next transition of a Lease with a low number, also after a long silence in which the time moved on.
            (8, 7, true),
            (time, 7, true),
            (time + MAX_EPOCHS_AHEAD, 7, true),
            (time + MAX_EPOCHS_AHEAD + 1, 7, false),
            (Epoch::MAX, 7, false),
            // A cluster whose clock was ahead.
            (2_000_000_008, 2_000_000_007, true),
            (2_000_000_007 + MAX_EPOCHS_AHEAD + 1, 2_000_000_007, false),
            (MAX_EPOCH, MAX_EPOCH - 1, true),
            // An older epoch passes here; the fence refuses it.
            (6, 7, true),
        ] {
            assert_eq!(check_plausible_at(epoch, newest, now).is_ok(), believed, "{epoch} after {newest}");
        }
    }
}
