//! A whole installation: gateways that are processes, Pods that are processes, and an API server that is real.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    net::SocketAddr,
    os::unix::fs::PermissionsExt as _,
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use k8s_openapi::api::{apps::v1::Deployment, core::v1::Pod};
use kube::{
    Api,
    api::{ListParams, Patch, PatchParams},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use rouse_cluster::{
    PodRunner,
    podrunner::{Image, NodeSpec},
    wait::{self, PATIENCE},
};
use rouse_gateway::controllers::crd::{AcceleratorPool, InferenceModel};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::time::timeout;

use crate::{
    client::Client,
    site::Site,
    support::{MANAGER, cluster},
};

/// What this test program is, when it is started for a Pod.
const RUNS: &str = "ROUSE_TEST_STUB";

/// Not a test: the stub of a Pod.
#[test]
fn stub() {
    let Ok(arguments) = std::env::var(RUNS) else { return };
    let arguments = std::iter::once("rouse-stub").chain(arguments.lines()).map(std::ffi::OsString::from);
    let ended = rouse_stub::cli::run_as(arguments);
    eprintln!("the stub has ended: {ended:?}");
}

/// A namespace with nodes, a pool of its own name, and what engines' and stubs' images stand for.
pub(crate) struct World {
    pub(crate) site: Site<'static>,
    pub(crate) runner: PodRunner,
    pub(crate) dir: TempDir,
}

impl World {
    /// With one node of so many accelerators, and so much memory in the pool.
    pub(crate) async fn new(name: &str, gpus: u32, memory: &str) -> Self {
        let site = Site::new(cluster().await, name).await;
        let dir = tempfile::tempdir().unwrap();
        let own = site.namespace.name().to_owned();
        let node = NodeSpec::new(&format!("{own}-a")).gpus(gpus).label("inference-pool", &own);
        let runner = PodRunner::of(&site.namespace)
            .node(node)
            .image("rouse/stub", Image::new(stub_program(&dir)))
            .image("rouse/engine", Image::new(env!("CARGO_BIN_EXE_rouse-gateway")))
            .start()
            .await
            .unwrap();
        let world = Self { site, runner, dir };
        world.pool(&own, json!({"nodeSelector": {"inference-pool": own}, "memory": memory})).await;
        world
    }

    pub(crate) fn name(&self) -> &str {
        self.site.namespace.name()
    }

    pub(crate) async fn pool(&self, name: &str, spec: Value) -> AcceleratorPool {
        let pool = json!({"apiVersion": "rouse.dev/v1alpha1", "kind": "AcceleratorPool",
            "metadata": {"name": name}, "spec": spec});
        let api: Api<AcceleratorPool> = Api::all(self.site.admin.clone());
        api.patch(name, &PatchParams::apply(MANAGER).force(), &Patch::Apply(&pool)).await.unwrap()
    }

    pub(crate) fn models(&self) -> Api<InferenceModel> {
        self.site.namespace.api()
    }

    pub(crate) fn deployments(&self) -> Api<Deployment> {
        self.site.namespace.api()
    }

    pub(crate) fn pods(&self) -> Api<Pod> {
        self.site.namespace.api()
    }

    /// Applies a model over engine-sim; `flags` are the engine's, `more` is merged into its spec.
    pub(crate) async fn model(&self, name: &str, memory: &str, flags: &str, more: Value) -> InferenceModel {
        let mut args: Vec<&str> = "demo-engine --host $(POD_IP) --port 8000 --model".split(' ').collect();
        args.push(name);
        args.extend("--start-time 100ms --ttft 5ms --itl 5ms".split(' '));
        args.extend(flags.split_whitespace());
        let mut spec = json!({
            "modelName": name,
            "memory": memory,
            "nodeSelector": {"inference-pool": self.name()},
            "engine": {"kind": "vllm"},
            "template": {"spec": {
                "terminationGracePeriodSeconds": 5,
                "containers": [{
                    "name": "engine",
                    "image": "rouse/engine",
                    "args": args,
                    "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
                    "resources": {"limits": {"nvidia.com/gpu": "1"}},
                }],
            }},
        });
        merge(&mut spec, more);
        self.apply(name, &spec).await.unwrap()
    }

    pub(crate) async fn apply(&self, name: &str, spec: &Value) -> kube::Result<InferenceModel> {
        let model = json!({"apiVersion": "rouse.dev/v1alpha1", "kind": "InferenceModel",
            "metadata": {"name": name}, "spec": spec});
        self.models().patch(name, &PatchParams::apply(MANAGER).force(), &Patch::Apply(&model)).await
    }

    /// Waits until the model's status is so.
    pub(crate) async fn until(
        &self,
        name: &str,
        what: &str,
        fits: impl Fn(&InferenceModel) -> bool,
    ) -> InferenceModel {
        let fits = |model: &Option<InferenceModel>| model.as_ref().is_some_and(&fits);
        wait::until(&self.models(), name, what, fits).await.unwrap().unwrap()
    }

    /// Pods that are not on their way out.
    pub(crate) async fn running(&self) -> Vec<Pod> {
        let pods = self.pods().list(&ListParams::default()).await.unwrap().items;
        pods.into_iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()).collect()
    }

    /// What the pool's ledger says: by model, how much is booked.
    pub(crate) async fn booked(&self) -> Vec<(String, u64)> {
        let api: Api<AcceleratorPool> = Api::all(self.site.admin.clone());
        let status = api.get(self.name()).await.unwrap().status.unwrap_or_default();
        let of = |r: &rouse_gateway::controllers::crd::ledger::Reservation| {
            (r.model.name.clone(), r.sum().0 >> 30)
        };
        status.ledger.reservations.iter().map(of).collect()
    }

    /// A gateway that watches this namespace.
    pub(crate) fn gateway(&self, name: &str, settings: &str) -> Gateway {
        let kubeconfig = self.site.cluster.kubeconfig(&self.site.account).unwrap();
        self.gateway_by(name, settings, &kubeconfig, &[])
    }

    /// One that reaches the API server in this way.
    pub(crate) fn gateway_by(
        &self,
        name: &str,
        settings: &str,
        kubeconfig: &std::path::Path,
        env: &[(&str, String)],
    ) -> Gateway {
        let file = self.dir.path().join(format!("{name}.yaml"));
        let own = self.name();
        let text = format!(
            "platform: kubernetes\nkubernetes: {{namespaces: [{own}], namespace: {own}, name: {name}, stubImage: rouse/stub}}\n\
             listen: {{api: 127.0.0.1:0, admin: 127.0.0.1:0}}\nstate: {}\n{settings}\n",
            self.dir.path().join(name).display()
        );
        fs::write(&file, text).unwrap();
        Gateway::start(&file, kubeconfig, env)
    }
}

pub(crate) fn merge(into: &mut Value, more: Value) {
    match (into, more) {
        (Value::Object(into), Value::Object(more)) => {
            for (key, value) in more {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, more) => *into = more,
    }
}

/// A script that starts this very program as the stub, with the container's arguments.
fn stub_program(dir: &TempDir) -> PathBuf {
    let path = dir.path().join("rouse-stub");
    let own = std::env::current_exe().unwrap();
    let script = format!(
        "#!/bin/sh\n{RUNS}=$(printf '%s\\n' \"$@\") exec {} world::stub --exact --nocapture\n",
        own.display()
    );
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// A gateway's process; ended by its own pid when dropped.
pub(crate) struct Gateway {
    child: Option<Child>,
    pub(crate) api: SocketAddr,
    pub(crate) admin: SocketAddr,
}

impl Gateway {
    fn start(file: &std::path::Path, kubeconfig: &std::path::Path, env: &[(&str, String)]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_rouse-gateway"))
            .args(["--config", file.to_str().unwrap()])
            .env("KUBECONFIG", kubeconfig)
            .env("ROUSE_LOG", std::env::var("ROUSE_LOG").unwrap_or_else(|_| "info".to_owned()))
            .envs(env.iter().map(|(name, value)| (*name, value)))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut at = |what: &str| {
            let line = lines.by_ref().map(Result::unwrap).find(|line| line.starts_with(what));
            let line = line.unwrap_or_else(|| panic!("the gateway did not say where its {what} is"));
            let url = line
                .rsplit(' ')
                .next()
                .unwrap()
                .trim_start_matches("http://")
                .trim_end_matches("/v1")
                .to_owned();
            url.parse().unwrap()
        };
        let (api, admin) = (at("inference API"), at("admin"));
        std::thread::spawn(move || lines.for_each(drop));
        Self { child: Some(child), api, admin }
    }

    pub(crate) fn client(&self) -> Client {
        Client::new(self.api)
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.child.as_ref().unwrap().id()).unwrap())
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).unwrap();
    }

    /// Waits for its end.
    pub(crate) async fn ended(mut self) {
        let mut child = self.child.take().unwrap();
        let ended = tokio::task::spawn_blocking(move || child.wait().unwrap());
        timeout(PATIENCE, ended).await.expect("it does not end").unwrap();
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}

/// Runs what blocks beside the test's own tasks.
pub(crate) async fn aside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work).await.unwrap()
}

pub(crate) fn reason(model: &InferenceModel, kind: &str) -> String {
    let status = model.status.clone().unwrap_or_default();
    let found = status.conditions.into_iter().find(|condition| condition.type_ == kind);
    found.map_or_else(String::new, |condition| condition.reason)
}
