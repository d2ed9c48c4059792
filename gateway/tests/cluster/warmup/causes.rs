//! What kubelets report about pulls and containers, and what a Warmup makes of it.

use futures_util::future::join_all;
use rouse_controllers::crd::{
    WarmupStatus,
    warmup::{WarmupNodeState, WarmupNodeStatus, WarmupStatusPhase},
};
use serde_json::json;

use super::{
    fixture::WarmupFixture,
    objects::{ACTION, cause, condition, counts, is_in, items_of},
    report::PodReport,
};

/// Reports of kubelets with containerd and CRI-O: an image, the reason, the message, and the cause.
type PullFailure = (&'static str, &'static str, &'static str, &'static str);

/// No further attempt can succeed.
const FINAL: [PullFailure; 6] = [
    (
        "missing:1",
        "ErrImagePull",
        "rpc error: code = NotFound desc = failed to pull and unpack image \"docker.io/library/missing:1\": failed to \
         resolve reference \"docker.io/library/missing:1\": docker.io/library/missing:1: not found",
        "NotFound",
    ),
    (
        "missing-backed-off:1",
        "ImagePullBackOff",
        "Back-off pulling image \"missing-backed-off:1\": ErrImagePull: failed to pull and unpack image \
         \"docker.io/library/missing-backed-off:1\": failed to resolve reference: not found",
        "NotFound",
    ),
    (
        "missing-crio:1",
        "ErrImagePull",
        "reading manifest 1 in quay.io/team/missing-crio: manifest unknown",
        "NotFound",
    ),
    (
        "private:1",
        "ErrImagePull",
        "failed to pull and unpack image \"docker.io/team/private:1\": failed to resolve reference \
         \"docker.io/team/private:1\": pull access denied, repository does not exist or may require authorization: \
         server message: insufficient_scope: authorization failed",
        "Auth",
    ),
    (
        "password:1",
        "ErrImagePull",
        "failed to pull and unpack image \"registry.example.com/password:1\": failed to resolve reference: \
         unexpected status from HEAD request to https://registry.example.com/v2/password/manifests/1: 401 Unauthorized",
        "Auth",
    ),
    (
        "invalid:1",
        "InvalidImageName",
        "Failed to apply default image tag \"invalid:1\": couldn't parse image name: invalid reference format",
        "InvalidImage",
    ),
];

/// A later attempt may succeed.
const PASSING: [PullFailure; 5] = [
    (
        "refused:1",
        "ErrImagePull",
        "failed to pull and unpack image \"registry.example.com/refused:1\": failed to resolve reference: failed to do \
         request: Head \"https://registry.example.com/v2/refused/manifests/1\": dial tcp 192.0.2.1:443: connect: \
         connection refused",
        "Network",
    ),
    (
        "unknown-host:1",
        "ImagePullBackOff",
        "Back-off pulling image \"unknown-host:1\": ErrImagePull: failed to do request: Head \
         \"https://registry.example.com/v2/unknown-host/manifests/1\": dial tcp: lookup registry.example.com: no such \
         host",
        "Network",
    ),
    (
        "slow:1",
        "ErrImagePull",
        "failed to do request: Get \"https://registry.example.com/v2/\": net/http: TLS handshake timeout",
        "Network",
    ),
    (
        "large:1",
        "ErrImagePull",
        "failed to pull and unpack image \"docker.io/library/large:1\": failed to extract layer sha256:0: write \
         /var/lib/containerd/tmpmounts/containerd-mount1/weights: no space left on device",
        "NoSpace",
    ),
    (
        "platform:1",
        "ErrImagePull",
        "failed to pull and unpack image \"docker.io/library/platform:1\": no match for platform in manifest: not \
         found",
        "WrongPlatform",
    ),
];

/// A later attempt may succeed. The registry limits the rate of pulls.
const LIMITED: PullFailure = (
    "limited:1",
    "ErrImagePull",
    "failed to pull and unpack image \"docker.io/library/limited:1\": failed to copy: httpReadSeeker: failed \
     open: unexpected status code https://registry-1.docker.io/v2/library/limited/manifests/1: 429 Too Many \
     Requests - Server message: toomanyrequests: You have reached your pull rate limit.",
    "RateLimited",
);

fn name(image: &str) -> String {
    image.trim_end_matches(":1").to_owned()
}

/// Fails at once, although no limit is set, and the cause is in the status with what the node said.
async fn is_final(fixture: &WarmupFixture<'_>, failure: PullFailure) {
    let (image, reason, message, expected) = failure;
    let (world, node, name) = (&fixture.world, fixture.node("a"), name(image));
    fixture.kubelet.script(&node, image, [PodReport::PullFailed(reason, message.to_owned())]);
    world.warmup(&name, fixture.spec(&["a"], &[image], json!({}))).await;
    let status = world.until_failed(&name).await;
    assert_eq!(cause(&status, &node), expected, "{name}: {status:?}");
    assert_eq!(status.failed_nodes, [node.as_str()], "{name}");
    let listed = items_of(&status, &node);
    assert!(listed.iter().any(|own| own.state == WarmupNodeState::Failed && own.message.is_some()), "{name}");
    assert_eq!(fixture.kubelet.count(&node, image), 1, "{name} is not tried again");
}

/// The cause of the first failure is in the status, with the time of the next attempt until that has begun.
async fn is_named(fixture: &WarmupFixture<'_>, failure: PullFailure) {
    let (image, reason, message, expected) = failure;
    let (world, node, name) = (&fixture.world, fixture.node("a"), name(image));
    let failed = PodReport::PullFailed(reason, message.to_owned());
    fixture.kubelet.script(&node, image, [failed, PodReport::Pulling]);
    world.warmup(&name, fixture.spec(&["a"], &[image], json!({"backoffLimit": 1}))).await;
    let named = |status: &WarmupStatus| {
        let is_it = |own: &&WarmupNodeStatus| {
            let goes_on = own.next_try.is_some() || own.state == WarmupNodeState::Pulling;
            (own.cause.as_deref(), own.attempts) == (Some(expected), 1) && goes_on
        };
        is_in(status, WarmupStatusPhase::InProgress) && items_of(status, &node).iter().any(is_it)
    };
    world.until_warmup(&name, &format!("{expected} after the first attempt"), named).await;
}

/// Is tried again after a pause.
async fn passes(fixture: &WarmupFixture<'_>, failure: PullFailure) {
    let (world, node, name) = (&fixture.world, fixture.node("a"), name(failure.0));
    is_named(fixture, failure).await;
    fixture.kubelet.until_count(&node, failure.0, 2).await;
    fixture.kubelet.report(&node, failure.0, PodReport::Present).await;
    let status = world.until_completed(&name).await;
    assert_eq!(counts(&status), (1, 0, 1, 0), "{name}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pull_that_fails_has_its_cause_named_and_is_tried_again_unless_that_is_futile() {
    let fixture = WarmupFixture::new("warm-pulls", &["a"]).await;
    let all = FINAL.map(|failure| Box::pin(is_final(&fixture, failure)));
    let passing = PASSING.map(|failure| Box::pin(passes(&fixture, failure)));
    tokio::join!(join_all(all), join_all(passing), Box::pin(is_named(&fixture, LIMITED)));
}

/// The image is on the node, whatever its container does: without a shell, or for another processor.
async fn is_present(fixture: &WarmupFixture<'_>, name: &str, message: &'static str) {
    let (world, node, image) = (&fixture.world, fixture.node("a"), format!("{name}:1"));
    fixture.kubelet.script(&node, &image, [PodReport::StartError(message)]);
    world.warmup(name, fixture.spec(&["a"], &[&image], json!({"backoffLimit": 0}))).await;
    let status = world.until_completed(name).await;
    assert_eq!(counts(&status), (1, 0, 1, 0), "{name}: {status:?}");
    assert_eq!(fixture.kubelet.count(&node, &image), 1, "{name}");
}

/// The kubelet evicts Pods for a while, which is not the image's fault.
async fn is_evicted(fixture: &WarmupFixture<'_>) {
    let (world, node) = (&fixture.world, fixture.node("a"));
    let text = "The node was low on resource: ephemeral-storage. Threshold quantity: 10Gi, available: 8Gi.";
    fixture.kubelet.script(&node, "evicted:1", [PodReport::Evicted(text)]);
    world.warmup("evicted", fixture.spec(&["a"], &["evicted:1"], json!({"backoffLimit": 1}))).await;
    let named = |status: &WarmupStatus| !cause(status, &node).is_empty();
    world.until_warmup("evicted", "a cause", named).await;
    // Only now: the cause of a single eviction is gone half a second later, maybe before the status is watched.
    fixture.kubelet.script(&node, "evicted:1", [PodReport::Present]);
    world.until_completed("evicted").await;
    assert!(fixture.kubelet.count(&node, "evicted:1") >= 2);
}

/// The limit counts the failures of a node: with more, it has failed.
async fn action_fails(fixture: &WarmupFixture<'_>) {
    let (world, node) = (&fixture.world, fixture.node("b"));
    fixture.kubelet.script(&node, ACTION, [PodReport::Exited(7)]);
    world.warmup("fails", fixture.action_spec(&["b"], json!({}), json!({"backoffLimit": 1}))).await;
    let status = world.until_failed("fails").await;
    assert_eq!(cause(&status, &node), "ActionFailed", "{status:?}");
    let listed = items_of(&status, &node);
    let says = |text: &Option<String>| text.as_ref().is_some_and(|text| text.contains('7'));
    assert!(listed.iter().any(|own| own.attempts == 2 && says(&own.message)), "{listed:?}");
    assert_eq!(fixture.kubelet.count(&node, ACTION), 2);
    assert_eq!(condition(&status, "Complete").1, "MaxFailedNodesExceeded", "{status:?}");
}

/// A failed attempt does not make the node fail while the limit allows another.
async fn action_succeeds_at_last(fixture: &WarmupFixture<'_>) {
    let (world, node) = (&fixture.world, fixture.node("c"));
    let reports = [PodReport::Exited(1), PodReport::Exited(1), PodReport::Exited(0)];
    fixture.kubelet.script(&node, ACTION, reports);
    world.warmup("at-last", fixture.action_spec(&["c"], json!({}), json!({"backoffLimit": 2}))).await;
    let status = world.until_completed("at-last").await;
    assert_eq!((counts(&status), fixture.kubelet.count(&node, ACTION)), ((1, 0, 1, 0), 3));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn success_is_an_image_that_is_there_and_an_action_that_ends_well_or_is_ready() {
    let fixture = WarmupFixture::new("warm-outcomes", &["a", "b", "c"]).await;
    let no_shell = "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc \
                    create failed: unable to start container process: exec: \"/rouse-warmup\": stat /rouse-warmup: no \
                    such file or directory: unknown";
    let foreign = "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc \
                   create failed: unable to start container process: exec /rouse-warmup: exec format error: unknown";
    tokio::join!(
        Box::pin(is_present(&fixture, "no-shell", no_shell)),
        Box::pin(is_present(&fixture, "foreign", foreign)),
        Box::pin(is_evicted(&fixture)),
        Box::pin(action_fails(&fixture)),
        Box::pin(action_succeeds_at_last(&fixture)),
    );
}
