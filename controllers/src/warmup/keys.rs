//! Names in the Pods of Warmups: labels, annotations, and what their values are.

use rouse::{pairing::ids::NodeName, warmup::WarmupItem};

/// Label: [`crate::label::value`] of the Warmup's name.
pub(super) const WARMUP: &str = "rouse.dev/warmup";
/// Annotation: name of the Warmup, which is in the Pod's namespace.
pub(super) const NAME: &str = "rouse.dev/warmup-name";
/// Annotation: name of the node.
pub(super) const NODE: &str = "rouse.dev/warmup-node";
/// Annotation: the image, or [`ACTION_ITEM`].
pub(super) const ITEM: &str = "rouse.dev/warmup-item";
/// Annotation: hash of the action, for the Pod of an action.
pub(super) const ACTION: &str = "rouse.dev/warmup-action";
/// Annotation: hash of the node's items, in decimal.
pub(super) const ITEMS: &str = "rouse.dev/warmup-items";
/// Annotation: generation of the Warmup, in decimal.
pub(super) const GENERATION: &str = "rouse.dev/warmup-generation";
/// Annotation: failures of the node before this Pod.
pub(super) const ATTEMPT: &str = "rouse.dev/attempt";

/// The item of an action, as [`WarmupItem`] displays it.
pub(super) const ACTION_ITEM: &str = "action";

/// Container of the Pods that pull an image.
pub(super) const CONTAINER: &str = "image";

/// Prefix of the taints that Kubernetes itself sets.
pub(super) const NODE_TAINTS: &str = "node.kubernetes.io/";

/// What tells apart the Pods of one Warmup, for their names.
pub(super) fn identity(node: &NodeName, item: &WarmupItem, generation: u64) -> String {
    let item = match item {
        WarmupItem::Image(image) => format!("image {image}"),
        WarmupItem::Action(action) => format!("action {action}"),
    };
    format!("{node} {generation} {item}")
}
