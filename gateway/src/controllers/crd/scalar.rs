//! Texts with a meaning: quantities of memory and spans of time.
//!
//! They keep what the object says, and are parsed by whoever needs the number. The schemas below let through only what
//! parses, up to sizes beyond 2⁶⁴ bytes.

use std::{borrow::Cow, fmt};

use rouse::units::{Bytes, Error, Millis};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, de};

/// Bytes, as `80Gi`, `1.5Gi`, `500M`, `85899345920` or the number alone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Quantity(String);

/// A span of time, as `90s`, `10m`, `1h30m`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Span(String);

/// A span of time, or `never`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct SpanOrNever(String);

const QUANTITY: &str = r"^[0-9]{1,18}(\.[0-9]{1,9})?(k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$";
// Four parts of six digits each stay within what an API server's rules can compute with.
const SPAN: &str = r"^([0-9]{1,6}(\.[0-9]{1,6})?(ms|s|m|h)){1,4}$";
const SPAN_OR_NEVER: &str = r"^(never|([0-9]{1,6}(\.[0-9]{1,6})?(ms|s|m|h)){1,4})$";
const NEVER: &str = "never";

impl Quantity {
    /// A fraction of a byte counts as a whole one.
    ///
    /// # Errors
    /// The text is not a size, or one beyond 2⁶⁴ bytes.
    pub fn bytes(&self) -> Result<Bytes, Error> {
        self.0.parse()
    }
}

impl Span {
    /// # Errors
    /// The text is not a duration.
    pub fn millis(&self) -> Result<Millis, Error> {
        self.0.parse()
    }
}

impl SpanOrNever {
    /// `None`: never.
    ///
    /// # Errors
    /// The text is neither a duration nor `never`.
    pub fn millis(&self) -> Result<Option<Millis>, Error> {
        if self.0 == NEVER { Ok(None) } else { self.0.parse().map(Some) }
    }
}

/// Exact, in the largest binary unit that divides it.
impl From<Bytes> for Quantity {
    fn from(Bytes(bytes): Bytes) -> Self {
        let units = [(40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki")];
        let whole = units.iter().find(|(shift, _)| bytes != 0 && bytes.trailing_zeros() >= *shift);
        Self(whole.map_or_else(|| bytes.to_string(), |(shift, unit)| format!("{}{unit}", bytes >> shift)))
    }
}

macro_rules! text {
    ($($name:ident)*) => {$(
        impl $name {
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }
        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                Self(text.to_owned())
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                d.deserialize_any(Scalar).map(Self)
            }
        }
    )*};
}

text!(Quantity Span SpanOrNever);

/// Any single value, as its text: what it means is asked later.
struct Scalar;

impl de::Visitor<'_> for Scalar {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text or a number")
    }
    fn visit_str<E: de::Error>(self, text: &str) -> Result<String, E> {
        Ok(text.to_owned())
    }
    fn visit_u64<E: de::Error>(self, number: u64) -> Result<String, E> {
        Ok(number.to_string())
    }
    fn visit_i64<E: de::Error>(self, number: i64) -> Result<String, E> {
        Ok(number.to_string())
    }
    fn visit_f64<E: de::Error>(self, number: f64) -> Result<String, E> {
        Ok(number.to_string())
    }
    fn visit_bool<E: de::Error>(self, flag: bool) -> Result<String, E> {
        Ok(flag.to_string())
    }
}

impl JsonSchema for Quantity {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> Cow<'static, str> {
        "Quantity".into()
    }
    /// Unquoted bytes are a number in YAML.
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"x-kubernetes-int-or-string": true, "pattern": QUANTITY, "minimum": 0, "maxLength": 32})
    }
}

impl JsonSchema for Span {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> Cow<'static, str> {
        "Span".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "pattern": SPAN, "maxLength": 64})
    }
}

impl JsonSchema for SpanOrNever {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> Cow<'static, str> {
        "SpanOrNever".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "pattern": SPAN_OR_NEVER, "maxLength": 64})
    }
}
