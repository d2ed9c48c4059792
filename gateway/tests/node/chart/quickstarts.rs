//! The quickstarts for clusters, followed block by block. `PageShell::replacements` lists all that the test changes of
//! their words.
//!
//! The pages end in what their readers see, and so do these tests. The time of each step is printed, for
//! `packaging/newcomer`.

use std::{collections::VecDeque, fs, net::SocketAddr};

use k8s_openapi::api::core::v1::Pod;
use rouse_cluster::wait::WAIT_TIMEOUT;
use rouse_controllers::label;
use rouse_testing::page::{self, PageBlock};
use serde_json::Value;
use tokio::time::{Duration, Instant, sleep, timeout};

use super::{
    release::{HelmRelease, MODELS},
    shell::RunningForward,
};
use crate::{
    client::TestClient, installation::blocking, pages::push_images, pairs::address, shared_node::archives,
    support::repo_path,
};

const CLUSTER: &str = "docs/quickstart-cluster.md";
const DUAL_PODS: &str = "docs/quickstart-dual-pods.md";
/// The label of a provider with its model.
const ENGINE_OF: &str = "rouse.dev/engine-of";
/// The port of a provider's engine.
const ENGINE_PORT: u16 = 8000;

/// Follows the quickstart for a cluster, and returns the values with which it installs.
pub(super) async fn follow_cluster(release: &HelmRelease) -> Value {
    let pages = [CLUSTER, DUAL_PODS].map(|name| fs::read_to_string(repo_path(name)).unwrap());
    for (on_page, _, reason) in release.shell().replacements() {
        assert!(pages.iter().any(|page| page.contains(on_page)), "no page has '{on_page}' ({reason})");
    }
    let mut page = PageReader::open(release, CLUSTER);
    page.pushes_images().await;
    let values = page.saves("yaml values", "values.yaml");
    page.types("install the chart");
    page.types("put the nodes into a pool");
    page.creates_models().await;
    let forward = page.forwards();
    let answer = page.types("the first answer");
    for model in MODELS {
        assert!(answer.contains(&format!("\"id\":\"{model}\"")), "{model} is not listed: {answer}");
    }
    assert_eq!(answers(&answer), 1, "{answer}");
    let answer = page.types("the other model's answer");
    assert_eq!(answers(&answer), 1, "{answer}");
    drop(forward);
    // The node has a single accelerator.
    let [ended, _] = MODELS;
    release.until_idle(ended).await;
    let described = page.types_inline(&format!("kubectl --namespace chat describe inferencemodel {ended}"));
    assert!(described.contains("ScaledToZero"), "{described}");
    page.ends();
    serde_saphyr::from_str(&values).unwrap()
}

/// Follows the quickstart for dual pods, as a reader who has followed the other one.
pub(super) async fn follow_dual_pods(release: &HelmRelease) {
    let mut page = PageReader::open(release, DUAL_PODS);
    page.saves("yaml values", "values.yaml");
    page.types_inline("kubectl --namespace chat delete inferencemodels --all");
    page.upgrades();
    page.creates_models().await;
    let forward = page.forwards();
    let answer = page.types("four answers by turns");
    assert_eq!(answers(&answer), 4, "{answer}");
    drop(forward);
    page.shows_sleeper().await;
    page.ends();
    // The first model slept for each turn of the other one, and neither was loaded again.
    for (model, sleeps) in MODELS.into_iter().zip([2, 1]) {
        let engines = release.pods(&format!("{ENGINE_OF}={}", label::value(model))).await;
        let [engine] = &engines[..] else { panic!("{model}: {engines:#?}") };
        assert_eq!(counters(engine).await["sleeps"], sleeps, "{model}");
    }
}

/// The number of complete answers.
fn answers(printed: &str) -> usize {
    printed.matches("\"choices\":").count()
}

/// What the simulated engine has counted.
async fn counters(engine: &Pod) -> Value {
    let client = TestClient::new(SocketAddr::new(address(engine), ENGINE_PORT));
    blocking(move || client.get("/sim/counters").json()).await
}

/// A reader who follows a page from its beginning to its end.
struct PageReader<'a> {
    release: &'a HelmRelease,
    name: &'static str,
    text: String,
    /// The blocks that are still to be followed.
    blocks: VecDeque<PageBlock>,
}

impl<'a> PageReader<'a> {
    fn open(release: &'a HelmRelease, name: &'static str) -> Self {
        let text = fs::read_to_string(repo_path(name)).unwrap();
        let blocks = page::blocks(&text).into();
        Self { release, name, text, blocks }
    }

    /// Returns the next block, which must have this tag.
    fn next(&mut self, tag: &str) -> String {
        let block = self.blocks.pop_front();
        let block = block.unwrap_or_else(|| panic!("{}: no block is left for '{tag}'", self.name));
        assert_eq!(block.tag, tag, "{}:{}", self.name, block.line);
        block.text
    }

    /// Asserts that no block is left.
    fn ends(self) {
        assert!(self.blocks.is_empty(), "{}: nothing follows {:?}", self.name, self.blocks);
    }

    fn took(&self, step: &str, begun: Instant) {
        println!("newcomer: {}: {step}: {:.1} s", self.name, begun.elapsed().as_secs_f64());
    }

    /// Saves the next block as this file, and returns it.
    fn saves(&mut self, tag: &str, file: &str) -> String {
        let text = self.next(tag);
        assert!(self.text.contains(&format!("Save this as `{file}`")), "{}: {file} is another", self.name);
        self.release.shell().save(file, &text);
        text
    }

    /// Types the next block, and returns what it prints.
    fn types(&mut self, step: &str) -> String {
        let block = self.next("sh helm");
        let begun = Instant::now();
        let printed = self.release.shell().run(&block);
        self.took(step, begun);
        printed
    }

    /// Types a command that is in the text.
    fn types_inline(&self, command: &str) -> String {
        assert!(self.text.contains(&format!("`{command}`")), "{} has no `{command}`", self.name);
        self.release.shell().run(command)
    }

    /// Types the block that installs, with the page's changes for a release that is there already.
    fn upgrades(&mut self) {
        let install = self.next("sh helm");
        let (first, rest) = install.split_once('\n').unwrap();
        assert_eq!(first, "kubectl create namespace chat", "{}", self.name);
        assert!(rest.starts_with("helm install "), "{}: {rest}", self.name);
        let begun = Instant::now();
        self.release.shell().run(&rest.replacen("install", "upgrade", 1));
        self.took("upgrade to dual pods", begun);
    }

    /// Starts what the page leaves running in a terminal of its own.
    fn forwards(&mut self) -> RunningForward {
        let command = self.next("sh helm");
        self.release.shell().forward(&command)
    }

    async fn pushes_images(&mut self) {
        let block = self.next("sh images");
        let begun = Instant::now();
        push_images(self.release.node(), &archives(), &block).await;
        self.took("import the images", begun);
    }

    /// Saves and applies the manifests, and waits until the models are `ScaledToZero`, as on the page.
    async fn creates_models(&mut self) {
        self.saves("yaml object", "models.yaml");
        let listed = self.types("apply the models");
        let begun = Instant::now();
        for model in MODELS {
            assert!(listed.contains(model), "{listed}");
            self.release.until_idle(model).await;
        }
        self.took("both models are accepted", begun);
    }

    /// Types the command that lists the Pods until it shows an engine that sleeps, and one that serves the last model:
    /// gateways write the labels beside the answers.
    async fn shows_sleeper(&mut self) {
        let block = self.next("sh helm");
        let [_, awake] = MODELS;
        let mut listed = String::new();
        let shown = async {
            while !(has_row(&listed, &["true"]) && has_row(&listed, &["false", awake])) {
                listed = self.release.shell().run(&block);
                sleep(Duration::from_millis(100)).await;
            }
        };
        let in_time = timeout(WAIT_TIMEOUT, shown).await.is_ok();
        assert!(in_time, "no engine sleeps, or none serves {awake}: {listed}");
    }
}

/// Whether a row of this table has a cell that begins with each of these.
fn has_row(table: &str, beginnings: &[&str]) -> bool {
    let has = |row: &str, begin: &str| row.split_whitespace().any(|cell| cell.starts_with(begin));
    table.lines().any(|row| beginnings.iter().all(|begin| has(row, begin)))
}
