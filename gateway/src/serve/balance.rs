//! Balances connections over the cores.
//!
//! The kernel spreads connections over the cores' sockets by a hash of their addresses. The result is even for many
//! short connections, but need not be for a few hundred streams that last minutes, and a badly hashed stream stays on
//! its core until it ends. So a core with a load well above the mean moves a connection that it accepted to the least
//! loaded core. The move happens once and before the first byte is read, since nothing after that point can change its
//! thread.
//!
//! A connection in use weighs four times as much as an idle one: it may wake its core for each event, while an idle one
//! only takes memory. The cost of a stream is unknown when its connection opens, so finer weights are not worth it.
//!
//! Only a core itself counts its exchanges, on a cache line that other cores read only when they accept. On a request's
//! path this costs an addition to a nearby number.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

/// The weight that an open exchange adds to the weight 1 of its connection.
const EXCHANGE_WEIGHT: u64 = 3;
/// The load above nine eighths of the mean that is not worth a move: eight connections in use. The slack also keeps
/// short and even loads in place, whose numbers are never quite equal.
const MOVE_SLACK_WEIGHT: u64 = 8 * (1 + EXCHANGE_WEIGHT);
const MOVE_MARGIN_DIVISOR: u64 = 8;

/// The load of each core.
#[derive(Debug)]
pub(crate) struct CoreLoads(Box<[CoreLoad]>);

/// Two cache lines, since processors fetch them in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
struct CoreLoad {
    connections: AtomicU32,
    /// Written only by the core itself.
    exchanges: AtomicU32,
}

/// One core's handle to its own load. Create it once per core and keep it on that core's thread.
#[derive(Clone, Debug)]
pub(crate) struct CoreLoadHandle {
    loads: Arc<CoreLoads>,
    core_index: usize,
}

/// Counts a connection for the core that serves it or will serve it, until its drop.
#[derive(Debug)]
pub(super) struct CoreConnectionGuard {
    loads: Arc<CoreLoads>,
    core_index: usize,
}

impl CoreLoads {
    pub(super) fn new(cores: usize) -> Arc<Self> {
        Arc::new(Self((0..cores).map(|_| CoreLoad::default()).collect()))
    }

    pub(super) fn handle(self: &Arc<Self>, number: usize) -> CoreLoadHandle {
        CoreLoadHandle { loads: Arc::clone(self), core_index: number }
    }

    /// Counts one more connection for this core. The count changes at once, on any caller's thread, so the next accept
    /// sees it.
    pub(super) fn add_connection(self: &Arc<Self>, number: usize) -> CoreConnectionGuard {
        if let Some(load) = self.0.get(number) {
            load.connections.fetch_add(1, Ordering::Relaxed);
        }
        CoreConnectionGuard { loads: Arc::clone(self), core_index: number }
    }

    /// The core to which this core moves an accepted connection. `None`: the connection stays.
    pub(super) fn less_loaded_than(&self, number: usize) -> Option<usize> {
        less_loaded_core(number, self.0.iter().map(CoreLoad::weight))
    }

    /// Connections of each core.
    #[cfg(test)]
    pub(crate) fn connections(&self) -> Vec<u32> {
        self.0.iter().map(|load| load.connections.load(Ordering::Relaxed)).collect()
    }

    #[cfg(test)]
    pub(crate) fn exchanges(&self) -> Vec<u32> {
        self.0.iter().map(|load| load.exchanges.load(Ordering::Relaxed)).collect()
    }
}

impl CoreLoad {
    fn weight(&self) -> u64 {
        let [connections, exchanges] =
            [&self.connections, &self.exchanges].map(|n| u64::from(n.load(Ordering::Relaxed)));
        connections + EXCHANGE_WEIGHT * exchanges
    }
}

impl CoreLoadHandle {
    pub(crate) fn exchange_started(&self) {
        self.add_exchanges(1);
    }

    pub(crate) fn exchange_ended(&self) {
        self.add_exchanges(-1);
    }

    /// A plain load and store is cheaper than an atomic addition, and enough because only one thread writes.
    fn add_exchanges(&self, change: i32) {
        let Some(CoreLoad { exchanges, .. }) = self.loads.0.get(self.core_index) else { return };
        exchanges.store(exchanges.load(Ordering::Relaxed).wrapping_add_signed(change), Ordering::Relaxed);
    }
}

impl Drop for CoreConnectionGuard {
    fn drop(&mut self) {
        if let Some(load) = self.loads.0.get(self.core_index) {
            load.connections.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// The least loaded core, if this core is well above the mean.
fn less_loaded_core(own_load: usize, weights: impl Iterator<Item = u64> + Clone) -> Option<usize> {
    let cores = weights.clone().count() as u64;
    let sum: u64 = weights.clone().sum();
    let carried = weights.clone().nth(own_load)?;
    let allowed = sum + sum / MOVE_MARGIN_DIVISOR + MOVE_SLACK_WEIGHT * cores;
    if carried * cores <= allowed {
        return None;
    }
    weights.enumerate().min_by_key(|(_, weight)| *weight).map(|(number, _)| number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_core_alone_and_cores_that_are_about_even_keep_what_they_accept() {
        let better = |own, weights: &[u64]| less_loaded_core(own, weights.iter().copied());
        assert_eq!(better(0, &[9999]), None);
        assert_eq!(better(0, &[0, 0]), None);
        assert_eq!(better(0, &[60, 0]), None, "a few connections are nothing");
        // A fair hash of 1000 streams, three standard deviations off.
        assert_eq!(better(0, &[4 * 548, 4 * 452]), None);
        assert_eq!(better(0, &[4 * 600, 4 * 400]), Some(1));
        assert_eq!(better(1, &[4 * 600, 4 * 400]), None);
        assert_eq!(better(2, &[300, 200, 900, 250]), Some(1));
    }

    #[test]
    fn an_exchange_weighs_more_than_a_connection_that_idles() {
        let loads = CoreLoads::new(2);
        let idle: Vec<_> = (0..100).map(|_| loads.add_connection(0)).collect();
        let in_use: Vec<_> = (0..40).map(|_| loads.add_connection(1)).collect();
        assert_eq!(loads.less_loaded_than(1), None);
        let core = loads.handle(1);
        (0..60).for_each(|_| core.exchange_started());
        assert_eq!(loads.less_loaded_than(1), Some(0));
        (0..60).for_each(|_| core.exchange_ended());
        drop((idle, in_use));
        assert_eq!((loads.connections(), loads.exchanges()), (vec![0, 0], vec![0, 0]));
    }

    /// Each seed is a world of cores and a kernel that deals connections out unevenly. Some connections are used and
    /// some idle.
    #[test]
    fn no_core_gets_far_above_the_mean_and_nothing_comes_back() {
        for seed in 0..500_u64 {
            let mut state = seed;
            let mut below = |n: u64| {
                state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
                (state >> 33) % n
            };
            let cores = 1 + below(8);
            let mut weights = vec![0_u64; cores as usize];
            for _ in 0..below(1500) {
                // Lower numbers get more of them, in some worlds all.
                let accepting = below(cores).min(below(1 + seed % 9)) as usize;
                let sum: u64 = weights.iter().sum();
                let target = less_loaded_core(accepting, weights.iter().copied());
                if let Some(target) = target {
                    assert!(weights[target] * cores <= sum, "it goes to no core above the mean");
                    assert_eq!(
                        less_loaded_core(target, weights.iter().copied()),
                        None,
                        "from there it would not move"
                    );
                }
                let weight = if below(2) == 0 { 1 } else { 1 + EXCHANGE_WEIGHT };
                weights[target.unwrap_or(accepting)] += weight;
                let sum: u64 = weights.iter().sum();
                let most =
                    (sum + sum / MOVE_MARGIN_DIVISOR) / cores + 1 + MOVE_SLACK_WEIGHT + 1 + EXCHANGE_WEIGHT;
                assert!(weights.iter().all(|weight| *weight <= most), "{seed}: {weights:?}");
            }
        }
    }
}
