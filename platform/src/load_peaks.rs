//! Keeps the readings of each engine's load over the window, and returns their peaks.
//!
//! A peak counts rather than the latest value, because an engine that was full for some seconds of a minute has no room
//! to spare.

use std::collections::{BTreeMap, VecDeque};

use rouse::{
    model::EngineId,
    saturation::PeakLoad,
    units::{Generation, Millis, Tick},
};
use rouse_net::engine_load::EngineLoad;

/// The outcome of one reading; `None` if the engine did not answer with metrics.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineReading {
    pub engine: EngineId,
    pub generation: Generation,
    pub load: Option<EngineLoad>,
}

/// The readings of all awake engines.
#[derive(Debug)]
pub struct LoadPeaks {
    window: Millis,
    engines: BTreeMap<EngineId, EngineReadings>,
}

/// The readings of one engine generation, the newest last.
#[derive(Debug, Default)]
struct EngineReadings {
    generation: Generation,
    readings: VecDeque<(Tick, EngineLoad)>,
}

impl LoadPeaks {
    #[must_use]
    pub const fn new(window: Millis) -> Self {
        Self { window, engines: BTreeMap::new() }
    }

    /// Replaces the window.
    pub const fn set_window(&mut self, window: Millis) {
        self.window = window;
    }

    /// Adds a reading that was taken at `at`. A failed one leaves the earlier ones, which grow old.
    pub fn add(&mut self, reading: EngineReading, at: Tick) {
        let EngineReading { engine, generation, load: Some(load) } = reading else { return };
        let known = self.engines.entry(engine).or_default();
        if known.generation != generation {
            *known = EngineReadings { generation, readings: VecDeque::new() };
        }
        let window = self.window;
        known.readings.retain(|(taken, _)| *taken + window >= at);
        known.readings.push_back((at, load));
    }

    /// Forgets the engines that are not awake: a sleeper reports an empty cache, and after a wake the cache is empty.
    pub fn retain(&mut self, is_awake: impl Fn(&EngineId) -> bool) {
        self.engines.retain(|engine, _| is_awake(engine));
    }

    /// Returns the peak of this engine generation; `None` if it was never read.
    ///
    /// A figure that the newest reading lacks is unknown, because the engine may have stopped reporting it. Without a
    /// reading in the window both are.
    #[must_use]
    pub fn peak(&self, engine: &EngineId, generation: Generation, now: Tick) -> Option<PeakLoad> {
        let known = self.engines.get(engine).filter(|known| known.generation == generation)?;
        let (newest, last) = known.readings.back()?;
        let is_current = |taken: Tick| taken + self.window >= now;
        let highest = |figure: fn(&EngineLoad) -> Option<f64>| {
            figure(last)?;
            let current = known.readings.iter().filter(|(taken, _)| is_current(*taken));
            current.filter_map(|(_, load)| figure(load)).reduce(f64::max)
        };
        Some(PeakLoad {
            kv_use: highest(|load| load.kv_use),
            waiting: highest(|load| load.waiting),
            newest: *newest,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: Millis = Millis::secs(60);

    fn reading(generation: u64, kv_use: Option<f64>, waiting: Option<f64>) -> EngineReading {
        let load = EngineLoad { kv_use, waiting, running: None };
        EngineReading { engine: engine(), generation: Generation(generation), load: Some(load) }
    }

    fn engine() -> EngineId {
        EngineId::new("qwen".into(), 0)
    }

    fn peak(peaks: &LoadPeaks, seconds: u64) -> Option<(Option<f64>, Option<f64>, u64)> {
        let found = peaks.peak(&engine(), Generation(1), Tick(seconds * 1000))?;
        Some((found.kv_use, found.waiting, found.newest.0 / 1000))
    }

    #[test]
    fn the_highest_value_of_the_window_counts_and_falls_out_of_it() {
        let mut peaks = LoadPeaks::new(WINDOW);
        for (seconds, kv_use, waiting) in [(100, 0.9, 0.0), (120, 0.2, 7.0), (140, 0.3, 1.0)] {
            peaks.add(reading(1, Some(kv_use), Some(waiting)), Tick(seconds * 1000));
        }
        assert_eq!(peak(&peaks, 160), Some((Some(0.9), Some(7.0), 140)));
        assert_eq!(peak(&peaks, 161), Some((Some(0.3), Some(7.0), 140)));
        assert_eq!(peak(&peaks, 200), Some((Some(0.3), Some(1.0), 140)));
        assert_eq!(peak(&peaks, 201), Some((None, None, 140)), "how old the last one is");
    }

    #[test]
    fn a_figure_that_is_no_longer_reported_is_unknown_and_a_failed_read_changes_nothing() {
        let mut peaks = LoadPeaks::new(WINDOW);
        peaks.add(reading(1, Some(0.9), Some(2.0)), Tick(100_000));
        peaks.add(EngineReading { load: None, ..reading(1, None, None) }, Tick(101_000));
        assert_eq!(peak(&peaks, 102), Some((Some(0.9), Some(2.0), 100)));
        peaks.add(reading(1, None, Some(1.0)), Tick(103_000));
        assert_eq!(peak(&peaks, 104), Some((None, Some(2.0), 103)));
    }

    #[test]
    fn another_generation_and_an_engine_that_slept_begin_anew() {
        let mut peaks = LoadPeaks::new(WINDOW);
        peaks.add(reading(1, Some(0.9), Some(2.0)), Tick(100_000));
        peaks.add(reading(2, Some(0.1), Some(0.0)), Tick(101_000));
        assert_eq!(peak(&peaks, 101), None);
        let found = peaks.peak(&engine(), Generation(2), Tick(101_000)).unwrap();
        assert_eq!(found.kv_use, Some(0.1));
        peaks.retain(|_| false);
        assert_eq!(peaks.peak(&engine(), Generation(2), Tick(101_000)), None);
    }
}
