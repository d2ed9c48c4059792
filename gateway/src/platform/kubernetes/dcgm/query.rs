//! What is asked of Prometheus, and what its answer means.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    sync::LazyLock,
};

use rouse::{
    model::AcceleratorId,
    units::{Bytes, Millis, Tick},
};
use serde::Deserialize;

use crate::controllers::crd::ledger::ObjectName;

/// Memory in use of each accelerator: in MiB up to dcgm-exporter 4.8, in bytes from 4.9 on, which gave other fields new names, too.
pub(super) const USED_MIB_METRIC: &str = "DCGM_FI_DEV_FB_USED";
pub(super) const USED_BYTES_METRIC: &str = "DCGM_FI_DEV_FB_USED_BYTES";
/// With the kind of each: the last Xid, 0 without any; how many errors of the memory could not be corrected; 1 where a row of it could
/// not be replaced. An exporter need not have them.
const FAULTS: [(&str, &str); 5] = [
    ("DCGM_FI_DEV_XID_ERROR", "xid"),
    ("DCGM_FI_DEV_XID_ERRORS", "xid"),
    ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "ecc"),
    ("DCGM_FI_DEV_ROW_REMAP_FAILED", "remap"),
    ("DCGM_FI_DEV_ROW_REMAP_FAILURE", "remap"),
];
/// Says which is meant: what is in use, or of when that is (else an answer has only the moment of the question), or a fault.
const KIND: &str = "rouse";

/// What is asked.
pub(super) static PATH: LazyLock<String> = LazyLock::new(|| {
    let labelled =
        |vector: &str, kind: &str| format!("label_replace({vector}, \"{KIND}\", \"{kind}\", \"\", \"\")");
    let used =
        [(USED_BYTES_METRIC, "bytes"), (USED_MIB_METRIC, "mib")].map(|(metric, kind)| labelled(metric, kind));
    let at =
        [USED_BYTES_METRIC, USED_MIB_METRIC].map(|metric| labelled(&format!("timestamp({metric})"), "at"));
    let faults = FAULTS.map(|(metric, kind)| labelled(metric, kind));
    let all: Vec<String> = used.into_iter().chain(at).chain(faults).collect();
    format!("/api/v1/query?query={}", encoded(&all.join(" or ")))
});

/// What Prometheus has, by UUID.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DcgmSamples {
    pub used: BTreeMap<AcceleratorId, MemorySample>,
    /// Those that are not to be used, and why.
    pub faults: BTreeMap<AcceleratorId, String>,
    /// Those whose last Xid is harmless: of one before it nothing is known any more.
    pub with_xid: BTreeSet<AcceleratorId>,
}

/// What was in use on one accelerator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemorySample {
    pub used: Bytes,
    /// When it was scraped, by our clock.
    pub at: Tick,
    /// Its node, and the Pod that has it, where the exporter says so.
    pub node: Option<String>,
    pub pod: Option<ObjectName>,
}

/// An answer that has no samples.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum QueryError {
    /// Prometheus says why.
    Refused(String),
    /// It is no Prometheus's.
    NotPrometheus(String),
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
    result: Vec<QuerySeries>,
}

#[derive(Deserialize)]
struct QuerySeries {
    metric: BTreeMap<String, String>,
    /// Seconds of Unix time at which it was evaluated, and the value as text.
    value: (f64, String),
}

/// `asked`: when, by our clock. A sample's age is taken by Prometheus's clock, so the two need not agree; what passed between
/// question and evaluation makes it older than it is, never younger.
///
/// Of several samples of one accelerator the newest counts, and of those of one moment the highest. A series that is of a part
/// of an accelerator (MIG) has the UUID of the whole and is left out.
///
/// # Errors
/// It is no answer to the question.
pub(super) fn parse(body: &[u8], asked: Tick) -> Result<DcgmSamples, QueryError> {
    let answer: QueryResponse =
        serde_json::from_slice(body).map_err(|error| QueryError::NotPrometheus(error.to_string()))?;
    let data = match (answer.status.as_str(), answer.data, answer.error) {
        ("success", Some(data), _) if data.result_type == "vector" => data,
        ("error", _, Some(why)) => return Err(QueryError::Refused(why)),
        _ => return Err(QueryError::NotPrometheus("its answer is none to a query".to_owned())),
    };
    let mut samples = BTreeMap::<AcceleratorId, MemorySample>::new();
    let faults = data.result.iter().filter_map(fault).collect();
    let erred = data.result.iter().filter_map(xid_accelerator).collect();
    for ((uuid, labels), (used, age)) in used_with_age(data.result) {
        let sample = MemorySample {
            used,
            at: asked - age,
            node: named(&labels, &["Hostname", "hostname", "node", "exported_node"]),
            pod: pod(&labels),
        };
        let newest = samples.get(&uuid).is_none_or(|known| (known.at, known.used) < (sample.at, sample.used));
        if newest {
            samples.insert(uuid, sample);
        }
    }
    Ok(DcgmSamples { used: samples, faults, with_xid: erred })
}

/// Xids that are a program's doing, or of which the accelerator has recovered. The first six are those that NVIDIA's device plugin
/// passes over; 63 says that a row of memory was replaced, 92 that many errors were corrected, 94 that one ended its program alone.
const HARMLESS_XIDS: [u32; 10] = [0, 13, 31, 43, 45, 63, 68, 92, 94, 109];

fn xid_accelerator(series: &QuerySeries) -> Option<AcceleratorId> {
    let QuerySeries { metric, value: (_, text) } = series;
    let xid = metric.get(KIND).filter(|kind| *kind == "xid").and_then(|_| text.parse::<f64>().ok());
    metric.get("UUID").filter(|_| xid.is_some_and(|xid| xid > 0.0)).map(|uuid| uuid.as_str().into())
}

/// What is wrong with an accelerator, if this says so.
fn fault(series: &QuerySeries) -> Option<(AcceleratorId, String)> {
    let QuerySeries { metric, value: (_, text) } = series;
    let uuid = metric.get("UUID").filter(|uuid| !uuid.is_empty())?;
    let value = text.parse::<f64>().ok().filter(|value| value.is_finite() && *value > 0.0)?;
    let what = match metric.get(KIND)?.as_str() {
        "xid" if !HARMLESS_XIDS.iter().any(|xid| f64::from(*xid) == value) => format!("Xid {value}"),
        "ecc" => format!("{value} errors of its memory could not be corrected"),
        "remap" => "a row of its memory could not be replaced".to_owned(),
        _ => return None,
    };
    Some((uuid.as_str().into(), what))
}

type SeriesLabels = BTreeMap<String, String>;

/// What is in use, and how long ago that was, by UUID and labels.
fn used_with_age(all: Vec<QuerySeries>) -> BTreeMap<(AcceleratorId, SeriesLabels), (Bytes, Millis)> {
    let mut found: BTreeMap<(AcceleratorId, SeriesLabels), (Option<Bytes>, Option<Millis>)> = BTreeMap::new();
    for QuerySeries { metric: mut labels, value: (evaluated, text) } in all {
        let kind = labels.remove(KIND);
        labels.remove("__name__");
        let part = labels.get("GPU_I_ID").is_some_and(|part| !part.is_empty());
        let Some(uuid) = labels.get("UUID").filter(|uuid| !uuid.is_empty() && !part) else { continue };
        let Some(value) = text.parse::<f64>().ok().filter(|value| value.is_finite() && *value >= 0.0) else {
            continue;
        };
        let entry = found.entry((uuid.as_str().into(), labels)).or_default();
        match kind.as_deref() {
            Some("bytes") => entry.0 = Some(Bytes(value as u64)),
            // Where an exporter has both, the other is the exact one.
            Some("mib") => drop(entry.0.get_or_insert_with(|| Bytes((value * f64::from(1 << 20)) as u64))),
            Some("at") => entry.1 = Some(Millis(((evaluated - value).max(0.0) * 1e3) as u64)),
            _ => {}
        }
    }
    found.into_iter().filter_map(|(key, (used, age))| Some((key, (used?, age?)))).collect()
}

/// The first of these labels that says something.
fn named(labels: &SeriesLabels, names: &[&str]) -> Option<String> {
    names.iter().find_map(|name| labels.get(*name).filter(|value| !value.is_empty())).cloned()
}

/// The Pod that has the accelerator. Where Prometheus has labels of its own, of the exporter's Pod, those of the exporter are
/// renamed.
fn pod(labels: &SeriesLabels) -> Option<ObjectName> {
    for (namespace, name) in [("exported_namespace", "exported_pod"), ("namespace", "pod")] {
        if let (Some(namespace), Some(name)) = (named(labels, &[namespace]), named(labels, &[name])) {
            return Some(ObjectName::new(namespace, name));
        }
    }
    None
}

/// For a query's value: all but letters and digits by their numbers.
fn encoded(text: &str) -> String {
    text.bytes().fold(String::new(), |mut out, byte| {
        if byte.is_ascii_alphanumeric() {
            out.push(char::from(byte));
        } else {
            // A text takes whatever is written.
            write!(out, "%{byte:02X}").unwrap_or_default();
        }
        out
    })
}
