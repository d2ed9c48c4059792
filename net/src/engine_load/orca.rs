//! ORCA load reports in HTTP headers, in their text form.
//!
//! ORCA (Open Request Cost Aggregation) is the report format of gRPC and Envoy. A client asks with
//! `endpoint-load-metrics-format: TEXT`, and the server adds `endpoint-load-metrics: TEXT name=value, …` to its
//! response. The names below are those of vLLM's own reports, so any balancer that reads vLLM's also reads a stub's.

use http::{HeaderMap, HeaderName, HeaderValue};

use super::{EngineLoad, known};

/// The response header that carries a report.
pub const REPORT_HEADER: HeaderName = HeaderName::from_static("endpoint-load-metrics");
/// The request header that asks for a report.
pub const FORMAT_HEADER: HeaderName = HeaderName::from_static("endpoint-load-metrics-format");
/// The only format that a stub writes and a gateway asks for.
pub const TEXT_FORMAT: &str = "TEXT";

/// The prefix of metrics that the standard does not define.
const NAMED: &str = "named_metrics.";
const KV_USE: &str = "kv_cache_usage_perc";
/// The name in vLLM's reports before it followed the metric's own name.
const OLD_KV_USE: &str = "kv_cache_utilization";
const WAITING: &str = "num_requests_waiting";
const RUNNING: &str = "num_requests_running";

/// Whether a request asks for a report in the text form.
#[must_use]
pub fn is_requested(headers: &HeaderMap) -> bool {
    headers
        .get(FORMAT_HEADER)
        .is_some_and(|format| format.as_bytes().eq_ignore_ascii_case(TEXT_FORMAT.as_bytes()))
}

/// Writes a report of the known figures; `None` if there is none.
#[must_use]
pub fn to_header(load: &EngineLoad) -> Option<HeaderValue> {
    let figures = [(KV_USE, load.kv_use), (WAITING, load.waiting), (RUNNING, load.running)];
    let texts = figures.into_iter().filter_map(|(name, value)| Some(format!("{NAMED}{name}={}", value?)));
    let texts: Vec<String> = texts.collect();
    if texts.is_empty() {
        return None;
    }
    HeaderValue::try_from(format!("{TEXT_FORMAT} {}", texts.join(", "))).ok()
}

/// Reads a report; `None` if it has none of the figures. Unknown names are ignored, and other forms are not read.
#[must_use]
pub fn from_header(value: &[u8]) -> Option<EngineLoad> {
    let text = str::from_utf8(value).ok()?.trim();
    // The oldest text form has no prefix.
    let figures = match text.split_once(' ') {
        Some((format, figures)) if format.eq_ignore_ascii_case(TEXT_FORMAT) => figures,
        _ => text,
    };
    let mut load = EngineLoad::default();
    for figure in figures.split(',') {
        // Envoy writes and reads either separator.
        let Some((name, value)) = figure.split_once(['=', ':']) else { continue };
        let figure = match name.trim().strip_prefix(NAMED) {
            Some(KV_USE | OLD_KV_USE) => &mut load.kv_use,
            Some(WAITING) => &mut load.waiting,
            Some(RUNNING) => &mut load.running,
            _ => continue,
        };
        *figure = value.trim().parse().ok().and_then(known);
    }
    (!load.is_unknown()).then_some(load)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_says_the_known_figures_and_is_read_back() {
        let load = EngineLoad { kv_use: Some(0.82), waiting: Some(3.0), running: Some(12.0) };
        let header = to_header(&load).unwrap();
        assert_eq!(
            header,
            "TEXT named_metrics.kv_cache_usage_perc=0.82, named_metrics.num_requests_waiting=3, \
             named_metrics.num_requests_running=12"
        );
        assert_eq!(from_header(header.as_bytes()), Some(load));
        for some in [
            EngineLoad { kv_use: None, ..load },
            EngineLoad { waiting: None, running: None, ..load },
            EngineLoad { kv_use: Some(1e-9), waiting: Some(1e300), running: Some(0.0) },
        ] {
            assert_eq!(to_header(&some).and_then(|header| from_header(header.as_bytes())), Some(some));
        }
        assert_eq!(to_header(&EngineLoad::default()), None);
    }

    #[test]
    fn reports_of_other_servers_are_read_too_and_what_is_no_figure_is_unknown() {
        let kv_use = |value| Some(EngineLoad { kv_use: Some(value), ..EngineLoad::default() });
        for (report, load) in [
            ("TEXT named_metrics.kv_cache_utilization=0.4", kv_use(0.4)),
            ("text cpu_utilization=0.9,named_metrics.kv_cache_usage_perc:0.4", kv_use(0.4)),
            ("named_metrics.kv_cache_usage_perc = 4e-1 ", kv_use(0.4)),
            (
                "TEXT named_metrics.kv_cache_usage_perc=0.4, named_metrics.num_requests_waiting=NaN",
                kv_use(0.4),
            ),
            ("TEXT named_metrics.kv_cache_usage_perc=-1", None),
            ("TEXT named_metrics.num_requests_waiting=inf", None),
            ("TEXT kv_cache_usage_perc=0.4", None),
            ("JSON {\"named_metrics\":{\"kv_cache_usage_perc\":0.4}}", None),
            ("BIN CZqZmZmZmbk/", None),
            ("TEXT", None),
            ("", None),
            (",=,:,", None),
        ] {
            assert_eq!(from_header(report.as_bytes()), load, "{report}");
        }
        assert_eq!(from_header(b"TEXT \xff"), None);
    }

    #[test]
    fn only_the_text_form_is_requested() {
        let asks = |format: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(FORMAT_HEADER, HeaderValue::from_static(format));
            is_requested(&headers)
        };
        assert!(asks("TEXT") && asks("text"));
        assert!(!asks("JSON") && !asks("BIN") && !asks("") && !is_requested(&HeaderMap::new()));
    }
}
