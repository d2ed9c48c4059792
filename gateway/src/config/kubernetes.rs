//! `platform: kubernetes`: where the gateway is in a cluster, and what it looks after there.

use super::{
    reader::{Reader, Section},
    tree::Node,
};

/// How a gateway of a cluster is set up. What is not said is taken from its Pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kubernetes {
    pub watched: Watched,
    /// Where the lease and this gateway's own object are; its Pod's, where nothing is said.
    pub namespace: Option<String>,
    /// What others know this gateway by; its Pod's name, where nothing is said.
    pub name: Option<String>,
    /// The image of the stub that is put beside each engine.
    pub stub_image: String,
    pub stub_pull_policy: Option<String>,
    /// Backends need not be Services of their model's namespace.
    pub any_backend: bool,
}

/// Whose models are served.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Watched {
    /// Those of the gateway's own namespace.
    #[default]
    Own,
    Some(Vec<String>),
    All,
}

pub(super) fn kubernetes(reader: &mut Reader, root: &mut Section) -> Option<Kubernetes> {
    let mut platform_at = root.at;
    let wanted = root.read(reader, "platform", |reader, node| {
        platform_at = node.at;
        reader.choice(node, &[("local", false), ("kubernetes", true)])
    });
    let wanted = wanted.unwrap_or(false);
    let mut given = None;
    let section = root.read(reader, "kubernetes", |reader, node| {
        given = Some(node.at);
        section(reader, node)
    });
    match (wanted, given) {
        (true, None) => {
            reader.note(platform_at, "kubernetes needs a section `kubernetes` with at least stubImage");
            None
        }
        (true, Some(_)) => {
            for (key, instead) in [("models", "InferenceModels"), ("accelerators", "AcceleratorPools")] {
                if let Some(at) = root.place_of(key) {
                    reader.note(
                        at,
                        format_args!("with platform: kubernetes there are {instead} instead of {key}"),
                    );
                }
            }
            section
        }
        (false, Some(at)) => {
            reader.note(at, "goes with platform: kubernetes");
            None
        }
        (false, None) => None,
    }
}

fn section(reader: &mut Reader, node: &Node) -> Option<Kubernetes> {
    let mut section = reader.section(node);
    let watched = section.read(reader, "namespaces", watched).unwrap_or_default();
    let namespace = section.read(reader, "namespace", Reader::text);
    let name = section.read(reader, "name", Reader::text);
    let stub_image = section.require(reader, "stubImage", Reader::text);
    let stub_pull_policy = section.read(reader, "stubPullPolicy", |reader, node| {
        reader.choice(node, &[("Always", "Always"), ("IfNotPresent", "IfNotPresent"), ("Never", "Never")])
    });
    let any_backend = section.read(reader, "anyBackend", Reader::flag).unwrap_or(false);
    section.close(reader);
    Some(Kubernetes {
        watched,
        namespace,
        name,
        stub_image: stub_image?,
        stub_pull_policy: stub_pull_policy.map(str::to_owned),
        any_backend,
    })
}

fn watched(reader: &mut Reader, node: &Node) -> Option<Watched> {
    let names = reader.list(node, Reader::text)?;
    if names.iter().any(|name| name == "*") {
        if names.len() > 1 {
            reader.note(node.at, "'*' is every namespace: say it alone");
        }
        return Some(Watched::All);
    }
    Some(if names.is_empty() { Watched::Own } else { Watched::Some(names) })
}
