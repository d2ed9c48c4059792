//! All watches of a gateway in a cluster: one for each kind and namespace.
//!
//! | watched | by | while |
//! |---|---|---|
//! | InferenceModels, pools, AcceleratorNodes, Nodes | the model controller; all but pools also by saturation, Nodes also by dual pods, Warmups and slots, AcceleratorNodes also by Warmups | always: a follower serves what follows from them |
//! | the ConfigMap of thresholds | saturation, if it is enabled | always: it changes rarely |
//! | GatewayReplicas | the driver | always: a follower knows the other gateways |
//! | Pods | the engine manager, dual pods, Warmups | leading: only the leader places engines |
//! | Warmups, their Pods, the Pods of RoleBasedGroups | Warmups | leading: only the leader warms nodes |
//! | DeviceConfigurations, DeviceInstances, Pods that have failed | slots | leading: only the leader frees slots and deletes rejected Pods |
//! | the public project's kinds, `gpu-map` | dual pods | always: they change rarely, and a new leader needs all of them |
//!
//! The only Secret is read once, at the start (`stub_key`).

use std::{collections::BTreeSet, fmt::Debug, sync::Arc, time::Duration};

use futures_util::future::BoxFuture;
use k8s_openapi::{
    NamespaceResourceScope,
    api::core::v1::{ConfigMap, Node, NodeSpec, NodeStatus, Pod},
};
use kube::{Client, Resource};
use serde::de::DeserializeOwned;
use tokio::{runtime::Handle, sync::watch, task::JoinSet, time};

use crate::{
    cache::{Cache, Subscription},
    crd::{
        self, AcceleratorNode, AcceleratorPool, DeviceConfiguration, DeviceInstance, GatewayReplica,
        InferenceModel, Warmup,
        fma::{GROUP, InferenceServerConfig, LauncherConfig, LauncherPopulationPolicy},
    },
    dual_pods::{GPU_MAP, NODE_READY_CONDITION, PairingWatches, engine_orders::EngineOrderReceiver},
    engine_pod,
    index::Resolved,
    kit::Terms,
    model_controller::ModelWatches,
    saturation::{self, SaturationWatches},
    slots::{self, DeviceSlotsWatches},
    warmup::{self, GROUP_LABEL, NODE_DISK_PRESSURE_CONDITION, WARMUP_LABEL, WarmupWatches},
    watch::{InitialLists, WatchTarget, drop_managed_fields, wait_until_listable},
    workload,
};

/// How often to check for optional kinds that the API server lacks: an operator may install them at any time.
const KIND_RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// The watches of one gateway, with their readers.
pub(super) struct ClusterWatches {
    client: Client,
    /// The namespaces of models and Pods; `None` is the whole cluster.
    namespaces: BTreeSet<Option<String>>,
    own_namespace: String,
    models: Cache<InferenceModel>,
    pools: Cache<AcceleratorPool>,
    accelerator_nodes: Cache<AcceleratorNode>,
    nodes: Cache<Node>,
    pods: Cache<Pod>,
    thresholds: Option<Cache<ConfigMap>>,
    dual_pods: Option<DualPodsCaches>,
    warmup: Option<WarmupCaches>,
    slots: Option<SlotsCaches>,
}

/// What only the controller of slots reads.
struct SlotsCaches {
    configurations: Cache<DeviceConfiguration>,
    instances: Cache<DeviceInstance>,
    failed_pods: Cache<Pod>,
    /// Lists of both kinds. No gateway waits for them.
    lists: InitialLists,
}

/// What only Warmups read.
struct WarmupCaches {
    warmups: Cache<Warmup>,
    warmup_pods: Cache<Pod>,
    group_pods: Cache<Pod>,
    /// Lists of Warmups. No gateway waits for them.
    lists: InitialLists,
}

/// What only dual pods read.
#[derive(Default)]
struct DualPodsCaches {
    gpu_map: Cache<ConfigMap>,
    server_configs: Cache<InferenceServerConfig>,
    launcher_configs: Cache<LauncherConfig>,
    policies: Cache<LauncherPopulationPolicy>,
}

impl ClusterWatches {
    pub(super) fn new(client: Client, namespaces: BTreeSet<Option<String>>, own_namespace: String) -> Self {
        Self {
            client,
            namespaces,
            own_namespace,
            models: Cache::default(),
            pools: Cache::default(),
            accelerator_nodes: Cache::default(),
            nodes: Cache::default(),
            pods: Cache::default(),
            thresholds: None,
            dual_pods: None,
            warmup: None,
            slots: None,
        }
    }

    /// Adds the model controller.
    pub(super) fn models(&mut self) -> ModelWatches {
        ModelWatches {
            models: self.models.subscribe(),
            pools: self.pools.subscribe(),
            accelerator_nodes: self.accelerator_nodes.subscribe(),
            nodes: self.nodes.subscribe(),
        }
    }

    /// Adds the controller of saturation.
    pub(super) fn saturation(
        &mut self,
        resolved: watch::Receiver<Option<Arc<Resolved>>>,
    ) -> SaturationWatches {
        SaturationWatches {
            models: self.models.subscribe(),
            thresholds: self.thresholds.get_or_insert_default().subscribe(),
            nodes: self.nodes.subscribe(),
            accelerator_nodes: self.accelerator_nodes.subscribe(),
            resolved,
        }
    }

    /// Adds the engine manager.
    pub(super) fn engine_pods(&mut self) -> Subscription<Pod> {
        self.pods.subscribe_to(engine_pod::is_engine_pod)
    }

    /// Adds the controller of dual pods.
    pub(super) fn pairing(
        &mut self,
        resolved: watch::Receiver<Option<Arc<Resolved>>>,
        orders: EngineOrderReceiver,
    ) -> PairingWatches {
        let caches = self.dual_pods.get_or_insert_default();
        PairingWatches {
            pods: self.pods.subscribe(),
            nodes: self.nodes.subscribe(),
            gpu_map: caches.gpu_map.subscribe(),
            server_configs: caches.server_configs.subscribe(),
            launcher_configs: caches.launcher_configs.subscribe(),
            policies: caches.policies.subscribe(),
            resolved,
            orders,
        }
    }

    /// Adds the controller of Warmups. `lists` records which lists of Warmups are missing.
    pub(super) fn warmup(
        &mut self,
        resolved: watch::Receiver<Option<Arc<Resolved>>>,
        lists: InitialLists,
    ) -> WarmupWatches {
        let [mut warmup_pods, mut group_pods] = [Cache::default(), Cache::default()];
        let mut warmups = Cache::default();
        let watches = WarmupWatches {
            warmups: warmups.subscribe(),
            warmup_pods: warmup_pods.subscribe(),
            engine_pods: self.pods.subscribe_to(warmup::is_engine),
            group_pods: group_pods.subscribe(),
            nodes: self.nodes.subscribe(),
            accelerator_nodes: self.accelerator_nodes.subscribe(),
            resolved,
        };
        self.warmup = Some(WarmupCaches { warmups, warmup_pods, group_pods, lists });
        watches
    }

    /// Adds the controller of slots. `lists` records which lists of its kinds are missing.
    pub(super) fn slots(&mut self, lists: InitialLists) -> DeviceSlotsWatches {
        let (mut configurations, mut instances) = (Cache::default(), Cache::default());
        let mut failed_pods = Cache::default();
        let watches = DeviceSlotsWatches {
            configurations: configurations.subscribe(),
            instances: instances.subscribe(),
            rejected_pods: failed_pods.subscribe_to(slots::is_rejected),
            nodes: self.nodes.subscribe(),
        };
        self.slots = Some(SlotsCaches { configurations, instances, failed_pods, lists });
        watches
    }

    /// Starts all watches on this runtime. `awaited` records which first lists are missing or skipped.
    ///
    /// Returns whether the Pods of any namespace may be listed. Once they may, the value stays true.
    pub(super) fn start(
        self,
        awaited: &InitialLists,
        terms: &Terms,
        tasks: &mut JoinSet<()>,
        on: &Handle,
    ) -> watch::Receiver<bool> {
        let Self {
            client,
            namespaces,
            own_namespace,
            models,
            pools,
            accelerator_nodes,
            nodes,
            pods,
            thresholds,
            dual_pods,
            warmup,
            slots,
        } = self;
        let in_namespaces = |slim| targets::<InferenceModel>(&client, &namespaces, slim);
        tasks.spawn_on(models.run(in_namespaces(slim), awaited.clone()), on);
        tasks.spawn_on(pools.run(vec![WatchTarget::cluster_wide(&client, slim)], awaited.clone()), on);
        let all = vec![WatchTarget::cluster_wide(&client, slim)];
        tasks.spawn_on(accelerator_nodes.run(all, awaited.clone()), on);
        tasks.spawn_on(nodes.run(vec![WatchTarget::cluster_wide(&client, slim_node)], awaited.clone()), on);

        // A requester is recognised by its annotations, which no selector can match.
        let selector = dual_pods.is_none().then(workload::selector);
        let pod_targets: Vec<WatchTarget<Pod>> = targets(&client, &namespaces, drop_managed_fields)
            .into_iter()
            .map(|target| target.labels(selector.clone()))
            .collect();
        // A gateway that may not list Pods learns that now, rather than when it leads.
        let (listable_tx, pods_listable) = watch::channel(false);
        for target in pod_targets.clone() {
            let (awaited, listable_tx) = (awaited.clone(), listable_tx.clone());
            let check = async move {
                wait_until_listable(target, awaited).await;
                listable_tx.send_replace(true);
            };
            tasks.spawn_on(check, on);
        }
        tasks.spawn_on(pods.run_while_leading(pod_targets, awaited.clone(), terms.clone()), on);

        if let Some(thresholds) = thresholds {
            // Its list has a record of its own, because no gateway waits for thresholds before it serves.
            let map = WatchTarget::namespaced(&client, Some(&own_namespace), drop_managed_fields)
                .fields(format!("metadata.name={}", saturation::CONFIG_MAP));
            tasks.spawn_on(thresholds.run(vec![map], InitialLists::default()), on);
        }

        let mut leader_watches =
            LeaderWatches { client: &client, namespaces: &namespaces, terms, tasks: &mut *tasks, on };
        if let Some(caches) = warmup {
            caches.start(&mut leader_watches);
        }
        if let Some(caches) = slots {
            caches.start(&mut leader_watches);
        }
        if let Some(DualPodsCaches { gpu_map, server_configs, launcher_configs, policies }) = dual_pods {
            let map = WatchTarget::namespaced(&client, Some(&own_namespace), drop_managed_fields)
                .fields(format!("metadata.name={GPU_MAP}"));
            tasks.spawn_on(gpu_map.run(vec![map], InitialLists::default()), on);
            tasks.spawn_on(
                watch_fma_objects(client.clone(), server_configs, namespaces.clone(), awaited.clone()),
                on,
            );
            tasks.spawn_on(
                watch_fma_objects(client.clone(), launcher_configs, namespaces.clone(), awaited.clone()),
                on,
            );
            tasks.spawn_on(watch_fma_objects(client, policies, namespaces, awaited.clone()), on);
        }
        pods_listable
    }
}

/// Starts watches that run while this gateway leads.
struct LeaderWatches<'a> {
    client: &'a Client,
    namespaces: &'a BTreeSet<Option<String>>,
    terms: &'a Terms,
    tasks: &'a mut JoinSet<()>,
    on: &'a Handle,
}

impl LeaderWatches<'_> {
    /// Watches some Pods of all namespaces. The right to list the Pods of engines covers these Pods, too.
    fn pods(&mut self, cache: Cache<Pod>, narrow: impl Fn(WatchTarget<Pod>) -> WatchTarget<Pod>) {
        let all = targets::<Pod>(self.client, self.namespaces, drop_managed_fields);
        let some = all.into_iter().map(narrow).collect();
        let watch = cache.run_while_leading(some, InitialLists::default(), self.terms.clone());
        self.tasks.spawn_on(watch, self.on);
    }

    /// Watches objects of a kind that the API server may lack, once it has the kind. `missing` says what to do until
    /// then.
    fn optional_kind<K>(
        &mut self,
        cache: Cache<K>,
        all: Vec<WatchTarget<K>>,
        lists: InitialLists,
        missing: &'static str,
    ) where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    {
        let (client, terms) = (self.client.clone(), self.terms.clone());
        let watch = async move {
            let plural = K::plural(&());
            let note_missing = || lists.record_kind(&plural, Some(missing));
            wait_for_kind(&client, crd::GROUP, &plural, note_missing).await;
            lists.record_kind(&plural, None);
            cache.run_while_leading(all, lists, terms).await;
        };
        self.tasks.spawn_on(watch, self.on);
    }
}

impl WarmupCaches {
    fn start(self, watches: &mut LeaderWatches<'_>) {
        let Self { warmups, warmup_pods, group_pods, lists } = self;
        for (cache, label) in [(warmup_pods, WARMUP_LABEL), (group_pods, GROUP_LABEL)] {
            watches.pods(cache, |target| target.labels(Some(label.to_owned())));
        }
        let all = targets::<Warmup>(watches.client, watches.namespaces, drop_managed_fields);
        watches.optional_kind(warmups, all, lists, NO_WARMUPS);
    }
}

impl SlotsCaches {
    fn start(self, watches: &mut LeaderWatches<'_>) {
        let Self { configurations, instances, failed_pods, lists } = self;
        watches.pods(failed_pods, |target| target.fields(slots::FAILED_PODS.to_owned()));
        let all = vec![WatchTarget::cluster_wide(watches.client, drop_managed_fields)];
        watches.optional_kind(configurations, all, lists.clone(), NO_SLOTS);
        let all = vec![WatchTarget::cluster_wide(watches.client, drop_managed_fields)];
        watches.optional_kind(instances, all, lists, NO_SLOTS);
    }
}

/// What to do if the API server does not have the kinds of shared devices.
const NO_SLOTS: &str = "the cluster does not have this kind: apply charts/rouse/definitions";
/// What to do if the API server does not have Warmups.
const NO_WARMUPS: &str = "the cluster does not have this kind: apply charts/rouse/definitions/warmups.yaml";

/// Returns the watch of the gateways' own objects, and its task, boxed for the program's size (ADR 18).
pub(super) fn gateway_replicas(
    client: &Client,
    namespace: &str,
) -> (Subscription<GatewayReplica>, BoxFuture<'static, ()>) {
    let mut cache = Cache::default();
    let replicas = cache.subscribe();
    // The write times are in the managed fields.
    let target = WatchTarget::namespaced(client, Some(namespace), |_| {});
    (replicas, Box::pin(cache.run(vec![target], InitialLists::default())))
}

/// Returns a target for each namespace.
fn targets<K>(client: &Client, namespaces: &BTreeSet<Option<String>>, slim: fn(&mut K)) -> Vec<WatchTarget<K>>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned,
{
    namespaces.iter().map(|namespace| WatchTarget::namespaced(client, namespace.as_deref(), slim)).collect()
}

/// Watches objects of one of the public project's kinds, once the API server has that kind.
async fn watch_fma_objects<K>(
    client: Client,
    cache: Cache<K>,
    namespaces: BTreeSet<Option<String>>,
    awaited: InitialLists,
) where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + DeserializeOwned
        + Debug
        + Send
        + Sync
        + 'static,
{
    wait_for_kind(&client, GROUP, &K::plural(&()), || {}).await;
    cache.run(targets(&client, &namespaces, drop_managed_fields), awaited).await;
}

/// Waits until the API server has the kind. Calls `note_missing` each time it has not.
async fn wait_for_kind(client: &Client, group: &str, plural: &str, note_missing: impl Fn() + Send) {
    loop {
        match client.list_api_group_resources(&format!("{group}/v1alpha1")).await {
            Ok(kinds) if kinds.resources.iter().any(|kind| kind.name == plural) => return,
            Ok(_) => note_missing(),
            Err(kube::Error::Api(status)) if status.code == 404 => note_missing(),
            Err(error) => {
                tracing::debug!(%error, "cannot check whether the API server has {plural}, retrying")
            }
        }
        time::sleep(KIND_RETRY_INTERVAL).await;
    }
}

/// Drops managed fields and annotations.
fn slim<K: Resource>(object: &mut K) {
    drop_managed_fields(object);
    object.meta_mut().annotations = None;
}

/// Drops everything of a Node that no controller reads, which is most of it.
///
/// Kept are metadata without annotations and managed fields, schedulability, taints, the conditions of readiness and
/// disk pressure, allocatable resources, the capacity of slots, the list of images, and the versions of kubelet and
/// container runtime.
fn slim_node(node: &mut Node) {
    slim(node);
    let NodeSpec { unschedulable, taints, .. } = node.spec.take().unwrap_or_default();
    node.spec = Some(NodeSpec { unschedulable, taints, ..NodeSpec::default() });
    let status = node.status.take().unwrap_or_default();
    let NodeStatus { mut conditions, allocatable, mut capacity, images, node_info, .. } = status;
    let node_info = node_info.map(warmup::slim_system);
    let is_read = |name: &str| [NODE_READY_CONDITION, NODE_DISK_PRESSURE_CONDITION].contains(&name);
    conditions.iter_mut().for_each(|all| all.retain(|condition| is_read(&condition.type_)));
    capacity.iter_mut().for_each(|all| all.retain(|resource, _| slots::slot_resource(resource).is_some()));
    node.status =
        Some(NodeStatus { conditions, allocatable, capacity, images, node_info, ..NodeStatus::default() });
}
