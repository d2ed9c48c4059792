//! Names of models, engines and accelerators, and the index that finds a model by name.
//!
//! Apart from the configuration's values, because every other module uses the names and few use the values.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};

use super::ModelSpec;

string_ids! {
    /// The name of a configured model, as the configuration spells it. Cheap to clone.
    ModelName;
    /// One accelerator, by its UUID (`GPU-…`) or the name a configuration gave it.
    AcceleratorId;
}

/// One engine of a model: `name#replica`, in texts and as a map key.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct EngineId {
    pub model: ModelName,
    pub replica: u32,
}

impl EngineId {
    #[must_use]
    pub const fn new(model: ModelName, replica: u32) -> Self {
        Self { model, replica }
    }
}

impl fmt::Display for EngineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}", self.model, self.replica)
    }
}

impl From<EngineId> for String {
    fn from(id: EngineId) -> Self {
        id.to_string()
    }
}

impl TryFrom<String> for EngineId {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let (model, replica) =
            text.rsplit_once('#').ok_or_else(|| format!("'{text}' is not an engine name (MODEL#REPLICA)"))?;
        let replica =
            replica.parse().map_err(|_| format!("'{text}' is not an engine name (MODEL#REPLICA)"))?;
        Ok(Self { model: model.into(), replica })
    }
}

/// Finds a model by its name or an alias. Immutable; a reload creates another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelNameIndex {
    names: BTreeMap<String, ModelName>,
}

impl ModelNameIndex {
    #[must_use]
    pub fn new<'a>(models: impl IntoIterator<Item = &'a ModelSpec>) -> Self {
        let mut names = BTreeMap::new();
        for spec in models {
            for alias in &spec.aliases {
                names.insert(alias.clone(), spec.name.clone());
            }
            names.insert(spec.name.to_string(), spec.name.clone());
        }
        Self { names }
    }

    #[must_use]
    pub fn find(&self, name: &str) -> Option<&ModelName> {
        self.names.get(name)
    }

    /// Returns every name and alias with its model, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &ModelName)> {
        self.names.iter().map(|(name, model)| (name.as_str(), model))
    }
}
