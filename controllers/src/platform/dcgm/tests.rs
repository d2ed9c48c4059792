use serde_json::{Value, json};

use super::*;
use crate::{crd::ledger::ObjectName, prometheus_api};

const NOW: Tick = Tick(1_780_000_000_000);

/// Prometheus's clock is an hour ahead.
const EVALUATED: f64 = 1_780_003_600.0;

/// Both series of one accelerator, as Prometheus returns them.
fn both(labels: &Value, used: &str, age: f64) -> [Value; 2] {
    let with = |kind: &str, name: Option<&str>, value: String| {
        let mut metric = labels.clone();
        metric["rouse"] = json!(kind);
        if let Some(name) = name {
            metric["__name__"] = json!(name);
        }
        json!({"metric": metric, "value": [EVALUATED, value]})
    };
    let used = with("mib", Some("DCGM_FI_DEV_FB_USED"), used.to_owned());
    [used, with("at", None, format!("{}", EVALUATED - age))]
}

/// Reads an answer with these series.
fn parse(series: &Value) -> DcgmSamples {
    let answer = json!({"status": "success", "data": {"resultType": "vector", "result": series}});
    query::samples(prometheus_api::parse(answer.to_string().as_bytes()).unwrap(), NOW)
}

fn samples(series: &[[Value; 2]]) -> DcgmSamples {
    parse(&series.iter().flatten().cloned().collect())
}

fn gpu(uuid: &str, pod: &str) -> Value {
    json!({"UUID": uuid, "gpu": "0", "Hostname": "node-a", "namespace": "monitoring", "pod": "exporter-x",
        "exported_namespace": "chat", "exported_pod": pod})
}

#[test]
fn a_sample_has_what_is_in_use_its_age_by_prometheus_s_clock_and_whose_it_is() {
    let found = samples(&[both(&gpu("GPU-1", "m-0"), "81559", 12.5), both(&gpu("GPU-2", ""), "0", 0.0)]);
    let one = &found.used[&AcceleratorId::from("GPU-1")];
    assert_eq!((one.used, one.at), (Bytes::mib(81_559), NOW - Millis(12_500)));
    assert_eq!(one.node.as_deref(), Some("node-a"));
    assert_eq!(one.pod, Some(ObjectName::new("chat", "m-0")));
    let two = &found.used[&AcceleratorId::from("GPU-2")];
    assert_eq!((two.used, two.at), (Bytes::ZERO, NOW));
    // The exporter's own labels, without labels of that name from Prometheus.
    let plain = json!({"UUID": "GPU-3", "namespace": "chat", "pod": "m-1"});
    let found = samples(&[both(&plain, "1", 0.0)]);
    assert_eq!(found.used[&AcceleratorId::from("GPU-3")].pod, Some(ObjectName::new("chat", "m-1")));
}

#[test]
fn bytes_are_believed_rather_than_mebibytes_of_the_same_moment() {
    let [mib, at] = both(&gpu("GPU-1", "m-0"), "3", 0.0);
    let mut bytes = mib.clone();
    (bytes["metric"]["rouse"], bytes["value"][1]) = (json!("bytes"), json!("3145729"));
    for order in [[bytes.clone(), mib.clone()], [mib, bytes]] {
        let [first, second] = order;
        let found = parse(&json!([first, at, second]));
        assert_eq!(found.used[&AcceleratorId::from("GPU-1")].used, Bytes(3_145_729));
    }
}

#[test]
fn of_several_samples_the_newest_counts_and_what_is_no_accelerator_s_is_left_out() {
    let part = json!({"UUID": "GPU-1", "GPU_I_ID": "7"});
    let found = samples(&[
        both(&gpu("GPU-1", "a"), "10", 30.0),
        both(&gpu("GPU-1", "b"), "20", 5.0),
        both(&gpu("GPU-1", "c"), "15", 5.0),
        both(&part, "99", 0.0),
        both(&json!({"gpu": "0"}), "99", 0.0),
        both(&gpu("GPU-2", ""), "NaN", 0.0),
        both(&gpu("GPU-3", ""), "-1", 0.0),
    ]);
    assert_eq!(found.used.len(), 1, "{found:?}");
    let one = &found.used[&AcceleratorId::from("GPU-1")];
    assert_eq!((one.used, one.at), (Bytes::mib(20), NOW - Millis::secs(5)));
    // Without a time, the sample's age is unknown.
    let [used, _] = both(&gpu("GPU-4", ""), "5", 0.0);
    assert_eq!(parse(&json!([used])), DcgmSamples::default());
}

#[test]
fn an_accelerator_with_a_fault_is_named_and_one_whose_program_erred_is_not() {
    let series = |(n, (kind, value)): (usize, (&str, &str))| {
        let metric =
            json!({"UUID": format!("GPU-{n}"), "rouse": kind, "err_msg": "as newer exporters have it"});
        json!({"metric": metric, "value": [EVALUATED, value]})
    };
    let all = [
        ("xid", "79"),
        ("xid", "31"),
        ("xid", "0"),
        ("ecc", "2"),
        ("ecc", "0"),
        ("remap", "1"),
        ("remap", "NaN"),
    ];
    let result: Value = all.into_iter().enumerate().map(series).collect();
    let DcgmSamples { faults: found, with_xid: erred, .. } = parse(&result);
    assert_eq!(erred.iter().map(AcceleratorId::as_str).collect::<Vec<_>>(), ["GPU-0", "GPU-1"]);
    let told: Vec<_> = found.iter().map(|(id, why)| format!("{id}: {why}")).collect();
    let expected = [
        "GPU-0: Xid 79",
        "GPU-3: 2 uncorrectable memory errors",
        "GPU-5: a memory row could not be remapped",
    ];
    assert_eq!(told, expected);
}

#[test]
fn a_sample_is_believed_that_is_young_and_later_than_the_last_sleep() {
    let sample = |age| {
        let at = NOW - Millis::secs(age);
        MemorySample { used: Bytes::gib(3), at, node: None, pod: None }
    };
    let meter_lag = Millis::secs(60);
    let of = |age, slept: Option<u64>| {
        trusted_usage(&sample(age), slept.map(|ago| NOW - Millis::secs(ago)), meter_lag, NOW)
    };
    assert_eq!(of(0, None), Ok(Bytes::gib(3)));
    assert_eq!(of(60, None), Ok(Bytes::gib(3)));
    assert_eq!(of(61, None), Err(UntrustedSample::TooOld { age: Millis::secs(61), meter_lag }));
    assert_eq!(of(10, Some(70)), Ok(Bytes::gib(3)), "just when all has settled");
    assert_eq!(of(11, Some(70)), Err(UntrustedSample::TooEarly { meter_lag }));
    assert_eq!(of(0, Some(0)), Err(UntrustedSample::TooEarly { meter_lag }));
    // With clocks that disagree, the engine may seem to fall asleep in the future.
    assert_eq!(
        trusted_usage(&sample(0), Some(NOW + Millis::secs(5)), meter_lag, NOW),
        Err(UntrustedSample::TooEarly { meter_lag })
    );
}

#[test]
fn the_question_can_be_sent() {
    let uri: http::Uri = prometheus_api::path(&query::QUERY).parse().unwrap();
    assert_eq!(uri.path(), "/api/v1/query");
    assert!(uri.query().unwrap().starts_with("query=label%5Freplace%28DCGM"), "{uri}");
}
