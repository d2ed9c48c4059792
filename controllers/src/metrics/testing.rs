//! Scrapes for tests.

use prometheus::{Registry, TextEncoder};

/// Returns what a scrape of this registry gets.
pub(crate) fn scrape(registry: &Registry) -> String {
    TextEncoder::new().encode_to_string(&registry.gather()).unwrap()
}
