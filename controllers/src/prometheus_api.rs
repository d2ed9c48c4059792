//! Client of the Prometheus HTTP API: one instant query at a time.
//!
//! Accelerator meters (`platform::dcgm`) and the load of engines (`saturation::load_metrics`) use it. Callers build
//! their queries, decide how often to send them, and judge the age of samples by `timestamp()`: an answer itself has
//! only the time of the evaluation.

use std::{collections::BTreeMap, fmt::Write as _};

use anyhow::Context as _;
use http::Request;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use kube::{Client, client::Body};
use rouse::units::{Bytes, Millis};
use rouse_config::PrometheusConfig;
use serde::Deserialize;
use tokio::time;

/// Two series of about six hundred bytes for each of ten thousand accelerators.
const MAX_RESPONSE_BYTES: usize = 16 << 20;

/// Why a query failed, worded for the gateway's operator.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PrometheusError {
    #[error("cannot reach Prometheus at {url}: {why}; check kubernetes.prometheus.url")]
    Unreachable { url: String, why: String },
    #[error("Prometheus at {url} did not answer within {within} (kubernetes.prometheus.timeout)")]
    Timeout { url: String, within: Millis },
    #[error(
        "Prometheus at {url} rejected the query with status {status}; check kubernetes.prometheus.tokenFile"
    )]
    Forbidden { url: String, status: u16 },
    #[error(
        "the server at {url} is not Prometheus (status {status}, {why}); set kubernetes.prometheus.url to the part of the URL before /api/v1"
    )]
    NotPrometheus { url: String, status: u16, why: String },
    #[error("Prometheus at {url} refused the query: {why}")]
    Query { url: String, why: String },
    #[error("the response of Prometheus at {url} is larger than {}", Bytes(MAX_RESPONSE_BYTES as u64))]
    Large { url: String },
}

impl PrometheusError {
    /// The kind of error in words that do not change with its details, for conditions.
    #[must_use]
    pub const fn summary(&self) -> &'static str {
        match self {
            Self::Unreachable { .. } => "Prometheus cannot be reached",
            Self::Timeout { .. } => "Prometheus does not answer in time",
            Self::Forbidden { .. } => "Prometheus rejects the queries",
            Self::NotPrometheus { .. } => "the server is not Prometheus",
            Self::Query { .. } => "Prometheus refuses the query",
            Self::Large { .. } => "the response of Prometheus is too large",
        }
    }
}

/// An answer without series.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum QueryError {
    /// Prometheus refused the query, and why.
    Refused(String),
    /// The server is not Prometheus.
    NotPrometheus(String),
}

/// One series of an instant vector.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(crate) struct PrometheusSeries {
    #[serde(rename = "metric")]
    pub labels: BTreeMap<String, String>,
    /// Unix time of the evaluation in seconds, and the value as text.
    value: (f64, String),
}

impl PrometheusSeries {
    /// Unix time of the evaluation, in seconds.
    pub(crate) const fn evaluated(&self) -> f64 {
        self.value.0
    }

    /// Returns the value, which may be NaN or infinite; `None` if the text is not a number.
    pub(crate) fn number(&self) -> Option<f64> {
        self.value.1.parse().ok()
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct QueryResponse {
    status: String,
    error: Option<String>,
    data: Option<QueryData>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct QueryData {
    result_type: String,
    result: Vec<PrometheusSeries>,
}

/// Sends queries to one Prometheus server.
pub(crate) struct PrometheusClient {
    client: Client,
    settings: PrometheusConfig,
}

impl PrometheusClient {
    /// # Errors
    /// A file that the settings name is unusable.
    pub(crate) fn new(settings: PrometheusConfig) -> anyhow::Result<Self> {
        let mut config = kube::Config::new(settings.url.clone());
        config.root_cert_file.clone_from(&settings.ca_file);
        config.default_retry = false;
        config.auth_info.token_file = settings.token_file.as_ref().map(|file| file.display().to_string());
        let client =
            Client::try_from(config).context("cannot set up the client for kubernetes.prometheus")?;
        Ok(Self { client, settings })
    }

    /// Returns the minimum interval between queries.
    pub(crate) const fn interval(&self) -> Millis {
        self.settings.interval
    }

    /// Returns the series of an instant query.
    ///
    /// # Errors
    /// The server did not answer in time, or not with a vector.
    pub(crate) async fn query(&self, query: &str) -> Result<Vec<PrometheusSeries>, PrometheusError> {
        let within = self.settings.timeout;
        let response = time::timeout(within.duration(), self.exchange(&path(query))).await;
        let (status, body) = response.map_err(|_| PrometheusError::Timeout { url: self.url(), within })??;
        let url = self.url();
        if matches!(status, 401 | 403) {
            return Err(PrometheusError::Forbidden { url, status });
        }
        parse(&body).map_err(|error| match error {
            QueryError::Refused(why) => PrometheusError::Query { url, why },
            QueryError::NotPrometheus(why) => PrometheusError::NotPrometheus { url, status, why },
        })
    }

    async fn exchange(&self, path: &str) -> Result<(u16, bytes::Bytes), PrometheusError> {
        let unreachable = |why: String| PrometheusError::Unreachable { url: self.url(), why };
        let request = Request::get(path).body(Body::empty());
        let request = request.map_err(|error| unreachable(error.to_string()))?;
        let response = self.client.send(request).await.map_err(|error| unreachable(cause(&error)))?;
        let status = response.status().as_u16();
        match Limited::new(response.into_body(), MAX_RESPONSE_BYTES).collect().await {
            Ok(body) => Ok((status, body.to_bytes())),
            Err(error) if error.is::<LengthLimitError>() => Err(PrometheusError::Large { url: self.url() }),
            Err(error) => Err(unreachable(error.to_string())),
        }
    }

    /// Returns the configured URL, without a slash at its end.
    pub(crate) fn url(&self) -> String {
        self.settings.url.to_string().trim_end_matches('/').to_owned()
    }
}

/// Parses the answer to an instant query.
///
/// # Errors
/// The body is not an answer with a vector.
pub(crate) fn parse(body: &[u8]) -> Result<Vec<PrometheusSeries>, QueryError> {
    let answer: QueryResponse =
        serde_json::from_slice(body).map_err(|error| QueryError::NotPrometheus(error.to_string()))?;
    match (answer.status.as_str(), answer.data, answer.error) {
        ("success", Some(data), _) if data.result_type == "vector" => Ok(data.result),
        ("error", _, Some(why)) => Err(QueryError::Refused(why)),
        _ => Err(QueryError::NotPrometheus("the response is not a query result".to_owned())),
    }
}

/// Returns path and query of the request, relative to the configured URL.
pub(crate) fn path(query: &str) -> String {
    format!("/api/v1/query?query={}", percent_encoded(query))
}

/// Returns the text as a string literal of PromQL, with its quotes.
pub(crate) fn quoted(text: &str) -> String {
    let escaped = text.chars().fold(String::new(), |mut out, c| {
        match c {
            '\\' | '"' => out.extend(['\\', c]),
            '\n' => out.push_str("\\n"),
            _ => out.push(c),
        }
        out
    });
    format!("\"{escaped}\"")
}

/// Returns a regular expression that matches exactly one of these texts.
pub(crate) fn any_of<'a>(texts: impl IntoIterator<Item = &'a str>) -> String {
    let literals: Vec<String> = texts.into_iter().map(regex_literal).collect();
    literals.join("|")
}

fn regex_literal(text: &str) -> String {
    text.chars().fold(String::new(), |mut out, c| {
        if r"\.+*?()|[]{}^$".contains(c) {
            out.push('\\');
        }
        out.push(c);
        out
    })
}

/// Percent-encodes all but letters and digits, for a query value.
fn percent_encoded(text: &str) -> String {
    text.bytes().fold(String::new(), |mut out, byte| {
        if byte.is_ascii_alphanumeric() {
            out.push(char::from(byte));
        } else {
            // Writing to a `String` cannot fail.
            write!(out, "%{byte:02X}").unwrap_or_default();
        }
        out
    })
}

/// Returns the innermost cause of the error, which an operator can act on.
fn cause(error: &kube::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_and_another_server_are_told_apart() {
        let refused = br#"{"status":"error","errorType":"bad_data","error":"parse error"}"#;
        assert_eq!(parse(refused), Err(QueryError::Refused("parse error".to_owned())));
        for other in ["<html>", "{}", r#"{"status":"success","data":{"resultType":"matrix","result":[]}}"#] {
            assert!(matches!(parse(other.as_bytes()), Err(QueryError::NotPrometheus(_))), "{other}");
        }
    }

    #[test]
    fn label_values_cannot_end_their_literal_and_match_only_themselves() {
        assert_eq!(quoted("a\"b\\c\nd"), r#""a\"b\\c\nd""#);
        assert_eq!(any_of(["a.b", "c|d"]), r"a\.b|c\|d");
        assert_eq!(quoted(&any_of(["a.b"])), r#""a\\.b""#);
    }

    #[test]
    fn values_that_are_no_finite_numbers_are_kept_as_such() {
        let answer = br#"{"status":"success","data":{"resultType":"vector","result":[
            {"metric":{"pod":"a"},"value":[12.5,"NaN"]},{"metric":{"pod":"b"},"value":[12.5,"0.5"]}]}}"#;
        let series = parse(answer).unwrap();
        assert!(series[0].number().unwrap().is_nan());
        assert_eq!((series[1].number(), series[1].evaluated()), (Some(0.5), 12.5));
    }
}
