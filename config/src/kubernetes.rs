//! Reads `platform: kubernetes`: the gateway's place in a cluster, and what it watches there.

use std::path::PathBuf;

use http::Uri;
use rouse::{
    pairing::{self, ids::ProviderMode},
    units::Millis,
};

use super::{
    reader::{ConfigReader, ConfigSection},
    saturation::{self, SaturationConfig},
    yaml::YamlNode,
};

/// Settings of a gateway in a cluster. Its Pod provides the defaults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubernetesConfig {
    pub watched_namespaces: WatchedNamespaces,
    /// Namespace of the Lease and of this gateway's own object; defaults to the Pod's.
    pub namespace: Option<String>,
    /// Name by which other gateways know this one; defaults to the Pod's name.
    pub name: Option<String>,
    /// Uid of the Pod of that name, which owns this gateway's own object.
    pub pod_uid: Option<String>,
    /// Image of the stub that runs beside each engine.
    pub stub_image: String,
    pub stub_pull_policy: Option<String>,
    /// Backends need not be Services of their model's namespace.
    pub any_backend: bool,
    /// Prometheus that reports the accelerators' used memory, besides the stubs, and the load of engines.
    pub prometheus: Option<PrometheusConfig>,
    /// How to scale models by the load of their engines; `None` disables it.
    pub saturation: Option<SaturationConfig>,
    pub warmup: WarmupConfig,
    /// How to serve requesters; `None` disables it.
    pub dual_pods: Option<DualPodsConfig>,
    /// How to keep the slots of shared devices; `None` disables it.
    pub slots: Option<SlotsConfig>,
}

/// How the gateway that leads carries out Warmups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WarmupConfig {
    /// `false`: Warmups are left alone, and models keep no images warm.
    pub enabled: bool,
    pub image_volumes: ImageVolumes,
    /// Nodes at a time that the Warmup of a model with `warmup: auto` warms; at least 1.
    pub auto_parallelism: u32,
    /// Pause after a node's first failure. It doubles with each further one.
    pub retry_delay: Millis,
}

/// When an image is mounted as a volume, so that nothing of it runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ImageVolumes {
    /// On each node whose kubelet and container runtime have them.
    #[default]
    Auto,
    /// Never: a container of the image is created, which need not start.
    Never,
}

impl Default for WarmupConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            image_volumes: ImageVolumes::default(),
            // More would take bandwidth that starting engines need.
            auto_parallelism: 2,
            retry_delay: Millis::secs(10),
        }
    }
}

/// Settings of dual pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DualPodsConfig {
    pub mode: ProviderMode,
    pub timing: pairing::settings::PairingSettings,
}

/// How the gateway that leads keeps the slots of shared devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotsConfig {
    /// A node that is not ready for so long, and has no Pod with a slot left, has lost its slots.
    pub node_timeout: Millis,
}

impl Default for SlotsConfig {
    fn default() -> Self {
        Self { node_timeout: Millis::secs(300) }
    }
}

/// A Prometheus that scrapes DCGM's exporter, or engines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrometheusConfig {
    /// `http` or `https`, with the path before `/api/v1`, if any.
    pub url: Uri,
    /// File with a bearer token.
    pub token_file: Option<PathBuf>,
    /// Root certificates for the server's certificate.
    pub ca_file: Option<PathBuf>,
    /// Minimum interval between queries.
    pub interval: Millis,
    /// Timeout of a query.
    pub timeout: Millis,
}

/// Where engines run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum PlatformKind {
    Local,
    Kubernetes,
}

/// Namespaces whose models are served.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum WatchedNamespaces {
    /// The gateway's own namespace.
    #[default]
    Own,
    Named(Vec<String>),
    All,
}

/// Reads the section. `instead` is the command line's override of `platform`.
pub(super) fn kubernetes(
    reader: &mut ConfigReader,
    root: &mut ConfigSection,
    instead: Option<PlatformKind>,
) -> Option<KubernetesConfig> {
    let mut platform_at = root.at;
    let platform = root.read(reader, "platform", |reader, node| {
        platform_at = node.at;
        reader.choice(node, &[("local", PlatformKind::Local), ("kubernetes", PlatformKind::Kubernetes)])
    });
    let is_kubernetes = instead.or(platform) == Some(PlatformKind::Kubernetes);
    let mut given = None;
    let section = root.read(reader, "kubernetes", |reader, node| {
        given = Some(node.at);
        section(reader, node)
    });
    match (is_kubernetes, given) {
        (true, None) => {
            reader.note(
                platform_at,
                "platform: kubernetes needs a `kubernetes` section with at least stubImage",
            );
            None
        }
        (true, Some(_)) => {
            for (key, instead) in [("models", "InferenceModels"), ("accelerators", "AcceleratorPools")] {
                if let Some(at) = root.location_of(key) {
                    reader.note(
                        at,
                        format_args!(
                            "{key} is not allowed with platform: kubernetes: create {instead} instead"
                        ),
                    );
                }
            }
            section
        }
        (false, Some(at)) => {
            reader.note(at, "the kubernetes section needs platform: kubernetes");
            None
        }
        (false, None) => None,
    }
}

fn section(reader: &mut ConfigReader, node: &YamlNode) -> Option<KubernetesConfig> {
    let mut section = reader.section(node);
    let watched = section.read(reader, "namespaces", read_namespaces).unwrap_or_default();
    let namespace = section.read(reader, "namespace", ConfigReader::text);
    let name = section.read(reader, "name", ConfigReader::text);
    let pod_uid = section.read(reader, "podUid", ConfigReader::text);
    let stub_image = section.require(reader, "stubImage", ConfigReader::text);
    let stub_pull_policy = section.read(reader, "stubPullPolicy", |reader, node| {
        reader.choice(node, &[("Always", "Always"), ("IfNotPresent", "IfNotPresent"), ("Never", "Never")])
    });
    let any_backend = section.read(reader, "anyBackend", ConfigReader::flag).unwrap_or(false);
    let prometheus = section.read(reader, "prometheus", prometheus);
    let saturation = saturation::of_cluster(reader, &mut section, prometheus.is_some());
    let warmup = section.sub(reader, "warmup", warmup);
    let dual_pods = section.read(reader, "dualPods", dual_pods);
    let slots = section.read(reader, "slots", slots);
    section.close(reader);
    Some(KubernetesConfig {
        watched_namespaces: watched,
        namespace,
        name,
        pod_uid,
        stub_image: stub_image?,
        stub_pull_policy: stub_pull_policy.map(str::to_owned),
        any_backend,
        prometheus,
        saturation,
        warmup,
        dual_pods,
        slots,
    })
}

fn warmup(reader: &mut ConfigReader, section: &mut ConfigSection) -> WarmupConfig {
    let default = WarmupConfig::default();
    let choices = [("auto", ImageVolumes::Auto), ("never", ImageVolumes::Never)];
    let enabled = section.read(reader, "enabled", ConfigReader::flag);
    let image_volumes = section.read(reader, "imageVolumes", |reader, node| reader.choice(node, &choices));
    let auto_parallelism = section.read(reader, "autoParallelism", |reader, node| {
        let nodes = reader.number::<u32>(node)?;
        if nodes == 0 {
            reader.note(node.at, "no node would ever be warmed: write at least 1, or enabled: false");
        }
        Some(nodes.max(1))
    });
    let retry_delay = section.read(reader, "retryDelay", ConfigReader::positive_duration);
    WarmupConfig {
        enabled: enabled.unwrap_or(default.enabled),
        image_volumes: image_volumes.unwrap_or(default.image_volumes),
        auto_parallelism: auto_parallelism.unwrap_or(default.auto_parallelism),
        retry_delay: retry_delay.unwrap_or(default.retry_delay),
    }
}

fn dual_pods(reader: &mut ConfigReader, node: &YamlNode) -> Option<DualPodsConfig> {
    let mut section = reader.section(node);
    let modes = [
        ("plain", ProviderMode::Plain),
        ("sleep", ProviderMode::Sleep),
        ("launcher", ProviderMode::Launcher),
    ];
    let mode = section
        .read(reader, "mode", |reader, node| reader.choice(node, &modes))
        .unwrap_or(ProviderMode::Sleep);
    let default = pairing::settings::PairingSettings::default();
    let mut span = |reader: &mut ConfigReader, key, default| {
        section.read(reader, key, ConfigReader::positive_duration).unwrap_or(default)
    };
    let timing = pairing::settings::PairingSettings {
        meter_lag: span(reader, "meterLag", default.meter_lag),
        drain_timeout: span(reader, "drain", default.drain_timeout),
        sleep_timeout: span(reader, "sleep", default.sleep_timeout),
        wake_timeout: span(reader, "wake", default.wake_timeout),
        start_timeout: span(reader, "start", default.start_timeout),
        launcher_idle_timeout: span(reader, "idle", default.launcher_idle_timeout),
        vanished_retention: span(reader, "vanishedPodRetention", default.vanished_retention),
        ..default
    };
    section.close(reader);
    Some(DualPodsConfig { mode, timing })
}

fn slots(reader: &mut ConfigReader, node: &YamlNode) -> Option<SlotsConfig> {
    let mut section = reader.section(node);
    let node_timeout = section.read(reader, "nodeTimeout", ConfigReader::positive_duration);
    section.close(reader);
    let default = SlotsConfig::default();
    Some(SlotsConfig { node_timeout: node_timeout.unwrap_or(default.node_timeout) })
}

fn prometheus(reader: &mut ConfigReader, node: &YamlNode) -> Option<PrometheusConfig> {
    let mut section = reader.section(node);
    let url = section.require(reader, "url", prometheus_url);
    let mut file =
        |reader: &mut ConfigReader, key| section.read(reader, key, ConfigReader::text).map(PathBuf::from);
    let (token_file, ca_file) = (file(reader, "tokenFile"), file(reader, "caFile"));
    let mut span = |reader: &mut ConfigReader, key, default| {
        section.read(reader, key, ConfigReader::positive_duration).unwrap_or_else(|| Millis::secs(default))
    };
    let (interval, timeout) = (span(reader, "interval", 15), span(reader, "timeout", 5));
    section.close(reader);
    Some(PrometheusConfig { url: url?, token_file, ca_file, interval, timeout })
}

fn prometheus_url(reader: &mut ConfigReader, node: &YamlNode) -> Option<Uri> {
    let text = reader.text(node)?;
    let usable = |uri: &Uri| matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some();
    match text.parse::<Uri>().ok().filter(usable) {
        // A text that holds a password is not repeated.
        Some(uri) if uri.authority().is_some_and(|authority| authority.as_str().contains('@')) => {
            reader.note(
                node.at,
                "the URL contains credentials: put a bearer token into a file, and set tokenFile",
            );
            None
        }
        Some(uri) if uri.query().is_some() => {
            reader.note(
                node.at,
                "the URL has a query: write only the part before /api/v1, like http://HOST:9090",
            );
            None
        }
        Some(uri) => Some(uri),
        None => {
            let shown = if text.contains('@') { "this value" } else { &format!("'{text}'") };
            reader.note(node.at, format_args!("{shown} is not a URL: write http://HOST:9090"));
            None
        }
    }
}

fn read_namespaces(reader: &mut ConfigReader, node: &YamlNode) -> Option<WatchedNamespaces> {
    let names = reader.list(node, ConfigReader::text)?;
    if names.iter().any(|name| name == "*") {
        if names.len() > 1 {
            reader.note(node.at, "'*' means every namespace: remove the other names");
        }
        return Some(WatchedNamespaces::All);
    }
    Some(if names.is_empty() { WatchedNamespaces::Own } else { WatchedNamespaces::Named(names) })
}
