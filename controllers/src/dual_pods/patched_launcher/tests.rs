use serde_json::json;

use super::*;

const SEED: &str = include_str!("../provider/seed.yaml");

fn seed() -> Pod {
    let mut pod: Pod = serde_saphyr::from_str(SEED).unwrap();
    pod.metadata.namespace = Some("ns".to_owned());
    pod
}

/// A requester with this server patch, whose stub has arguments and a readiness probe.
fn requester(patch: &Value) -> Pod {
    let stub = json!({
        "name": "inference-server",
        "image": "stub",
        "args": ["proxy"],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": 8080}},
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
    });
    let annotations = json!({keys::SERVER_PATCH: patch.to_string()});
    let metadata =
        json!({"name": "one", "namespace": "ns", "annotations": annotations, "labels": {"app": "one"}});
    serde_json::from_value(json!({"metadata": metadata, "spec": {"containers": [stub]}})).unwrap()
}

/// The server patch of a vLLM with these options, with the container's other fields.
fn patch(options: &[&str], fields: Value) -> Value {
    let mut container =
        json!({"name": "inference-server", "image": "vllm", "command": ["vllm", "serve"], "args": options});
    crate::workload::merge::into(&mut container, &fields);
    json!({"metadata": {"labels": {"app": null}}, "spec": {"containers": [container]}})
}

fn of(pod: &Pod) -> Result<PatchedLauncher, String> {
    PatchedLauncher::of(pod, &NodeName::from("somenode")).map_err(|error| error.to_string())
}

fn patched(options: &[&str], fields: Value) -> PatchedLauncher {
    of(&requester(&patch(options, fields))).unwrap()
}

#[test]
fn the_seeds_requester_gets_a_launcher_and_an_engine_with_its_command() {
    let PatchedLauncher { server, template, revision, .. } = of(&seed()).unwrap();
    let model = "/pvcs/local/hf/models--deepseek-ai--DeepSeek-R1-Distill-Qwen-32B/snapshots/711ad2ea6aa40cfca18895e8aca02ab92df1a746";
    assert_eq!(server.options, format!("serve {model} --max-model-len=32768"), "without its port");
    assert_eq!(server.env_vars, [("VLLM_CACHE_ROOT".to_owned(), "/pvcs/shared/vllm".to_owned())].into());
    let spec = Value::Object(template.value())["spec"].take();
    let container = &spec["containers"][0];
    let command = [
        "/rouse-stub",
        "launcher",
        "--host=$(POD_IP)",
        "--port=8001",
        "--expand-variables",
        "--command=vllm",
    ];
    assert_eq!(container["command"], json!(command));
    assert_eq!(container["image"], "docker.io/vllm/vllm-openai:v0.10.1.1");
    let address = json!({"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}});
    assert_eq!(container["env"], json!([address]));
    assert_eq!((&container["args"], &container["readinessProbe"]), (&Value::Null, &Value::Null));
    assert_eq!(spec["volumes"][0]["persistentVolumeClaim"]["claimName"], "somenode-local");
    assert!(revision.is_of_patch() && revision.namespace == "ns", "{revision:?}");
}

#[test]
fn what_belongs_to_one_process_makes_another_engine_and_all_else_another_launcher() {
    let base = patched(&["m"], json!({}));
    let options = patched(&["m", "--x", "a b"], json!({}));
    assert_eq!(options.server.options, "serve m --x 'a b'");
    let variables = patched(&["m"], json!({"env": [{"name": "A", "value": "1"}]}));
    let key = json!({"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}});
    for other in [&options, &variables] {
        assert_eq!(other.revision, base.revision, "they share a launcher");
        assert_ne!(other.fingerprint, base.fingerprint);
    }
    let port = patched(&["m", "--port", "8010"], json!({"ports": [{"containerPort": 8010}]}));
    assert_eq!(port, base, "each engine gets another port anyway");
    for other in [
        patched(&["m"], json!({"image": "vllm:2"})),
        patched(&["m"], json!({"command": ["sglang", "serve"]})),
        patched(&["m"], json!({"env": [key]})),
        patched(&["m"], json!({"volumeMounts": [{"name": "models", "mountPath": "/models"}]})),
        patched(&["m"], json!({"resources": {"limits": {"memory": "64Gi"}}})),
    ] {
        assert_ne!(other.revision, base.revision, "{other:?}");
        assert_eq!(other.fingerprint, base.fingerprint);
    }
}

#[test]
fn variables_that_a_kubelet_resolves_stay_in_the_launchers_pod() {
    let env = json!([{"name": "A", "value": "1"}, {"name": "B", "value": "$(A):2"}]);
    let launcher = patched(&["--host", "$(POD_IP)"], json!({"env": env}));
    assert_eq!(launcher.server.options, "serve --host '$(POD_IP)'", "the launcher replaces it");
    assert_eq!(launcher.server.env_vars, BTreeMap::new());
    let spec = Value::Object(launcher.template.value())["spec"].take();
    let names: Vec<&Value> =
        spec["containers"][0]["env"].as_array().unwrap().iter().map(|env| &env["name"]).collect();
    assert_eq!(names, ["A", "B", "POD_IP"]);
}

#[test]
fn the_images_program_is_the_launchers_default() {
    let launcher = patched(&["--model", "m"], json!({"command": null}));
    assert_eq!(launcher.server.options, "--model m");
    let spec = Value::Object(launcher.template.value())["spec"].take();
    let command = spec["containers"][0]["command"].as_array().unwrap();
    assert!(command.iter().all(|word| !word.as_str().unwrap().starts_with("--command")), "{command:?}");
}

#[test]
fn labels_lead_to_the_engine_and_those_of_the_launchers_pod_are_not_touched() {
    let mut patch = patch(&["m"], json!({}));
    patch["metadata"] = json!({
        "labels": {"app": null, "serves": "m", "app.kubernetes.io/component": "x", "app.kubernetes.io/managed-by": "x"},
        "annotations": {"about": "m", "engines.rouse.dev/x": "{", "dual-pods.llm-d.ai/requester": "x"},
    });
    let server = of(&requester(&patch)).unwrap().server;
    assert_eq!(server.labels, [("serves".to_owned(), "m".to_owned())].into());
    assert_eq!(server.annotations, [("about".to_owned(), "m".to_owned())].into());
}

#[test]
fn a_script_is_refused_with_what_to_do() {
    for (command, args) in [(json!(["/bin/sh", "-c"]), "vllm serve m"), (json!(["bash"]), "-ec")] {
        let refused = of(&requester(&patch(&[args], json!({"command": command})))).unwrap_err();
        assert!(refused.contains("the engine's command is a script for"), "{refused}");
        assert!(refused.ends_with("or set the annotation rouse.dev/provider-mode to sleep"), "{refused}");
    }
    assert!(of(&requester(&patch(&["/run.sh"], json!({"command": ["/bin/sh"]})))).is_ok());
    let unnamed =
        of(&requester(&json!({"spec": {"containers": [{"name": "inference-server", "$patch": "delete"}]}})));
    assert!(unnamed.unwrap_err().contains("no container named inference-server"));
}
