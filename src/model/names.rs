//! Names of models, engines and accelerators, and the index that finds a model by name.
//!
//! Apart from the configuration's values, because every other module uses the names and few use the values.

use std::{collections::BTreeMap, fmt, sync::LazyLock};

use serde::{Deserialize, Serialize};

use super::ModelSpec;

string_ids! {
    /// The name of a configured model, as the configuration spells it. Cheap to clone.
    ModelName;
    /// One accelerator, by its UUID (`GPU-…`) or the name a configuration gave it.
    AcceleratorId;
    /// One way of running a model, on other hardware or at another cost. Unique in its model.
    VariantName;
}

impl VariantName {
    /// The only variant of a model that lists none.
    pub const DEFAULT: &str = "default";

    /// Whether this is the variant of a model that lists none. Texts leave its name out.
    #[must_use]
    pub fn is_default(&self) -> bool {
        self.as_str() == Self::DEFAULT
    }
}

impl Default for VariantName {
    fn default() -> Self {
        // Nearly every engine has this variant, so they share one text.
        static SHARED: LazyLock<VariantName> = LazyLock::new(|| VariantName::from(VariantName::DEFAULT));
        SHARED.clone()
    }
}

/// One engine of a model: `model#replica`, or `model#variant.replica` for a variant that is not `default`.
///
/// The text is a map key and part of stored names. No model's name contains `#` and no variant's name a dot, so each
/// text has one meaning.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct EngineId {
    pub model: ModelName,
    pub variant: VariantName,
    pub replica: u32,
}

impl EngineId {
    /// An engine of the variant `default`.
    #[must_use]
    pub fn new(model: ModelName, replica: u32) -> Self {
        Self::of_variant(model, VariantName::default(), replica)
    }

    #[must_use]
    pub const fn of_variant(model: ModelName, variant: VariantName, replica: u32) -> Self {
        Self { model, variant, replica }
    }

    /// The engine's name within its model: `replica`, or `variant.replica` if the variant is not `default`.
    #[must_use]
    pub fn name_in_model(&self) -> String {
        if self.variant.is_default() {
            self.replica.to_string()
        } else {
            format!("{}.{}", self.variant, self.replica)
        }
    }

    /// A key that is not after any engine of this model, where a map's engines of the model begin.
    #[must_use]
    pub fn first_key_of(model: ModelName) -> Self {
        static EMPTY: LazyLock<VariantName> = LazyLock::new(|| VariantName::from(""));
        Self::of_variant(model, EMPTY.clone(), 0)
    }
}

impl fmt::Display for EngineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#", self.model)?;
        if !self.variant.is_default() {
            write!(f, "{}.", self.variant)?;
        }
        write!(f, "{}", self.replica)
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
        let invalid = || format!("'{text}' is not an engine name (MODEL#REPLICA or MODEL#VARIANT.REPLICA)");
        let (model, engine) = text.rsplit_once('#').ok_or_else(invalid)?;
        let (variant, replica) = match engine.rsplit_once('.') {
            Some(("", _)) => return Err(invalid()),
            Some((variant, replica)) => (VariantName::from(variant), replica),
            None => (VariantName::default(), engine),
        };
        let replica = replica.parse().map_err(|_| invalid())?;
        Ok(Self { model: model.into(), variant, replica })
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

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<EngineId, String> {
        EngineId::try_from(text.to_owned())
    }

    #[test]
    fn an_engine_of_the_default_variant_has_the_text_that_was_always_stored() {
        let engine = EngineId::new("org/model:8b@fp8".into(), 3);
        assert_eq!(engine.to_string(), "org/model:8b@fp8#3");
        assert_eq!(parse("org/model:8b@fp8#3"), Ok(engine));
    }

    #[test]
    fn an_engine_of_a_named_variant_is_read_back_whatever_its_model_is_called() {
        for model in ["m", "org/model.v1", "m@h100", "m.0"] {
            let engine = EngineId::of_variant(model.into(), "h100-80g".into(), 12);
            assert_eq!(engine.to_string(), format!("{model}#h100-80g.12"));
            assert!(EngineId::first_key_of(model.into()) < engine);
            assert_eq!(engine.name_in_model(), "h100-80g.12");
            assert_eq!(parse(&engine.to_string()), Ok(engine));
        }
        assert_eq!(parse("m#default.1"), Ok(EngineId::new("m".into(), 1)), "one engine, one identity");
    }

    #[test]
    fn a_text_without_a_replica_or_a_variant_is_no_engine() {
        for text in ["m", "m#", "m#h100", "m#h100.", "m#.1", "m#1.x", "m#-1"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
