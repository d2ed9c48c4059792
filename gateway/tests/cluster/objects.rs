//! Valid objects are stored as written, with the documented defaults.

use std::collections::BTreeMap;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};
use kube::{
    Api,
    api::{ApiResource, DynamicObject, PostParams},
};
use rouse::{
    model::{AcceleratorId, VariantName},
    units::{Bytes, Tick},
};
use rouse_controllers::{
    crd::{
        self, AcceleratorNode, AcceleratorPool, DeviceConfiguration, DeviceInstance, GatewayReplica,
        InferenceModel, InferenceModelSpec, Warmup,
        ledger::{Ledger, ObjectName, Reservation, ReservationState},
    },
    ledger::PoolLedger,
};
use serde_json::{Value, json};

use crate::{
    site::GatewayNamespace,
    support::{cluster, own_cluster, pool, reservation_request},
};

const MOMENT: &str = "2026-11-22T08:00:00Z";

fn condition(kind: &str, reason: &str, message: &str) -> Value {
    json!({
        "type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": MOMENT,
        "observedGeneration": 1,
    })
}

/// Spec and status with every field that is valid together with mode deployment and a template.
pub(crate) fn full_model() -> (Value, Value) {
    let spec = json!({
        "modelName": "meta-llama/Llama-3.3-70B-Instruct",
        "aliases": ["llama-70b", "llama"],
        "memory": "75Gi", "memoryAsleep": "1.5Gi", "hostMemory": 80_530_636_800_u64,
        "accelerators": 2,
        "nodeSelector": { "inference-pool": "large" },
        "mode": "deployment",
        "template": {
            "metadata": { "labels": { "team": "a" } },
            "spec": {
                "containers": [{
                    "name": "vllm", "image": "vllm/vllm-openai:v0.11.0", "args": ["--model", "x"],
                    "resources": { "limits": { "nvidia.com/gpu": "2" } }, "a-field-of-tomorrow": { "x": [1] },
                }],
                "terminationGracePeriodSeconds": 10,
            },
        },
        "engine": {
            "kind": "vllm", "task": "generate", "port": 8001, "container": "vllm", "servedName": "llama",
            "sleepMode": "vllm", "level": "1", "onDisconnect": "drain", "rehearse": "idle",
            "passthrough": ["/x", "GET /y"],
        },
        "variants": [
            {
                "name": "h200", "cost": 12.5, "accelerators": 1, "memory": "130Gi", "memoryAsleep": "2Gi",
                "hostMemory": 0, "nodeSelector": { "gpu": "h200" }, "template": { "spec": { "x": 1 } },
                "minReplicas": 0, "maxReplicas": 3, "role": "prefill",
            },
            { "name": "h100", "cost": 10, "role": "decode" },
        ],
        "minReplicas": 5, "maxReplicas": 4,
        "cooldownPeriod": "1m30s", "stopAfter": "never", "startTimeout": "20m",
        "eviction": "cooldown", "pinned": true, "priority": -5, "maxConcurrency": 64,
        "queue": { "policy": "reject", "maxWait": "30s", "maxWaiting": 0 },
        "dependencies": ["embedder"],
        "replicas": 2,
        "saturation": {
            "enabled": true, "profile": "rouse", "stabilisation": "2m", "mayEvict": "never", "actuation": "external",
            "kvCacheThreshold": 0.8, "queueLengthThreshold": 5, "kvSpareTrigger": 0.1, "queueSpareTrigger": 3,
            "analyzer": "tokens", "limiter": "inventory", "scaleToZero": { "enabled": true, "after": "15m" },
        },
        "warmup": "auto",
    });
    let status = json!({
        "observedGeneration": 1, "ready": true, "replicas": 2, "asleep": 1, "selector": "rouse.dev/model=a",
        "variants": [{
            "name": "h100", "replicas": 2, "asleep": 1, "desired": 2, "reason": "demand", "decided": MOMENT,
            "learned": {
                "peak": "60Gi", "residue": "1Gi", "startMillis": 61_000, "wakeMillis": 900, "sleepMillis": 2500,
            },
        }],
        "engines": [{
            "pod": "llama-0", "replica": 0, "variant": "h100", "address": "10.1.2.3:8001", "state": "Awake",
            "accelerators": ["GPU-1"], "generation": 3, "since": MOMENT,
            "failure": { "cause": "exited:3", "failures": 2, "fruitless": 2, "retryAfter": MOMENT },
        }],
        "declaredMemory": "75Gi", "observedPeakMemory": "60Gi", "utilizationPercent": 80,
        "recommendation": "66Gi", "lastObservation": MOMENT, "lastRequestTime": MOMENT,
        "learned": {
            "peak": "60Gi", "residue": "1Gi", "startMillis": 61_000, "wakeMillis": 900, "sleepMillis": 2500,
        },
        "saturation": {
            "targets": [{ "variant": "h100", "replicas": 2, "reason": "demand", "decided": MOMENT }],
            "thresholds": "default",
        },
        "conditions": [condition("Accepted", "Accepted", ""), condition("Ready", "Deployed", "It serves.")],
    });
    (spec, status)
}

/// The fields that are not valid together with those.
fn other_models() -> [Value; 2] {
    [
        json!({ "modelName": "gpt-oss", "mode": "external", "backendUrl": "http://gpt-oss:8000" }),
        json!({
            "modelName": "nomic-embed", "memory": 2_147_483_648_u64, "containerImage": "registry.example.com/embed:1",
            "resources": {
                "requests": { "cpu": "500m", "memory": "4Gi", "gpu": "1" },
                "limits": { "cpu": "4", "memory": "8Gi", "gpu": "1" },
            },
        }),
    ]
}

pub(crate) fn full_pool() -> (Value, Value) {
    let spec = json!({
        "nodeSelector": { "inference-pool": "large" }, "memory": "1200Gi", "sleepingMemory": "8Gi",
        "hostSleepMemory": "512Gi", "meterLag": "1m15s", "slots": 4, "taint": "nvidia.com/gpu",
        "acceleratorTypeLabel": "gpu", "resource": "example.com/gpu", "gpuAccess": "runtimeClass",
        "runtimeClassName": "nvidia-legacy", "allowedNamespaces": ["chat", "batch"],
        "namespaceQuota": { "chat": "800Gi", "*": 0 }, "maxPriority": 10, "pinnable": false,
    });
    let ledger = Ledger { next: 8, reservations: vec![reservation(7)] };
    let status = json!({
        "observedGeneration": 1, "nodes": 2, "accelerators": 16, "total": "1200Gi", "allocated": "80Gi",
        "available": "1120Gi", "count": 1, "epoch": 178_000_123, "ledger": ledger,
        "conditions": [condition("Ready", "Ready", "")],
    });
    (spec, status)
}

pub(crate) fn full_node() -> (Value, Value) {
    let uuid = "GPU-7c0d5f9e-2f4b-4e0a-9d2f-6a1f0c3b5a77";
    let status = json!({
        "count": 1, "healthy": 1, "type": "NVIDIA-H200", "total": "80Gi", "reserved": "40Gi",
        "accelerators": [{
            "uuid": uuid, "index": 0, "capacity": "79Gi", "healthy": true, "configuration": "h200", "slots": 8,
            "lastSleep": MOMENT, "lastSeen": MOMENT,
        }],
        "partial": true,
        "reservations": [{
            "id": 7, "model": "chat/llama", "variant": "h100", "replica": 0, "bytes": "40Gi", "hostBytes": "0", "uuids": [uuid],
            "state": "Placed",
        }],
        "conditions": [condition("Ready", "Ready", "")],
    });
    (json!({ "pool": "default" }), status)
}

pub(crate) fn full_replica() -> (Value, Value) {
    let demand = json!({ "waiting": 3, "inFlight": 5, "lastRequest": MOMENT });
    let status = json!({
        "waiting": 3, "inFlight": 5, "models": { "meta-llama/Llama-3.3-70B-Instruct": demand }, "renewed": MOMENT,
        "conditions": [condition("SeesAll", "Granted", "It may see all that it is configured for.")],
    });
    (json!({ "address": "10.0.0.7:8080" }), status)
}

pub(crate) fn full_warmup() -> (Value, Value) {
    let spec = json!({
        "paused": true,
        "policies": {
            "parallelism": 10, "backoffLimit": 3, "timeoutSeconds": 300, "ttlSecondsAfterFinished": 86_400,
            "maxFailedNodes": 1,
        },
        "tolerations": [
            { "key": "gpu", "operator": "Equal", "value": "a", "effect": "NoExecute", "tolerationSeconds": 60 },
        ],
        "targetNodes": with_actions(json!({ "nodeSelector": { "pool": "gpu" }, "nodeNames": ["gpu-node-1"] })),
    });
    let node = json!({
        "node": "gpu-node-1", "item": "image1:tag1", "state": "Pending", "cause": "Network", "message": "It is slow.",
        "attempts": 2, "nextTry": MOMENT, "durationMillis": 61_000, "digest": "sha256:0",
    });
    let record = json!({
        "state": "failed", "items": 7, "attempts": 4, "cause": "Auth", "nodes": "AAAAAAAA", "uids": "AAB",
    });
    let status = json!({
        "observedGeneration": 1, "phase": "InProgress", "target": "nodes", "startTime": MOMENT,
        "startGeneration": 1, "specHash": "0a", "completionTime": MOMENT, "desiredNodeNum": 5, "activeNodeNum": 1,
        "succeededNodeNum": 2, "failedNodeNum": 1,
        "failedNodes": ["gpu-node-2"],
        "items": { "pending": 1, "pulling": 2, "present": 3, "failed": 4, "skipped": 5 },
        "nodes": [node], "moreNodes": 1, "record": [record], "pausedSince": MOMENT, "pausedSeconds": 9,
        "conditions": [condition("Accepted", "Accepted", "")],
    });
    (spec, status)
}

/// Adds images and a custom action to what selects the nodes.
fn with_actions(mut target: Value) -> Value {
    target["imagesPreload"] = json!({ "items": ["image1:tag1"], "pullSecrets": ["secret1"] });
    target["customizedAction"] = json!({ "podTemplate": {
        "metadata": { "labels": { "team": "a" } }, "restartPolicy": "Never",
        "spec": { "containers": [{ "name": "copy", "image": "image1:tag1", "a-field-of-tomorrow": { "x": [1] } }] },
    } });
    target
}

/// The specs with the other two targets.
fn other_warmups() -> [Value; 2] {
    let roles = json!({ "prefill": with_actions(json!({})) });
    [
        json!({ "targetRoleBasedGroup": { "name": "sglang", "namespace": "chat", "roles": roles } }),
        json!({ "targetModel": { "name": "llama", "nodes": 3, "keepWarm": true } }),
    ]
}

pub(crate) fn full_device_configuration() -> (Value, Value) {
    let device =
        json!({ "id": "box-1", "properties": { "rack": "7" }, "nodes": ["gpu-node-1", "gpu-node-2"] });
    let spec = json!({
        "discovery": { "static": { "devices": [device] } },
        "nodeSelector": { "inference-pool": "shared" },
        "capacity": 5, "shared": true,
        "env": { "BOX": "$(id)" },
        "mounts": [{ "hostPath": "/var/models", "containerPath": "/models", "readOnly": true }],
        "devices": [{ "hostPath": "/dev/box", "containerPath": "/dev/box", "permissions": "rw" }],
        "unusedSeconds": 60,
    });
    let status = json!({
        "observedGeneration": 1, "devices": 1, "slots": 5, "usedSlots": 2,
        "conditions": [condition("Accepted", "Accepted", "")],
    });
    (spec, status)
}

/// The specs with the other two discoveries.
fn other_device_configurations() -> [Value; 2] {
    let endpoint = json!({ "url": "http://box-1:9000/", "properties": { "rack": "7" } });
    [
        json!({ "discovery": { "accelerators": {} } }),
        json!({ "discovery": { "http": { "endpoints": [endpoint], "intervalSeconds": 5, "timeoutSeconds": 1 } } }),
    ]
}

pub(crate) fn full_device_instance() -> (Value, Value) {
    let spec = json!({
        "configuration": "box", "shared": true, "capacity": 5, "deviceId": "box-1",
        "properties": { "rack": "7", "id": "box-1" },
    });
    let status = json!({
        "nodes": ["gpu-node-1", "gpu-node-2"],
        "deviceUsage": {
            "box-0123456789-0": "", "box-0123456789-1": "gpu-node-1", "box-0123456789-2": "C:box-0:gpu-node-2",
        },
        "unusedSince": { "box-0123456789-1": MOMENT },
    });
    (spec, status)
}

fn reservation(id: u64) -> Reservation {
    Reservation {
        id,
        model: ObjectName::new("chat", "llama"),
        variant: "h100".into(),
        replica: 1,
        count: 2,
        bytes: Bytes::gib(40),
        host_bytes: Bytes::gib(16),
        node: Some("gpu-node-1".into()),
        accelerators: vec![uuid(1), uuid(2)],
        state: ReservationState::Placed,
        since: Tick(1_795_000_000_000),
    }
}

fn uuid(seed: u64) -> AcceleratorId {
    let bits = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    AcceleratorId::from(format!("GPU-{:08x}-{:04x}-4000-8000-{seed:012x}", bits >> 32, bits >> 16 & 0xffff))
}

/// Collects the schema's fields that none of these values has.
fn missing(path: &str, schema: &JSONSchemaProps, values: &[&Value], into: &mut Vec<String>) {
    for (name, below) in schema.properties.iter().flatten() {
        let path = format!("{path}.{name}");
        let there: Vec<_> = values.iter().filter_map(|value| value.get(name)).collect();
        if there.is_empty() {
            into.push(path);
        } else {
            missing(&path, below, &there, into);
        }
    }
    if let Some(JSONSchemaPropsOrArray::Schema(items)) = &schema.items {
        let there: Vec<_> = values.iter().filter_map(|value| value.as_array()).flatten().collect();
        missing(&format!("{path}[]"), items, &there, into);
    }
    if let Some(JSONSchemaPropsOrBool::Schema(each)) = &schema.additional_properties {
        let there: Vec<_> =
            values.iter().filter_map(|value| value.as_object()).flat_map(|map| map.values()).collect();
        missing(&format!("{path}.*"), each, &there, into);
    }
}

/// An API of this kind for untyped objects.
fn api<K: kube::Resource<DynamicType = ()>>(site: &GatewayNamespace<'_>) -> Api<DynamicObject> {
    let resource = ApiResource::erase::<K>(&());
    let definition = crd::all().into_iter().find(|crd| crd.spec.names.kind == K::kind(&())).unwrap();
    match definition.spec.scope.as_str() {
        "Namespaced" => Api::namespaced_with(site.admin.clone(), &site.namespace, &resource),
        _ => Api::all_with(site.admin.clone(), &resource),
    }
}

fn object<K: kube::Resource<DynamicType = ()>>(name: &str, spec: &Value) -> DynamicObject {
    let resource = ApiResource::erase::<K>(&());
    DynamicObject::new(name, &resource).data(json!({ "spec": spec }))
}

/// Creates an object, reads it back, and then writes its status, which changes nothing else.
async fn kept<K: kube::Resource<DynamicType = ()>>(
    site: &GatewayNamespace<'_>,
    name: &str,
    (spec, status): (Value, Value),
) {
    let api = api::<K>(site);
    let mut made = api.create(&PostParams::default(), &object::<K>(name, &spec)).await.unwrap();
    assert_eq!(api.get(name).await.unwrap().data["spec"], spec);
    let generation = made.metadata.generation;
    // A definition may have a default status for objects that no gateway has read yet.
    let before = made.data.get("status").cloned();
    assert_ne!(before.as_ref(), Some(&status));

    made.data = json!({ "spec": spec, "status": status });
    let made = api.replace(name, &PostParams::default(), &made).await.unwrap();
    assert_eq!(made.data.get("status"), before.as_ref(), "the status is written by its own door alone");

    let mut told = made.clone();
    told.data = json!({ "spec": {}, "status": status });
    api.replace_status(name, &PostParams::default(), &told).await.unwrap();
    let there = api.get(name).await.unwrap();
    assert_eq!(there.data, json!({ "spec": spec, "status": status }));
    assert_eq!(there.metadata.generation, generation, "a status is no change of what is wanted");
}

#[tokio::test]
async fn every_field_of_every_kind_comes_back_as_it_was_written() {
    let cluster = own_cluster().await;
    let site = GatewayNamespace::new(&cluster, "objects").await;
    let name = site.namespace.name();
    let written = [
        ("InferenceModel", full_model()),
        ("AcceleratorPool", full_pool()),
        ("AcceleratorNode", full_node()),
        ("GatewayReplica", full_replica()),
        ("Warmup", full_warmup()),
        ("DeviceConfiguration", full_device_configuration()),
        ("DeviceInstance", full_device_instance()),
    ];
    for (definition, (kind, (spec, status))) in crd::all().iter().zip(&written) {
        assert_eq!(definition.spec.names.kind, *kind);
        let schema =
            definition.spec.versions[0].schema.as_ref().unwrap().open_api_v3_schema.as_ref().unwrap();
        let of = |part: &str| &schema.properties.as_ref().unwrap()[part];
        let mut not_tried = Vec::new();
        let others = match *kind {
            "InferenceModel" => other_models().to_vec(),
            "Warmup" => other_warmups().to_vec(),
            "DeviceConfiguration" => other_device_configurations().to_vec(),
            _ => Vec::new(),
        };
        let mut specs = vec![spec];
        specs.extend(&others);
        missing("spec", of("spec"), &specs, &mut not_tried);
        missing("status", of("status"), &[status], &mut not_tried);
        assert!(not_tried.is_empty(), "{kind}: {not_tried:?}");
    }
    let [
        (_, model),
        (_, pool),
        (_, node),
        (_, replica),
        (_, warmup),
        (_, device_configuration),
        (_, device_instance),
    ] = written;
    kept::<InferenceModel>(&site, name, model).await;
    kept::<AcceleratorPool>(&site, name, pool).await;
    kept::<AcceleratorNode>(&site, name, node).await;
    kept::<GatewayReplica>(&site, name, replica).await;
    kept::<Warmup>(&site, name, warmup).await;
    kept::<DeviceConfiguration>(&site, name, device_configuration).await;
    kept::<DeviceInstance>(&site, name, device_instance).await;
}

#[tokio::test]
async fn what_is_left_out_is_filled_in_as_the_types_say() {
    let site = GatewayNamespace::new(cluster().await, "defaults").await;
    let models = api::<InferenceModel>(&site);
    for (n, spec) in other_models().iter().enumerate() {
        let name = format!("model-{n}");
        let made =
            models.create(&PostParams::default(), &object::<InferenceModel>(&name, spec)).await.unwrap();
        let typed: InferenceModelSpec = serde_json::from_value(spec.clone()).unwrap();
        let there: InferenceModelSpec = serde_json::from_value(made.data["spec"].clone()).unwrap();
        assert_eq!(there, typed, "the types fill in something else than the schema");
        let mut filled = made.data["spec"].clone();
        let given = spec.as_object().unwrap();
        filled.as_object_mut().unwrap().retain(|name, _| !given.contains_key(name));
        let mut want = json!({
            "accelerators": 1, "cooldownPeriod": "10m", "maxReplicas": 1, "minReplicas": 0, "mode": "deployment",
            "nodeSelector": { "inference-pool": "default" }, "pinned": false, "priority": 0, "startTimeout": "5m",
            "warmup": "never",
            "engine": {
                "kind": "custom", "level": "auto", "onDisconnect": "abort", "port": 8000, "rehearse": "never",
                "sleepMode": "auto", "task": "generate",
            },
        });
        want.as_object_mut().unwrap().retain(|name, _| !given.contains_key(name));
        assert_eq!(filled, want);
    }
    // A partial engine, and nulls for fields without a value.
    let spec = json!({
        "modelName": "half", "memory": "1Gi", "containerImage": "x", "engine": { "kind": "vllm", "port": null },
        "priority": null, "eviction": null,
    });
    let made = models.create(&PostParams::default(), &object::<InferenceModel>("half", &spec)).await.unwrap();
    let engine = &made.data["spec"]["engine"];
    assert_eq!(
        (&engine["kind"], &engine["port"], &engine["task"]),
        (&json!("vllm"), &json!(8000), &json!("generate"))
    );
    assert_eq!(
        (made.data["spec"].get("priority"), made.data["spec"].get("eviction")),
        (Some(&json!(0)), None)
    );

    let spec = json!({ "nodeSelector": { "a": "b" } });
    let pools = api::<AcceleratorPool>(&site);
    let made = pools
        .create(&PostParams::default(), &object::<AcceleratorPool>(&site.namespace, &spec))
        .await
        .unwrap();
    let want = json!({
        "nodeSelector": { "a": "b" }, "acceleratorTypeLabel": "nvidia.com/gpu.product", "gpuAccess": "envvar",
        "pinnable": true, "resource": "nvidia.com/gpu", "meterLag": "1m", "slots": 1,
    });
    assert_eq!(made.data["spec"], want);

    let spec = json!({
        "discovery": { "http": { "endpoints": [{ "url": "http://box-1:9000/" }] } },
        "mounts": [{ "hostPath": "/a", "containerPath": "/a" }],
        "devices": [{ "hostPath": "/dev/a", "containerPath": "/dev/a" }],
    });
    let configurations = api::<DeviceConfiguration>(&site);
    let made = configurations
        .create(&PostParams::default(), &object::<DeviceConfiguration>(&site.namespace, &spec))
        .await
        .unwrap();
    let mut want = spec;
    want["capacity"] = json!(1);
    want["unusedSeconds"] = json!(300);
    want["discovery"]["http"]["intervalSeconds"] = json!(10);
    want["discovery"]["http"]["timeoutSeconds"] = json!(2);
    want["mounts"][0]["readOnly"] = json!(false);
    want["devices"][0]["permissions"] = json!("rwm");
    assert_eq!(made.data["spec"], want);
}

/// 1,000 nodes with 8 accelerators; one awake and four sleeping engines on each accelerator, of 2,000 models.
fn a_large_ledger() -> Ledger {
    let one = |id: u64| {
        let (node, layer, model) = (id / 8 % 1000, id / 8000, id * 7919 % 2000);
        Reservation {
            model: ObjectName::new(format!("team-{}", model % 50), format!("model-{model}-instruct")),
            variant: VariantName::default(),
            replica: (id / 2000) as u32,
            count: 1,
            bytes: if layer == 0 { Bytes::gib(60) } else { Bytes(2_863_311_530) },
            host_bytes: if layer == 0 { Bytes::ZERO } else { Bytes::gib(16) },
            node: Some(format!("gpu-node-{node:04}.example.internal")),
            accelerators: vec![uuid(node * 8 + id % 8)],
            state: if layer == 0 { ReservationState::Placed } else { ReservationState::Asleep },
            since: Tick((1_795_000_000 + id * 7_919_993 % 2_600_000) * 1000),
            ..reservation(1_000_000 + id * 3)
        }
    };
    Ledger { next: 2_000_000, reservations: (0..40_000).map(one).collect() }
}

#[tokio::test]
async fn a_ledger_of_forty_thousand_is_kept_and_booked_in() {
    let site = GatewayNamespace::new(cluster().await, "large").await;
    let name = site.namespace.name().to_owned();
    let ledger = a_large_ledger();
    let total = Bytes(ledger.allocated().0 + Bytes::gib(100).0);
    let mut made = pool(&site.admin, &name, total).await;
    made.status.as_mut().unwrap().ledger = ledger.clone();
    let pools: Api<AcceleratorPool> = Api::all(site.admin.clone());
    pools.replace_status(&name, &PostParams::default(), &made).await.unwrap();
    let there = pools.get(&name).await.unwrap();
    let size = serde_json::to_string(&there).unwrap().len();
    println!("{size} bytes for {} reservations", ledger.reservations.len());
    assert!(size < 3 << 19, "{size} bytes: beyond what etcd takes");
    assert_eq!(there.status.unwrap().ledger, ledger);

    let (election, _) = site.leader("only").await;
    let books = PoolLedger::new(site.client().await, election.leadership());
    let begun = tokio::time::Instant::now();
    let reserve = |ledger: &mut Ledger, total| {
        ledger.reserve(&reservation_request("one-more", Bytes::gib(100)), total, Tick(0))
    };
    let id = books.change(&name, reserve).await.unwrap();
    println!("one more was reserved in {:?}", begun.elapsed());
    let after = pools.get(&name).await.unwrap().status.unwrap();
    assert_eq!((id, after.ledger.reservations.len(), after.ledger.allocated()), (ledger.next, 40_001, total));
    let states = after.ledger.reservations.iter().fold(BTreeMap::new(), |mut count, one| {
        *count.entry(one.state).or_insert(0) += 1;
        count
    });
    assert_eq!(states[&ReservationState::Asleep], 32_000);
}
