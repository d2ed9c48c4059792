//! A complete installation: gateways and Pods as processes, and a real API server.

use std::{
    fs,
    future::ready,
    io::{BufRead as _, BufReader},
    net::SocketAddr,
    path::{Path, PathBuf},
    pin::pin,
    process::{Child, Command, Stdio},
    time::Duration,
};

use futures_util::StreamExt as _;
use k8s_openapi::api::{apps::v1::Deployment, core::v1::Pod};
use kube::{
    Api, ResourceExt as _,
    api::{ListParams, Patch, PatchParams},
    runtime::{WatchStreamExt as _, watcher},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use rouse_cluster::{
    PodRunner,
    wait::{self, WAIT_TIMEOUT},
};
use rouse_controllers::crd::{AcceleratorPool, InferenceModel};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::time::timeout;

use crate::{client::TestClient, site::GatewayNamespace, support::FIELD_MANAGER};

/// A namespace with nodes, a pool of its own name, and programs for the images of engines and stubs.
pub(crate) struct Installation<'a, R = PodRunner> {
    pub(crate) site: GatewayNamespace<'a>,
    pub(crate) runner: R,
    pub(crate) dir: TempDir,
    /// The gateways' program.
    pub(crate) program: PathBuf,
    /// The stub image in the gateways' configuration.
    pub(crate) stub_image: String,
    /// The namespaces whose models the gateways serve.
    pub(crate) watched: String,
}

impl<R> Installation<'_, R> {
    pub(crate) fn name(&self) -> &str {
        self.site.namespace.name()
    }

    pub(crate) async fn pool(&self, name: &str, spec: Value) -> AcceleratorPool {
        let pool = json!({"apiVersion": "rouse.dev/v1alpha1", "kind": "AcceleratorPool",
            "metadata": {"name": name}, "spec": spec});
        let api: Api<AcceleratorPool> = Api::all(self.site.admin.clone());
        api.patch(name, &PatchParams::apply(FIELD_MANAGER).force(), &Patch::Apply(&pool)).await.unwrap()
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

    /// Applies a model over engine-sim. `flags` are the engine's; `more` is merged into its spec.
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

    /// Changes this field of a model's spec, and waits until the leader has observed the change.
    pub(crate) async fn edit(&self, name: &str, change: Value) {
        let patch = Patch::Merge(json!({"spec": change}));
        let made = self.models().patch(name, &PatchParams::apply(FIELD_MANAGER), &patch).await.unwrap();
        let seen = |model: &InferenceModel| {
            model.status.as_ref().is_some_and(|status| status.observed_generation == made.metadata.generation)
        };
        self.until(name, "the change to be seen", seen).await;
    }

    /// Sets and clears faults of the engines in these Pods, past their stubs.
    pub(crate) async fn faults(&self, pods: &[Pod], faults: &'static str) {
        for pod in pods {
            let engine = TestClient::new(SocketAddr::new(crate::pairs::address(pod), 8000));
            let answer = blocking(move || engine.post("/sim/faults", faults)).await;
            assert_eq!(answer.status, 200, "{}", answer.text());
        }
    }

    pub(crate) async fn apply(&self, name: &str, spec: &Value) -> kube::Result<InferenceModel> {
        let model = json!({"apiVersion": "rouse.dev/v1alpha1", "kind": "InferenceModel",
            "metadata": {"name": name}, "spec": spec});
        self.models().patch(name, &PatchParams::apply(FIELD_MANAGER).force(), &Patch::Apply(&model)).await
    }

    /// Waits until the model's status fits, and returns the model.
    pub(crate) async fn until(
        &self,
        name: &str,
        what: &str,
        fits: impl Fn(&InferenceModel) -> bool,
    ) -> InferenceModel {
        let fits = |model: &Option<InferenceModel>| model.as_ref().is_some_and(&fits);
        wait::until(&self.models(), name, what, fits).await.unwrap().unwrap()
    }

    /// The present pool.
    pub(crate) async fn get_pool(&self) -> AcceleratorPool {
        let api: Api<AcceleratorPool> = Api::all(self.site.admin.clone());
        api.get(self.name()).await.unwrap()
    }

    /// Waits until this model has a Deployment.
    pub(crate) async fn until_deployed(&self, model: &str) {
        let of = |deployment: &Deployment| deployment.name_any().starts_with(&format!("{model}-"));
        let seen = async {
            let events = watcher(self.deployments(), watcher::Config::default()).applied_objects();
            let mut deployments = pin!(events.filter_map(|seen| ready(seen.ok())));
            while !deployments.next().await.as_ref().is_some_and(of) {}
        };
        timeout(WAIT_TIMEOUT, Box::pin(seen)).await.unwrap_or_else(|_| panic!("{model} has no Deployment"));
    }

    /// Pods without a deletion timestamp.
    pub(crate) async fn running(&self) -> Vec<Pod> {
        let pods = self.pods().list(&ListParams::default()).await.unwrap().items;
        pods.into_iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()).collect()
    }

    /// The reservations in the pool's ledger, by model, in GiB.
    pub(crate) async fn reserved_gib(&self) -> Vec<(String, u64)> {
        reservations_gib(&self.get_pool().await)
    }

    /// Waits until the reservations in the pool's ledger fit.
    pub(crate) async fn until_reserved(&self, what: &str, fits: impl Fn(&[(String, u64)]) -> bool) {
        self.until_pool(what, |pool| fits(&reservations_gib(pool))).await;
    }

    /// Waits until the pool's accelerators are known: until then no variant of a model fits.
    pub(crate) async fn until_accelerators(&self) {
        let has_some =
            |pool: &AcceleratorPool| pool.status.as_ref().is_some_and(|status| status.accelerators > 0);
        self.until_pool("accelerators", has_some).await;
    }

    async fn until_pool(&self, what: &str, fits: impl Fn(&AcceleratorPool) -> bool) {
        let api: Api<AcceleratorPool> = Api::all(self.site.admin.clone());
        let fits = |pool: &Option<AcceleratorPool>| pool.as_ref().is_some_and(&fits);
        wait::until(&api, self.name(), what, fits).await.unwrap();
    }

    /// Starts a gateway that watches this namespace.
    pub(crate) fn gateway(&self, name: &str, settings: &str) -> ClusterGateway {
        let kubeconfig = self.site.cluster.kubeconfig(&self.site.account).unwrap();
        self.gateway_by(name, settings, &kubeconfig, &[])
    }

    /// Starts a gateway with more in its section `kubernetes`.
    pub(crate) fn gateway_with(&self, name: &str, kubernetes: &str) -> ClusterGateway {
        self.gateway_in(name, kubernetes, &[])
    }

    /// Starts a gateway with more in its section `kubernetes` and in its environment.
    pub(crate) fn gateway_in(&self, name: &str, kubernetes: &str, env: &[(&str, String)]) -> ClusterGateway {
        let kubeconfig = self.site.cluster.kubeconfig(&self.site.account).unwrap();
        self.start(name, kubernetes, "", &kubeconfig, env)
    }

    /// Starts a gateway that reaches the API server with this kubeconfig.
    pub(crate) fn gateway_by(
        &self,
        name: &str,
        settings: &str,
        kubeconfig: &Path,
        env: &[(&str, String)],
    ) -> ClusterGateway {
        self.start(name, "", settings, kubeconfig, env)
    }

    fn start(
        &self,
        name: &str,
        kubernetes: &str,
        settings: &str,
        kubeconfig: &Path,
        env: &[(&str, String)],
    ) -> ClusterGateway {
        StartingGateway::of(&self.program, &self.file(name, kubernetes, settings), kubeconfig, env)
            .wait_until_listening()
    }

    /// Writes the configuration of such a gateway.
    pub(crate) fn file(&self, name: &str, kubernetes: &str, settings: &str) -> PathBuf {
        let file = self.dir.path().join(format!("{name}.yaml"));
        let (own, stub, watched) = (self.name(), &self.stub_image, &self.watched);
        let text = format!(
            "platform: kubernetes\nkubernetes: {{namespaces: [{watched}], namespace: {own}, name: {name}, stubImage: {stub}{kubernetes}}}\n\
             listen: {{api: 127.0.0.1:0, admin: 127.0.0.1:0}}\nstate: {}\n{settings}\n",
            self.dir.path().join(name).display()
        );
        fs::write(&file, text).unwrap();
        file
    }
}

fn reservations_gib(pool: &AcceleratorPool) -> Vec<(String, u64)> {
    let reservations = pool.status.iter().flat_map(|status| &status.ledger.reservations);
    reservations.map(|entry| (entry.model.name.clone(), entry.sum().0 >> 30)).collect()
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

/// A gateway process. The drop kills it by its own pid.
pub(crate) struct ClusterGateway {
    child: Option<Child>,
    pub(crate) api: SocketAddr,
    pub(crate) admin: SocketAddr,
    log: PathBuf,
}

/// A gateway process that has not printed its addresses yet. The drop kills it by its own pid, so that a reader of its
/// output ends as well.
pub(crate) struct StartingGateway {
    child: Option<Child>,
    log: PathBuf,
}

impl StartingGateway {
    pub(crate) fn new(file: &Path, kubeconfig: &Path, env: &[(&str, String)]) -> Self {
        Self::of(Path::new(env!("CARGO_BIN_EXE_rouse-gateway")), file, kubeconfig, env)
    }

    fn of(program: &Path, file: &Path, kubeconfig: &Path, env: &[(&str, String)]) -> Self {
        let log = file.with_extension("log");
        let lines = fs::OpenOptions::new().create(true).append(true).open(&log).unwrap();
        let child = Command::new(program)
            .args(["--config", file.to_str().unwrap()])
            .env("KUBECONFIG", kubeconfig)
            .env("ROUSE_LOG", std::env::var("ROUSE_LOG").unwrap_or_else(|_| "info".to_owned()))
            .envs(env.iter().map(|(name, value)| (*name, value)))
            .stdout(Stdio::piped())
            .stderr(lines)
            .spawn()
            .unwrap();
        Self { child: Some(child), log }
    }

    /// Blocks until the gateway listens.
    pub(crate) fn wait_until_listening(mut self) -> ClusterGateway {
        let stdout = self.child.as_mut().unwrap().stdout.take().unwrap();
        let mut lines = BufReader::new(stdout).lines();
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
        ClusterGateway { child: self.child.take(), api, admin, log: self.log.clone() }
    }
}

impl Drop for StartingGateway {
    fn drop(&mut self) {
        stop_child(&mut self.child, &self.log);
    }
}

/// Kills the process. A failing test prints its log.
fn stop_child(child: &mut Option<Child>, log: &Path) {
    if let Some(mut child) = child.take() {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    if std::thread::panicking() {
        eprintln!("--- {}\n{}", log.display(), fs::read_to_string(log).unwrap_or_default());
    }
}

impl ClusterGateway {
    pub(crate) fn start(file: &Path, kubeconfig: &Path, env: &[(&str, String)]) -> Self {
        StartingGateway::new(file, kubeconfig, env).wait_until_listening()
    }

    pub(crate) fn client(&self) -> TestClient {
        TestClient::new(self.api)
    }

    /// The gateway's metrics from the admin listener.
    pub(crate) fn metrics(&self) -> String {
        TestClient::new(self.admin).get("/metrics").text()
    }

    /// Waits until this gateway, or an earlier one with its name, has logged a line of this level with these words.
    pub(crate) async fn until_logged(&self, level: &str, words: &str) {
        let has = |line: &str| line.contains(level) && line.contains(words);
        let logged = async {
            while !fs::read_to_string(&self.log).unwrap().lines().any(has) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let in_time = timeout(WAIT_TIMEOUT, logged).await;
        in_time.unwrap_or_else(|_| panic!("no {level} with '{words}' in the log of {}", self.log.display()));
    }

    /// Waits until the gateway reports ready.
    pub(crate) async fn until_ready(&self) {
        let client = self.client();
        let ready = blocking(move || while client.get("/readyz").status != 200 {});
        timeout(WAIT_TIMEOUT, ready).await.expect("it never serves");
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.child.as_ref().unwrap().id()).unwrap())
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).unwrap();
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.as_mut().unwrap().try_wait().unwrap().is_some()
    }

    /// Waits for the process to end.
    pub(crate) async fn wait_owned(mut self) {
        self.wait().await;
    }

    pub(crate) async fn wait(&mut self) {
        let mut child = self.child.take().unwrap();
        let ended = tokio::task::spawn_blocking(move || child.wait().unwrap());
        timeout(WAIT_TIMEOUT, ended).await.expect("it does not end").unwrap();
    }
}

impl Drop for ClusterGateway {
    fn drop(&mut self) {
        stop_child(&mut self.child, &self.log);
    }
}

/// Runs blocking work beside the test's own tasks.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work).await.unwrap()
}

pub(crate) fn reason(model: &InferenceModel, kind: &str) -> String {
    let status = model.status.clone().unwrap_or_default();
    let found = status.conditions.into_iter().find(|condition| condition.type_ == kind);
    found.map_or_else(String::new, |condition| condition.reason)
}
