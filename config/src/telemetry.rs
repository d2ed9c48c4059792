//! Reads the targets of traces and of the access log.

use std::{collections::BTreeMap, fmt, path::PathBuf};

use http::{HeaderName, HeaderValue, Uri};

use super::{
    reader::{ConfigReader, ConfigSection},
    yaml::{YamlNode, YamlValue},
};

/// Settings of traces. Without an address here, OpenTelemetry's standard variables may set one.
#[derive(Clone, PartialEq)]
pub struct TelemetryConfig {
    /// The collector's `http` or `https` address, with its path.
    pub otlp: Option<String>,
    /// Headers of every export.
    pub headers: BTreeMap<String, String>,
    /// Share of traced requests, from 0 to 1. Applies to requests without a sampling decision of their own.
    pub sample: f64,
}

/// Target of the access log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AccessLogTarget {
    #[default]
    Off,
    Stdout,
    Stderr,
    File(PathBuf),
}

impl Default for TelemetryConfig {
    fn default() -> Self {
        Self { otlp: None, headers: BTreeMap::new(), sample: 1.0 }
    }
}

/// Omits the headers' values, which are credentials.
impl fmt::Debug for TelemetryConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TelemetryConfig")
            .field("otlp", &self.otlp)
            .field("headers", &self.headers.keys())
            .field("sample", &self.sample)
            .finish()
    }
}

pub(super) fn telemetry(reader: &mut ConfigReader, root: &mut ConfigSection) -> TelemetryConfig {
    root.sub(reader, "telemetry", |reader, section| TelemetryConfig {
        otlp: section.read(reader, "otlp", collector),
        headers: section.read(reader, "headers", headers).unwrap_or_default(),
        sample: section.read(reader, "sample", ratio).unwrap_or(1.0),
    })
}

pub(super) fn access_log(reader: &mut ConfigReader, node: &YamlNode) -> Option<AccessLogTarget> {
    let text = reader.text(node)?;
    Some(match text.as_str() {
        "off" => AccessLogTarget::Off,
        "stdout" => AccessLogTarget::Stdout,
        "stderr" => AccessLogTarget::Stderr,
        path if path.contains('/') => AccessLogTarget::File(path.into()),
        _ => {
            // A bare word is more likely a mistake than a file in the gateway's working directory.
            reader.note(
                node.at,
                format_args!("'{text}' is not one of: off, stdout, stderr, a path with a slash"),
            );
            return None;
        }
    })
}

/// Adds OTLP's path to a base address; an address with a path stays as it is.
fn collector(reader: &mut ConfigReader, node: &YamlNode) -> Option<String> {
    let text = reader.text(node)?;
    if let Some(fault) = invalid_collector_reason(&text) {
        // A text that may hold a password is not repeated.
        let shown = if text.contains('@') { "this value" } else { &format!("'{text}'") };
        reader.note(node.at, format_args!("{shown} {fault}"));
        return None;
    }
    let rooted = text.parse::<Uri>().is_ok_and(|uri| matches!(uri.path(), "" | "/"));
    Some(if rooted { format!("{}/v1/traces", text.trim_end_matches('/')) } else { text })
}

/// Explains why this cannot be a collector's address.
///
/// The text completes a sentence and does not repeat the address.
pub fn invalid_collector_reason(address: &str) -> Option<&'static str> {
    let uri = address.parse::<Uri>().ok();
    let usable = uri.filter(|uri| matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some());
    let Some(uri) = usable else { return Some("is not a URL: write http://HOST:4318") };
    let named = uri.authority().is_some_and(|authority| authority.as_str().contains('@'));
    named.then_some("contains credentials: send them as a header instead (authorization)")
}

fn headers(reader: &mut ConfigReader, node: &YamlNode) -> Option<BTreeMap<String, String>> {
    let YamlValue::Map(entries) = &node.value else {
        reader.note(node.at, format_args!("expected a mapping, found {}", node.type_name()));
        return None;
    };
    let mut headers = BTreeMap::new();
    for entry in entries {
        let value = reader.text(&entry.value)?;
        let named = entry.key.parse::<HeaderName>().is_ok();
        if !named || HeaderValue::from_str(&value).is_err() {
            reader.note(
                entry.at,
                format_args!("'{}' is not a valid header name, or its value is not valid", entry.key),
            );
            return None;
        }
        headers.insert(entry.key.clone(), value);
    }
    Some(headers)
}

fn ratio(reader: &mut ConfigReader, node: &YamlNode) -> Option<f64> {
    let text = reader.text(node)?;
    let share = text.parse().ok().filter(|share| (0.0..=1.0).contains(share));
    if share.is_none() {
        reader.note(node.at, format_args!("'{text}' is not between 0 and 1"));
    }
    share
}

#[cfg(test)]
mod tests {
    use super::{super::parse, *};

    #[test]
    fn a_collectors_base_address_gets_the_path_of_otlp() {
        for (written, asked) in [
            ("http://c:4318", "http://c:4318/v1/traces"),
            ("https://c/", "https://c/v1/traces"),
            ("http://c/own/path", "http://c/own/path"),
        ] {
            let config = parse(&format!("telemetry: {{otlp: \"{written}\"}}"), "t").unwrap();
            assert_eq!(config.telemetry.otlp.as_deref(), Some(asked));
            assert!((config.telemetry.sample - 1.0).abs() < f64::EPSILON);
        }
    }

    #[test]
    fn a_log_goes_to_a_stream_or_a_path() {
        let log =
            |text: &str| parse(&format!("logs: {{access: {text}}}"), "t").map(|config| config.access_log);
        assert_eq!(log("stdout").unwrap(), AccessLogTarget::Stdout);
        assert_eq!(log("./access.log").unwrap(), AccessLogTarget::File("./access.log".into()));
        assert_eq!(log("off").unwrap(), AccessLogTarget::Off);
        assert!(log("syslog").is_err());
    }

    #[test]
    fn every_mistake_is_told_and_no_credential() {
        let text = "telemetry: {otlp: \"collector:4318\", headers: {\"a b\": c}, sample: 2}";
        let errors = parse(text, "t").unwrap_err().to_string();
        for part in [
            "telemetry.otlp: 'collector:4318' is not a URL",
            "'a b' is not a valid header name",
            "'2' is not between",
        ] {
            assert!(errors.contains(part), "{part} in {errors}");
        }
        for secret in ["http://user:s3cret@c:4318", "c@s3cret"] {
            let errors = parse(&format!("telemetry: {{otlp: \"{secret}\"}}"), "t").unwrap_err().to_string();
            assert!(errors.contains("telemetry.otlp: this value") && !errors.contains("s3cret"), "{errors}");
        }
        let config = parse("telemetry: {headers: {authorization: s3cret}}", "t").unwrap();
        assert!(!format!("{config:?}").contains("s3cret"));
    }
}
