//! The form in which the last failures are stored.

use std::collections::BTreeMap;

use rouse::{
    engine::{
        Engine,
        last_outcome::{EngineDiagnostics, FailureRecord, FailureStage},
    },
    fault::FailureCause,
    fleet::event::Event,
    model::EngineId,
    units::Tick,
};
use serde::{Deserialize, Deserializer, Serialize};

/// The last failure of an engine that has not served since.
///
/// The engine's last output is not part of it: that stays in the engine's log, which only the gateway's user can read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(in crate::platform::local) struct StoredFailure {
    pub(in crate::platform::local) at: Tick,
    pub(in crate::platform::local) stage: FailureStage,
    pub(in crate::platform::local) cause: FailureCause,
    /// Failures in a row, this one included.
    pub(in crate::platform::local) count: u32,
    /// Fingerprint of the model's configuration: a failure of another command is not restored.
    pub(in crate::platform::local) fingerprint: u64,
}

impl StoredFailure {
    /// Returns the engine's last failure; `None` if it has served since. `fingerprint`: of the model's configuration.
    pub(in crate::platform::local) fn of(engine: &Engine, fingerprint: u64) -> Option<Self> {
        let (at, failure) = (engine.last_outcome.as_ref()?.at, engine.failure()?);
        let FailureRecord { stage, cause, count, diagnostics: _ } = failure;
        Some(Self { at, stage: *stage, cause: cause.clone(), count: *count, fingerprint })
    }

    /// Returns the event that restores the failure.
    pub(in crate::platform::local) fn into_event(self, engine: EngineId) -> Event {
        let Self { at, stage, cause, count, fingerprint } = self;
        let failure = FailureRecord { stage, cause, count, diagnostics: EngineDiagnostics::default() };
        Event::FailureRestored { engine, fingerprint, at, failure }
    }
}

/// Reads the failures that this build knows. A newer build may have written others, and they must not cost the engines.
pub(super) fn readable_failures<'de, D: Deserializer<'de>>(
    file: D,
) -> Result<BTreeMap<EngineId, StoredFailure>, D::Error> {
    let entries = BTreeMap::<EngineId, serde_json::Value>::deserialize(file)?;
    let known = entries.into_iter().filter_map(|(engine, entry)| {
        let failure: StoredFailure = serde_json::from_value(entry).ok()?;
        Some((engine, failure))
    });
    Ok(known.collect())
}
