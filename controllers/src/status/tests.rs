use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use rouse::{
    model::{IdlePolicy, RehearsalPolicy, SleepLevelPolicy, VariantName},
    units::{Bytes, Millis, Tick},
};
use serde_json::{Value, json};

use super::*;
use crate::{
    condition::{SATURATED, time},
    convert::ConversionPolicy,
    crd::{
        InferenceModelStatus,
        inference_model::{EngineState, EngineStatus, LearnedStatus, SaturationStatus, SaturationTarget},
        ledger::{Ledger, ObjectName, Reservation, ReservationState},
    },
    index::{ClusterIndex, IndexedObject, PoolSlots, Resolved, ResolvedNode, ResolvedPool, WatchScope},
    label,
    published::PublishedModel,
};

const NOW: Tick = Tick(1_780_000_000_000);
const LATER: Tick = Tick(1_780_000_020_000);

/// A pool without nodes or with its own declaration, and a model.
fn settled(pool: Value, model: Value) -> Arc<Resolved> {
    let mut index =
        ClusterIndex::new(WatchScope { policy: ConversionPolicy::default(), nodes: false, namespaces: 1 });
    let whole = |kind: &str, namespace: Option<&str>, spec: &Value| {
        json!({
            "apiVersion": "rouse.dev/v1alpha1",
            "kind": kind,
            "metadata": {"name": "m", "namespace": namespace, "generation": 3},
            "spec": spec,
        })
    };
    let pool = serde_json::from_value(whole("AcceleratorPool", None, &pool)).unwrap();
    let model = serde_json::from_value(whole("InferenceModel", Some("chat"), &model)).unwrap();
    index.apply(IndexedObject::Pool(Box::new(pool)));
    index.apply(IndexedObject::Model(Box::new(model)));
    index.resolved()
}

fn pool() -> Value {
    json!({"nodeSelector": {"inference-pool": "default"}, "memory": "320Gi"})
}

fn model() -> Value {
    json!({"modelName": "m", "memory": "80Gi", "containerImage": "vllm:1", "accelerators": 2})
}

fn seen(resolved: &Resolved) -> ResolvedModel<'_> {
    let object = ObjectName::new("chat", "m");
    match resolved.served.get(&object) {
        Some(served) => ResolvedModel::Served(served),
        None => ResolvedModel::Rejected(&resolved.rejected[&object]),
    }
}

fn engine(replica: u32, state: EngineState) -> EngineStatus {
    EngineStatus {
        pod: format!("m-{replica}"),
        replica,
        variant: "default".to_owned(),
        address: None,
        accelerators: Vec::new(),
        state,
        generation: 1,
        since: Some(time(NOW)),
        failure: None,
    }
}

fn found<'a>(conditions: &'a [Condition], kind: &str) -> &'a Condition {
    conditions.iter().find(|condition| condition.type_ == kind).unwrap()
}

/// Returns Ready, Available, and their reason and message.
fn told(settled: &Resolved, facts: &ModelFacts) -> (bool, bool, String, String) {
    let status = model_status(seen(settled), facts, None, NOW);
    let [ready, available] = ["Ready", "Available"].map(|kind| found(&status.conditions, kind));
    assert_eq!((&ready.reason, &ready.message), (&available.reason, &available.message));
    assert_eq!(status.ready, ready.status == "True");
    (status.ready, available.status == "True", ready.reason.clone(), ready.message.clone())
}

/// Whether the status is worth a write.
fn differs(stored: Option<&InferenceModelStatus>, desired: &InferenceModelStatus, patience: Millis) -> bool {
    model_difference(stored, desired, patience) != StatusDifference::Nothing
}

#[test]
fn the_conditions_say_what_the_engines_are_in() {
    use EngineState::{
        Asleep, Awake, Backoff, Draining, FallingAsleep, Launching, Loading, Stopping, Waking,
    };
    let resolved = settled(pool(), model());
    for (states, ready, available, reason) in [
        (&[][..], false, true, "ScaledToZero"),
        (&[Launching], false, true, "Deploying"),
        (&[Asleep, Loading], false, true, "Deploying"),
        (&[Backoff, Waking], false, true, "Waking"),
        (&[Asleep, Awake, Backoff], true, true, "Deployed"),
        (&[Asleep], false, true, "Asleep"),
        (&[FallingAsleep], false, true, "Asleep"),
        (&[Draining, Asleep], false, true, "Draining"),
        (&[Stopping], false, true, "Stopping"),
        (&[Asleep, Backoff], false, false, "Failed"),
    ] {
        let engines = (0..).zip(states).map(|(n, state)| engine(n, *state)).collect();
        let facts = ModelFacts { engines, ..ModelFacts::default() };
        let (is_ready, is_available, found, text) = told(&resolved, &facts);
        assert_eq!(
            (is_ready, is_available, found.as_str()),
            (ready, available, reason),
            "{states:?}: {text}"
        );
    }
}

#[test]
fn who_waits_says_what_for() {
    let memory = ModelFacts {
        wait_reason: Some(ModelWaitReason::Memory("held by b".into())),
        ..ModelFacts::default()
    };
    let settled_well = settled(pool(), model());
    assert_eq!(told(&settled_well, &memory), (false, false, "InsufficientMemory".into(), "held by b".into()));
    let asleep = ModelFacts { engines: vec![engine(0, EngineState::Asleep)], ..memory.clone() };
    assert_eq!(told(&settled_well, &asleep).2, "InsufficientMemory", "it cannot be woken");
    let awake = ModelFacts { engines: vec![engine(0, EngineState::Awake)], ..memory };
    assert_eq!(told(&settled_well, &awake).2, "Deployed", "it serves, whatever a second one waits for");
    let pulled = ModelFacts {
        engines: vec![engine(0, EngineState::Backoff)],
        last_failure: Some("ErrImagePull: why".into()),
        ..ModelFacts::default()
    };
    assert_eq!(told(&settled_well, &pulled).3, "failed: 1 engine; ErrImagePull: why");
    let backoff = ModelFacts {
        engines: vec![engine(0, EngineState::Backoff)],
        wait_reason: Some(ModelWaitReason::Other("exit status 1; starts again in 8s".into())),
        ..ModelFacts::default()
    };
    assert_eq!(told(&settled_well, &backoff).3, "exit status 1; starts again in 8s");

    let broken = settled(json!({"nodeSelector": {"inference-pool": "default"}, "memory": "x"}), model());
    let (ready, available, reason, text) = told(&broken, &ModelFacts::default());
    assert_eq!((ready, available, reason.as_str()), (false, false, "PoolNotReady"));
    assert!(text.contains("memory: 'x'"), "{text}");
    let awake = ModelFacts { engines: vec![engine(0, EngineState::Awake)], ..ModelFacts::default() };
    assert_eq!(told(&broken, &awake).2, "Deployed", "what runs goes on");
}

#[test]
fn a_backend_that_is_not_found_is_not_available_and_the_resolver_says_why() {
    let external = json!({"modelName": "m", "mode": "external", "backendUrl": "http://vllm:8000"});
    let resolved = settled(pool(), external);
    let starting = ModelFacts { engines: vec![engine(0, EngineState::Launching)], ..ModelFacts::default() };
    let (ready, available, reason, text) = told(&resolved, &starting);
    assert_eq!((ready, available, reason.as_str()), (false, false, "Deploying"));
    assert_eq!(text, "the backend has not answered yet");
    let why = "cannot resolve the backend's name 'vllm': Name or service not known".to_owned();
    let lost = ModelFacts { last_failure: Some(why.clone()), ..starting };
    assert_eq!(told(&resolved, &lost), (false, false, "Deploying".into(), why));
}

#[test]
fn what_can_never_start_and_what_did_not_start_are_not_scaled_to_zero() {
    let resolved = settled(pool(), model());
    let misfit = ModelFacts { unplaceable: Some("it needs 400Gi".into()), ..ModelFacts::default() };
    assert_eq!(told(&resolved, &misfit), (false, false, "Unplaceable".into(), "it needs 400Gi".into()));
    let failed = ModelFacts {
        last_outcome: Some("last start failed at 10:00:00.000: exit status 1 (exited:1)".into()),
        start_failed: true,
        ..ModelFacts::default()
    };
    let (_, available, reason, text) = told(&resolved, &failed);
    assert_eq!((available, reason.as_str()), (false, "Failed"), "{text}");
    assert!(text.contains("exit status 1"), "{text}");
    let evicted =
        ModelFacts { last_outcome: Some("evicted at 10:00:00.000 for b".into()), ..ModelFacts::default() };
    let (_, available, reason, text) = told(&resolved, &evicted);
    assert_eq!((available, reason.as_str()), (true, "ScaledToZero"));
    assert!(text.contains("evicted at 10:00:00.000 for b"), "{text}");
}

#[test]
fn what_is_refused_says_so_in_every_condition() {
    let settled = settled(pool(), json!({"modelName": "m", "memory": "lots", "containerImage": "x"}));
    let status = model_status(seen(&settled), &ModelFacts::default(), None, NOW);
    for condition in &status.conditions {
        assert_eq!((condition.status.as_str(), condition.reason.as_str()), ("False", "InvalidQuantity"));
        assert!(condition.message.contains("memory: 'lots'"), "{}", condition.message);
        assert_eq!(condition.observed_generation, Some(3));
    }
    let kinds: Vec<_> = status.conditions.iter().map(|condition| condition.type_.as_str()).collect();
    assert_eq!(kinds, ["Accepted", "Ready", "Available"]);
    assert_eq!((status.declared_memory, status.observed_generation), (None, Some(3)));
}

#[test]
fn a_status_has_what_is_declared_observed_and_noted() {
    let variants = json!([{"name": "a", "memory": "40Gi"}, {"name": "b", "cost": 99}]);
    let mut spec = model();
    spec["variants"] = variants;
    let resolved = settled(pool(), spec);
    let of = |variant: &str, engine: EngineStatus| EngineStatus { variant: variant.to_owned(), ..engine };
    let facts = ModelFacts {
        engines: vec![
            of("a", engine(0, EngineState::Awake)),
            of("a", engine(1, EngineState::Launching)),
            of("a", engine(2, EngineState::Draining)),
            of("b", engine(0, EngineState::Waking)),
            of("b", engine(1, EngineState::Asleep)),
            of("b", engine(2, EngineState::FallingAsleep)),
        ],
        peak: Some(Bytes::gib(30)),
        observed: Some(NOW),
        last_request: Some(NOW),
        ..ModelFacts::default()
    };
    let status = model_status(seen(&resolved), &facts, None, NOW);
    assert_eq!(status.declared_memory.unwrap().as_str(), "40Gi", "of one accelerator");
    assert_eq!(status.observed_peak_memory.unwrap().as_str(), "30Gi");
    assert_eq!(status.utilization_percent, Some(75));
    assert!(status.recommendation.unwrap().contains("33Gi instead of 40Gi"));
    assert_eq!((status.replicas, status.asleep, status.last_request_time), (3, 2, Some(time(NOW))));
    let counts: Vec<_> =
        status.variants.iter().map(|it| (it.name.as_str(), it.replicas, it.asleep, it.desired)).collect();
    assert_eq!(counts, [("a", 2, 0, 2), ("b", 1, 2, 1)]);
    assert_eq!(status.engines, facts.engines);
    let label = label::value("m");
    assert_eq!(status.selector, Some(format!("app.kubernetes.io/managed-by=rouse,rouse.dev/model={label}")));
    let accepted = found(&status.conditions, "Accepted");
    assert_eq!((accepted.status.as_str(), accepted.message.as_str()), ("True", "the model is served"));
}

#[test]
fn a_variant_that_does_not_run_is_noted() {
    let mut spec = model();
    spec["variants"] = json!([{"name": "a"}, {"name": "b", "nodeSelector": {"x": "y"}}]);
    let resolved = settled(pool(), spec);
    let status = model_status(seen(&resolved), &ModelFacts::default(), None, NOW);
    let accepted = found(&status.conditions, "Accepted");
    assert!(
        accepted.status == "True"
            && accepted.message.contains("the variant 'b' does not run: no AcceleratorPool"),
        "{}",
        accepted.message
    );
    let names: Vec<_> = status.variants.iter().map(|variant| variant.name.as_str()).collect();
    assert_eq!(names, ["a", "b"]);
}

#[test]
fn what_saturation_decided_is_shown_and_kept_until_a_leader_decides_again() {
    let mut spec = model();
    spec["saturation"] = json!({});
    let resolved = settled(pool(), spec.clone());
    let target = SaturationTarget {
        variant: "default".to_owned(),
        replicas: 3,
        reason: "the spare KV cache is 0.02".to_owned(),
        decided: Some(time(NOW)),
    };
    let decided = SaturationFacts {
        status: SaturationStatus { targets: vec![target.clone()], thresholds: Some("default".to_owned()) },
        conditions: vec![SaturationCondition {
            kind: SATURATED,
            status: true,
            reason: "SpareCapacityLow",
            message: "2 of 2 engines are saturated".to_owned(),
        }],
    };
    let facts = ModelFacts { saturation: Some(decided), ..ModelFacts::default() };
    let first = model_status(seen(&resolved), &facts, None, NOW);
    assert_eq!(first.saturation.as_ref().unwrap().targets, [target]);
    let [variant] = first.variants.as_slice() else { panic!("{:?}", first.variants) };
    assert_eq!((variant.replicas, variant.desired, variant.decided.clone()), (0, 3, Some(time(NOW))));
    assert_eq!(variant.reason.as_deref(), Some("the spare KV cache is 0.02"));
    assert_eq!(found(&first.conditions, SATURATED).status, "True");

    let next_leader = model_status(seen(&resolved), &ModelFacts::default(), Some(&first), LATER);
    assert_eq!(next_leader, first);

    spec["saturation"] = json!({"enabled": false});
    let off = model_status(seen(&settled(pool(), spec)), &facts, Some(&first), LATER);
    assert_eq!((off.saturation, off.variants[0].desired), (None, 0));
    assert!(off.conditions.iter().all(|condition| condition.type_ != SATURATED));
}

#[test]
fn moments_change_with_what_they_are_of_and_only_that_is_written() {
    let resolved = settled(pool(), model());
    let patience = Millis::secs(60);
    let of = |state, stored: Option<&InferenceModelStatus>, now| {
        let facts = ModelFacts {
            engines: vec![engine(0, state)],
            observed: Some(now),
            last_request: Some(now),
            ..ModelFacts::default()
        };
        model_status(seen(&resolved), &facts, stored, now)
    };
    let first = of(EngineState::Asleep, None, NOW);
    assert!(differs(None, &first, patience));
    // The status survives a round trip through JSON.
    let first: InferenceModelStatus = serde_json::from_value(serde_json::to_value(&first).unwrap()).unwrap();
    let again = of(EngineState::Asleep, Some(&first), LATER);
    assert!(!differs(Some(&first), &again, patience), "{again:?}");
    let later = model_difference(Some(&first), &again, Millis::secs(20));
    assert_eq!(later, StatusDifference::LastRequest, "it is far later");
    let awake = of(EngineState::Awake, Some(&first), LATER);
    assert!(differs(Some(&first), &awake, patience));
    let moment =
        |status: &InferenceModelStatus, kind| found(&status.conditions, kind).last_transition_time.clone();
    assert_eq!(moment(&awake, "Ready"), time(LATER), "it flipped");
    for kind in ["Accepted", "Available"] {
        assert_eq!(moment(&awake, kind), time(NOW), "{kind} did not flip");
    }
    assert_eq!(awake.variants[0].decided, Some(time(LATER)), "another number of engines is awake");
    let still_awake = of(EngineState::Awake, Some(&awake), Tick(LATER.0 + 1000));
    assert_eq!(still_awake.variants[0].decided, Some(time(LATER)), "nothing was decided anew");
    // A gateway that has just started has seen no request: the stored time is later.
    let restarted = model_status(seen(&resolved), &ModelFacts::default(), Some(&awake), LATER);
    assert_eq!(restarted.last_request_time, Some(time(LATER)));
}

#[test]
fn a_peak_is_kept_and_written_again_once_it_is_a_hundredth_higher() {
    let resolved = settled(pool(), model());
    let learned = |bytes: Bytes| LearnedStatus {
        peak: Some(bytes.into()),
        start_millis: Some(7),
        ..LearnedStatus::default()
    };
    let of = |peak: Option<Bytes>, stored: Option<&InferenceModelStatus>, now| {
        let learned = peak.map(learned);
        let facts = ModelFacts { peak, learned, observed: peak.map(|_| now), ..ModelFacts::default() };
        let status = model_status(seen(&resolved), &facts, stored, now);
        serde_json::from_value::<InferenceModelStatus>(serde_json::to_value(status).unwrap()).unwrap()
    };
    let peak = |status: &InferenceModelStatus| status.observed_peak_memory.clone().unwrap().bytes().unwrap();
    let first = of(Some(Bytes::gib(50)), None, NOW);
    assert_eq!((peak(&first), first.utilization_percent), (Bytes::gib(50), Some(62)));
    assert!(first.recommendation.as_ref().unwrap().starts_with("declare memory: 55Gi instead of 80Gi"));
    assert_eq!(first.learned, Some(learned(Bytes::gib(50))));
    assert_eq!(first.last_observation, Some(time(NOW)));

    let patience = Millis::secs(60);
    let hardly = of(Some(Bytes(Bytes::gib(50).0 + Bytes::gib(50).0 / 101)), Some(&first), LATER);
    assert!(!differs(Some(&first), &hardly, patience), "{hardly:?}");
    let lower = of(Some(Bytes::gib(40)), Some(&first), LATER);
    assert!(!differs(Some(&first), &lower, patience), "{lower:?}");
    let higher = of(Some(Bytes::mib(51_712)), Some(&first), LATER);
    assert!(differs(Some(&first), &higher, patience));
    assert_eq!((peak(&higher), higher.last_observation.clone()), (Bytes::mib(51_712), Some(time(LATER))));
    // A new leader has observed nothing yet.
    let restarted = of(None, Some(&higher), LATER);
    assert!(!differs(Some(&higher), &restarted, patience), "{restarted:?}");
    assert_eq!(restarted, higher);
}

#[test]
fn what_a_new_leader_has_not_measured_yet_stays_as_it_is_stored() {
    let mut spec = model();
    spec["variants"] = json!([{"name": "small", "cost": 1}]);
    let resolved = settled(pool(), spec);
    let of = |learned: &LearnedStatus, gib, stored: Option<&InferenceModelStatus>| {
        let facts = ModelFacts {
            peak: Some(Bytes::gib(gib)),
            learned: Some(learned.clone()),
            learned_of_variants: [(VariantName::from("small"), learned.clone())].into(),
            ..ModelFacts::default()
        };
        model_status(seen(&resolved), &facts, stored, NOW)
    };
    let whole = LearnedStatus {
        peak: Some(Bytes::gib(50).into()),
        residue: Some(Bytes::gib(2).into()),
        start_millis: Some(90),
        wake_millis: Some(7),
        sleep_millis: Some(5),
    };
    let first = of(&whole, 50, None);
    assert_eq!(first.learned.as_ref(), Some(&whole));
    let peak = Some(Bytes::gib(60).into());
    let only_peak = LearnedStatus { peak, ..LearnedStatus::default() };
    let expected = LearnedStatus { peak: only_peak.peak.clone(), ..whole };
    let later = of(&only_peak, 60, Some(&first));
    assert_eq!(later.learned.as_ref(), Some(&expected));
    assert_eq!(later.variants[0].learned.as_ref(), Some(&expected));
}

#[test]
fn a_new_leader_has_what_was_learned_of_each_variant() {
    let mut spec = model();
    spec["variants"] = json!([{"name": "large", "cost": 9}, {"name": "small", "cost": 1}]);
    let resolved = settled(pool(), spec.clone());
    let learned = |gib, start| LearnedStatus {
        peak: Some(Bytes::gib(gib).into()),
        start_millis: Some(start),
        ..LearnedStatus::default()
    };
    let of = |variants: &[(&str, LearnedStatus)], stored: Option<&InferenceModelStatus>| {
        let variants = variants.iter().map(|(name, learned)| (VariantName::from(*name), learned.clone()));
        let facts = ModelFacts { learned_of_variants: variants.collect(), ..ModelFacts::default() };
        model_status(seen(&resolved), &facts, stored, NOW)
    };
    let first = of(&[("large", learned(70, 90)), ("small", learned(30, 40))], None);
    // A new leader has measured neither yet, and then hardly more of one.
    let restarted = of(&[], Some(&first));
    assert_eq!(restarted.variants, first.variants);
    let hardly = LearnedStatus { peak: Some(Bytes::mib(70 * 1024 + 7).into()), ..learned(70, 95) };
    let again = of(&[("large", hardly)], Some(&first));
    let large = again.variants.iter().find(|variant| variant.name == "large").unwrap();
    assert_eq!(large.learned, Some(learned(70, 95)));

    let mut wrong = spec.clone();
    wrong["memory"] = json!("x");
    let rejected = settled(pool(), wrong);
    let kept = model_status(seen(&rejected), &ModelFacts::default(), Some(&first), NOW);
    assert_eq!(kept.variants.len(), 2, "a mistake in the object loses nothing");
    assert!(kept.variants.iter().zip(&first.variants).all(|(kept, first)| kept.learned == first.learned));

    let object = json!({
        "apiVersion": "rouse.dev/v1alpha1",
        "kind": "InferenceModel",
        "metadata": {"name": "m", "namespace": "chat"},
        "spec": spec,
        "status": first,
    });
    let published = PublishedModel::of(&serde_json::from_value(object).unwrap());
    let known = published.measurements("small".into()).into_iter();
    let known = known.map(|(variant, learned)| (variant, learned.observed, learned.start));
    let expected =
        |name: &str, gib, start| (VariantName::from(name), Some(Bytes::gib(gib)), Some(Millis(start)));
    assert_eq!(known.collect::<Vec<_>>(), [expected("large", 70, 90), expected("small", 30, 40)]);
}

#[test]
fn patience_is_a_tenth_of_the_cooldown_and_half_a_minute_at_least() {
    let of = |sleep_after: Option<Millis>| {
        max_last_request_lag(&IdlePolicy {
            sleep_after,
            stop_after: None,
            level: SleepLevelPolicy::Auto,
            rehearse: RehearsalPolicy::Never,
        })
    };
    assert_eq!(of(Some(Millis::secs(600))), Millis::secs(60));
    assert_eq!(of(Some(Millis::secs(60))), Millis::secs(30));
    assert_eq!(of(None), Millis::secs(30));
}

#[test]
fn a_pool_says_what_it_has_or_why_it_is_not_ready() {
    let good = settled(pool(), model());
    let reservation = Reservation {
        id: 0,
        model: ObjectName::new("chat", "m"),
        variant: VariantName::default(),
        replica: 0,
        count: 2,
        bytes: Bytes::gib(80),
        host_bytes: Bytes::ZERO,
        node: None,
        accelerators: Vec::new(),
        state: ReservationState::Reserved,
        since: NOW,
    };
    let ledger = Ledger { next: 1, reservations: vec![reservation] };
    let stored = crate::crd::AcceleratorPoolStatus { ledger, ..Default::default() };
    let status = pool_status(&good.pools["m"], Some(&stored), NOW);
    assert_eq!(status.ledger, stored.ledger, "it is not this one's to change");
    let [total, allocated, available] =
        [&status.total, &status.allocated, &status.available].map(|it| it.as_ref().unwrap().to_string());
    assert_eq!([total.as_str(), &allocated, &available], ["320Gi", "160Gi", "160Gi"]);
    let ready = found(&status.conditions, "Ready");
    assert_eq!((ready.status.as_str(), ready.reason.as_str()), ("True", "Ready"));
    assert!(pool_differs(Some(&stored), &status));
    assert!(!pool_differs(Some(&status), &pool_status(&good.pools["m"], Some(&status), LATER)));
    let slots = Some(PoolSlots { configuration: "h100".into(), each: 4 });
    let with_slots = ResolvedPool { slots, ..good.pools["m"].clone() };
    let message = &pool_status(&with_slots, None, NOW).conditions[0].message;
    assert!(message.contains("0 accelerators of 4 slots, "), "{message}");
    // A reservation is no change for the pool's status writer.
    let booked = crate::crd::AcceleratorPoolStatus { count: 7, ..status.clone() };
    assert!(!pool_differs(Some(&booked), &status));

    let bad = settled(json!({"nodeSelector": {"a": "b"}, "meterLag": "soon"}), model());
    let broken = pool_status(&bad.pools["m"], Some(&status), LATER);
    let ready = found(&broken.conditions, "Ready");
    assert_eq!((ready.status.as_str(), ready.reason.as_str()), ("False", "InvalidDuration"));
    assert_eq!((&ready.last_transition_time, &broken.total), (&time(LATER), &None));
}

#[test]
fn a_node_says_whether_it_may_be_given_work() {
    let place = |pool: Option<&str>, accelerators, doubt: Option<&str>| ResolvedNode {
        pool: pool.map(str::to_owned),
        accelerators,
        warning: doubt.map(str::to_owned),
        ..ResolvedNode::default()
    };
    let odd = Some("GPU-1: capacity: 'x' is not a size");
    for (place, ready, reason, says) in [
        (Some(place(Some("p"), 8, None)), "True", "Ready", "8 accelerators for the pool 'p'"),
        (Some(place(Some("p"), 7, odd)), "True", "Ready", "Not counted: GPU-1"),
        (Some(place(Some("p"), 0, odd)), "False", "NoAccelerators", "Not counted: GPU-1"),
        (Some(place(None, 0, Some("the node matches the pools 'p', 'q'"))), "False", "NoPool", "'p', 'q'"),
        (None, "False", "NoPool", "the node is in no AcceleratorPool"),
    ] {
        let found = node_condition(place.as_ref(), Some(2), &[], NOW);
        assert_eq!((found.status.as_str(), found.reason.as_str()), (ready, reason), "{found:?}");
        assert!(found.message.contains(says) && found.type_ == "Ready", "{found:?}");
    }
}

#[test]
fn less_is_recommended_only_below_nine_tenths() {
    let of = |declared: u64, peak: u64| usage(Bytes::gib(declared), Bytes::gib(peak));
    let recommended = of(100, 75).unwrap();
    assert_eq!(recommended.advised, Some(Bytes::mib(82 * 1024 + 512)), "82.5Gi");
    assert_eq!((recommended.ratio, recommended.percent), (0.75, 75));
    let text = recommended.recommendation.unwrap();
    assert_eq!(
        text,
        "declare memory: 84480Mi instead of 100Gi, because no engine has used more than 75Gi of it (75 %)"
    );
    let seven_eighths = of(80, 70).unwrap();
    assert_eq!((seven_eighths.ratio, seven_eighths.percent), (0.875, 87));
    assert_eq!(seven_eighths.advised, Some(Bytes::gib(77)));
    let fine = of(80, 73).unwrap();
    assert_eq!((fine.percent, fine.advised, fine.recommendation), (91, None, None));
    assert_eq!(of(100, 90).unwrap().advised, None, "nine tenths are not below nine tenths");
    assert_eq!(of(80, 100).unwrap().percent, 125);
    assert_eq!((of(80, 0), of(0, 80)), (None, None));
    // Advice is rounded up to a whole MiB, and dropped if that saves nothing.
    assert_eq!(usage(Bytes::mib(100), Bytes(1)).unwrap().advised, Some(Bytes::mib(1)));
    assert_eq!(usage(Bytes(1 << 20), Bytes(1)).unwrap().advised, None);
    assert!(usage(Bytes(u64::MAX), Bytes(u64::MAX / 2)).unwrap().advised.is_some());
}
