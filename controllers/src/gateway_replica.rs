//! Reports this gateway's demand to the leader, and passes on the demand of other gateways.
//!
//! A gateway reports the first waiter of a model that no engine serves or starts for, and the loss of the last, at
//! once: a start must not wait for a timer, and must not begin when no request waits. Models that begin or cease to be
//! in use are reported within a second, and other numbers within seconds (`schedule.rs`).
//!
//! # Writes
//!
//! A write is a merge patch of the entries that changed (`report.rs`), made against the object that the last write
//! returned, and for its version. So a write that was held up, perhaps one of a former gateway of this name, is refused
//! and changes nothing. After a failure the gateway applies its object anew, which returns what is stored.
//!
//! Ten gateways with 100 models in use, of which 10 begin or cease to be in use each second, at each gateway:
//!
//! | Writes | in a second |
//! |---|---|
//! | GatewayReplicas: one for each gateway, with all that changed, urgent or not | 10 |
//! | InferenceModels: 100 times of a last request, each once in 30 s or a tenth of the cooldown (4 at most) | 3.3 |
//! | the Lease | 0.5 |
//! | Events: none of these models starts, sleeps or wakes | 0 |
//!
//! That is 14 of at most 20, whatever the number of models is. Only a burst of first or last waiters takes more: four
//! more writes of a gateway within half a second, which the gateway makes up for in the seconds after it.
//!
//! # Age
//!
//! A GatewayReplica disappears with its gateway's Pod, and when its gateway shuts down in order. A gateway that was
//! killed while its Pod runs on leaves a GatewayReplica that nothing renews; it expires after a while. The expiry never
//! compares clocks of two machines, only times that the API server set: that of the last write of the object, and that
//! of the newest write of any of them, which includes this gateway's own. The API server notes the time of a patch with
//! the fields that the patch sets, and each patch sets `renewed`.

mod report;
mod schedule;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use futures_util::future::BoxFuture;
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
    units::Millis,
};
use rouse_net::timer::sleep_until_some;
use rouse_platform::DriverClient;
use serde_json::{Value, json};
use tokio::{
    sync::{oneshot, watch},
    time::{self, Instant},
};

use self::schedule::{ReportScope, WriteSchedule};
use super::{
    cache::{Subscription, TermDelta},
    condition::{condition, tick},
    crd::{GatewayReplica, GatewayReplicaStatus},
    index::Resolved,
    status::max_last_request_lag,
    status_inputs::StatusInputs,
    watch::{Delta, InitialLists, WatchedObject},
    writer::MANAGER,
};

/// Condition type of a GatewayReplica.
const SEES_ALL: &str = "SeesAll";
/// Maximum age of the object before this gateway renews it unchanged.
const RENEW_INTERVAL: Duration = Duration::from_secs(20);
/// Age without renewal at which a gateway counts as gone.
const PEER_TIMEOUT: Duration = Duration::from_secs(60);
/// Lag of the time of a last request, for a model that is not served any more.
const DEFAULT_LAG: Millis = Millis::secs(30);
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// Writes this gateway's own GatewayReplica.
pub(crate) struct DemandReporter<D> {
    pub client: Client,
    pub namespace: String,
    pub name: String,
    /// Uid of the Pod of that name, which owns the object.
    pub pod_uid: Option<String>,
    /// Address at which other gateways reach this gateway's API.
    pub address: String,
    pub handle: D,
    pub status_inputs: Arc<StatusInputs>,
    /// The served models, whose cooldowns say how late the time of a last request may be.
    pub resolved: watch::Receiver<Option<Arc<Resolved>>>,
    /// Lists that this gateway could not read.
    pub initial_lists: InitialLists,
}

/// This gateway's object as its last write left it.
struct StoredReplica {
    version: Option<String>,
    status: GatewayReplicaStatus,
    written: Instant,
}

/// What a report is about.
struct ReportRequest {
    scope: ReportScope,
    /// Models whose demand has changed.
    changed: BTreeSet<ModelName>,
}

impl<D: DriverClient> DemandReporter<D> {
    /// Writes until it is dropped. Drops `first_report` after the first attempt, successful or not.
    pub(crate) async fn run(self, first_report: oneshot::Sender<()>) {
        let mut first_report = Some(first_report);
        let api: Api<GatewayReplica> = Api::namespaced(self.client.clone(), &self.namespace);
        let mut schedule = WriteSchedule::new(Instant::now());
        let mut changed = BTreeSet::new();
        let mut stored = None;
        loop {
            tokio::select! {
                change = self.status_inputs.demand_change() => {
                    schedule.note(change.urgency, Instant::now());
                    changed.extend(change.models);
                    continue;
                }
                () = time::sleep_until(schedule.due()) => {}
            }
            let began = Instant::now();
            let request =
                ReportRequest { scope: schedule.begin(began), changed: std::mem::take(&mut changed) };
            match time::timeout(CALL_TIMEOUT, self.report(&api, &mut stored, request)).await {
                Ok(Ok(false)) => {}
                Ok(Ok(true)) => schedule.wrote(began),
                Ok(Err(kube::Error::Api(status))) if status.is_conflict() => {
                    tracing::debug!("this gateway's demand was written by another write, writing again");
                    schedule.wrote(began);
                    schedule.retry_soon(Instant::now());
                }
                Ok(Err(error)) => {
                    tracing::warn!(%error, "write of this gateway's demand failed, retrying");
                    schedule.wrote(began);
                    schedule.retry_later(Instant::now());
                }
                Err(_) => {
                    tracing::warn!("write of this gateway's demand timed out, retrying");
                    schedule.wrote(began);
                    schedule.retry_later(Instant::now());
                }
            }
            // Signals the receiver that the first attempt is over.
            drop(first_report.take());
        }
    }

    /// Writes what differs from the stored status, and returns whether it wrote. Leaves `None` in `stored` if it fails.
    async fn report(
        &self,
        api: &Api<GatewayReplica>,
        stored: &mut Option<StoredReplica>,
        request: ReportRequest,
    ) -> kube::Result<bool> {
        let known = stored.take();
        let everything = known.is_none() || request.scope == ReportScope::Everything;
        let renews = known.as_ref().is_none_or(|known| known.written.elapsed() >= RENEW_INTERVAL);
        let before = match known {
            Some(known) => known,
            None => StoredReplica::of(self.make(api).await?),
        };
        let demand = self.handle.demand((!everything).then(|| request.changed.clone())).await;
        let models =
            if everything { report::all_models(&demand, &before.status.models) } else { request.changed };
        let now = self.handle.clock().now();
        let changes = report::entry_changes(models.iter(), &demand, &before.status.models, self.lags(), now);
        let conditions = self.conditions(&before.status.conditions);
        let ended = demand.iter().map(|(model, demand)| (model, demand.last_request));
        self.status_inputs.record_last_requests(ended);
        let differs = !changes.is_empty() || (everything && conditions != before.status.conditions);
        if !differs && !renews {
            *stored = Some(before);
            return Ok(false);
        }
        let patch = json!({
            "metadata": {"resourceVersion": before.version},
            "status": report::status_patch(&before.status, &changes, &conditions, now),
        });
        let parameters = PatchParams { field_manager: Some(MANAGER.to_owned()), ..PatchParams::default() };
        let written = api.patch_status(&self.name, &parameters, &Patch::Merge(&patch)).await?;
        *stored = Some(StoredReplica::of(written));
        Ok(true)
    }

    /// Returns how late the time of each model's last request may be.
    fn lags(&self) -> impl Fn(&ModelName) -> Millis {
        let resolved = self.resolved.borrow().clone();
        move |model: &ModelName| {
            let served = resolved.as_ref().and_then(|resolved| resolved.find(model));
            served.map_or(DEFAULT_LAG, |served| max_last_request_lag(&served.spec.idle))
        }
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

    /// Applies the object without its status, and returns it with the status that is stored.
    async fn make(&self, api: &Api<GatewayReplica>) -> kube::Result<GatewayReplica> {
        let owner = |uid: &String| json!({"apiVersion": "v1", "kind": "Pod", "name": self.name, "uid": uid});
        let owners: Vec<Value> = self.pod_uid.iter().map(owner).collect();
        let object = json!({
            "apiVersion": "rouse.dev/v1alpha1",
            "kind": "GatewayReplica",
            "metadata": {"name": self.name, "namespace": self.namespace, "ownerReferences": owners},
            "spec": {"address": self.address},
        });
        api.patch(&self.name, &PatchParams::apply(MANAGER).force(), &Patch::Apply(&object)).await
    }
}

impl StoredReplica {
    fn of(object: GatewayReplica) -> Self {
        Self {
            version: object.metadata.resource_version,
            status: object.status.unwrap_or_default(),
            written: Instant::now(),
        }
    }
}

/// Deletes a gateway's GatewayReplica on an orderly shutdown. Boxed for the program's size (ADR 18).
pub(crate) fn remove<'a>(client: Client, namespace: &str, name: &'a str) -> BoxFuture<'a, ()> {
    let api: Api<GatewayReplica> = Api::namespaced(client, namespace);
    Box::pin(async move {
        match time::timeout(CALL_TIMEOUT, api.delete(name, &DeleteParams::default())).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => tracing::debug!(%error, "deletion of this gateway's GatewayReplica failed"),
            Err(_) => tracing::debug!("deletion of this gateway's GatewayReplica timed out"),
        }
    })
}

/// Sends the other gateways' demand to the driver until it is dropped.
pub(crate) async fn watch_peers<D: DriverClient>(
    own: String,
    handle: D,
    mut seen: Subscription<GatewayReplica>,
) {
    let latest = Timestamp::MIN;
    let mut listener =
        PeerWatcher { own, handle, peers: BTreeMap::new(), peer_names: None, alone: false, latest };
    loop {
        let oldest = listener.peers.values().map(|peer| peer.expires_at).min();
        tokio::select! {
            TermDelta { delta, .. } = seen.recv() => listener.apply(delta),
            () = sleep_until_some(oldest) => listener.forget(|_, peer| peer.expires_at <= Instant::now()),
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
                self.peer_applied(found);
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
        let (gateway, status) = (object.name_any(), object.status.clone().unwrap_or_default());
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
mod tests;
