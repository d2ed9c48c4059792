//! The pages' instructions for a cluster, done as written. A shell runs each `sh kubectl` block with recorders for
//! kubectl and curl, and this test then carries out the recorded calls. Objects are applied as `kubectl apply -f -`
//! would. Only the names of the two namespaces differ, because tests share a cluster.

use std::{collections::BTreeSet, fs, os::unix::fs::PermissionsExt as _, path::Path, process::Command};

use k8s_openapi::api::{
    apps::v1::Deployment,
    core::v1::{Pod, Service},
};
use kube::{
    Api,
    api::{DeleteParams, ListParams, PatchParams, ValidationDirective},
};
use rouse_cluster::{
    Namespace, PodRunner,
    podrunner::{NodeSpec, PodImage},
    wait,
};
use rouse_controllers::crd::{AcceleratorPool, InferenceModel};
use rouse_testing::page;
use serde_json::{Value, json};

use crate::{
    client::TestClient,
    installation::{blocking, reason},
    launched::define_fma_kinds,
    support::{FIELD_MANAGER, apply_object, cluster, repo_path},
};

/// A script in place of kubectl and curl that records its arguments and input.
const NOTES: &str = r#"#!/bin/bash
set -eu
call=$(mktemp -d "$CALLS/$(date +%s%N)-XXXX")
printf '%s\0' "$(basename "$0")" "$@" > "$call/words"
case " $* " in *" -f - "*) cat > "$call/input" ;; esac
"#;

/// One recorded call and its standard input.
struct RecordedProgramCall {
    words: Vec<String>,
    input: String,
}

/// Runs a block in a shell and returns its recorded calls.
fn calls(block: &str, at: &str) -> Vec<RecordedProgramCall> {
    let folder = tempfile::tempdir().unwrap();
    let (programs, noted) = (folder.path().join("bin"), folder.path().join("calls"));
    for made in [&programs, &noted] {
        fs::create_dir(made).unwrap();
    }
    for program in ["kubectl", "curl"] {
        let program = programs.join(program);
        fs::write(&program, NOTES).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let own = Path::new(env!("CARGO_BIN_EXE_rouse-gateway")).parent().unwrap();
    let path = format!("{}:{}:{}", programs.display(), own.display(), std::env::var("PATH").unwrap());
    let script = format!("set -euo pipefail\n{block}\nwait\n");
    let mut shell = Command::new("bash");
    shell.args(["-c", &script]).current_dir(repo_path("")).env("PATH", path).env("CALLS", &noted);
    let output = shell.output().unwrap();
    assert!(output.status.success(), "{at}: {}", String::from_utf8_lossy(&output.stderr));
    let mut folders: Vec<_> = fs::read_dir(&noted).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    let call = |folder: &Path| {
        let words = fs::read_to_string(folder.join("words")).unwrap();
        let words = words.split_terminator('\0').map(str::to_owned).collect();
        RecordedProgramCall { words, input: fs::read_to_string(folder.join("input")).unwrap_or_default() }
    };
    let mut calls: Vec<RecordedProgramCall> = folders.iter().map(|folder| call(folder)).collect();
    // The port forward runs beside the calls that follow it.
    calls.sort_by_key(|call| !call.words.iter().any(|word| word == "port-forward"));
    calls
}

/// A reader who carries out the pages' instructions.
struct DocsReader {
    client: kube::Client,
    /// The real namespaces by their names on the pages.
    namespaces: [(&'static str, Namespace); 2],
    made: BTreeSet<String>,
    /// The namespace, the Service and the two ports of the forward.
    forwarded: Option<(String, String, [u16; 2])>,
    /// Accounts with rights from the pages.
    accounts: BTreeSet<String>,
}

impl DocsReader {
    /// The real namespace for the page's name. The page must have created it before.
    fn namespace(&self, name: &str, at: &str) -> &str {
        assert!(self.made.contains(name), "{at}: the namespace {name} is not made yet");
        self.real(name)
    }

    fn real(&self, name: &str) -> &str {
        let known = self.namespaces.iter().find(|(page, _)| *page == name);
        known.map_or_else(|| panic!("no page speaks of the namespace {name}"), |(_, real)| real.name())
    }

    async fn call(&mut self, RecordedProgramCall { words, input }: RecordedProgramCall, at: &str) {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        match words[..] {
            ["kubectl", "apply", "-f", "-"] | ["kubectl", "apply", "--server-side", "-f", "-"] => {
                self.apply(&input, None, at).await;
            }
            ["kubectl", "create", "namespace", name] => {
                self.real(name);
                assert!(self.made.insert(name.to_owned()), "{at}: {name} is made twice");
            }
            ["kubectl", "apply", "-f", file] => self.apply(&read(file), None, at).await,
            ["kubectl", "apply", "--namespace", namespace, "-f", file] => {
                self.apply(&read(file), Some(namespace), at).await;
            }
            ["kubectl", "--namespace", namespace, "create", "serviceaccount", name] => {
                let account =
                    json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}});
                self.apply(&account.to_string(), Some(namespace), at).await;
            }
            ["kubectl", "--namespace", namespace, "rollout", "status", what] => {
                let deployment = what.strip_prefix("deployment/").expect(at);
                let deployments: Api<Deployment> = self.api(self.namespace(namespace, at));
                let available = |deployment: &Option<Deployment>| {
                    let status = deployment.as_ref().and_then(|deployment| deployment.status.as_ref());
                    status.and_then(|status| status.available_replicas) == Some(2)
                };
                wait::until(&deployments, deployment, "two gateways", available).await.unwrap();
            }
            ["kubectl", "--namespace", namespace, "port-forward", what, ports] => {
                let service = what.strip_prefix("service/").expect(at).to_owned();
                let (here, there) = ports.split_once(':').expect(at);
                let ports = [here, there].map(|port| port.parse::<u16>().expect(at));
                self.forwarded = Some((self.namespace(namespace, at).to_owned(), service, ports));
            }
            ["kubectl", "--namespace", namespace, "get", "inferencemodel", name, "-o", "yaml"] => {
                let models: Api<InferenceModel> = self.api(self.namespace(namespace, at));
                models.get(name).await.expect(at);
            }
            ["curl", "-s", url] => drop(self.get(url, at).await),
            _ => panic!("{at}: nobody here knows how to do this: {words:?}"),
        }
    }

    fn api<K>(&self, namespace: &str) -> Api<K>
    where
        K: kube::Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
    {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// Gets an answer from a gateway behind the forwarded port of its Service.
    async fn get(&self, url: &str, at: &str) -> Value {
        let (namespace, service, [here, there]) = self.forwarded.as_ref().expect(at);
        let path = url.strip_prefix(&format!("localhost:{here}")).expect(at).to_owned();
        let service = self.api::<Service>(namespace).get(service).await.unwrap().spec.unwrap();
        let port = service.ports.iter().flatten().find(|port| port.port == i32::from(*there)).expect(at);
        let labels = service.selector.iter().flatten().map(|(key, value)| format!("{key}={value}"));
        let behind = ListParams::default().labels(&labels.collect::<Vec<_>>().join(","));
        let pod = self.api::<Pod>(namespace).list(&behind).await.unwrap().items.pop().expect(at);
        let ports = pod.spec.unwrap().containers[0].ports.clone().unwrap();
        let target = ports.iter().find(|own| json!(own.name) == json!(port.target_port)).expect(at);
        let address = format!("{}:{}", pod.status.unwrap().pod_ip.unwrap(), target.container_port);
        let gateway = TestClient::new(address.parse().unwrap());
        let answer = blocking(move || gateway.get(&path)).await;
        assert_eq!(answer.status, 200, "{at}: {}", answer.text());
        answer.json()
    }

    /// Applies every document of this text. `into`: the namespace of the command line.
    async fn apply(&mut self, text: &str, into: Option<&str>, at: &str) {
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

    /// Replaces the page's namespace names in an object with the real ones.
    fn rename(&mut self, object: &mut Value) {
        if object["metadata"]["namespace"].is_string() {
            object["metadata"].as_object_mut().unwrap().remove("namespace");
        }
        for subject in object.get_mut("subjects").and_then(Value::as_array_mut).into_iter().flatten() {
            subject["namespace"] = json!(self.real(subject["namespace"].as_str().unwrap()));
            self.accounts.insert(subject["name"].as_str().unwrap().to_owned());
        }
        // Tests share a cluster, so a ClusterRoleBinding gets a name of its own.
        if object["kind"] == "ClusterRoleBinding" {
            let name = object["metadata"]["name"].as_str().unwrap();
            object["metadata"]["name"] = json!(format!("{name}-{}", self.real("rouse")));
        }
        if object["kind"] == "ConfigMap" {
            let text = object["data"]["rouse.yaml"].as_str().unwrap();
            let mut configuration: Value = serde_saphyr::from_str(text).unwrap();
            assert_eq!(configuration["listen"], json!({"api": "0.0.0.0:8080"}));
            // Pods are processes on this machine, each with an address of its own.
            configuration["listen"] = json!({"api": "${env:POD_IP}:8080", "admin": "${env:POD_IP}:8081"});
            for namespace in configuration["kubernetes"]["namespaces"].as_array_mut().unwrap() {
                *namespace = json!(self.real(namespace.as_str().unwrap()));
            }
            object["data"]["rouse.yaml"] = json!(serde_saphyr::to_string(&configuration).unwrap());
        }
    }

    async fn patch(&self, object: &Value, namespace: Option<&str>, at: &str) {
        let (kind, name) = (object["kind"].as_str().unwrap(), object["metadata"]["name"].as_str().unwrap());
        let cluster_wide = kind.starts_with("Cluster")
            || kind.starts_with("ValidatingAdmissionPolicy")
            || ["CustomResourceDefinition", "AcceleratorPool", "DeviceConfiguration"].contains(&kind);
        assert!(
            cluster_wide || namespace.is_some(),
            "{at}: {kind} {name} would be made in the namespace default"
        );
        let namespace = namespace.filter(|_| !cluster_wide);
        let mut parameters = PatchParams::apply(FIELD_MANAGER).force();
        parameters.field_validation = Some(ValidationDirective::Strict);
        // Of the other pages the API server only has to accept the objects: other tests cover their effects.
        parameters.dry_run = !at.starts_with("docs/kubernetes.md") && kind != "CustomResourceDefinition";
        let answer = apply_object(&self.client, object, namespace, &parameters).await;
        assert!(answer.is_ok(), "{at}: {kind} {name}: {}", answer.unwrap_err());
    }

    /// Carries out everything on this page, in order.
    async fn does(&mut self, page: &str) {
        for block in page::blocks(&read(page)) {
            let at = format!("{page}:{}", block.line);
            match block.tag.as_str() {
                "sh kubectl" => {
                    for call in calls(&block.text, &at) {
                        self.call(call, &at).await;
                    }
                }
                "yaml object" => self.apply(&block.text, None, &at).await,
                _ => {}
            }
        }
    }
}

fn read(file: &str) -> String {
    fs::read_to_string(repo_path(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_pages_lead_to_gateways_that_serve_a_model_and_to_objects_that_an_api_server_takes() {
    let cluster = cluster().await;
    let (rouse, chat) = (cluster.namespace("rouse").await.unwrap(), cluster.namespace("chat").await.unwrap());
    let version = env!("CARGO_PKG_VERSION");
    let runner = PodRunner::builder(&rouse)
        .node(NodeSpec::new(&format!("{}-a", rouse.name())))
        .image(
            &format!("localhost/rouse-gateway:{version}"),
            PodImage::new(env!("CARGO_BIN_EXE_rouse-gateway")),
        )
        .start()
        .await
        .unwrap();
    let models = chat.api::<InferenceModel>();
    let client = cluster.client().await.unwrap();
    let namespaces = [("rouse", rouse), ("chat", chat)];
    let (made, accounts) = (BTreeSet::new(), BTreeSet::new());
    let mut reader = DocsReader { client, namespaces, made, forwarded: None, accounts };
    reader.does("docs/kubernetes.md").await;

    let accepted = |model: &Option<InferenceModel>| {
        model.as_ref().is_some_and(|model| reason(model, "Accepted") == "Accepted")
    };
    wait::until(&models, "llama-70b", "accepted", accepted).await.unwrap();
    // A client sees the model in the list as well.
    let is_listed = |told: &Value| {
        let mut models = told["data"].as_array().unwrap().iter();
        models.any(|model| model["id"] == "meta-llama/Llama-3.3-70B-Instruct")
    };
    let listed = async {
        // The leader has accepted the model, but the forwarded port may lead to another gateway.
        while !is_listed(&reader.get("localhost:8080/v1/models", "the port that the page forwards").await) {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(wait::WAIT_TIMEOUT, listed).await.expect("the gateway lists the model");

    reader.does("docs/saturation.md").await;
    reader.does("docs/warmup.md").await;
    // Objects of the public project's kinds are on that page.
    Box::pin(define_fma_kinds()).await;
    reader.does("docs/dual-pods.md").await;
    reader.does("docs/quickstart-cluster.md").await;
    reader.does("docs/quickstart-dual-pods.md").await;
    reader.does("docs/slots.md").await;
    // The manifest must contain the text that the page replaces.
    assert!(reader.accounts.contains("rouse-fma-controllers"), "{:?}", reader.accounts);
    // Pools belong to no namespace, so the test deletes its own.
    let pools: Api<AcceleratorPool> = Api::all(reader.client.clone());
    pools.delete("default", &DeleteParams::default()).await.unwrap();
    drop(runner);
}
