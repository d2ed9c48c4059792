//! A large cluster: how long a gateway takes to read it, what an idle gateway costs, and how much one change costs.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    time::Duration,
};

use k8s_openapi::api::core::v1::Event;
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use rouse_cluster::{AuditedCall, ServerRole, wait::WAIT_TIMEOUT};
use rouse_controllers::crd::{AcceleratorNode, AcceleratorPool, InferenceModel};
use serde_json::json;
use tokio::time::{Instant, sleep, timeout};

use crate::{
    client::TestClient,
    crowd::{self, MODELS, ModelApi, NODES, POOLS, PoolApi},
    installation::{ClusterGateway, blocking, reason},
    machine_load::stat_fields,
    site::GatewayNamespace,
    support::{FIELD_MANAGER, own_cluster},
};

/// The promised figures for a cluster of this size.
const FIRST_SYNC: Duration = Duration::from_secs(5);
const MEMORY: u64 = 100_000_000;
const OF_A_CORE: f64 = 0.02;

/// Memory of the released program itself. The tested program is larger.
const PROGRAM: u64 = 16 << 20;
/// CPU time for a change of one model, by an unoptimised program: the gateway checks all models against one another and
/// reads none again.
const CHANGE: Duration = Duration::from_millis(250);

/// Long enough for several renewals of everything that the gateway renews.
const QUIET: Duration = Duration::from_secs(10);
/// Changes of one model each, one after the other.
const CHANGES: usize = 10;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_thousand_models_are_known_in_seconds_and_cost_next_to_nothing_while_nothing_happens() {
    let cluster = own_cluster().await;
    let site = GatewayNamespace::new(&cluster, "scale").await;
    // These nodes have no kubelets, so the controller manager would find all of them dead and report each.
    cluster.stop_server(ServerRole::ControllerManager).await;
    crowd::make(&site.admin, site.namespace.name()).await;

    let scene = ScaleFixture::start(&site).await;
    scene.check_first_sync().await;
    scene.check_quiet().await;
    scene.check_change().await;
    scene.check_scrape().await;
    let (own, program) = (memory(&scene.gateway, "RssAnon"), memory(&scene.gateway, "RssFile"));
    println!("at the end: {} MiB of its own, {} MiB of the program", own >> 20, program >> 20);
    assert!(own <= MEMORY - PROGRAM, "{own} bytes");
}

struct ScaleFixture<'a> {
    site: &'a GatewayNamespace<'a>,
    gateway: ClusterGateway,
    _dir: tempfile::TempDir,
}

impl<'a> ScaleFixture<'a> {
    /// Starts a gateway and waits until it lists all models.
    async fn start(site: &'a GatewayNamespace<'a>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let own = site.namespace.name();
        let file = dir.path().join("gateway.yaml");
        let text = format!(
            "platform: kubernetes\nkubernetes: {{namespaces: [{own}], namespace: {own}, name: gateway-0, stubImage: stub}}\n\
             listen: {{api: 127.0.0.1:0, admin: 127.0.0.1:0}}\nstate: {}\n",
            dir.path().display()
        );
        fs::write(&file, text).unwrap();
        let kubeconfig = site.cluster.kubeconfig(&site.account).unwrap();
        let begun = Instant::now();
        // The pauses between two thousand Events have a test of their own.
        let env = [("ROUSE_TEST_UNPACED_EVENTS", "1".to_owned())];
        let gateway = blocking(move || ClusterGateway::start(&file, &kubeconfig, &env)).await;
        let client = gateway.client();
        let listed = blocking(move || client.get("/v1/models")).await;
        let took = begun.elapsed();
        assert_eq!(listed.json()["data"].as_array().unwrap().len(), MODELS);
        println!("all models were known after {took:?}, with {} MiB", memory(&gateway, "VmRSS") >> 20);
        assert!(took <= FIRST_SYNC, "all models were known after {took:?}");
        Self { site, gateway, _dir: dir }
    }

    /// Asserts that the gateway writes every status once.
    async fn check_first_sync(&self) {
        let begun = Instant::now();
        let accepted = |model: &InferenceModel| reason(model, "Accepted") == "Accepted";
        crowd::until(self.models(), MODELS, "accepted", accepted).await;
        let known = |pool: &AcceleratorPool| pool.status.as_ref().is_some_and(|s| s.total.is_some());
        crowd::until(PoolApi::all(self.site.admin.clone()), POOLS, "surveyed", known).await;
        println!(
            "all statuses were written after {:?} more, for {:?} of CPU",
            begun.elapsed(),
            cpu(&self.gateway)
        );
        let noted = |node: &AcceleratorNode| node.status.as_ref().is_some_and(|s| s.reserved.is_some());
        crowd::until(Api::<AcceleratorNode>::all(self.site.admin.clone()), NODES, "noted", noted).await;
        let created = |event: &Event| event.reason.as_deref() == Some("Created");
        crowd::until(self.site.namespace.api(), MODELS, "created", created).await;
        for (resource, all) in
            [("inferencemodels/status", MODELS), ("events", MODELS), ("acceleratornodes/status", NODES)]
        {
            self.calls_with(0, resource, all).await;
        }
        let calls = self.calls();
        let written: Vec<&AuditedCall> =
            calls.iter().filter(|call| call.resource == "inferencemodels/status").collect();
        let names: BTreeSet<&str> = written.iter().map(|call| call.name.as_str()).collect();
        assert_eq!((written.len(), names.len()), (MODELS, MODELS), "each status once");
        let mut calls = count(&calls);
        let took = begun.elapsed();
        println!("{calls:?} after {took:?}");
        let mut of = |verb: &str, resource: &str| {
            calls.remove(&(verb.to_owned(), resource.to_owned())).unwrap_or_default()
        };
        assert_eq!(of("patch", "inferencemodels/status"), MODELS);
        assert_eq!(of("patch", "events"), MODELS, "one Event each");
        // The gateway stamps each pool with the leader's epoch, and then writes its survey. Each write is for the
        // version that it read.
        assert_eq!(
            (of("get", "acceleratorpools"), of("update", "acceleratorpools/status")),
            (2 * POOLS, 2 * POOLS)
        );
        let nodes = (of("create", "acceleratornodes"), of("patch", "acceleratornodes/status"));
        assert_eq!(nodes, (NODES, NODES), "an AcceleratorNode for each Node");
        let lists = of("list", "inferencemodels") + of("list", "nodes") + of("list", "acceleratorpools");
        assert!(lists <= (MODELS + NODES + POOLS) / 500 + 3, "{lists} pages");
        // The lease is renewed every two seconds, so a slow run on a busy machine has more renewals.
        let renewed = of("update", "leases");
        assert!(
            renewed <= usize::try_from(took.as_secs()).unwrap() / 2 + 5,
            "renewed {renewed} times in {took:?}"
        );
        // The gateway states its demand at most every five seconds, so a slow run has more statements.
        let stated = of("patch", "gatewayreplicas/status");
        assert!(
            stated <= usize::try_from(took.as_secs()).unwrap() / 5 + 1,
            "it stated its demand {stated} times in {took:?}"
        );
        // Of Warmups: the discovery of their kind, and the lists and watches of them, their Pods and groups' Pods. A list
        // of Pods before each watch shows whether they may be listed.
        assert_eq!((of("get", ""), of("list", "warmups"), of("watch", "warmups")), (1, 1, 1));
        assert_eq!((of("list", "pods"), of("watch", "pods")), (4, 3));
        let rest: usize = calls.values().sum();
        assert!(rest <= 20, "the rest is watches: {calls:?}");
    }

    /// A scrape returns the metrics of all models.
    async fn check_scrape(&self) {
        let (used, admin) = (cpu(&self.gateway), TestClient::new(self.gateway.admin));
        let text = blocking(move || admin.get("/metrics")).await.text();
        assert_eq!(
            text.lines().filter(|line| line.starts_with("inference_model_ready{")).count(),
            MODELS + 1
        );
        println!("metrics: {} KiB for {:?} of CPU", text.len() >> 10, cpu(&self.gateway) - used);
    }

    /// Asserts that an idle gateway sends only its signs of life.
    async fn check_quiet(&self) {
        let (before, used, begun) = (self.calls().len(), cpu(&self.gateway), Instant::now());
        sleep(QUIET).await;
        let took = begun.elapsed();
        let share = (cpu(&self.gateway) - used).as_secs_f64() / took.as_secs_f64();
        let calls = count(&self.calls()[before..]);
        println!(
            "quiet: {:.2} % of a core, {} MiB, {calls:?}",
            share * 100.0,
            memory(&self.gateway, "VmRSS") >> 20
        );
        assert!(share <= OF_A_CORE, "{share} of a core");
        let mut calls = calls;
        let renewals = calls.remove(&("update".to_owned(), "leases".to_owned())).unwrap_or_default();
        let own =
            calls.remove(&("patch".to_owned(), "gatewayreplicas/status".to_owned())).unwrap_or_default();
        let most = usize::try_from(took.as_secs()).unwrap() / 2 + 1;
        assert!((1..=most).contains(&renewals) && own <= 1, "{renewals} and {own}");
        assert!(calls.is_empty(), "{calls:?}");
    }

    /// Asserts that a change of one model is one write of its status, without a list.
    async fn check_change(&self) {
        let (before, used) = (self.calls().len(), cpu(&self.gateway));
        let mut slowest = Duration::ZERO;
        for change in 0..CHANGES {
            let begun = Instant::now();
            let name = crowd::model(change * 7);
            let patch = json!({"spec": {"cooldownPeriod": format!("{}m", 11 + change)}});
            let made = self
                .models()
                .patch(&name, &PatchParams::apply(FIELD_MANAGER), &Patch::Merge(&patch))
                .await
                .unwrap();
            let seen = |model: &Option<InferenceModel>| {
                let status = model.as_ref().and_then(|model| model.status.as_ref());
                status.is_some_and(|status| status.observed_generation == made.metadata.generation)
            };
            rouse_cluster::wait::until(&self.models(), &name, "seen", seen).await.unwrap();
            slowest = slowest.max(begun.elapsed());
        }
        let each = (cpu(&self.gateway) - used) / u32::try_from(CHANGES).unwrap();
        let calls = self.calls_with(before, "inferencemodels/status", CHANGES).await;
        println!("a change: {each:?} of CPU, {slowest:?} at the most until its status says so, {calls:?}");
        assert!(each <= CHANGE, "{each:?} of CPU");
        let mut calls = calls;
        let written = calls.remove(&("patch".to_owned(), "inferencemodels/status".to_owned()));
        assert_eq!(written, Some(CHANGES), "one write for each");
        let told = calls.remove(&("patch".to_owned(), "events".to_owned())).unwrap_or_default();
        assert!(told <= CHANGES, "{told} Events");
        calls.remove(&("update".to_owned(), "leases".to_owned()));
        calls.remove(&("patch".to_owned(), "gatewayreplicas/status".to_owned()));
        assert!(calls.is_empty(), "{calls:?}");
    }

    fn models(&self) -> ModelApi {
        self.site.namespace.api()
    }

    /// The calls since then, once at least this many are of this resource: the API server writes its log after its
    /// answers.
    async fn calls_with(
        &self,
        since: usize,
        resource: &str,
        least: usize,
    ) -> BTreeMap<(String, String), usize> {
        let logged = async {
            loop {
                let calls = self.calls();
                let of = calls[since..].iter().filter(|call| call.resource == resource);
                if of.count() >= least {
                    return count(&calls[since..]);
                }
                sleep(Duration::from_millis(50)).await;
            }
        };
        timeout(WAIT_TIMEOUT, logged).await.expect("so many calls were never logged")
    }

    fn calls(&self) -> Vec<AuditedCall> {
        self.site.cluster.calls(&self.site.account).unwrap()
    }
}

/// Counts the calls by verb and resource.
fn count(calls: &[AuditedCall]) -> BTreeMap<(String, String), usize> {
    let mut count = BTreeMap::new();
    for call in calls {
        *count.entry((call.verb.clone(), call.resource.clone())).or_default() += 1;
    }
    count
}

/// CPU time of the process on all cores so far.
pub(crate) fn cpu(gateway: &ClusterGateway) -> Duration {
    let fields = stat_fields(gateway.pid().as_raw()).unwrap();
    // Hundredths of a second in user and kernel mode.
    let ticks: u64 = fields[11..13].iter().map(|field| field.parse::<u64>().unwrap()).sum();
    Duration::from_millis(ticks * 10)
}

/// Bytes of physical memory: all (`VmRSS`), anonymous (`RssAnon`), or mapped from files (`RssFile`).
pub(crate) fn memory(gateway: &ClusterGateway, what: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", gateway.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(what)?.strip_prefix(':')).unwrap();
    line.trim().strip_suffix(" kB").unwrap().trim().parse::<u64>().unwrap() << 10
}
