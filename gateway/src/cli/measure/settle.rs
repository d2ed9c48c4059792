//! Decides when the memory of an engine that fell asleep has stopped to shrink.

use crate::platform::local::MemoryReading;

/// This many readings in a row that are nearly equal.
const EQUAL_READINGS: u32 = 5;
/// Readings are nearly equal if they differ by no more than one part in so many.
const TOLERANCE: u64 = 200;

/// The readings so far.
#[derive(Debug, Default)]
pub(super) struct SettlingReading {
    last: Option<MemoryReading>,
    equal: u32,
}

impl SettlingReading {
    /// Adds a reading. Returns true once the memory no longer changes.
    pub(super) fn add(&mut self, reading: MemoryReading) -> bool {
        let near = |a: u64, b: u64| a.abs_diff(b) <= a.max(b) / TOLERANCE;
        let same = self.last.is_some_and(|last| {
            near(last.accelerator.0, reading.accelerator.0) && near(last.host.0, reading.host.0)
        });
        self.equal = if same { self.equal + 1 } else { 0 };
        self.last = Some(reading);
        self.equal >= EQUAL_READINGS
    }
}

#[cfg(test)]
mod tests {
    use rouse::units::Bytes;

    use super::*;

    #[test]
    fn memory_is_settled_after_some_equal_readings_and_a_change_starts_over() {
        let reading = |gib| MemoryReading { accelerator: Bytes::gib(gib), host: Bytes::ZERO };
        let mut settling = SettlingReading::default();
        let mut settled: Vec<bool> = (0..5).map(|_| settling.add(reading(8))).collect();
        settled.extend((0..6).map(|_| settling.add(reading(1))));
        assert_eq!(settled.iter().position(|settled| *settled), Some(10), "{settled:?}");
    }
}
