//! How loaded an engine is, and how loaded a preferred engine may be.

use rouse::units::Tick;

use crate::routing::Endpoint;

/// The weight of a request at an engine whose KV cache is empty or unknown. With a full cache it counts twice.
const REQUEST_WEIGHT: u64 = 64;

impl Endpoint {
    /// The requests that hold the engine, from all cores of this gateway, and those that the engine reports as waiting,
    /// each weighted by the engine's use of its KV cache.
    ///
    /// Requests of other gateways count only while they wait: those that run delay this one little, and a reading is up
    /// to some seconds old. Calls `now` only if the engine has reported a load.
    pub(super) fn weighted_load(&self, now: impl FnOnce() -> Tick) -> u64 {
        let leases = u64::from(self.gate.leases());
        let Some(load) = self.activity.load().fresh(now) else { return leases * REQUEST_WEIGHT };
        // A reading is never negative, and a number that is too large becomes the largest.
        let waiting = u64::from(load.waiting.unwrap_or_default() as u32);
        let used = (load.kv_use.unwrap_or_default().min(1.0) * REQUEST_WEIGHT as f64) as u64;
        (leases + waiting) * (REQUEST_WEIGHT + used)
    }
}

/// The most load of a preferred engine: a multiple of the mean, and some requests more, without which a few requests
/// would give up their caches for nothing.
///
/// The mean includes the request to be placed. The numbers are those with which `tests/caches.rs` has the shortest time
/// to the first token.
#[derive(Clone, Copy)]
pub(super) struct LoadBound {
    quarters_of_mean: u64,
    requests: u64,
}

impl LoadBound {
    /// For a request whose beginning the preferred engine probably has in its cache. Another engine would compute it
    /// again, which takes longer than a short queue.
    pub(super) const CACHED: Self = Self { quarters_of_mean: 8, requests: 6 };
    /// For a first request. It has nothing to gain but its later turns.
    pub(super) const NEW: Self = Self { quarters_of_mean: 5, requests: 1 };

    /// Whether this load is within the bound, whatever the mean.
    pub(super) const fn always_allows(self, load: u64) -> bool {
        load <= self.requests * REQUEST_WEIGHT
    }

    /// Whether an engine's load is within the bound. The mean is weighted by the engines' limits, which usually match
    /// on one machine but need not.
    pub(super) fn allows(self, load: u64, limit: u32, total: TotalLoad) -> bool {
        let [load, limit, quarters, requests] =
            [load, u64::from(limit), self.quarters_of_mean, self.requests * REQUEST_WEIGHT].map(u128::from);
        let [all, limits] = [total.load, total.limit].map(u128::from);
        4 * load * limits <= quarters * all * limit + 4 * requests * limits
    }
}

/// The load of all usable engines, including the request to be placed, and their total limit.
#[derive(Clone, Copy)]
pub(super) struct TotalLoad {
    load: u64,
    limit: u64,
}

impl TotalLoad {
    pub(super) const OF_THE_REQUEST: Self = Self { load: REQUEST_WEIGHT, limit: 0 };

    pub(super) fn plus(self, (load, limit): (u64, u32)) -> Self {
        Self { load: self.load + load, limit: self.limit + u64::from(limit) }
    }
}
