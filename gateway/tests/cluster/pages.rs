//! What the pages tell their readers to do in a cluster, done as it stands there: `sh kubectl` by what kubectl does with it, and objects
//! as `kubectl apply -f -` would. Only the names of the two namespaces are others, since tests share a cluster.

use std::{collections::BTreeSet, fs, process::Command};

use k8s_openapi::api::{
    apps::v1::Deployment,
    core::v1::{Pod, Service},
};
use kube::{
    Api,
    api::{ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, ValidationDirective},
    core::GroupVersionKind,
};
use rouse_cluster::{
    Namespace, PodRunner,
    podrunner::{Image, NodeSpec},
    wait,
};
use rouse_gateway::controllers::crd::{AcceleratorPool, InferenceModel};
use serde_json::{Value, json};

use crate::{
    client::Client,
    support::{MANAGER, cluster, root},
    world::{aside, reason},
};

/// Who does what a page says.
struct Reader {
    client: kube::Client,
    /// By their names on the pages.
    namespaces: [(&'static str, Namespace); 2],
    made: BTreeSet<String>,
}

impl Reader {
    /// The page's namespace, which it must have had made.
    fn namespace(&self, name: &str, at: &str) -> &str {
        assert!(self.made.contains(name), "{at}: the namespace {name} is not made yet");
        self.real(name)
    }

    fn real(&self, name: &str) -> &str {
        let known = self.namespaces.iter().find(|(page, _)| *page == name);
        known.map_or_else(|| panic!("no page speaks of the namespace {name}"), |(_, real)| real.name())
    }

    /// One line of a shell.
    async fn command(&mut self, line: &str, at: &str) {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["rouse-gateway", .., "|", "kubectl", "apply", "--server-side", "-f", "-"] => {
                let args: Vec<&str> = words.iter().skip(1).copied().take_while(|word| *word != "|").collect();
                let output = Command::new(env!("CARGO_BIN_EXE_rouse-gateway")).args(args).output().unwrap();
                assert!(output.status.success(), "{at}: {line}");
                self.apply(&String::from_utf8(output.stdout).unwrap(), None, at).await;
            }
            ["kubectl", "create", "namespace", name] => {
                self.real(name);
                assert!(self.made.insert(name.to_owned()), "{at}: {name} is made twice");
            }
            ["kubectl", "apply", "-f", file] => self.apply(&read(file), None, at).await,
            ["kubectl", "apply", "--namespace", namespace, "-f", file] => {
                self.apply(&read(file), Some(namespace), at).await;
            }
            _ => panic!("{at}: nobody here knows how to do this: {line}"),
        }
    }

    /// Every document of this text. `into`: the namespace of the command line.
    async fn apply(&self, text: &str, into: Option<&str>, at: &str) {
        for document in text.split("---\n").filter(|document| !document.trim().is_empty()) {
            let mut object: Value =
                serde_saphyr::from_str(document).unwrap_or_else(|error| panic!("{at}: {error}"));
            if object.is_null() {
                continue;
            }
            let own = object["metadata"]["namespace"].as_str().map(str::to_owned);
            if let (Some(own), Some(into)) = (&own, into) {
                assert_eq!(own, into, "{at}: kubectl refuses an object of another namespace: {document}");
            }
            let namespace = own.as_deref().or(into).map(|name| self.namespace(name, at).to_owned());
            self.rename(&mut object);
            self.patch(&object, namespace.as_deref(), at).await;
        }
    }

    /// Names of namespaces, wherever an object has them.
    fn rename(&self, object: &mut Value) {
        if object["metadata"]["namespace"].is_string() {
            object["metadata"].as_object_mut().unwrap().remove("namespace");
        }
        for subject in object.get_mut("subjects").and_then(Value::as_array_mut).into_iter().flatten() {
            subject["namespace"] = json!(self.real(subject["namespace"].as_str().unwrap()));
        }
        // These are nobody's own in a cluster that tests share.
        if object["kind"] == "ClusterRoleBinding" {
            let name = object["metadata"]["name"].as_str().unwrap();
            object["metadata"]["name"] = json!(format!("{name}-{}", self.real("rouse")));
        }
        if object["kind"] == "ConfigMap" {
            let text = object["data"]["rouse.yaml"].as_str().unwrap();
            // Pods are processes of this machine, each with an address of its own.
            let listens = r#"listen: {api: "0.0.0.0:8080"}"#;
            assert!(text.contains(listens), "{text}");
            let here = r#"listen: {api: "${env:POD_IP}:8080", admin: "${env:POD_IP}:8081"}"#;
            let text = text.replace("[chat]", &format!("[{}]", self.real("chat"))).replace(listens, here);
            object["data"]["rouse.yaml"] = json!(text);
        }
    }

    async fn patch(&self, object: &Value, namespace: Option<&str>, at: &str) {
        let (kind, name) = (object["kind"].as_str().unwrap(), object["metadata"]["name"].as_str().unwrap());
        let version = object["apiVersion"].as_str().unwrap();
        let (group, version) = version.split_once('/').unwrap_or(("", version));
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
        let cluster_wide =
            kind.starts_with("Cluster") || ["CustomResourceDefinition", "AcceleratorPool"].contains(&kind);
        let api: Api<DynamicObject> = match namespace {
            _ if cluster_wide => Api::all_with(self.client.clone(), &resource),
            Some(namespace) => Api::namespaced_with(self.client.clone(), namespace, &resource),
            None => panic!("{at}: {kind} {name} would be made in the namespace default"),
        };
        let mut parameters = PatchParams::apply(MANAGER).force();
        parameters.field_validation = Some(ValidationDirective::Strict);
        // Of dual pods it is enough that the API server takes them: what becomes of them has tests of its own.
        parameters.dry_run = at.starts_with("docs/dual-pods.md") && !cluster_wide;
        let answer = api.patch(name, &parameters, &Patch::Apply(object)).await;
        assert!(answer.is_ok(), "{at}: {kind} {name}: {}", answer.unwrap_err());
    }

    /// All that this page says, in its order.
    async fn does(&mut self, page: &str) {
        let text = read(page);
        let mut number = 0;
        let mut lines = text.lines();
        while let Some(line) = lines.next() {
            number += 1;
            let mut block = || lines.by_ref().take_while(|line| *line != "```").collect::<Vec<_>>();
            let at = format!("{page}:{number}");
            match line {
                "```sh kubectl" => {
                    let block = block();
                    number += block.len() + 1;
                    for line in block {
                        self.command(line, &at).await;
                    }
                }
                "```yaml object" => {
                    let block = block();
                    number += block.len() + 1;
                    self.apply(&(block.join("\n") + "\n"), None, &at).await;
                }
                _ => {}
            }
        }
    }
}

fn read(file: &str) -> String {
    fs::read_to_string(root(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_pages_lead_to_gateways_that_serve_a_model_and_to_objects_that_an_api_server_takes() {
    let cluster = cluster().await;
    let (rouse, chat) = (cluster.namespace("rouse").await.unwrap(), cluster.namespace("chat").await.unwrap());
    let version = env!("CARGO_PKG_VERSION");
    let runner = PodRunner::of(&rouse)
        .node(NodeSpec::new(&format!("{}-a", rouse.name())))
        .image(&format!("localhost/rouse-gateway:{version}"), Image::new(env!("CARGO_BIN_EXE_rouse-gateway")))
        .start()
        .await
        .unwrap();
    let (deployments, services) = (rouse.api::<Deployment>(), rouse.api::<Service>());
    let models = chat.api::<InferenceModel>();
    let client = cluster.client().await.unwrap();
    let namespaces = [("rouse", rouse), ("chat", chat)];
    let mut reader = Reader { client, namespaces, made: BTreeSet::new() };
    reader.does("docs/kubernetes.md").await;

    let available = |deployment: &Option<Deployment>| {
        let status = deployment.as_ref().and_then(|deployment| deployment.status.as_ref());
        status.and_then(|status| status.available_replicas) == Some(2)
    };
    wait::until(&deployments, "rouse-gateway", "two gateways", available).await.unwrap();
    let accepted = |model: &Option<InferenceModel>| {
        model.as_ref().is_some_and(|model| reason(model, "Accepted") == "Accepted")
    };
    wait::until(&models, "llama-70b", "accepted", accepted).await.unwrap();
    // Behind the Service is what the Deployment makes, at a port that it has.
    let (service, deployment) = (
        services.get("rouse-gateway").await.unwrap().spec.unwrap(),
        deployments.get("rouse-gateway").await.unwrap(),
    );
    let template = deployment.spec.unwrap().template;
    let (labels, pod) = (template.metadata.unwrap().labels.unwrap(), template.spec.unwrap());
    assert!(service.selector.unwrap().iter().all(|(key, value)| labels.get(key) == Some(value)));
    let ports = pod.containers[0].ports.clone().unwrap();
    assert_eq!(json!(service.ports.unwrap()[0].target_port), json!(ports[0].name));
    // And a client is told of the model there.
    let pods: Api<Pod> = reader.namespaces[0].1.api();
    let pods = pods.list(&ListParams::default()).await.unwrap().items;
    let address =
        format!("{}:{}", pods[0].status.as_ref().unwrap().pod_ip.as_ref().unwrap(), ports[0].container_port);
    let gateway = Client::new(address.parse().unwrap());
    let told = aside(move || gateway.get("/v1/models").json()).await;
    let names: Vec<&str> =
        told["data"].as_array().unwrap().iter().filter_map(|model| model["id"].as_str()).collect();
    assert!(names.contains(&"meta-llama/Llama-3.3-70B-Instruct"), "{names:?}");

    reader.does("docs/dual-pods.md").await;
    // Pools belong to no namespace.
    let pools: Api<AcceleratorPool> = Api::all(reader.client.clone());
    pools.delete("default", &DeleteParams::default()).await.unwrap();
    drop(runner);
}
