//! Reports this gateway's demand to the leader, and passes on the demand of other gateways.
//!
//! A gateway reports its first waiter of a model, and the loss of the last, at once: a start must not wait for a timer.
//! Other numbers may be seconds old. A GatewayReplica disappears with its gateway's Pod, and when its gateway shuts
//! down in order. A gateway that was killed while its Pod runs on leaves a GatewayReplica that nothing renews; it
//! expires after a while. The expiry never compares clocks of two machines, only times that the API server set: that of
//! the last write of the object, and that of the newest write of any of them, which includes this gateway's own.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta},
    jiff::Timestamp,
};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams},
};
use rouse::{
    fleet::event::{Event, GatewayDemand},
    model::ModelName,
    units::{Millis, Tick},
};
use rouse_platform::DriverClient;
use serde_json::{Value, json};
use tokio::{
    sync::{mpsc, oneshot},
    time::{self, Instant, MissedTickBehavior},
};

use super::{
    condition::{condition, tick, time as written},
    crd::{GatewayReplica, GatewayReplicaStatus, replica::ModelDemand},
    status_inputs::StatusInputs,
    watch::{Delta, InitialLists, WatchedObject},
    writer::MANAGER,
};

/// Condition type of a GatewayReplica.
const SEES_ALL: &str = "SeesAll";
/// Minimum interval between writes that are not 0<->n transitions.
const REPORT_INTERVAL: Duration = Duration::from_secs(5);
/// Minimum interval between writes of which models are used.
const USE_REPORT_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum age of the object before this gateway renews it unchanged.
const RENEW_INTERVAL: Duration = Duration::from_secs(20);
/// Age without renewal at which a gateway counts as gone.
const PEER_TIMEOUT: Duration = Duration::from_secs(60);
/// Minimum growth of a last request's time that is worth a write.
const LAST_REQUEST_STEP: Millis = Millis::secs(30);
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// Writes this gateway's own GatewayReplica.
pub struct DemandReporter<D> {
    pub client: Client,
    pub namespace: String,
    pub name: String,
    /// Uid of the Pod of that name, which owns the object.
    pub pod_uid: Option<String>,
    /// Address at which other gateways reach this gateway's API.
    pub address: String,
    pub handle: D,
    pub status_inputs: Arc<StatusInputs>,
    /// Lists that this gateway could not read.
    pub initial_lists: InitialLists,
}

impl<D: DriverClient> DemandReporter<D> {
    /// Writes until it is dropped. Drops `first_report` after the first attempt, successful or not.
    pub async fn run(self, first_report: oneshot::Sender<()>) {
        let mut first_report = Some(first_report);
        let api: Api<GatewayReplica> = Api::namespaced(self.client.clone(), &self.namespace);
        let mut every = time::interval(REPORT_INTERVAL);
        every.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut last, mut renewed) = (None::<BTreeMap<ModelName, GatewayDemand>>, Instant::now());
        let (mut made, mut conditions) = (false, Vec::new());
        loop {
            tokio::select! {
                () = self.status_inputs.demand_edge() => {}
                () = self.use_changed_since(renewed) => {}
                _ = every.tick() => {}
            }
            let now = self.handle.demand().await;
            conditions = self.conditions(&conditions);
            let stale = renewed.elapsed() >= RENEW_INTERVAL;
            if !stale && last.as_ref().is_some_and(|last| !differs(last, &now)) {
                continue;
            }
            let wrote = async {
                if !made {
                    self.make(&api).await?;
                }
                self.write(&api, &now, &conditions).await
            };
            match time::timeout(CALL_TIMEOUT, wrote).await {
                Ok(Ok(())) => (made, last, renewed) = (true, Some(now), Instant::now()),
                Ok(Err(error)) => {
                    tracing::warn!(%error, "write of this gateway's demand failed, retrying");
                    (made, last) = (false, None);
                }
                Err(_) => {
                    tracing::warn!("write of this gateway's demand timed out, retrying");
                    last = None;
                }
            }
            // Signals the receiver that the first attempt is over.
            drop(first_report.take());
        }
    }

    /// Completes when the set of used models has changed, at the earliest one interval after `last_report`.
    ///
    /// A busy gateway's set changes with each turn, so this limits its writes.
    async fn use_changed_since(&self, last_report: Instant) {
        self.status_inputs.use_changed().await;
        time::sleep_until(last_report + USE_REPORT_INTERVAL).await;
    }

    fn conditions(&self, before: &[Condition]) -> Vec<Condition> {
        let lacks = self.initial_lists.skipped_message();
        let (reason, message) = match &lacks {
            None => ("SeesAll", "this gateway may read every namespace that it serves".to_owned()),
            Some(lacks) => {
                let text = format!(
                    "this gateway may not read {lacks}, and does not serve these: apply \
                     charts/rouse/rbac/namespace.yaml in their namespaces"
                );
                ("Forbidden", text)
            }
        };
        let now = self.handle.clock().now();
        vec![condition(SEES_ALL, lacks.is_none(), reason, &message, None, before, now)]
    }

    async fn make(&self, api: &Api<GatewayReplica>) -> kube::Result<()> {
        let owner = |uid: &String| json!({"apiVersion": "v1", "kind": "Pod", "name": self.name, "uid": uid});
        let owners: Vec<Value> = self.pod_uid.iter().map(owner).collect();
        let object = json!({
            "apiVersion": "rouse.dev/v1alpha1",
            "kind": "GatewayReplica",
            "metadata": {"name": self.name, "namespace": self.namespace, "ownerReferences": owners},
            "spec": {"address": self.address},
        });
        api.patch(&self.name, &PatchParams::apply(MANAGER).force(), &Patch::Apply(&object)).await.map(drop)
    }

    async fn write(
        &self,
        api: &Api<GatewayReplica>,
        demand: &BTreeMap<ModelName, GatewayDemand>,
        conditions: &[Condition],
    ) -> kube::Result<()> {
        let each = |of: fn(&GatewayDemand) -> u32| demand.values().map(of).fold(0, u32::saturating_add);
        let status = GatewayReplicaStatus {
            waiting: each(|demand| demand.waiting),
            in_flight: each(|demand| demand.in_flight),
            models: demand
                .iter()
                .map(|(model, demand)| (model.to_string(), ModelDemand::from(demand)))
                .collect(),
            renewed: Some(written(self.handle.clock().now())),
            conditions: conditions.to_vec(),
        };
        let object = json!({
            "apiVersion": "rouse.dev/v1alpha1",
            "kind": "GatewayReplica",
            "metadata": {"name": self.name, "namespace": self.namespace},
            "status": status,
        });
        api.patch_status(&self.name, &PatchParams::apply(MANAGER).force(), &Patch::Apply(&object))
            .await
            .map(drop)
    }
}

/// Deletes a gateway's GatewayReplica on an orderly shutdown.
pub async fn remove(client: Client, namespace: &str, name: &str) {
    let api: Api<GatewayReplica> = Api::namespaced(client, namespace);
    match time::timeout(CALL_TIMEOUT, api.delete(name, &DeleteParams::default())).await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => tracing::debug!(%error, "deletion of this gateway's GatewayReplica failed"),
        Err(_) => tracing::debug!("deletion of this gateway's GatewayReplica timed out"),
    }
}

/// Whether the demand has changed enough for a write: models or numbers, or a much later last request.
fn differs(before: &BTreeMap<ModelName, GatewayDemand>, now: &BTreeMap<ModelName, GatewayDemand>) -> bool {
    let numbers = |of: &GatewayDemand| (of.waiting, of.in_flight);
    now.iter().any(|(model, now)| {
        before.get(model).is_none_or(|before| {
            numbers(before) != numbers(now) || before.last_request + LAST_REQUEST_STEP <= now.last_request
        })
    }) || before.keys().any(|model| !now.contains_key(model))
}

impl From<&GatewayDemand> for ModelDemand {
    fn from(demand: &GatewayDemand) -> Self {
        let last = demand.last_request;
        Self {
            waiting: demand.waiting,
            in_flight: demand.in_flight,
            last_request: (last > Tick(0)).then(|| written(last)),
        }
    }
}

/// Sends the other gateways' demand to the driver until the watch ends.
pub async fn watch_peers<D: DriverClient>(
    own: String,
    handle: D,
    mut seen: mpsc::Receiver<Delta<GatewayReplica>>,
) {
    let latest = Timestamp::MIN;
    let mut listener =
        PeerWatcher { own, handle, peers: BTreeMap::new(), peer_names: None, alone: false, latest };
    loop {
        let oldest = listener.peers.values().map(|peer| peer.expires_at).min();
        let silent = async {
            match oldest {
                Some(at) => time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            change = seen.recv() => match change {
                None => return,
                Some(change) => listener.apply(change),
            },
            () = silent => listener.forget(|_, peer| peer.expires_at <= Instant::now()),
        }
        listener.report_peers();
    }
}

struct PeerWatcher<D> {
    own: String,
    handle: D,
    peers: BTreeMap<String, PeerDemand>,
    /// Names of all other gateways' objects, expired ones too; `None` before the first list.
    peer_names: Option<BTreeSet<String>>,
    /// The driver was last informed that there are no other gateways.
    alone: bool,
    /// The latest API server time of a write to any of these objects. The present is not earlier.
    latest: Timestamp,
}

/// Demand of one other gateway.
struct PeerDemand {
    status: GatewayReplicaStatus,
    written: Timestamp,
    /// Time at which this demand expires.
    expires_at: Instant,
}

impl<D: DriverClient> PeerWatcher<D> {
    /// Informs the driver when it begins or ceases to have peers.
    fn report_peers(&mut self) {
        let alone = self.peer_names.as_ref().is_some_and(BTreeSet::is_empty);
        if std::mem::replace(&mut self.alone, alone) != alone {
            self.handle.send_event(Event::PeersChanged { exist: !alone });
        }
    }

    fn apply(&mut self, change: Delta<GatewayReplica>) {
        match change {
            Delta::All { objects, .. } => {
                let listed: BTreeSet<String> = objects.iter().map(|found| found.name().name).collect();
                self.peer_names = Some(listed.iter().filter(|name| **name != self.own).cloned().collect());
                self.forget(|name, _| !listed.contains(name));
                let times = objects.iter().map(|found| written_at(found.metadata()));
                self.latest = times.fold(self.latest, Timestamp::max);
                objects.into_iter().for_each(|found| self.peer_applied(found));
            }
            Delta::Applied(found) => {
                self.latest = self.latest.max(written_at(found.metadata()));
                let name = found.name().name;
                if name != self.own {
                    self.peer_names.get_or_insert_default().insert(name);
                }
                self.peer_applied(*found);
            }
            Delta::Deleted(name) => {
                if let Some(peer_names) = &mut self.peer_names {
                    peer_names.remove(&name.name);
                }
                self.forget(|gateway, _| *gateway == name.name);
            }
        }
        // A newer write may show that known demand is older than it seemed.
        let (now, latest) = (Instant::now(), self.latest);
        for peer in self.peers.values_mut() {
            peer.expires_at = peer.expires_at.min(now + time_left(peer.written, latest));
        }
    }

    fn peer_applied(&mut self, found: WatchedObject<GatewayReplica>) {
        let written = written_at(found.metadata());
        let Some(object) = found.readable().filter(|object| object.name_any() != self.own) else { return };
        let (gateway, status) = (object.name_any(), object.status.unwrap_or_default());
        let rest = time_left(written, self.latest);
        if rest.is_zero() || self.peers.get(&gateway).is_some_and(|known| known.status == status) {
            return;
        }
        let demand = status.models.iter().map(|(model, demand)| {
            let last_request = demand.last_request.as_ref().map(tick).unwrap_or_default();
            let elsewhere =
                GatewayDemand { waiting: demand.waiting, in_flight: demand.in_flight, last_request };
            (ModelName::from(model.as_str()), elsewhere)
        });
        self.handle
            .send_event(Event::RemoteDemand { gateway: gateway.clone(), demand: Some(demand.collect()) });
        self.peers.insert(gateway, PeerDemand { status, written, expires_at: Instant::now() + rest });
    }

    fn forget(&mut self, is_gone: impl Fn(&String, &PeerDemand) -> bool) {
        let handle = &self.handle;
        self.peers.retain(|gateway, peer| {
            let gone = is_gone(gateway, peer);
            if gone {
                handle.send_event(Event::RemoteDemand { gateway: gateway.clone(), demand: None });
            }
            !gone
        });
    }
}

/// Returns the time at which the API server took the object's last write.
fn written_at(metadata: &ObjectMeta) -> Timestamp {
    let writes = metadata.managed_fields.iter().flatten().filter_map(|fields| fields.time.as_ref());
    let made = metadata.creation_timestamp.as_ref();
    writes.chain(made).map(|time| time.0).max().unwrap_or(Timestamp::MIN)
}

/// Returns how long demand written at `written` stays valid at `now`.
fn time_left(written: Timestamp, now: Timestamp) -> Duration {
    let age = Duration::try_from(now.duration_since(written)).unwrap_or_default();
    PEER_TIMEOUT.saturating_sub(age)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_a_minute_older_than_the_latest_counts_no_more() {
        let at = |second: i64| Timestamp::from_second(1_795_000_000 + second).unwrap();
        assert_eq!(time_left(at(0), at(0)), PEER_TIMEOUT);
        assert_eq!(time_left(at(0), at(20)), Duration::from_secs(40));
        assert_eq!(time_left(at(0), at(60)), Duration::ZERO);
        assert_eq!(time_left(Timestamp::MIN, Timestamp::MAX), Duration::ZERO);
        assert_eq!(time_left(at(30), at(0)), PEER_TIMEOUT, "another API server's clock is ahead");
    }

    #[test]
    fn an_object_is_as_old_as_the_last_write_of_any_of_its_parts() {
        let metadata = json!({
            "creationTimestamp": "2026-11-22T08:00:00Z",
            "managedFields": [{"time": "2026-11-22T08:05:00Z"}, {"time": "2026-11-22T08:03:00Z"}, {}],
        });
        let metadata: ObjectMeta = serde_json::from_value(metadata).unwrap();
        assert_eq!(written_at(&metadata).to_string(), "2026-11-22T08:05:00Z");
        assert_eq!(written_at(&ObjectMeta::default()), Timestamp::MIN);
    }
}
