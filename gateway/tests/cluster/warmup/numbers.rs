//! The rules in numbers: budgets, permanent failures, verdicts, and an end by the timeout.
//!
//! Requeues and times to live depend on the clock alone: `tests/warmup/vectors.rs` has them in simulated time. Merges
//! are in `groups`, and a Warmup without nodes as well.

use futures_util::future::join_all;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use rouse_controllers::crd::{WarmupStatus, warmup::WarmupStatusPhase};
use serde_json::{Value, json};

use super::{
    fixture::WarmupFixture,
    objects::{ITEM_ANNOTATION, condition, counts, is_in, items_of},
    report::PodReport,
};

/// The nodes that take Pods.
const NODES: [&str; 9] = ["a", "b", "c", "d", "e", "f", "g", "h", "i"];
const CORDONED: &str = "j";
const UNREACHABLE: &str = "dial tcp 192.0.2.1:443: connect: connection refused";
/// As many failed nodes as may fail where no limit is meant. The default is none.
const NO_LIMIT: u32 = 100;

/// A Warmup with this parallelism, with nodes that are active and nodes that wait.
#[derive(Clone, Copy, Debug)]
struct Budget {
    parallelism: Option<u32>,
    active: u32,
    pending: u32,
}

impl Budget {
    /// All that have a node at all.
    fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for parallelism in [Some(1), Some(2), None] {
            for active in 0..=2 {
                let least = u32::from(active == 0);
                all.extend((least..=3).map(|pending| Self { parallelism, active, pending }));
            }
        }
        all
    }

    fn name(self) -> String {
        let Self { parallelism, active, pending } = self;
        let parallelism = parallelism.map_or_else(|| "all".to_owned(), |limit| limit.to_string());
        format!("budget-{parallelism}-{active}-{pending}")
    }

    /// Number of nodes that are active in the end.
    fn active_in_the_end(self) -> u32 {
        let room = self.parallelism.map_or(self.pending, |limit| limit.saturating_sub(self.active));
        self.active + self.pending.min(room)
    }
}

/// Lets some nodes begin, and then limits them and adds others.
async fn begins_within(fixture: &WarmupFixture<'_>, budget: Budget) {
    let (world, name) = (&fixture.world, budget.name());
    let image = format!("{name}:1");
    let (active, desired) = (budget.active as usize, (budget.active + budget.pending) as usize);
    for node in fixture.nodes(&NODES[..desired]) {
        fixture.kubelet.script(&node, &image, [PodReport::Pulling]);
    }
    if active > 0 {
        world.warmup(&name, fixture.spec(&NODES[..active], &[&image], json!({}))).await;
        let begun = |status: &WarmupStatus| status.active_node_num == budget.active;
        world.until_warmup(&name, "the first nodes active", begun).await;
    }
    let policies = budget.parallelism.map_or_else(|| json!({}), |limit| json!({"parallelism": limit}));
    world.warmup(&name, fixture.spec(&NODES[..desired], &[&image], policies)).await;
    let expected = (budget.active + budget.pending, budget.active_in_the_end(), 0, 0);
    world.until_warmup(&name, &format!("{expected:?}"), |status| counts(status) == expected).await;
}

/// Fails so often, with this limit: the node has failed for good, or tries again.
async fn fails(fixture: &WarmupFixture<'_>, failures: u32, limit: Option<u32>, is_permanent: bool) {
    let (world, kubelet, node) = (&fixture.world, &fixture.kubelet, fixture.node("f"));
    let (name, policies) = match limit {
        Some(limit) => (format!("fails-{failures}-{limit}"), json!({"backoffLimit": limit})),
        None => (format!("fails-{failures}"), json!({})),
    };
    let image = format!("{name}:1");
    let failed = (0..failures).map(|_| PodReport::PullFailed("ErrImagePull", UNREACHABLE.to_owned()));
    kubelet.script(&node, &image, failed.chain([PodReport::Pulling]));
    world.warmup(&name, fixture.spec(&["f"], &[&image], policies)).await;
    if is_permanent {
        let status = world.until_failed(&name).await;
        assert_eq!(counts(&status), (1, 0, 0, 1), "{name}: {status:?}");
        assert_eq!(kubelet.count(&node, &image), failures as usize, "{name}");
        return;
    }
    kubelet.until_count(&node, &image, failures as usize + 1).await;
    let goes_on = |status: &WarmupStatus| {
        counts(status) == (1, 1, 0, 0) && items_of(status, &node).iter().any(|own| own.attempts == failures)
    };
    world.until_warmup(&name, "another attempt", goes_on).await;
    kubelet.report(&node, &image, PodReport::Present).await;
    world.until_completed(&name).await;
}

/// A Warmup of three nodes. The first ones succeed, the next ones fail, and the others are active or wait.
#[derive(Clone, Copy)]
struct Verdict {
    name: &'static str,
    succeeded: u32,
    failed: u32,
    active: u32,
    max_failed: u32,
    phase: WarmupStatusPhase,
}

const VERDICTS: [Verdict; 7] = {
    use WarmupStatusPhase::{Completed, Failed, InProgress};
    const fn of(name: &'static str, numbers: [u32; 4], phase: WarmupStatusPhase) -> Verdict {
        let [succeeded, failed, active, max_failed] = numbers;
        Verdict { name, succeeded, failed, active, max_failed, phase }
    }
    [
        of("all-succeed", [3, 0, 0, NO_LIMIT], Completed),
        of("any-may-fail", [2, 1, 0, NO_LIMIT], Completed),
        of("none-may-fail", [2, 1, 0, 0], Failed),
        of("one-may-fail", [2, 1, 0, 1], Completed),
        of("two-fail", [1, 2, 0, 1], Failed),
        of("one-active", [2, 0, 1, NO_LIMIT], InProgress),
        of("one-waits", [2, 0, 0, NO_LIMIT], InProgress),
    ]
};

async fn is_judged(fixture: &WarmupFixture<'_>, verdict: Verdict) {
    let (world, kubelet) = (&fixture.world, &fixture.kubelet);
    let Verdict { name, succeeded, failed, active, max_failed, phase } = verdict;
    let waits = succeeded + failed + active < 3;
    let names = ["g", "h", if waits { CORDONED } else { "i" }];
    let (image, nodes) = (format!("{name}:1"), fixture.nodes(&names));
    let (first, last) = (succeeded as usize, (succeeded + failed) as usize);
    nodes[first..].iter().for_each(|node| kubelet.script(node, &image, [PodReport::Pulling]));
    world.warmup(name, fixture.spec(&names, &[&image], json!({"maxFailedNodes": max_failed}))).await;
    let begun = (3, failed + active, succeeded, 0);
    world.until_warmup(name, &format!("{begun:?}"), |status| counts(status) == begun).await;
    for node in &nodes[first..last] {
        let text = format!("docker.io/library/{image}: not found");
        kubelet.report(node, &image, PodReport::PullFailed("ErrImagePull", text)).await;
    }
    let ends =
        |status: &WarmupStatus| is_in(status, phase) && counts(status) == (3, active, succeeded, failed);
    world.until_warmup(name, &format!("{phase:?}"), ends).await;
}

/// Of ten nodes five have succeeded and one has failed when the time is over. The others end, and the numbers stay.
async fn times_out(fixture: &WarmupFixture<'_>) {
    let (world, kubelet) = (&fixture.world, &fixture.kubelet);
    let pulling = fixture.nodes(&NODES[5..]);
    pulling.iter().for_each(|node| kubelet.script(node, "stopped:1", [PodReport::Pulling]));
    let mut spec = fixture.spec(&NODES, &["stopped:1"], json!({"maxFailedNodes": 1}));
    // It has failed at once, also after the edit.
    spec["targetNodes"]["nodeNames"].as_array_mut().unwrap().push(json!("never-existed"));
    world.warmup("stopped", spec.clone()).await;
    world.until_warmup("stopped", "four active", |status| counts(status) == (10, 4, 5, 1)).await;
    // The time begins with the edit. What is done stays done, and what pulls goes on.
    spec["policies"] = json!({"maxFailedNodes": 1, "timeoutSeconds": 1});
    world.warmup("stopped", spec).await;
    let status = world.until_failed("stopped").await;
    assert_eq!(counts(&status), (10, 0, 5, 1), "{status:?}");
    assert_eq!(condition(&status, "Complete").1, "TimeoutExceeded", "{status:?}");
    for node in &pulling {
        kubelet.until_gone_from(node, "stopped:1").await;
        assert_eq!(kubelet.count(node, "stopped:1"), 1, "{node}");
    }
}

/// Nothing more has begun or ended since the numbers were reached.
async fn nothing_changed(fixture: &WarmupFixture<'_>, budgets: &[Budget]) {
    let world = &fixture.world;
    // The leader has decided about all of them again before it has refused a Warmup that is created after them.
    let refused: Value = json!({"targetNodes": {"nodeNames": [fixture.node("a")]}});
    world.warmup("later", refused).await;
    world.until_failed("later").await;
    let pods = fixture.pods().await;
    for budget in budgets {
        let image = format!("{}:1", budget.name());
        let is_it = |pod: &&Pod| pod.annotations().get(ITEM_ANNOTATION) == Some(&image);
        let number = pods.iter().filter(is_it).count();
        assert_eq!(number, budget.active_in_the_end() as usize, "Pods with {budget:?}");
    }
    for verdict in VERDICTS {
        let found = world.warmups().get(verdict.name).await.unwrap();
        let status = found.status.unwrap_or_default();
        assert!(is_in(&status, verdict.phase), "{}: {status:?}", verdict.name);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn budgets_failures_verdicts_and_the_timeout_follow_the_numbers_of_nodes() {
    let mut nodes = NODES.to_vec();
    nodes.push(CORDONED);
    let fixture = WarmupFixture::new("warm-numbers", &nodes).await;
    fixture.patch_node(CORDONED, json!({"spec": {"unschedulable": true}})).await;
    let budgets = Budget::all();
    let all_begin = budgets.iter().map(|budget| Box::pin(begins_within(&fixture, *budget)));
    let failures =
        [(0, Some(0), false), (1, Some(0), true), (2, Some(2), false), (3, Some(2), true), (3, None, false)];
    let all_fail = failures
        .map(|(failures, limit, is_permanent)| Box::pin(fails(&fixture, failures, limit, is_permanent)));
    let all_end = VERDICTS.map(|verdict| Box::pin(is_judged(&fixture, verdict)));
    tokio::join!(join_all(all_begin), join_all(all_fail), join_all(all_end), Box::pin(times_out(&fixture)),);
    Box::pin(nothing_changed(&fixture, &budgets)).await;
}
