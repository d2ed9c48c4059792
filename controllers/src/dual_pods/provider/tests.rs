use k8s_openapi::{api::apps::v1::ReplicaSet, apimachinery::pkg::api::resource::Quantity};
use rouse::{
    model::SleepLevelPolicy,
    pairing::{
        event::MemorySizes,
        ids::{PairingEngineId, ProviderMode, RequesterId},
    },
    units::{Bytes, Generation, Tick},
};

use super::*;
use crate::crd::pool::NVIDIA_GPU;

const SEED: &str = include_str!("seed.yaml");

fn seed() -> Pod {
    let mut pod: Pod = serde_saphyr::from_str(SEED).unwrap();
    pod.metadata.namespace = Some("ns".to_owned());
    // Fields that the API server, the scheduler and the kubelet add.
    let spec = pod.spec.as_mut().unwrap();
    spec.node_name = Some("somenode".to_owned());
    spec.priority = Some(7);
    let injected =
        json!({"name": "kube-api-access-x", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"});
    let mounts = spec.containers[0].volume_mounts.as_mut().unwrap();
    mounts.push(serde_json::from_value(injected).unwrap());
    let volume = json!({"name": "kube-api-access-x", "projected": {"sources": []}});
    spec.volumes.as_mut().unwrap().push(serde_json::from_value(volume).unwrap());
    pod
}

/// The seed's requester with this patch in place of its own.
fn patched_by(patch: &str) -> Pod {
    let mut pod = seed();
    let annotations = pod.metadata.annotations.as_mut().unwrap();
    annotations.insert("dual-pod.llm-d.ai/server-patch".to_owned(), patch.to_owned());
    pod
}

fn record(mode: ProviderMode) -> EngineRecord {
    EngineRecord {
        engine: PairingEngineId {
            mode,
            accelerators: ["GPU-3".into()].into(),
            fingerprint: EngineFingerprint(1 << 60),
        },
        generation: Generation(5),
        sizes: MemorySizes { awake: Bytes::gib(60), asleep: Bytes::gib(1), host: Bytes::ZERO },
        level: SleepLevelPolicy::Auto,
        stop_after: None,
        requester: Some(RequesterId::from("uid-1")),
        last_used: Tick(0),
    }
}

fn made(requester: &Pod, mode: ProviderMode, owner: Option<&RequesterOwner>) -> Result<Pod, Error> {
    let node = NodeName::from("somenode");
    let record = record(mode);
    let place =
        ProviderPlacement { node: &node, accelerators: &record.engine.accelerators, numbers: Some(&[3]) };
    build(requester, &place, &record, owner, NVIDIA_GPU).map(|made| made.pod)
}

/// Compares every field with what the public project makes; the intended differences have comments.
#[test]
fn the_seeds_requester_gets_the_seeds_provider() {
    let pod = made(&seed(), ProviderMode::Plain, None).unwrap();
    let wanted = json!({
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
            {"matchExpressions": [
                // The seed drops the user's node affinity. Here it stays, and the node is added to it.
                {"key": "nvidia.com/gpu.product", "operator": "In", "values": ["NVIDIA-A100-SXM4-80GB"]},
                {"key": "kubernetes.io/hostname", "operator": "In", "values": ["somenode"]},
            ]},
        ]}}},
        "containers": [{
            "name": "inference-server",
            "image": "docker.io/vllm/vllm-openai:v0.10.1.1",
            "command": ["vllm", "serve", "--port=8000",
                "/pvcs/local/hf/models--deepseek-ai--DeepSeek-R1-Distill-Qwen-32B/snapshots/711ad2ea6aa40cfca18895e8aca02ab92df1a746",
                "--max-model-len=32768"],
            "env": [
                {"name": "VLLM_CACHE_ROOT", "value": "/pvcs/shared/vllm"},
                {"name": "CUDA_VISIBLE_DEVICES", "value": "3"},
                // Otherwise CUDA's indices differ from the node's.
                {"name": "CUDA_DEVICE_ORDER", "value": "PCI_BUS_ID"},
            ],
            "resources": {
                "limits": {"nvidia.com/gpu": "0", "cpu": "2", "memory": "1Gi"},
                // The API server would set the request to the limit, which is the same.
                "requests": {"nvidia.com/gpu": "0"},
            },
            // As the API server merges: items that the patch adds precede items that it does not name.
            "volumeMounts": [
                {"name": "local", "readOnly": true, "mountPath": "/pvcs/local"},
                {"name": "shared", "mountPath": "/pvcs/shared"},
            ],
            // Otherwise the Pod is ready before the server is. The command has the port.
            "readinessProbe": {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 1},
        }],
        // A restarted server would take memory without a reservation.
        "restartPolicy": "Never",
        "volumes": [
            {"name": "local", "persistentVolumeClaim": {"claimName": "somenode-local"}},
            {"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}},
        ],
    });
    assert_eq!(serde_json::to_value(pod.spec.unwrap()).unwrap(), wanted);
    let metadata = pod.metadata;
    assert_eq!(metadata.name.as_deref(), Some("somenode-8-dual"));
    assert_eq!(metadata.owner_references, None, "it outlives its requester");
    assert_eq!(metadata.finalizers.unwrap(), [keys::PROVIDER_FINALIZER]);
    let annotations = metadata.annotations.unwrap();
    assert_eq!(annotations[keys::REQUESTER], "uid-1 example-request");
    assert_eq!(annotations[keys::ACCELERATORS], "GPU-3");
    let names: Vec<&String> = annotations.keys().collect();
    assert_eq!(names, [keys::ACCELERATORS, keys::NOMINAL, keys::REQUESTER, keys::SERVER_PORT, keys::ENGINE]);
}

#[test]
fn what_only_leads_requests_to_it_is_no_part_of_what_it_is() {
    let node = NodeName::from("somenode");
    let of = |pod: &Pod| patched_engine(pod, &node).unwrap().fingerprint;
    let mut routed = seed();
    routed.metadata.labels = Some([("team".to_owned(), "x".to_owned())].into());
    assert_eq!(of(&seed()), of(&routed));
    assert_eq!(patched_engine(&routed, &node).unwrap().labels["team"], "x");
    let mut scheduled = seed();
    scheduled.spec.as_mut().unwrap().node_name = None;
    assert_eq!(of(&seed()), of(&scheduled));
    let mut other = seed();
    let patch =
        other.metadata.annotations.as_mut().unwrap().get_mut("dual-pod.llm-d.ai/server-patch").unwrap();
    *patch = patch.replace("32768", "65536");
    assert_ne!(of(&seed()), of(&other));
    assert!(!patched_engine(&other, &node).unwrap().adapters);
    let patch =
        other.metadata.annotations.as_mut().unwrap().get_mut("dual-pod.llm-d.ai/server-patch").unwrap();
    *patch = patch.replace("--max-model-len=65536", "--enable-lora");
    assert!(patched_engine(&other, &node).unwrap().adapters, "{:?}", other.metadata.annotations);
    assert_ne!(
        of(&seed()),
        patched_engine(&seed(), &NodeName::from("another")).unwrap().fingerprint,
        "another volume"
    );
}

#[test]
fn a_provider_that_its_requesters_owner_would_count_is_refused() {
    let owner = |app: &str| RequesterOwner {
        name: "the ReplicaSet chat".to_owned(),
        selector: serde_json::from_value(json!({"matchLabels": {"app": app}})).unwrap(),
    };
    let mut requester = seed();
    requester.metadata.labels = Some(
        [("app", "chat"), ("pod-template-hash", "abc")].map(|(k, v)| (k.to_owned(), v.to_owned())).into(),
    );
    let error = made(&requester, ProviderMode::Sleep, Some(&owner("chat"))).unwrap_err();
    assert!(error.to_string().contains("counted by the ReplicaSet chat"), "{error}");
    let pod = made(&requester, ProviderMode::Sleep, Some(&owner("other"))).unwrap();
    let labels = pod.metadata.labels.unwrap();
    assert!(!labels.contains_key("pod-template-hash") && labels["app"] == "chat", "{labels:?}");
    assert_eq!(pod.metadata.name.as_deref(), Some("somenode-8-10000000-dual"));
}

#[test]
fn users_errors_say_what_is_wrong() {
    for (patch, says) in [
        ("{{ .Nowhere }}", "the server patch is not a valid template: line 1 has {{ .Nowhere }}"),
        ("a: [", "not a YAML or JSON object"),
        ("spec: {containers: [{image: x}]}", "spec.containers has an item without 'name'"),
        (
            "spec: {containers: [{name: inference-server, imagine: x}]}",
            "a field that Pods do not have: spec.containers.[0].imagine",
        ),
        (
            "spec: {containers: [{name: inference-server, $patch: delete}]}",
            "no container named inference-server",
        ),
        ("spec: {containers: [{name: inference-server, command: 7}]}", "the patched Pod is not a valid Pod"),
    ] {
        let error = made(&patched_by(patch), ProviderMode::Plain, None).unwrap_err().to_string();
        assert!(error.contains(says), "{patch}: {error}");
    }
    let mut bare = seed();
    bare.metadata.annotations = None;
    assert_eq!(made(&bare, ProviderMode::Plain, None).unwrap_err(), Error::NoPatch);
}

#[test]
fn providers_of_one_server_in_one_place_are_nominally_the_same() {
    let node = NodeName::from("somenode");
    let of = |requester: &Pod, numbers: &[u32]| {
        let record = record(ProviderMode::Sleep);
        let place = ProviderPlacement {
            node: &node,
            accelerators: &record.engine.accelerators,
            numbers: Some(numbers),
        };
        let pod = build(requester, &place, &record, None, NVIDIA_GPU).unwrap().pod;
        pod.metadata.annotations.unwrap()[keys::NOMINAL].clone()
    };
    let (mut routed, seed) = (seed(), seed());
    routed.metadata.labels = Some([("team".to_owned(), "x".to_owned())].into());
    let nominal = of(&seed, &[3]);
    assert_eq!(nominal.len(), 43, "256 bits in base64, without padding: {nominal}");
    assert_eq!(of(&routed, &[3]), nominal, "labels do not make another engine");
    assert_ne!(of(&seed, &[2]), nominal, "it would use another accelerator");
}

/// The example in the docs works as described.
#[test]
fn the_pages_example_gets_a_provider() {
    let page = include_str!("../../../../docs/dual-pods.md");
    let (_, rest) = page.split_once("```yaml object\n").unwrap();
    let (text, _) = rest.split_once("```").unwrap();
    let set: ReplicaSet = serde_saphyr::from_str(text).unwrap();
    let spec = set.spec.unwrap();
    let template = spec.template.unwrap();
    let mut requester = Pod { metadata: template.metadata.unwrap(), spec: template.spec, ..Pod::default() };
    requester.metadata.name = Some("chat-x".to_owned());
    let owner = RequesterOwner { name: "the ReplicaSet chat".to_owned(), selector: spec.selector };
    let pod = made(&requester, ProviderMode::Sleep, Some(&owner)).unwrap();
    let engine = &pod.spec.as_ref().unwrap().containers[0];
    assert_eq!(engine.command.as_ref().unwrap()[0], "vllm");
    assert_eq!(engine.args, None, "those were the stub's");
    let claim = pod.spec.as_ref().unwrap().volumes.as_ref().unwrap()[0].persistent_volume_claim.as_ref();
    assert_eq!(claim.unwrap().claim_name, "somenode-local");
    let wanted = record::memory_request(&requester).unwrap();
    assert_eq!(
        (wanted.awake, wanted.asleep, wanted.host),
        (Some(Bytes::gib(60)), Bytes::gib(2), Some(Bytes::gib(40)))
    );
}

/// A provider inherits the limits of its requester unless the server patch replaces them.
#[test]
fn a_provider_takes_neither_an_accelerator_of_its_pool_nor_a_slot() {
    let mut requester = patched_by("{}");
    let container = &mut requester.spec.as_mut().unwrap().containers[0];
    let amounts = [("rouse.dev/h100", "2"), ("rouse.dev/h100-0123456789", "1"), ("rdma/hca", "1")];
    let amounts: BTreeMap<String, Quantity> =
        amounts.map(|(name, amount)| (name.to_owned(), Quantity(amount.to_owned()))).into();
    let resources = container.resources.get_or_insert_default();
    resources.limits.get_or_insert_default().extend(amounts.clone());
    resources.requests = Some(amounts);
    let node = NodeName::from("somenode");
    let record = record(ProviderMode::Sleep);
    let place = ProviderPlacement { node: &node, accelerators: &record.engine.accelerators, numbers: None };
    for pool in ["rouse.dev/h100", "amd.com/gpu"] {
        let pod = build(&requester, &place, &record, None, pool).unwrap().pod;
        let resources = pod.spec.unwrap().containers[0].resources.clone().unwrap();
        for amounts in [resources.limits.unwrap(), resources.requests.unwrap()] {
            for name in ["rouse.dev/h100", "rouse.dev/h100-0123456789"] {
                assert!(!amounts.contains_key(name), "{pool}: a kubelet rejects even zero of {name}");
            }
            for name in [pool, NVIDIA_GPU] {
                assert!(amounts.get(name).is_none_or(|amount| amount.0 == "0"), "{pool}: {name}");
            }
            assert_eq!(amounts.contains_key(pool), pool == "amd.com/gpu", "{pool}");
            assert_eq!(amounts["rdma/hca"].0, "1", "it is no accelerator");
        }
    }
}
