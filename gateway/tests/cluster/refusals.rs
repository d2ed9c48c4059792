//! What a schema refuses, and its messages: each case spoils a valid object in one place.

use kube::{
    Api,
    api::{ApiResource, DynamicObject, PostParams},
};
use rouse_controllers::crd::{
    AcceleratorNode, AcceleratorPool, DeviceConfiguration, DeviceInstance, GatewayReplica, InferenceModel,
    Warmup,
};
use serde_json::{Value, json};

use crate::{
    objects::{
        full_device_configuration, full_device_instance, full_model, full_node, full_pool, full_replica,
        full_warmup,
    },
    support::cluster,
};

/// The change to the valid object, and the texts of the refusal: the field, and its value or the expected one.
type RefusedSpecCase<'a> = (Value, &'a [&'a str]);

fn merge(into: &mut Value, more: &Value) {
    match (into, more) {
        (Value::Object(into), Value::Object(more)) => {
            for (key, value) in more {
                if value.is_null() {
                    into.remove(key);
                } else {
                    merge(into.entry(key).or_insert(Value::Null), value);
                }
            }
        }
        (into, more) => *into = more.clone(),
    }
}

async fn refuses<K: kube::Resource<DynamicType = ()>>(
    api: Api<DynamicObject>,
    good: Value,
    rows: &[RefusedSpecCase<'_>],
) {
    let resource = ApiResource::erase::<K>(&());
    let try_it = PostParams { dry_run: true, ..PostParams::default() };
    let object = |spec: &Value| DynamicObject::new("spoiled", &resource).data(json!({ "spec": spec }));
    let outcome = api.create(&try_it, &object(&good)).await;
    assert!(outcome.is_ok(), "the good one is refused: {outcome:?}");
    let mut wrong = Vec::new();
    for (spoil, words) in rows {
        let mut spec = good.clone();
        merge(&mut spec, spoil);
        match api.create(&try_it, &object(&spec)).await {
            Err(kube::Error::Api(status)) if status.code == 422 => {
                println!("{spoil}\n    {}", status.message);
                if !words.iter().all(|word| status.message.contains(word)) {
                    wrong.push(format!("{spoil}: {words:?} is not in: {}", status.message));
                }
            }
            other => wrong.push(format!("{spoil}: {other:?}")),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[tokio::test]
async fn a_model_with_junk_is_refused_with_words_for_people() {
    let cluster = cluster().await;
    let namespace = cluster.namespace("refusals").await.unwrap();
    let client = namespace.client();
    let resource = ApiResource::erase::<InferenceModel>(&());
    let api = || Api::namespaced_with(client.clone(), &namespace, &resource);

    let mut rows: Vec<RefusedSpecCase<'_>> = Vec::new();
    for field in ["memory", "memoryAsleep", "hostMemory"] {
        for junk in [
            json!("lots"),
            json!("80 Gi"),
            json!("-1Gi"),
            json!(-1),
            json!("1e9"),
            json!("1500m"),
            json!("80GiB"),
            json!(""),
            json!(1.5),
            json!(true),
            json!({}),
            json!("1".repeat(33)),
        ] {
            rows.push((
                json!({ field: junk }),
                if field == "memory" { &["spec.memory: "] } else { &["spec."] },
            ));
        }
    }
    rows.extend([
        (json!({ "memory": null }), &["memory is missing", "such as 80Gi"][..]),
        (json!({ "memory": "lots" }), &["spec.memory", "\"lots\"", "Ki|Mi|Gi"]),
        (json!({ "memory": 0 }), &["spec.memory", "greater than or equal to 1"]),
        (json!({ "memory": "0Gi" }), &["spec.memory", "\"0Gi\""]),
        (json!({ "modelName": null }), &["spec.modelName: Required value"]),
        (json!({ "modelName": "" }), &["spec.modelName", "at least 1 chars"]),
        (json!({ "modelName": "two words" }), &["spec.modelName", "two words"]),
        (json!({ "modelName": "x".repeat(257) }), &["spec.modelName", "256"]),
        (json!({ "aliases": ["a", "a"] }), &["spec.aliases[1]: Duplicate value: \"a\""]),
        (
            json!({ "aliases": ["meta-llama/Llama-3.3-70B-Instruct"] }),
            &["modelName is also listed in aliases: remove it there"],
        ),
        (json!({ "accelerators": 0 }), &["spec.accelerators", "greater than or equal to 1"]),
        (json!({ "accelerators": 65 }), &["spec.accelerators", "less than or equal to 64"]),
        (json!({ "accelerators": "two" }), &["spec.accelerators", "must be of type integer: \"string\""]),
        (json!({ "accelerators": 1.5 }), &["spec.accelerators", "integer"]),
        (json!({ "nodeSelector": [] }), &["spec.nodeSelector", "must be of type object"]),
        (
            json!({ "mode": "cloud" }),
            &["spec.mode: Unsupported value: \"cloud\"", "\"deployment\", \"dualPods\", \"external\""],
        ),
        (
            json!({ "mode": "external" }),
            &["mode external needs a backendUrl, and backendUrl is only for mode external"],
        ),
        (
            json!({ "backendUrl": "http://x" }),
            &["mode external needs a backendUrl, and backendUrl is only for mode external"],
        ),
        (json!({ "mode": "external", "backendUrl": "ftp://x" }), &["spec.backendUrl", "ftp://x"]),
        (
            json!({ "mode": "external", "backendUrl": "http://x" }),
            &["Rouse does not start, put to sleep, stop or scale the backend of mode external"],
        ),
        (
            json!({ "template": null }),
            &["set exactly one of template and containerImage, and neither in mode external"],
        ),
        (
            json!({ "containerImage": "x" }),
            &["set exactly one of template and containerImage, and neither in mode external"],
        ),
        (json!({ "resources": {} }), &["resources is only for containerImage"]),
        (json!({ "template": { "spec": null } }), &["spec.template.spec: Required value"]),
        (
            json!({ "template": { "spec": { "containers": [] } } }),
            &["spec.template.spec.containers", "at least 1 items"],
        ),
        (
            json!({ "template": { "spec": { "containers": [{}] } } }),
            &["spec.template.spec.containers[0].name: Required value"],
        ),
        (
            json!({ "engine": { "kind": "tgi" } }),
            &["spec.engine.kind: Unsupported value: \"tgi\"", "llama-cpp"],
        ),
        (json!({ "engine": { "port": 0 } }), &["spec.engine.port", "greater than or equal to 1"]),
        (json!({ "engine": { "port": 70_000 } }), &["spec.engine.port", "65535"]),
        (json!({ "engine": { "level": 3 } }), &["spec.engine.level", "less than or equal to 2"]),
        (json!({ "engine": { "level": 1.5 } }), &["spec.engine.level", "integer"]),
        (json!({ "engine": { "level": "3" } }), &["spec.engine.level: Invalid value: \"3\"", "never"]),
        (json!({ "engine": { "task": "dream" } }), &["spec.engine.task: Unsupported value"]),
        (json!({ "engine": { "sleepMode": "deep" } }), &["spec.engine.sleepMode: Unsupported value"]),
        (json!({ "engine": { "onDisconnect": "wait" } }), &["spec.engine.onDisconnect: Unsupported value"]),
        (json!({ "engine": { "passthrough": ["no-slash"] } }), &["spec.engine.passthrough[0]", "no-slash"]),
        (
            json!({ "variants": [{ "name": "a" }, { "name": "a" }] }),
            &["spec.variants[1]: Duplicate value", "\"name\":\"a\""],
        ),
        (json!({ "variants": [{}] }), &["spec.variants[0].name: Required value"]),
        (json!({ "variants": [{ "name": "No_Label" }] }), &["spec.variants[0].name", "No_Label"]),
        (
            json!({ "variants": [{ "name": "a", "cost": -1 }] }),
            &["spec.variants[0].cost", "greater than or equal to 0"],
        ),
        (
            json!({ "variants": [{ "name": "a", "memory": "some" }] }),
            &["spec.variants[0].memory", "\"some\""],
        ),
        (
            json!({ "variants": [{ "name": "a", "minReplicas": 3, "maxReplicas": 2 }] }),
            &["minReplicas must be at most maxReplicas"],
        ),
        (json!({ "minReplicas": 5, "variants": null }), &["minReplicas must be at most maxReplicas"]),
        (json!({ "maxReplicas": 0 }), &["spec.maxReplicas", "greater than or equal to 1"]),
        (json!({ "cooldownPeriod": "soon" }), &["spec.cooldownPeriod", "\"soon\"", "ms|s|m|h"]),
        (json!({ "cooldownPeriod": 10 }), &["spec.cooldownPeriod", "must be of type string: \"integer\""]),
        (json!({ "stopAfter": "1m" }), &["stopAfter is shorter than cooldownPeriod"]),
        (json!({ "startTimeout": "never" }), &["spec.startTimeout", "\"never\""]),
        (
            json!({ "eviction": "sometimes" }),
            &["spec.eviction: Unsupported value", "\"residency\", \"cooldown\", \"never\""],
        ),
        (json!({ "pinned": "yes" }), &["spec.pinned", "must be of type boolean: \"string\""]),
        (json!({ "priority": 1001 }), &["spec.priority", "less than or equal to 1000"]),
        (json!({ "maxConcurrency": 0 }), &["spec.maxConcurrency", "greater than or equal to 1"]),
        (
            json!({ "queue": { "policy": "drop" } }),
            &["spec.queue.policy: Unsupported value", "\"wait\", \"reject\""],
        ),
        (json!({ "queue": { "maxWait": "long" } }), &["spec.queue.maxWait", "\"long\""]),
        (json!({ "queue": { "maxWaiting": -1 } }), &["spec.queue.maxWaiting", "greater than or equal to 0"]),
        (json!({ "dependencies": ["spoiled"] }), &["the model depends on itself"]),
        (json!({ "dependencies": ["Not A Name"] }), &["spec.dependencies[0]", "Not A Name"]),
        (json!({ "replicas": -1 }), &["spec.replicas", "greater than or equal to 0"]),
        (json!({ "replicas": null }), &["replicas is for saturation.actuation external, which needs it"]),
        (
            json!({ "saturation": { "actuation": "own" } }),
            &["replicas is for saturation.actuation external, which needs it"],
        ),
        (
            json!({ "saturation": { "actuation": "hpa" } }),
            &["spec.saturation.actuation: Unsupported value", "\"own\", \"external\""],
        ),
        (
            json!({ "saturation": { "profile": "v2" } }),
            &["spec.saturation.profile: Unsupported value", "\"doc\", \"latest\", \"rouse\""],
        ),
        (
            json!({ "saturation": { "mayEvict": "busy" } }),
            &["spec.saturation.mayEvict: Unsupported value", "\"idle\", \"never\""],
        ),
        (
            json!({ "saturation": { "analyzer": "v2" } }),
            &["spec.saturation.analyzer: Unsupported value", "\"percent\", \"tokens\""],
        ),
        (
            json!({ "saturation": { "limiter": "quota" } }),
            &["spec.saturation.limiter: Unsupported value", "\"none\", \"inventory\""],
        ),
        (
            json!({ "saturation": { "scaleToZero": { "enabled": false } } }),
            &["after is only for enabled true: remove it"],
        ),
        (
            json!({ "saturation": { "scaleToZero": { "after": "never" } } }),
            &["spec.saturation.scaleToZero.after", "\"never\""],
        ),
        (
            json!({ "variants": [{ "name": "a", "role": "draft" }] }),
            &["spec.variants[0].role: Unsupported value", "\"both\", \"decode\", \"prefill\""],
        ),
        (
            json!({ "saturation": { "stabilisation": "never" } }),
            &["spec.saturation.stabilisation", "\"never\""],
        ),
        (
            json!({ "saturation": { "kvCacheThreshold": 80 } }),
            &["spec.saturation.kvCacheThreshold", "less than or equal to 1"],
        ),
        (
            json!({ "saturation": { "kvSpareTrigger": 0.9 } }),
            &["kvSpareTrigger must be at most kvCacheThreshold"],
        ),
        (
            json!({ "saturation": { "queueSpareTrigger": 6 } }),
            &["queueSpareTrigger must be at most queueLengthThreshold"],
        ),
    ]);
    refuses::<InferenceModel>(api(), full_model().0, &rows).await;

    let short = json!({ "modelName": "m", "memory": "1Gi", "containerImage": "x" });
    let rows: Vec<RefusedSpecCase<'_>> = vec![
        (json!({ "nodeSelector": {} }), &["spec.nodeSelector", "at least 1 properties"]),
        (json!({ "resources": { "limits": { "gpu": "one" } } }), &["spec.resources.limits.gpu", "\"one\""]),
        (
            json!({ "resources": { "requests": { "cpu": "many" } } }),
            &["spec.resources.requests.cpu", "\"many\""],
        ),
        (
            json!({ "resources": { "limits": { "memory": "lots" } } }),
            &["spec.resources.limits.memory", "\"lots\""],
        ),
        (json!({ "containerImage": "" }), &["spec.containerImage", "at least 1 chars"]),
    ];
    refuses::<InferenceModel>(api(), short, &rows).await;
}

#[tokio::test]
async fn so_are_pools_nodes_replicas_and_warmups() {
    let cluster = cluster().await;
    let namespace = cluster.namespace("refusals").await.unwrap();
    let client = namespace.client();
    let everywhere = |resource: ApiResource| Api::all_with(client.clone(), &resource);

    let rows: Vec<RefusedSpecCase<'_>> = vec![
        (json!({ "nodeSelector": null }), &["spec.nodeSelector: Required value"]),
        (json!({ "memory": "lots" }), &["spec.memory", "\"lots\""]),
        (json!({ "memory": 0 }), &["spec.memory", "greater than or equal to 1"]),
        (json!({ "sleepingMemory": "little" }), &["spec.sleepingMemory", "\"little\""]),
        (json!({ "hostSleepMemory": "-1" }), &["spec.hostSleepMemory", "\"-1\""]),
        (json!({ "meterLag": "a while" }), &["spec.meterLag", "a while"]),
        (json!({ "slots": 0 }), &["spec.slots", "greater than or equal to 1"]),
        (json!({ "taint": "" }), &["spec.taint", "at least 1 chars"]),
        (
            json!({ "gpuAccess": "root", "runtimeClassName": null }),
            &["spec.gpuAccess: Unsupported value: \"root\"", "\"privileged\""],
        ),
        (json!({ "gpuAccess": "envvar" }), &["runtimeClassName is only for gpuAccess runtimeClass"]),
        (json!({ "allowedNamespaces": ["a", "a"] }), &["spec.allowedNamespaces[1]: Duplicate value: \"a\""]),
        (json!({ "namespaceQuota": { "a": "lots" } }), &["spec.namespaceQuota.a", "\"lots\""]),
        (json!({ "maxPriority": 1001 }), &["spec.maxPriority", "less than or equal to 1000"]),
        (json!({ "pinnable": 1 }), &["spec.pinnable", "must be of type boolean: \"integer\""]),
    ];
    let pools = everywhere(ApiResource::erase::<AcceleratorPool>(&()));
    refuses::<AcceleratorPool>(pools, full_pool().0, &rows).await;

    let rows: Vec<RefusedSpecCase<'_>> =
        vec![(json!({ "pool": 1 }), &["spec.pool", "must be of type string: \"integer\""])];
    let nodes = everywhere(ApiResource::erase::<AcceleratorNode>(&()));
    refuses::<AcceleratorNode>(nodes, full_node().0, &rows).await;

    let rows: Vec<RefusedSpecCase<'_>> = vec![
        (json!({ "address": null }), &["spec.address: Required value"]),
        (json!({ "address": "" }), &["spec.address", "at least 1 chars"]),
    ];
    let replicas =
        Api::namespaced_with(client.clone(), &namespace, &ApiResource::erase::<GatewayReplica>(&()));
    refuses::<GatewayReplica>(replicas, full_replica().0, &rows).await;

    const ONE_TARGET: &str = "set exactly one of targetNodes, targetRoleBasedGroup and targetModel";
    let rows: Vec<RefusedSpecCase<'_>> = vec![
        (json!({ "targetNodes": null }), &[ONE_TARGET][..]),
        (json!({ "targetModel": { "name": "a" } }), &[ONE_TARGET]),
        (json!({ "targetRoleBasedGroup": { "name": "a" } }), &[ONE_TARGET]),
        (
            json!({ "targetNodes": null, "targetModel": { "nodes": 0 } }),
            &["spec.targetModel.name: Required value", "spec.targetModel.nodes"],
        ),
        (
            json!({ "policies": { "parallelism": 0 } }),
            &["spec.policies.parallelism", "greater than or equal to 1"],
        ),
        (
            json!({ "policies": { "backoffLimit": -1 } }),
            &["spec.policies.backoffLimit", "greater than or equal to 0"],
        ),
        (
            json!({ "policies": { "timeoutSeconds": "5m" } }),
            &["spec.policies.timeoutSeconds", "integer: \"string\""],
        ),
        (
            json!({ "targetNodes": { "customizedAction": { "podTemplate": null } } }),
            &["spec.targetNodes.customizedAction.podTemplate: Required value"],
        ),
    ];
    let warmups = Api::namespaced_with(client.clone(), &namespace, &ApiResource::erase::<Warmup>(&()));
    refuses::<Warmup>(warmups, full_warmup().0, &rows).await;
}

#[tokio::test]
async fn so_are_devices() {
    let cluster = cluster().await;
    let namespace = cluster.namespace("refusals").await.unwrap();
    let client = namespace.client();
    let everywhere = |resource: ApiResource| Api::all_with(client.clone(), &resource);

    const ONE_DISCOVERY: &str = "set exactly one of accelerators, static and http";
    let http = |fields: Value| {
        let mut http = json!({ "endpoints": [{ "url": "http://box/" }] });
        merge(&mut http, &fields);
        json!({ "discovery": { "static": null, "http": http } })
    };
    let mounts =
        json!([{ "hostPath": "/a", "containerPath": "/m" }, { "hostPath": "/b", "containerPath": "/m" }]);
    let rows: Vec<RefusedSpecCase<'_>> = vec![
        (json!({ "discovery": null }), &["spec.discovery: Required value"][..]),
        (json!({ "discovery": { "static": null } }), &[ONE_DISCOVERY]),
        (json!({ "discovery": { "accelerators": {} } }), &[ONE_DISCOVERY]),
        (
            json!({ "discovery": { "static": null, "accelerators": {} } }),
            &["nodes cannot share accelerators"],
        ),
        (
            json!({ "discovery": { "static": { "devices": [] } } }),
            &["spec.discovery.static.devices", "at least 1"],
        ),
        (
            json!({ "discovery": { "static": { "devices": [{ "id": "a" }, { "id": "a" }] } } }),
            &["spec.discovery.static.devices[1]: Duplicate value"],
        ),
        (http(json!({ "timeoutSeconds": 11 })), &["timeoutSeconds must be at most intervalSeconds"]),
        (http(json!({ "intervalSeconds": 0 })), &["spec.discovery.http.intervalSeconds"]),
        (http(json!({ "endpoints": [{}] })), &["spec.discovery.http.endpoints[0].url: Required value"]),
        (json!({ "capacity": 0 }), &["spec.capacity", "greater than or equal to 1"]),
        (json!({ "capacity": 257 }), &["spec.capacity", "less than or equal to 256"]),
        (json!({ "unusedSeconds": 0 }), &["spec.unusedSeconds", "greater than or equal to 1"]),
        (json!({ "mounts": mounts }), &["spec.mounts[1]: Duplicate value"]),
        (
            json!({ "devices": [{ "hostPath": "/a", "containerPath": "/a", "permissions": "x" }] }),
            &["spec.devices[0].permissions", "^[rwm]{1,3}$"],
        ),
    ];
    let configurations = everywhere(ApiResource::erase::<DeviceConfiguration>(&()));
    refuses::<DeviceConfiguration>(configurations, full_device_configuration().0, &rows).await;

    let rows: Vec<RefusedSpecCase<'_>> = vec![
        (json!({ "configuration": null }), &["spec.configuration: Required value"][..]),
        (json!({ "deviceId": "" }), &["spec.deviceId", "at least 1 chars"]),
        (json!({ "capacity": 0 }), &["spec.capacity", "greater than or equal to 1"]),
    ];
    let instances = everywhere(ApiResource::erase::<DeviceInstance>(&()));
    refuses::<DeviceInstance>(instances, full_device_instance().0, &rows).await;
}
