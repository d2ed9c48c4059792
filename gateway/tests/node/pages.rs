//! Blocks of the pages, and their commands for a node, run on a node as written. Only the archives' folder is another.

use std::{fs, path::Path};

use rouse_cluster::{KubeletNode, node::image};

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

/// Returns the blocks of this page with this tag, in order.
pub(crate) fn blocks(page: &str, tag: &str) -> Vec<String> {
    let text = fs::read_to_string(repo_path(page)).unwrap();
    let begin = format!("\n```{tag}\n");
    let block = |rest: &str| rest.split_once("\n```").unwrap().0.to_owned();
    text.split(begin.as_str()).skip(1).map(block).collect()
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
