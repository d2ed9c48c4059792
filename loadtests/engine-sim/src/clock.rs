//! The one place that reads wall time: timestamps that another process compares with its own.

use std::time::{SystemTime, UNIX_EPOCH};

/// Microseconds since the Unix epoch.
#[expect(clippy::disallowed_methods, reason = "the engine's counters and the shared file speak wall time")]
pub(crate) fn wall_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros() as u64
}
