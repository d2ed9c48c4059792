//! The chart as helm renders it: whole, or the accounts and rights of an installation alone.

use std::{collections::BTreeSet, process::Command};

use rouse_cluster::TestCluster;
use serde_json::{Value, json};

use crate::support::repo_path;

/// Which rights of the chart the installations have: `namespace`, which is the default, or `cluster`.
const RIGHTS_ENV: &str = "ROUSE_RIGHTS";

/// A part of the chart that is off in most installations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ChartPart {
    DualPods,
    /// The rights of gateways and of node agents.
    Slots,
    /// The right of gateways to label warm nodes.
    WarmLabels,
}

/// The values of a release by which installations differ. Saturation and warmup are on in all of them.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReleaseValues {
    /// The namespaces of models as in the chart: none are the release's own namespace, `*` is every namespace.
    pub(crate) namespaces: Vec<String>,
    pub(crate) parts: BTreeSet<ChartPart>,
}

impl ReleaseValues {
    /// The values of an installation that serves its own namespace. With `ROUSE_RIGHTS=cluster` it has the rights to
    /// serve every namespace, and does not use them: installations share a cluster.
    pub(crate) fn new(parts: &[ChartPart]) -> Self {
        let namespaces = match std::env::var(RIGHTS_ENV).as_deref() {
            Err(_) | Ok("namespace") => Vec::new(),
            Ok("cluster") => vec!["*".to_owned()],
            Ok(other) => panic!("{RIGHTS_ENV} is '{other}', and must be namespace or cluster"),
        };
        Self { namespaces, parts: parts.iter().copied().collect() }
    }

    /// Returns the accounts and rights of a release `rouse` in the namespace `rouse`. Helm renders each set of values
    /// once per cluster, because it takes as long as the rest of an installation.
    pub(crate) async fn rights(&self, cluster: &TestCluster) -> Vec<Value> {
        let is_on = |part: ChartPart| self.parts.contains(&part);
        let values = json!({
            "models": {"namespaces": self.namespaces},
            "saturation": {"enabled": true},
            "warmup": {"enabled": true, "labelNodes": is_on(ChartPart::WarmLabels)},
            "slots": {"enabled": is_on(ChartPart::Slots)},
            "dualPods": {"enabled": is_on(ChartPart::DualPods)},
        });
        let rendered = async { json!(render_rights("rouse", &values)).to_string() };
        let name = format!("rights-{}-{:?}", self.namespaces.join("+"), self.parts);
        let text = cluster.text_once(&name, rendered).await.unwrap();
        serde_json::from_str(&text).unwrap()
    }
}

/// Returns the accounts and rights of a release `rouse` in this namespace with these values.
pub(crate) fn render_rights(namespace: &str, values: &Value) -> Vec<Value> {
    let values: Vec<String> =
        values.as_object().unwrap().iter().map(|(key, value)| format!("{key}={value}")).collect();
    let mut more = vec!["--show-only", "templates/rights.yaml"];
    more.extend(values.iter().flat_map(|value| ["--set-json", value.as_str()]));
    render(namespace, &more)
}

/// Returns the objects of a release `rouse` in this namespace. `more`: further arguments of helm.
pub(crate) fn render(namespace: &str, more: &[&str]) -> Vec<Value> {
    let helm = std::env::var_os("ROUSE_HELM")
        .expect("ROUSE_HELM must be the path of helm: `make test-cluster` builds it and sets the variable");
    let mut command = Command::new(helm);
    command.args(["template", "rouse", "--namespace", namespace, "--kube-version", "1.34.0"]);
    let output = command.args(more).arg(repo_path("charts/rouse")).output().unwrap();
    assert!(output.status.success(), "{more:?}: {}", String::from_utf8_lossy(&output.stderr));
    let text = format!("\n{}", String::from_utf8(output.stdout).unwrap());
    let documents = text.split("\n---\n").filter(|document| !document.trim().is_empty());
    // Kubernetes reads `0440` as octal.
    let options = serde_saphyr::options! { legacy_octal_numbers: true };
    let read = |document: &str| -> Value {
        serde_saphyr::from_str_with_options(document, options.clone())
            .unwrap_or_else(|error| panic!("{more:?}: {error}\n{document}"))
    };
    documents.map(read).filter(|object| !object.is_null()).collect()
}
