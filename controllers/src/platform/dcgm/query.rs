//! Builds the Prometheus query and reads its answer.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::LazyLock,
};

use rouse::{
    model::AcceleratorId,
    units::{Bytes, Millis, Tick},
};

use crate::{crd::ledger::ObjectName, prometheus_api::PrometheusSeries};

/// Memory in use per accelerator. dcgm-exporter reports MiB up to 4.8, and bytes from 4.9 on, which also renamed other
/// metrics.
pub(super) const USED_MIB_METRIC: &str = "DCGM_FI_DEV_FB_USED";
pub(super) const USED_BYTES_METRIC: &str = "DCGM_FI_DEV_FB_USED_BYTES";
/// Fault metrics and the kind of each. An exporter may lack any of them.
///
/// They hold the last Xid (0 for none), the count of uncorrectable memory errors, and 1 if a memory row could not be
/// replaced.
const FAULTS: [(&str, &str); 5] = [
    ("DCGM_FI_DEV_XID_ERROR", "xid"),
    ("DCGM_FI_DEV_XID_ERRORS", "xid"),
    ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "ecc"),
    ("DCGM_FI_DEV_ROW_REMAP_FAILED", "remap"),
    ("DCGM_FI_DEV_ROW_REMAP_FAILURE", "remap"),
];
/// Label for the kind of a series: memory in use, its sample time (else an answer has only the query's time), or a
/// fault.
const KIND: &str = "rouse";

/// The query.
pub(super) static QUERY: LazyLock<String> = LazyLock::new(|| {
    let labelled =
        |vector: &str, kind: &str| format!("label_replace({vector}, \"{KIND}\", \"{kind}\", \"\", \"\")");
    let used =
        [(USED_BYTES_METRIC, "bytes"), (USED_MIB_METRIC, "mib")].map(|(metric, kind)| labelled(metric, kind));
    let at =
        [USED_BYTES_METRIC, USED_MIB_METRIC].map(|metric| labelled(&format!("timestamp({metric})"), "at"));
    let faults = FAULTS.map(|(metric, kind)| labelled(metric, kind));
    let all: Vec<String> = used.into_iter().chain(at).chain(faults).collect();
    all.join(" or ")
});

/// Samples from Prometheus, by accelerator UUID.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DcgmSamples {
    pub used: BTreeMap<AcceleratorId, MemorySample>,
    /// Accelerators that must not be used, and why.
    pub faults: BTreeMap<AcceleratorId, String>,
    /// Accelerators whose last Xid is not 0. It hides any earlier Xid.
    pub with_xid: BTreeSet<AcceleratorId>,
}

/// Memory in use on one accelerator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemorySample {
    pub used: Bytes,
    /// Scrape time, by our clock.
    pub at: Tick,
    /// The accelerator's node, and the Pod that has it, where the exporter reports them.
    pub node: Option<String>,
    pub pod: Option<ObjectName>,
}

/// Reads the samples in the answer to the query that was sent at `asked_at`, by our clock.
///
/// A sample's age comes from Prometheus's clock, so the two clocks need not agree. The time between request and
/// evaluation makes a sample look older than it is, never younger.
///
/// Among several samples of one accelerator the newest counts, and the highest among those of the same time. A series
/// about a part of an accelerator (MIG) has the UUID of the whole and is left out.
pub(super) fn samples(series: Vec<PrometheusSeries>, asked_at: Tick) -> DcgmSamples {
    let mut samples = BTreeMap::<AcceleratorId, MemorySample>::new();
    let faults = series.iter().filter_map(fault).collect();
    let erred = series.iter().filter_map(xid_accelerator).collect();
    for ((uuid, labels), (used, age)) in used_with_age(series) {
        let sample = MemorySample {
            used,
            at: asked_at - age,
            node: named(&labels, &["Hostname", "hostname", "node", "exported_node"]),
            pod: pod(&labels),
        };
        let newest = samples.get(&uuid).is_none_or(|known| (known.at, known.used) < (sample.at, sample.used));
        if newest {
            samples.insert(uuid, sample);
        }
    }
    DcgmSamples { used: samples, faults, with_xid: erred }
}

/// Xids caused by a program, or from which the accelerator has recovered.
///
/// NVIDIA's device plugin ignores 13, 31, 43, 45, 68 and 109. 63: a memory row was replaced. 92: many errors were
/// corrected. 94: an error ended only its own program.
const HARMLESS_XIDS: [u32; 10] = [0, 13, 31, 43, 45, 63, 68, 92, 94, 109];

fn xid_accelerator(series: &PrometheusSeries) -> Option<AcceleratorId> {
    let labels = &series.labels;
    let xid = labels.get(KIND).filter(|kind| *kind == "xid").and_then(|_| series.number());
    labels.get("UUID").filter(|_| xid.is_some_and(|xid| xid > 0.0)).map(|uuid| uuid.as_str().into())
}

/// Returns the accelerator and its fault, if the series reports one.
fn fault(series: &PrometheusSeries) -> Option<(AcceleratorId, String)> {
    let labels = &series.labels;
    let uuid = labels.get("UUID").filter(|uuid| !uuid.is_empty())?;
    let value = series.number().filter(|value| value.is_finite() && *value > 0.0)?;
    let what = match labels.get(KIND)?.as_str() {
        "xid" if !HARMLESS_XIDS.iter().any(|xid| f64::from(*xid) == value) => format!("Xid {value}"),
        "ecc" => format!("{value} uncorrectable memory errors"),
        "remap" => "a memory row could not be remapped".to_owned(),
        _ => return None,
    };
    Some((uuid.as_str().into(), what))
}

type SeriesLabels = BTreeMap<String, String>;

/// Pairs memory use with its age, by UUID and labels.
fn used_with_age(all: Vec<PrometheusSeries>) -> BTreeMap<(AcceleratorId, SeriesLabels), (Bytes, Millis)> {
    let mut found: BTreeMap<(AcceleratorId, SeriesLabels), (Option<Bytes>, Option<Millis>)> = BTreeMap::new();
    for series in all {
        let (evaluated, number) = (series.evaluated(), series.number());
        let mut labels = series.labels;
        let kind = labels.remove(KIND);
        labels.remove("__name__");
        let part = labels.get("GPU_I_ID").is_some_and(|part| !part.is_empty());
        let Some(uuid) = labels.get("UUID").filter(|uuid| !uuid.is_empty() && !part) else { continue };
        let Some(value) = number.filter(|value| value.is_finite() && *value >= 0.0) else { continue };
        let entry = found.entry((uuid.as_str().into(), labels)).or_default();
        match kind.as_deref() {
            Some("bytes") => entry.0 = Some(Bytes(value as u64)),
            // Where an exporter has both, the bytes are exact.
            Some("mib") => drop(entry.0.get_or_insert_with(|| Bytes((value * f64::from(1 << 20)) as u64))),
            Some("at") => entry.1 = Some(Millis(((evaluated - value).max(0.0) * 1e3) as u64)),
            _ => {}
        }
    }
    found.into_iter().filter_map(|(key, (used, age))| Some((key, (used?, age?)))).collect()
}

/// Returns the first of these labels that is set.
fn named(labels: &SeriesLabels, names: &[&str]) -> Option<String> {
    names.iter().find_map(|name| labels.get(*name).filter(|value| !value.is_empty())).cloned()
}

/// Returns the Pod that has the accelerator.
///
/// Where Prometheus sets these labels itself, to the exporter's own Pod, it renames the exporter's labels to
/// `exported_*`.
fn pod(labels: &SeriesLabels) -> Option<ObjectName> {
    for (namespace, name) in [("exported_namespace", "exported_pod"), ("namespace", "pod")] {
        if let (Some(namespace), Some(name)) = (named(labels, &[namespace]), named(labels, &[name])) {
            return Some(ObjectName::new(namespace, name));
        }
    }
    None
}
