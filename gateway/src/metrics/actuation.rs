//! How long requesters of dual pods wait for their engines, under the name that the public project has for it.

use prometheus::{HistogramOpts, HistogramVec, Registry};
use rouse::units::Millis;

use super::{SECONDS, register, seconds, valid};

/// How a requester came to its engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// One that slept was woken.
    Hot,
    /// A launcher that was there started one.
    Warm,
    /// A Pod was made for it.
    Cold,
}

impl Path {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Hot => "hot",
            Self::Warm => "warm",
            Self::Cold => "cold",
        }
    }
}

/// Measures waits of requesters.
#[derive(Clone)]
pub struct Actuations(HistogramVec);

impl Actuations {
    pub(super) fn new(registry: &Registry) -> Self {
        let opts = HistogramOpts::new(
            "fma_actuation_seconds",
            "From when a requester's stub was seen to run until its engine served it",
        );
        let labels = ["exported_namespace", "path", "isc_name"];
        Self(register(registry, valid(HistogramVec::new(opts.buckets(SECONDS.to_vec()), &labels))))
    }

    /// A requester of this namespace is served. `config`: the InferenceServerConfig that it asks for, where it does.
    pub fn served(&self, namespace: &str, path: Path, config: Option<&str>, took: Millis) {
        let labels = [namespace, path.as_str(), config.unwrap_or_default()];
        self.0.with_label_values(&labels).observe(seconds(took));
    }
}
