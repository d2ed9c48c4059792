//! The chart's NetworkPolicies, as helm renders them: they allow each connection that Rouse makes, and refuse others.
//!
//! Nothing in the test cluster enforces policies, so this evaluates them as the API's reference describes it. Probes
//! and `kubectl port-forward` are left out: they come from a Pod's own node, and no policy refuses them.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::{
        core::v1::PodTemplateSpec,
        networking::v1::{NetworkPolicy, NetworkPolicyIngressRule, NetworkPolicyPeer, NetworkPolicyPort},
    },
    apimachinery::pkg::{apis::meta::v1::LabelSelector, util::intstr::IntOrString},
};
use kube::core::{Selector, SelectorExt as _};
use rouse_controllers::{
    label,
    workload::{MANAGED, PROBES_PORT, PROXY_PORT, ROUSE, SPI_PORT},
};
use serde_json::Value;

use crate::{rendered::render, support::repo_path};

/// The namespace of the release.
const OWN: &str = "rouse";
/// The namespace whose label makes its Pods clients in `charts/values/everything.yaml`.
const CLIENTS: &str = "apps";
/// Where an engine listens, beside the ports of its stub.
const ENGINE_PORT: u16 = 8000;

/// One end of a connection.
struct PolicyPod {
    namespace: String,
    labels: BTreeMap<String, String>,
    /// The ports that have names.
    ports: BTreeMap<String, i32>,
}

impl PolicyPod {
    fn new(namespace: &str, labels: &[(&str, &str)]) -> Self {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        Self { namespace: namespace.to_owned(), labels, ports: BTreeMap::new() }
    }

    /// A Pod of the release's only object of this kind.
    fn of_release(objects: &[Value], kind: &str) -> Self {
        let object = objects.iter().find(|object| object["kind"] == kind).unwrap();
        let template: PodTemplateSpec = serde_json::from_value(object["spec"]["template"].clone()).unwrap();
        let ports =
            template.spec.unwrap().containers.into_iter().flat_map(|one| one.ports.unwrap_or_default());
        Self {
            namespace: OWN.to_owned(),
            labels: template.metadata.unwrap().labels.unwrap(),
            ports: ports.filter_map(|port| Some((port.name?, port.container_port))).collect(),
        }
    }

    /// A Pod that Rouse creates for a model.
    fn of_engine(namespace: &str) -> Self {
        Self::new(namespace, &[(MANAGED, ROUSE), (label::MODEL, "qwen"), ("app", "anything")])
    }

    fn port(&self, name: &str) -> u16 {
        u16::try_from(self.ports[name]).unwrap()
    }

    fn namespace_labels(&self) -> BTreeMap<String, String> {
        let mut labels = BTreeMap::from([("kubernetes.io/metadata.name".to_owned(), self.namespace.clone())]);
        if self.namespace == CLIENTS {
            labels.insert("clients".to_owned(), "true".to_owned());
        }
        labels
    }
}

struct Policies(Vec<NetworkPolicy>);

impl Policies {
    fn of_release(objects: &[Value]) -> Self {
        let policies = objects.iter().filter(|object| object["kind"] == "NetworkPolicy");
        let policies: Vec<NetworkPolicy> =
            policies.map(|object| serde_json::from_value(object.clone()).unwrap()).collect();
        assert!(!policies.is_empty(), "the release has no policies");
        Self(policies)
    }

    /// Whether a TCP connection is allowed.
    fn allow(&self, from: &PolicyPod, to: &PolicyPod, port: u16) -> bool {
        // The chart has no egress rules, so this evaluates none: a Pod with a policy for them may connect nowhere.
        let is_confined = self.0.iter().any(|policy| applies(policy, from, "Egress"));
        let mut limits = self.0.iter().filter(|policy| applies(policy, to, "Ingress")).peekable();
        !is_confined && (limits.peek().is_none() || limits.any(|policy| admits(policy, from, to, port)))
    }
}

/// Whether connections of this Pod in this direction need a rule of the policy, or of another that applies.
fn applies(policy: &NetworkPolicy, pod: &PolicyPod, direction: &str) -> bool {
    let spec = policy.spec.as_ref().unwrap();
    let is_selected = spec.pod_selector.as_ref().is_none_or(|selector| selects(selector, &pod.labels));
    policy.metadata.namespace.as_ref() == Some(&pod.namespace)
        && is_selected
        && spec.policy_types.as_ref().unwrap().iter().any(|own| own == direction)
}

fn admits(policy: &NetworkPolicy, from: &PolicyPod, to: &PolicyPod, port: u16) -> bool {
    let rules = policy.spec.as_ref().and_then(|spec| spec.ingress.as_ref());
    let own = policy.metadata.namespace.as_deref().unwrap();
    let admits = |rule: &NetworkPolicyIngressRule| {
        let ports = rule.ports.as_deref().unwrap_or_default();
        let peers = rule.from.as_deref().unwrap_or_default();
        // An empty list is no limit.
        let fits_port = ports.is_empty() || ports.iter().any(|one| covers(one, to, port));
        let fits_peer = peers.is_empty() || peers.iter().any(|one| is_peer(one, own, from));
        fits_port && fits_peer
    };
    rules.is_some_and(|rules| rules.iter().any(admits))
}

fn covers(allowed: &NetworkPolicyPort, to: &PolicyPod, port: u16) -> bool {
    assert!(allowed.protocol.as_deref().is_none_or(|protocol| protocol == "TCP"), "{allowed:?}");
    let port = i32::from(port);
    match &allowed.port {
        None => true,
        Some(IntOrString::Int(first)) => (*first..=allowed.end_port.unwrap_or(*first)).contains(&port),
        Some(IntOrString::String(name)) => to.ports.get(name) == Some(&port),
    }
}

/// Whether a peer of a policy in the namespace `own` is this Pod.
fn is_peer(peer: &NetworkPolicyPeer, own: &str, from: &PolicyPod) -> bool {
    assert!(peer.ip_block.is_none(), "the Pods here have no addresses");
    let in_namespace = peer
        .namespace_selector
        .as_ref()
        .map_or_else(|| from.namespace == own, |selector| selects(selector, &from.namespace_labels()));
    in_namespace && peer.pod_selector.as_ref().is_none_or(|selector| selects(selector, &from.labels))
}

fn selects(selector: &LabelSelector, labels: &BTreeMap<String, String>) -> bool {
    Selector::try_from(selector.clone()).unwrap().matches(labels)
}

#[test]
fn policies_for_named_peers_allow_what_rouse_needs_and_nothing_else() {
    let values = repo_path("charts/values/everything.yaml");
    let objects = render(OWN, &["--values", values.to_str().unwrap()]);
    let policies = Policies::of_release(&objects);
    let (gateway, agent) =
        (PolicyPod::of_release(&objects, "Deployment"), PolicyPod::of_release(&objects, "DaemonSet"));
    let (engine, other_engine) = (PolicyPod::of_engine("chat"), PolicyPod::of_engine("search"));
    let [client, prometheus, neighbour, stranger] =
        [CLIENTS, "monitoring", OWN, "elsewhere"].map(|namespace| PolicyPod::new(namespace, &[]));
    let (backend, system) =
        (PolicyPod::new("chat", &[("app", "backend")]), PolicyPod::new("kube-system", &[]));
    let pretender = PolicyPod { labels: gateway.labels.clone(), ..PolicyPod::new("elsewhere", &[]) };
    let (api, admin, of_agent) = (gateway.port("api"), gateway.port("admin"), agent.port("admin"));
    let needed = [
        ("clients ask gateways", &client, &gateway, api),
        ("gateways ask each other", &gateway, &gateway, api),
        ("Prometheus scrapes gateways", &prometheus, &gateway, admin),
        ("Prometheus scrapes node agents", &prometheus, &agent, of_agent),
        ("requests go to engines", &gateway, &engine, PROXY_PORT),
        ("orders go to stubs", &gateway, &other_engine, SPI_PORT),
        ("gateways read the load of engines", &gateway, &engine, ENGINE_PORT),
        ("requests go to backends that others run", &gateway, &backend, ENGINE_PORT),
        ("gateways ask the API server", &gateway, &system, 6443),
        ("gateways look names up", &gateway, &system, 53),
        ("gateways ask Prometheus", &gateway, &prometheus, 9090),
        ("node agents ask the API server", &agent, &system, 6443),
        ("engines download weights", &engine, &stranger, 443),
    ];
    for (what, from, to, port) in needed {
        assert!(policies.allow(from, to, port), "{what}: {} to {}:{port}", from.namespace, to.namespace);
    }
    let undeclared = [
        ("a stranger asks gateways", &stranger, &gateway, api),
        ("Prometheus sends a request for a model", &prometheus, &gateway, api),
        ("a Pod beside the gateways asks them", &neighbour, &gateway, api),
        ("a client gives orders", &client, &gateway, admin),
        ("an engine gives orders", &engine, &gateway, admin),
        ("a client reads the metrics of a node", &client, &agent, of_agent),
        ("a client goes past the gateways", &client, &engine, ENGINE_PORT),
        ("a client goes past the gateways by the stub", &client, &engine, PROXY_PORT),
        ("Prometheus gives orders to a stub", &prometheus, &engine, SPI_PORT),
        ("an engine gives orders to another's stub", &engine, &other_engine, SPI_PORT),
        ("a Pod beside the gateways gives orders to a stub", &neighbour, &engine, SPI_PORT),
        ("a Pod with a gateway's labels elsewhere gives orders to a stub", &pretender, &engine, SPI_PORT),
    ];
    for (what, from, to, port) in undeclared {
        assert!(!policies.allow(from, to, port), "{what}: {} to {}:{port}", from.namespace, to.namespace);
    }
}

#[test]
fn policies_without_peers_keep_only_orders_to_gateways() {
    let policy = r#"networkPolicy={"enabled": true, "engines": {"enabled": true}}"#;
    let objects = render(OWN, &["--set-json", policy]);
    let policies = Policies::of_release(&objects);
    let gateway = PolicyPod::of_release(&objects, "Deployment");
    let (engine, stranger) = (PolicyPod::of_engine(OWN), PolicyPod::new("elsewhere", &[]));
    assert!(policies.allow(&stranger, &gateway, gateway.port("api")));
    // Without a token, metrics and the admin API are on loopback only.
    assert!(!gateway.ports.contains_key("admin") && !policies.allow(&stranger, &gateway, 8180));
    for port in [ENGINE_PORT, PROBES_PORT, SPI_PORT, PROXY_PORT] {
        assert!(policies.allow(&gateway, &engine, port), "{port}");
        assert_eq!(policies.allow(&stranger, &engine, port), port != SPI_PORT, "{port}");
    }
}
