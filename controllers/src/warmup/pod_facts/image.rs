//! State of a Pod that pulls an image.

use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use rouse::warmup::{WarmupCause, WarmupPodState, classify_pull};

use super::{AFTER_PULL, containers, ended_by_kubelet, not_begun, reached_at, waiting};

/// Part of the runtime's message if it cannot run programs of the image's platform.
const FOREIGN_FORMAT: &str = "exec format error";

/// The node has the image as soon as a container could be made of it, whatever becomes of the container.
pub(super) fn state(pod: &Pod) -> WarmupPodState {
    let Some(container) = containers(pod).first() else {
        return ended_by_kubelet(pod).unwrap_or_else(|| not_begun(pod));
    };
    let mounts = mounts_image(pod);
    if is_present(container, mounts) {
        let digest = (!mounts).then(|| digest(&container.image_id)).flatten();
        return WarmupPodState::Present { digest, note: note(container), at: reached_at(pod, container) };
    }
    if let Some(ended) = ended_by_kubelet(pod) {
        return ended;
    }
    match waiting(container) {
        Some((reason, message)) => {
            if let Some(cause) = classify_pull(reason, message) {
                return WarmupPodState::Pending { cause: Some(cause) };
            }
            if AFTER_PULL.contains(&reason) {
                return WarmupPodState::Pending { cause: Some(WarmupCause::unknown(message)) };
            }
            WarmupPodState::Pulling
        }
        None => not_begun(pod),
    }
}

/// Whether the Pod mounts the image as a volume. Its container is of another image then.
fn mounts_image(pod: &Pod) -> bool {
    let volumes = pod.spec.as_ref().and_then(|spec| spec.volumes.as_ref());
    volumes.into_iter().flatten().any(|volume| volume.image.is_some())
}

fn is_present(container: &ContainerStatus, mounts_image: bool) -> bool {
    let was_created =
        container.state.as_ref().is_some_and(|state| state.running.is_some() || state.terminated.is_some());
    // The kubelet creates a container after it has pulled the image. A mount may fail while the container is created.
    let is_pulled = || {
        !container.image_id.is_empty()
            || waiting(container).is_some_and(|(reason, _)| AFTER_PULL.contains(&reason))
    };
    was_created || (!mounts_image && is_pulled())
}

fn note(container: &ContainerStatus) -> Option<WarmupCause> {
    let ended = container.state.as_ref()?.terminated.as_ref()?;
    ended.message.as_ref()?.contains(FOREIGN_FORMAT).then_some(WarmupCause::WrongPlatform)
}

/// Returns the digest in an image id such as `docker.io/library/nginx@sha256:…` or `sha256:…`.
fn digest(image_id: &str) -> Option<String> {
    let digest = image_id.rsplit_once('@').map_or(image_id, |(_, digest)| digest);
    (!digest.is_empty()).then(|| digest.to_owned())
}
