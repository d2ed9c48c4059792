//! Texts with a meaning: quantities of memory and spans of time.
//!
//! They keep the object's text. The code that needs the number parses the text. The schemas below admit only texts that
//! parse, up to sizes beyond 2⁶⁴ bytes.

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
/// Like `QUANTITY`, but above 0.
const POSITIVE: &str = concat!(
    r"^([0-9]{0,17}[1-9][0-9]{0,17}(\.[0-9]{1,9})?|[0-9]{1,18}\.[0-9]{0,8}[1-9][0-9]{0,8})",
    "(k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
);
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

/// Writes the exact size, in the largest binary unit that divides it.
impl From<Bytes> for Quantity {
    fn from(size: Bytes) -> Self {
        Self(size.to_exact_text())
    }
}

macro_rules! impl_text_scalar {
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
                d.deserialize_any(ScalarVisitor).map(Self)
            }
        }
    )*};
}

impl_text_scalar!(Quantity Span SpanOrNever);

/// Any single value, as its text.
pub(super) struct Scalar(pub(super) String);

impl<'de> Deserialize<'de> for Scalar {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        d.deserialize_any(ScalarVisitor).map(Self)
    }
}

/// Accepts any scalar; parsing happens later.
struct ScalarVisitor;

impl de::Visitor<'_> for ScalarVisitor {
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
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        quantity(QUANTITY, 0)
    }
}

/// Schema of a quantity above 0.
pub(super) fn positive(_: &mut SchemaGenerator) -> Schema {
    quantity(POSITIVE, 1)
}

/// Unquoted bytes are a number in YAML. The schemas have no rules that compare quantities: an API server assumes texts of
/// megabytes when it estimates the cost of a rule, and refuses the definition.
fn quantity(pattern: &str, least: u8) -> Schema {
    json_schema!({"x-kubernetes-int-or-string": true, "pattern": pattern, "minimum": least, "maxLength": 32})
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

#[cfg(test)]
mod tests {
    use regex::Regex;

    use super::*;

    const NUMBERS: [&str; 11] = [
        "0",
        "00",
        "1",
        "007",
        "999",
        "1.5",
        "0.0",
        "0.000000001",
        "1.000000001",
        "123456",
        "123456789012345678",
    ];

    #[test]
    fn quantities_that_a_schema_lets_through_parse_but_for_those_beyond_all_memory() {
        let [any, positive] = [QUANTITY, POSITIVE].map(|pattern| Regex::new(pattern).unwrap());
        for number in NUMBERS {
            for unit in ["", "k", "M", "G", "T", "P", "Ki", "Mi", "Gi", "Ti", "Pi"] {
                let text = format!("{number}{unit}");
                assert!(any.is_match(&text), "{text}");
                let bytes = Quantity(text.clone()).bytes();
                assert_eq!(positive.is_match(&text), bytes != Ok(Bytes::ZERO), "{text}");
                // 123456P is more than 2⁶⁴.
                assert!(
                    bytes.is_ok() || number.len() == 18 || (number.len() == 6 && unit.starts_with('P')),
                    "{text}"
                );
            }
        }
        for junk in [
            "", "Gi", "-1Gi", "+1", "1e9", "1500m", "1 Gi", " 1", "1Gi ", "1GiB", "1.Gi", ".5Gi", "0x10",
            "1_000", "lots", "1Gi\n",
        ] {
            assert!(!any.is_match(junk) && !positive.is_match(junk), "{junk:?}");
        }
    }

    #[test]
    fn durations_that_a_schema_lets_through_parse() {
        let [span, or_never] = [SPAN, SPAN_OR_NEVER].map(|pattern| Regex::new(pattern).unwrap());
        for number in NUMBERS.iter().filter(|number| number.len() < 8) {
            for unit in ["ms", "s", "m", "h"] {
                for text in [format!("{number}{unit}"), format!("{number}{unit}999999h999999.999999h1ms")] {
                    assert!(span.is_match(&text) && or_never.is_match(&text), "{text}");
                    assert!(Span(text.clone()).millis().is_ok(), "{text}");
                    assert!(SpanOrNever(text.clone()).millis().is_ok_and(|span| span.is_some()), "{text}");
                }
            }
        }
        assert!(or_never.is_match(NEVER) && !span.is_match(NEVER));
        assert_eq!(SpanOrNever::from(NEVER).millis(), Ok(None));
        for junk in ["", "10", "soon", "-1s", "10 m", "1d", "Never", "10m1", "1h1h1h1h1h", "1.s", "never1s"] {
            assert!(!span.is_match(junk) && !or_never.is_match(junk), "{junk}");
        }
    }

    #[test]
    fn bytes_are_written_exactly() {
        for (bytes, text) in [
            (80 << 30, "80Gi"),
            (0, "0"),
            (1, "1"),
            (1536 << 20, "1536Mi"),
            (3 << 40, "3Ti"),
            (u64::MAX, "18446744073709551615"),
        ] {
            assert_eq!(Quantity::from(Bytes(bytes)).as_str(), text);
            assert_eq!(Quantity::from(text).bytes(), Ok(Bytes(bytes)));
        }
    }
}
