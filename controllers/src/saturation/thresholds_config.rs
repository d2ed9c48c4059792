//! Reads the thresholds in the ConfigMap [`CONFIG_MAP`], and says which of them are refused.
//!
//! Each data key holds one YAML document. The key `default` is for all models. Any other entry is for one model: by its
//! key `{modelID}#{namespace}`, or by `model_id` and `namespace` in the entry, because an API server accepts neither
//! `#` nor `/` in a key. [`ThresholdTable`] has the rules: what an entry replaces, and that the last good one of a key
//! stays while its successor is wrong. `spec.saturation` of an InferenceModel goes over the table, field by field.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ConfigMap;
use rouse::saturation::{Profile, ThresholdEntry, ThresholdTable, Thresholds};
use serde_json::Value;

/// Name of the ConfigMap, in the gateways' own namespace.
pub(crate) const CONFIG_MAP: &str = "rouse-saturation-config";
/// Key of the entry for all models.
const DEFAULT_KEY: &str = "default";

/// The ConfigMap's thresholds.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ThresholdsConfig {
    table: ThresholdTable,
    /// The key in the table of each key of the ConfigMap, as of the last readable entry.
    table_keys: BTreeMap<String, String>,
}

/// The thresholds of one model.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ModelThresholds {
    pub thresholds: Thresholds,
    /// Why something that is configured for the model is not in effect, for its condition.
    pub refused: Option<String>,
}

impl ThresholdsConfig {
    /// Takes the ConfigMap, or its absence. Returns whether anything is different now.
    pub(crate) fn apply(&mut self, map: Option<&ConfigMap>) -> bool {
        let before = self.clone();
        let nothing = BTreeMap::new();
        let data = map.and_then(|map| map.data.as_ref()).unwrap_or(&nothing);
        let mut entries: BTreeMap<String, Result<ThresholdEntry, String>> = BTreeMap::new();
        let mut table_keys = BTreeMap::new();
        for (key, text) in data {
            let (table_key, entry) = self.read(key, text);
            if entries.contains_key(&table_key) {
                entries.insert(
                    key.clone(),
                    Err(format!("another entry is for {table_key}: remove one of them")),
                );
                continue;
            }
            table_keys.insert(key.clone(), table_key.clone());
            entries.insert(table_key, entry);
        }
        self.table_keys = table_keys;
        self.table.replace(entries);
        let changed = *self != before;
        if changed {
            for (key, error) in self.table.refused() {
                tracing::warn!(
                    config_map = CONFIG_MAP, key, %error,
                    "thresholds refused; the last good ones of this entry stay in effect"
                );
            }
        }
        changed
    }

    /// Reads one entry. Returns its key in the table, too.
    fn read(&self, key: &str, text: &str) -> (String, Result<ThresholdEntry, String>) {
        let unreadable = |error: serde_saphyr::Error| {
            let known = self.table_keys.get(key).cloned();
            (known.unwrap_or_else(|| key.to_owned()), error.without_snippet().to_string())
        };
        let entry: ThresholdEntry = match serde_saphyr::from_str(text) {
            Ok(entry) => entry,
            Err(error) => {
                let (key, error) = unreadable(error);
                return (key, Err(error));
            }
        };
        let text_of = |field: &str| entry.other.get(field).and_then(Value::as_str);
        let inside = text_of("model_id").zip(text_of("namespace"));
        let inside = inside.map(|(model, namespace)| format!("{model}#{namespace}"));
        let by_key = (key == DEFAULT_KEY || key.contains('#')).then_some(key);
        match (by_key, inside) {
            (Some(DEFAULT_KEY), _) => (DEFAULT_KEY.to_owned(), Ok(entry)),
            (Some(key), Some(inside)) if key != inside => {
                let error = format!("the key names another model than model_id and namespace ({inside})");
                (key.to_owned(), Err(error))
            }
            (Some(key), _) => (key.to_owned(), Ok(entry)),
            (None, Some(inside)) => (inside, Ok(entry)),
            (None, None) => {
                let error = "it does not name its model: set model_id and namespace in the entry";
                (key.to_owned(), Err(error.to_owned()))
            }
        }
    }

    /// Returns the thresholds of a model. `own` is what its InferenceModel sets.
    pub(crate) fn of_model(
        &self,
        profile: Profile,
        model: &str,
        namespace: &str,
        own: &ThresholdEntry,
    ) -> ModelThresholds {
        let wanted = self.table.resolve(profile, model, namespace, Some(own));
        let (thresholds, refused) = match wanted.validate() {
            Ok(()) => (wanted, None),
            Err(error) => {
                let configured = self.table.resolve(profile, model, namespace, None);
                (configured, Some(format!("spec.saturation is ignored: {error}")))
            }
        };
        let entry = || {
            let key = format!("{model}#{namespace}");
            let keys = [key.as_str(), DEFAULT_KEY];
            let (key, error) = keys.into_iter().find_map(|key| self.table.refused().get_key_value(key))?;
            Some(format!("the entry {key} of ConfigMap {CONFIG_MAP} is refused: {error}"))
        };
        ModelThresholds { thresholds, refused: refused.or_else(entry) }
    }

    /// Number of entries that are refused.
    pub(crate) fn refused_count(&self) -> usize {
        self.table.refused().len()
    }
}
