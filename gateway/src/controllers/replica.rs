//! What this gateway tells the one that leads of its demand, and what it hears of the others'.
//!
//! Whoever has its first waiter of a model, or its last, says so at once: a start must not wait for a clock. The rest may be
//! some seconds old. An object says when it was last renewed; a gateway that is gone without its object (its node died, it
//! was killed) is forgotten when that has not changed for a while by the clock of whoever looks.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams},
};
use rouse::{
    fleet::event::{Elsewhere, Event},
    model::ModelName,
    units::{Millis, Tick},
};
use serde_json::json;
use tokio::{
    sync::mpsc,
    time::{self, Instant, MissedTickBehavior},
};

use super::{
    condition::{tick, time as written},
    crd::{GatewayReplica, GatewayReplicaStatus, replica::Demand},
    told::Told,
    watch::{Change, Found},
    writer::MANAGER,
};
use crate::driver::Handle;

/// What is no edge is written so often at most.
const EVERY: Duration = Duration::from_secs(5);
/// An object is renewed so often, also when nothing is new.
const RENEW: Duration = Duration::from_secs(20);
/// A gateway whose object was not renewed for so long is gone.
const GONE: Duration = Duration::from_secs(60);
/// The end of a last request is no news before it is so much later.
const LATER: Millis = Millis::secs(30);
const CALL: Duration = Duration::from_secs(5);

/// This gateway's own object.
pub struct Replica {
    pub client: Client,
    pub namespace: String,
    pub name: String,
    /// Where others reach its API.
    pub address: String,
    pub handle: Handle,
    pub told: Arc<Told>,
}

impl Replica {
    /// Writes until it is dropped.
    pub async fn run(self) {
        let api: Api<GatewayReplica> = Api::namespaced(self.client.clone(), &self.namespace);
        let mut every = time::interval(EVERY);
        every.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut last, mut renewed) = (None::<BTreeMap<ModelName, Elsewhere>>, Instant::now());
        let mut made = false;
        loop {
            tokio::select! {
                () = self.told.edge() => {}
                _ = every.tick() => {}
            }
            let now = self.handle.demand().await;
            let stale = renewed.elapsed() >= RENEW;
            if !stale && last.as_ref().is_some_and(|last| !differs(last, &now)) {
                continue;
            }
            let wrote = async {
                if !made {
                    self.make(&api).await?;
                }
                self.write(&api, &now).await
            };
            match time::timeout(CALL, wrote).await {
                Ok(Ok(())) => (made, last, renewed) = (true, Some(now), Instant::now()),
                Ok(Err(error)) => {
                    tracing::warn!(%error, "this gateway's demand was not written; it is tried again");
                    (made, last) = (false, None);
                }
                Err(_) => {
                    tracing::warn!("this gateway's demand was not written in time; it is tried again");
                    last = None;
                }
            }
        }
    }

    async fn make(&self, api: &Api<GatewayReplica>) -> kube::Result<()> {
        let object = json!({
            "apiVersion": "rouse.dev/v1alpha1",
            "kind": "GatewayReplica",
            "metadata": {"name": self.name, "namespace": self.namespace},
            "spec": {"address": self.address},
        });
        api.patch(&self.name, &PatchParams::apply(MANAGER).force(), &Patch::Apply(&object)).await.map(drop)
    }

    async fn write(
        &self,
        api: &Api<GatewayReplica>,
        demand: &BTreeMap<ModelName, Elsewhere>,
    ) -> kube::Result<()> {
        let each = |of: fn(&Elsewhere) -> u32| demand.values().map(of).fold(0, u32::saturating_add);
        let status = GatewayReplicaStatus {
            waiting: each(|demand| demand.waiting),
            in_flight: each(|demand| demand.in_flight),
            models: demand.iter().map(|(model, demand)| (model.to_string(), Demand::from(demand))).collect(),
            renewed: Some(written(self.handle.clock().now())),
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

/// Takes a gateway's object away when it ends in order.
pub async fn remove(client: Client, namespace: &str, name: &str) {
    let api: Api<GatewayReplica> = Api::namespaced(client, namespace);
    match time::timeout(CALL, api.delete(name, &DeleteParams::default())).await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => tracing::debug!(%error, "this gateway's object was not deleted"),
        Err(_) => tracing::debug!("this gateway's object was not deleted in time"),
    }
}

/// An edge, another number, or a last request that is later by more than it need be told.
fn differs(before: &BTreeMap<ModelName, Elsewhere>, now: &BTreeMap<ModelName, Elsewhere>) -> bool {
    let numbers = |of: &Elsewhere| (of.waiting, of.in_flight);
    now.iter().any(|(model, now)| {
        before.get(model).is_none_or(|before| {
            numbers(before) != numbers(now) || before.last_request + LATER <= now.last_request
        })
    }) || before.keys().any(|model| !now.contains_key(model))
}

impl From<&Elsewhere> for Demand {
    fn from(demand: &Elsewhere) -> Self {
        let last = demand.last_request;
        Self {
            waiting: demand.waiting,
            in_flight: demand.in_flight,
            last_request: (last > Tick(0)).then(|| written(last)),
        }
    }
}

/// Tells the decisions what other gateways say, until nobody watches any more.
pub async fn listen(own: String, handle: Handle, mut seen: mpsc::Receiver<Change<GatewayReplica>>) {
    let mut heard: BTreeMap<String, (GatewayReplicaStatus, Instant)> = BTreeMap::new();
    loop {
        let oldest = heard.values().map(|(_, at)| *at + GONE).min();
        let silent = async {
            match oldest {
                Some(at) => time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            change = seen.recv() => match change {
                None => return,
                Some(Change::All { objects, .. }) => {
                    let there: Vec<String> = objects.iter().map(|found| found.name().name).collect();
                    let gone: Vec<String> =
                        heard.keys().filter(|name| !there.contains(name)).cloned().collect();
                    gone.into_iter().for_each(|name| forget(&handle, &mut heard, name));
                    objects.into_iter().for_each(|found| hear(&handle, &mut heard, &own, found));
                }
                Some(Change::Applied(found)) => hear(&handle, &mut heard, &own, *found),
                Some(Change::Deleted(name)) => forget(&handle, &mut heard, name.name),
            },
            () = silent => {
                let now = Instant::now();
                let gone = heard.iter().filter(|(_, (_, at))| *at + GONE <= now);
                let gone: Vec<String> = gone.map(|(name, _)| name.clone()).collect();
                gone.into_iter().for_each(|name| forget(&handle, &mut heard, name));
            }
        }
    }
}

fn hear(
    handle: &Handle,
    heard: &mut BTreeMap<String, (GatewayReplicaStatus, Instant)>,
    own: &str,
    found: Found<GatewayReplica>,
) {
    let Some(object) = found.good().filter(|object| object.name_any() != own) else { return };
    let (gateway, status) = (object.name_any(), object.status.unwrap_or_default());
    if heard.get(&gateway).is_some_and(|(known, _)| *known == status) {
        return;
    }
    let demand = status.models.iter().map(|(model, demand)| {
        let last_request = demand.last_request.as_ref().map(tick).unwrap_or_default();
        let elsewhere = Elsewhere { waiting: demand.waiting, in_flight: demand.in_flight, last_request };
        (ModelName::from(model.as_str()), elsewhere)
    });
    handle.tell(Event::Elsewhere { gateway: gateway.clone(), demand: Some(demand.collect()) });
    heard.insert(gateway, (status, Instant::now()));
}

fn forget(handle: &Handle, heard: &mut BTreeMap<String, (GatewayReplicaStatus, Instant)>, gateway: String) {
    if heard.remove(&gateway).is_some() {
        handle.tell(Event::Elsewhere { gateway, demand: None });
    }
}
