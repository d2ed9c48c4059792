//! The table of thresholds: an entry `default`, and entries of models under `{modelID}#{namespace}`.
//!
//! The caller parses the entries, because this crate reads no YAML. A bad entry is refused with its reason, and the
//! last good one under its key stays.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::{Profile, ThresholdError, Thresholds};

/// The key of the entry for models without one of their own.
const DEFAULT_KEY: &str = "default";
/// Fields that entries of the public project have and that decide nothing here: the key alone names the model.
const IGNORED_FIELDS: [&str; 7] =
    ["model_id", "namespace", "analyzerName", "enableLimiter", "enableRescale", "scaleToZero", "limiters"];
/// The analyzer whose thresholds of its own count.
const SATURATION_ANALYZER: &str = "saturation";

/// One entry, as it is written. An absent field is `None`, so that a written 0 is a 0.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ThresholdEntry {
    pub kv_cache_threshold: Option<f64>,
    pub queue_length_threshold: Option<f64>,
    pub kv_spare_trigger: Option<f64>,
    pub queue_spare_trigger: Option<f64>,
    pub scale_up_threshold: Option<f64>,
    pub scale_down_boundary: Option<f64>,
    pub priority: Option<f64>,
    /// Whether absent fields are those of the entry `default`, rather than the built-in values.
    pub merge: bool,
    pub analyzers: Vec<AnalyzerEntry>,
    /// Every other field, by its name.
    #[serde(flatten)]
    pub other: BTreeMap<String, serde_json::Value>,
}

/// Thresholds of one analyzer within an entry, which win over those of the entry.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct AnalyzerEntry {
    #[serde(alias = "type")]
    pub name: String,
    pub scale_up_threshold: Option<f64>,
    pub scale_down_boundary: Option<f64>,
}

/// The entries in use, and why others are not.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ThresholdTable {
    entries: BTreeMap<String, ThresholdEntry>,
    refused: BTreeMap<String, ThresholdError>,
}

impl ThresholdEntry {
    /// Returns the thresholds with the fields of this entry in place of theirs.
    ///
    /// A 0 in the two boundaries of the token capacity means that they are not set, as in the public project.
    #[must_use]
    pub fn onto(&self, base: Thresholds) -> Thresholds {
        let analyzer = self.analyzers.iter().find(|analyzer| analyzer.name == SATURATION_ANALYZER);
        let up = analyzer.and_then(|analyzer| analyzer.scale_up_threshold).or(self.scale_up_threshold);
        let down = analyzer.and_then(|analyzer| analyzer.scale_down_boundary).or(self.scale_down_boundary);
        Thresholds {
            kv_cache: self.kv_cache_threshold.unwrap_or(base.kv_cache),
            queue_length: self.queue_length_threshold.unwrap_or(base.queue_length),
            kv_spare_trigger: self.kv_spare_trigger.unwrap_or(base.kv_spare_trigger),
            queue_spare_trigger: self.queue_spare_trigger.unwrap_or(base.queue_spare_trigger),
            scale_up: not_zero(up).unwrap_or(base.scale_up),
            scale_down: not_zero(down).unwrap_or(base.scale_down),
            priority: self.priority.unwrap_or(base.priority),
        }
    }

    /// Returns the entry without its zeros: in [`Profile::Latest`] a 0 means that the field is not set.
    fn without_zeros(&self) -> Self {
        Self {
            kv_cache_threshold: not_zero(self.kv_cache_threshold),
            queue_length_threshold: not_zero(self.queue_length_threshold),
            kv_spare_trigger: not_zero(self.kv_spare_trigger),
            queue_spare_trigger: not_zero(self.queue_spare_trigger),
            priority: not_zero(self.priority),
            ..self.clone()
        }
    }

    fn validate(&self, base: Thresholds) -> Result<(), ThresholdError> {
        if let Some(field) = self.other.keys().find(|field| !IGNORED_FIELDS.contains(&field.as_str())) {
            return Err(ThresholdError::UnknownField(field.clone()));
        }
        self.onto(base).validate()
    }
}

fn not_zero(value: Option<f64>) -> Option<f64> {
    value.filter(|value| *value != 0.0)
}

impl ThresholdTable {
    /// Takes all entries anew. Keys that are not among them are forgotten.
    ///
    /// `Err` has the parser's reason why an entry is unreadable. A refused entry leaves the last good one of its key in
    /// use, as long as that one is still valid over the entry `default`.
    pub fn replace(&mut self, entries: BTreeMap<String, Result<ThresholdEntry, String>>) {
        let mut earlier = std::mem::take(&mut self.entries);
        self.refused.clear();
        // The entry `default` comes first, because others may be merged into it.
        let (default, models): (Vec<_>, Vec<_>) =
            entries.into_iter().partition(|(key, _)| key == DEFAULT_KEY);
        for (key, entry) in default.into_iter().chain(models) {
            let checked = entry.map_err(ThresholdError::Unreadable).and_then(|entry| {
                entry.validate(self.base_of(&entry))?;
                Ok(entry)
            });
            match checked {
                Ok(entry) => {
                    self.entries.insert(key, entry);
                }
                Err(reason) => {
                    let last_good = earlier.remove(&key);
                    if let Some(entry) = last_good.filter(|entry| entry.validate(self.base_of(entry)).is_ok())
                    {
                        self.entries.insert(key.clone(), entry);
                    }
                    self.refused.insert(key, reason);
                }
            }
        }
    }

    /// Returns why entries are refused, by their keys.
    #[must_use]
    pub const fn refused(&self) -> &BTreeMap<String, ThresholdError> {
        &self.refused
    }

    /// Returns the thresholds of a model. `own` has the fields of its own object, which win over the table.
    #[must_use]
    pub fn resolve(
        &self,
        profile: Profile,
        model: &str,
        namespace: &str,
        own: Option<&ThresholdEntry>,
    ) -> Thresholds {
        let default = self.entries.get(DEFAULT_KEY);
        let entry = self.entries.get(&format!("{model}#{namespace}"));
        let resolved = match profile {
            Profile::Doc => {
                entry.or(default).map_or(Thresholds::UNSET, |entry| entry.onto(Thresholds::UNSET))
            }
            Profile::Latest => [default, entry]
                .into_iter()
                .flatten()
                .fold(Thresholds::default(), |base, entry| entry.without_zeros().onto(base)),
            Profile::Rouse => {
                entry.or(default).map_or_else(Thresholds::default, |entry| entry.onto(self.base_of(entry)))
            }
        };
        own.map_or(resolved, |own| own.onto(resolved))
    }

    /// What the absent fields of this entry are.
    fn base_of(&self, entry: &ThresholdEntry) -> Thresholds {
        let default = self.entries.get(DEFAULT_KEY).filter(|_| entry.merge);
        default.map_or_else(Thresholds::default, |default| default.onto(Thresholds::default()))
    }
}
