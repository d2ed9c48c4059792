//! Blocks of the pages, and their commands for a node, run on a node as written. Only the archives' folder is another.

use std::{fs, path::Path};

use rouse_cluster::{KubeletNode, node::image};
use rouse_testing::page;

use crate::support::repo_path;

/// Stand-ins for the programs that this node has not. They take the arguments that the real programs document, and
/// import the archive as those do: `k3s ctr` is containerd's `ctr` with the socket and the namespace of the kubelet,
/// kind sends the file to the `ctr` of its nodes, and podman reads the archive by its path.
const STAND_INS: &str = r#"
k3s() {
    [ "${1-}" = ctr ]
    shift
    ctr --namespace k8s.io "$@"
}
kind() {
    [ "$#:${1-}:${2-}" = 3:load:image-archive ]
    ctr --namespace k8s.io images import - < "$3"
}
podman() {
    [ "$#:${1-}:${2-}" = 3:load:--input ]
    ctr --namespace k8s.io images import "$3"
}
"#;

/// `make images` and `skopeo` for this node. The images are built before the tests, as that target builds them. A copy
/// to a registry goes into the node's own store under the same name, so that the kubelet has no reason to pull it.
const REGISTRY_STAND_INS: &str = r#"
make() {
    [ "$*" = images ]
}
skopeo() {
    [ "$#:${1-}" = 3:copy ]
    local archive=${2#oci-archive:} name=${3#docker://}
    ctr --namespace k8s.io images import "$archive"
    ctr --namespace k8s.io images tag "localhost/${name##*/}" "$name"
}
"#;

/// Returns the blocks of this page with this tag, in order.
pub(crate) fn blocks(page: &str, tag: &str) -> Vec<String> {
    page::tagged(&fs::read_to_string(repo_path(page)).unwrap(), tag)
}

/// Runs the commands that build the images and push them to a registry. The node has them afterwards.
pub(crate) async fn push_images(node: &KubeletNode, archives: &Path, block: &str) {
    let commands = block.replace("target/images", &archives.display().to_string());
    let pushed = node.run(&format!("{REGISTRY_STAND_INS}\n{commands}")).await;
    pushed.unwrap_or_else(|error| panic!("{block}: {error:#}"));
}

/// Imports the stub's image by each command of the page in turn. The Pods of all tests then run what the last one left.
pub(crate) async fn import_stub(node: &KubeletNode, archives: &Path) {
    let page = fs::read_to_string(repo_path("docs/kubernetes.md")).unwrap();
    let block = blocks("docs/kubernetes.md", "sh node").remove(0);
    let image = image("rouse-stub");
    assert!(
        page.contains(&format!("`{image}`")),
        "docs/kubernetes.md does not say that the image is {image}"
    );
    for line in block.lines() {
        let command = line.replace("target/images", &archives.display().to_string());
        // Each command alone must bring the image.
        let script = format!(
            "{STAND_INS}\nctr --namespace k8s.io images rm --sync {image}\n{command}\n\
             ctr --namespace k8s.io images ls --quiet | grep --fixed-strings --line-regexp {image}\n"
        );
        node.run(&script).await.unwrap_or_else(|error| panic!("docs/kubernetes.md: {line}: {error:#}"));
    }
}
