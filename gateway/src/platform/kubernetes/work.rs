//! What a life does with its Pod, its stub and its engine, step by step. Each is a future that the life polls and may drop at
//! any await; each can be begun again where another leader left off.

use std::{
    net::SocketAddr,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use k8s_openapi::api::{apps::v1::Deployment, core::v1::Pod as PodObject};
use kube::Api;
use rouse::{
    fault::Cause,
    fleet::event::Event,
    units::{Millis, Tick},
};
use serde_json::{Value, json};
use tokio::time;

use super::{
    life::{Berth, Pauses, Pod, crashed},
    steward::Request,
    stub::{self, Stub},
};
use crate::{
    controllers::{
        booking::Spot,
        dual::record,
        pods::{Seen, Trouble},
        workload::{DELETION_COST, EPOCH, GENERATION, REPLICA, SPI_PORT, merge},
        writer::Error,
    },
    platform::{contact::Contact, ready},
};

/// How a step of a start ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Done {
    /// Its Pod has an address, and is its own.
    Started,
    Ready,
    Asleep,
    /// It has been told why.
    Failed,
}

/// A Pod that no node takes for so long is given up.
const UNSCHEDULED: Millis = Millis::secs(60);
/// Where no Pod has come for so long, it is asked why, and again.
const UNMADE: Duration = Duration::from_secs(5);
/// While an engine loads, its stub is told its orders so often.
const ENTER: Duration = Duration::from_secs(10);
/// A kubelet looks every second whether a stub says that it serves.
const UNREADY: Duration = Duration::from_secs(3);
/// A ReplicaSet that has not let a Pod go within this is not the one to do it.
const RELEASED: Duration = Duration::from_secs(3);
/// A stub that has not answered for so long is not waited for, where requests under way are to end.
const SILENT: Duration = Duration::from_secs(30);
/// What a ReplicaSet gives up last, and first.
const KEPT: &str = "100";
const LEAVING: &str = "-100";

/// Waits for a Pod and makes it the engine's.
pub(super) async fn begin(berth: Arc<Berth>, mut pod: Pod) -> Done {
    let mut pauses = Pauses::new();
    loop {
        let (troubled, unmade) = (trouble(&berth, pod.clone()), denied(&berth, pod.clone()));
        let found = tokio::select! {
            seen = usable(&mut pod) => seen,
            cause = troubled => {
                fail(&berth, cause).await;
                return Done::Failed;
            }
            cause = unmade => {
                fail(&berth, cause).await;
                return Done::Failed;
            }
        };
        let Some((seen, address)) = found else { return Done::Failed };
        if claim(&berth, &seen).await {
            let (engine, generation) = (berth.id.clone(), berth.generation);
            berth.shared.told.runs_in(&engine, generation, &seen.name.name, &berth.place.variant.name);
            drop(berth.requests.send(Request::Bound { engine: engine.clone(), generation }));
            berth.shared.common.tell(Event::Started { engine, generation, address }).await;
            return Done::Started;
        }
        // It is gone, and another comes for it as soon as that is seen.
        pauses.pause().await;
    }
}

/// Makes the Pod the engine's. False: there is no such Pod any more.
async fn claim(berth: &Berth, seen: &Seen) -> bool {
    let marks = json!({
        REPLICA: berth.id.replica.to_string(),
        GENERATION: berth.generation.to_string(),
        DELETION_COST: KEPT,
    });
    let mut pauses = Pauses::new();
    while let Err(error) = mark(berth, seen, marks.clone()).await {
        if matches!(error, Error::Gone | Error::Conflict) {
            return false;
        }
        tracing::debug!(pod = %seen.name, %error, "the Pod was not marked; it is tried again");
        pauses.pause().await;
    }
    true
}

/// While no Pod comes: ends when the Deployment says that none can be made (a quota, an admission policy).
async fn denied(berth: &Berth, mut pod: Pod) -> Cause {
    let deployment = berth.place.deployment();
    let api: Api<Deployment> = Api::namespaced(berth.shared.client.clone(), &deployment.namespace);
    loop {
        if pod.wait_for(Option::is_none).await.is_err() {
            return std::future::pending().await;
        }
        time::sleep(UNMADE).await;
        if pod.borrow().is_some() {
            continue;
        }
        let Ok(Some(found)) = berth.shared.writer.look(&api, &deployment.name).await else { continue };
        let conditions = found.status.and_then(|status| status.conditions).unwrap_or_default();
        let fails = conditions.into_iter().find(|it| it.type_ == "ReplicaFailure" && it.status == "True");
        if let Some(fails) = fails {
            let why = fails.message.unwrap_or_default();
            tracing::warn!(engine = %berth.id, why, "no Pod can be made for it");
            berth.shared.fails(&berth.id, berth.generation, &why).await;
            return Cause::Unrunnable;
        }
    }
}

/// Waits until the engine of the Pod answers, then tells that it is ready.
pub(super) async fn resume(berth: Arc<Berth>, pod: Pod) -> Done {
    let Some(address) = berth.proxy(&pod) else { return Done::Failed };
    let contact = Contact::new(
        &berth.shared.common,
        berth.id.clone(),
        berth.generation,
        address,
        Arc::clone(&berth.place.engine),
    );
    let fit = async {
        enter(&berth, address).await?;
        tokio::select! {
            biased;
            // One that serves has its memory, whatever was expected.
            fit = async {
                while time::timeout(ENTER, ready::up(&contact, None)).await.is_err() {
                    // A stub whose container was started anew knows nothing, and lets nobody in.
                    enter(&berth, address).await?;
                }
                contact.adapter.serves(contact.health_timeout()).await
            } => fit,
            cause = misplaced(&berth, &pod, address) => Err(cause),
        }
    };
    let outcome = tokio::select! {
        fit = fit => fit,
        cause = trouble(&berth, pod.clone()) => Err(cause),
    };
    if let Err(cause) = outcome {
        fail(&berth, cause).await;
        return Done::Failed;
    }
    let (engine, generation) = (berth.id.clone(), berth.generation);
    berth.shared.common.tell(Event::Ready { engine, generation }).await;
    told_ready(&berth, address, true).await;
    Done::Ready
}

/// Notes to which accelerators the engine came; ends when it does not fit there.
async fn misplaced(berth: &Berth, pod: &Pod, proxy: SocketAddr) -> Cause {
    if let (Some(stub), Some(node)) = (berth.stub(proxy), node(pod)) {
        let spot = spot(&stub, node).await;
        let known = !spot.accelerators.is_empty();
        if let Err(why) = berth.shared.placed(&berth.place, berth.id.replica, spot).await {
            tracing::warn!(engine = %berth.id, %why, "it came to where there is no room");
            return Cause::Misplaced;
        }
        berth.located.store(known, Ordering::Relaxed);
    }
    locate(berth, pod).await;
    std::future::pending().await
}

/// Notes which accelerators the engine's stub reports, as soon as it reports any; its node alone where the stub knows of none.
///
/// The engine is not judged by them: a requester's accelerators are handed to the next before what the former had there is released
/// in the ledger, and it is the pairing of requesters with engines that keeps room on them.
pub(super) async fn locate(berth: &Berth, pod: &Pod) {
    let mut pauses = Pauses::new();
    while !berth.located.load(Ordering::Relaxed) {
        let stub = berth.proxy(pod).and_then(|proxy| berth.stub(proxy));
        if let (Some(stub), Some(node)) = (stub, node(pod)) {
            let reported = stub.accelerators().await;
            if let Err(error) = &reported {
                tracing::debug!(engine = %berth.id, %error, "the stub does not say which accelerators its Pod has");
            }
            // A requester's Pod has an address before its stub listens, and a stub waits for its driver.
            let later =
                |error: &stub::Error| matches!(error, stub::Error::Silent(_)) || error.is_unavailable();
            if !reported.as_ref().is_err_and(later) {
                let accelerators = reported.unwrap_or_default();
                berth.shared.is_at(&berth.place, berth.id.replica, Spot { node, accelerators });
                berth.located.store(true, Ordering::Relaxed);
                return;
            }
        }
        pauses.pause().await;
    }
}

fn node(pod: &Pod) -> Option<String> {
    pod.borrow().as_ref()?.node.clone()
}

/// Where the engine behind this stub is.
pub(super) async fn spot(stub: &Stub, node: String) -> Spot {
    let accelerators = stub.accelerators().await.unwrap_or_else(|error| {
        tracing::debug!(%error, "the stub does not say which accelerators its Pod has");
        Vec::new()
    });
    Spot { node, accelerators }
}

/// The stub knows its engine and lets requests in. An error: it was made by another key, and never will.
pub(super) async fn enter(berth: &Berth, proxy: SocketAddr) -> Result<(), Cause> {
    if berth.place.dual {
        // Who pairs it with an engine does that.
        return Ok(());
    }
    let target = SocketAddr::new(proxy.ip(), berth.place.pods.port);
    let mut pauses = Pauses::new();
    loop {
        // A claim that is not fresh is renewed again, or lost, and this task with it.
        let Some(stub) = berth.stub(proxy) else {
            pauses.pause().await;
            continue;
        };
        let done = async {
            stub.target(target).await?;
            stub.open().await
        };
        match done.await {
            Ok(()) => return Ok(()),
            Err(stub::Error::Older) => overruled(berth).await,
            Err(stub::Error::Stranger) => return Err(Cause::Refused),
            Err(error) => tracing::debug!(engine = %berth.id, %error, "its stub is not there yet"),
        }
        pauses.pause().await;
    }
}

/// A stub whose container was started anew knows nothing: it is told again.
pub(super) async fn restore(contact: Arc<Contact>, berth: Arc<Berth>) {
    open(Arc::clone(&contact), Arc::clone(&berth)).await;
    told_ready(&berth, contact.address, true).await;
}

/// Closes the stub's gate and tells when nothing is under way any more.
pub(super) async fn drain(contact: Arc<Contact>, berth: Arc<Berth>, cut: bool) {
    // A requester's gate closes when it is told to go, and its engine is left alone until nothing is under way.
    if !berth.place.dual {
        closed(&contact, &berth, cut).await;
    }
    let (engine, generation) = (berth.id.clone(), berth.generation);
    berth.shared.common.tell(Event::Drained { engine, generation }).await;
}

pub(super) async fn closed(contact: &Contact, berth: &Berth, cut: bool) {
    let mut pauses = Pauses::new();
    let given_up = time::Instant::now() + SILENT;
    loop {
        let Some(stub) = berth.stub(contact.address) else {
            pauses.pause().await;
            continue;
        };
        match stub.drained(cut).await {
            // Nobody is to be waited for any more, and nobody can be reached: what is under way ends with its Pod.
            Err(_) if cut && time::Instant::now() > given_up => break,
            // Nor will this one ever obey.
            Ok(true) | Err(stub::Error::Stranger) => break,
            Ok(false) => continue,
            Err(stub::Error::Older) => return overruled(berth).await,
            Err(error) => tracing::debug!(engine = %berth.id, %error, "its stub does not drain yet"),
        }
        pauses.pause().await;
    }
}

pub(super) async fn open(contact: Arc<Contact>, berth: Arc<Berth>) {
    if let Err(cause) = enter(&berth, contact.address).await {
        tracing::warn!(engine = %berth.id, %cause, "its stub lets nobody in");
    }
}

/// What the engine has comes to its end: nobody gets in, its Pod is given up, and seen gone. `begun`: it has a stub.
pub(super) async fn leave(berth: Arc<Berth>, mut pod: Pod, begun: bool) {
    berth.shared.releasing(&berth.place, berth.id.replica);
    let seen = pod.borrow().clone();
    if let Some(seen) = &seen {
        if begun && let Some(address) = berth.proxy(&pod) {
            shut(&berth, address).await;
        }
        if !seen.ending {
            // A Pod that is not ready is given up before one that is, whatever it costs.
            if let Err(error) = mark(&berth, seen, last_marks(&berth)).await {
                tracing::debug!(pod = %seen.name, %error, "the Pod was not marked as leaving");
            }
            let unready = |seen: &Option<Arc<Seen>>| seen.as_ref().is_none_or(|seen| !seen.ready);
            // Late or not, it goes.
            let _late = time::timeout(UNREADY, pod.wait_for(unready)).await.is_err();
        }
    }
    berth.left().await;
    // Its ReplicaSet lets it go as soon as it hears that it is to have fewer; before that it would make another in its place.
    let ends = |seen: &Option<Arc<Seen>>| seen.as_ref().is_none_or(|seen| seen.ending);
    let _itself = time::timeout(RELEASED, pod.wait_for(ends)).await.is_ok();
    let mut pauses = Pauses::new();
    loop {
        let seen = pod.borrow().clone();
        let Some(seen) = seen.filter(|seen| !seen.ending) else { break };
        if delete(&berth, &seen).await {
            break;
        }
        pauses.pause().await;
    }
    let gone = pod.wait_for(Option::is_none).await.is_ok();
    if !gone {
        std::future::pending::<()>().await;
    }
}

/// What a Pod that is given up is marked with. A requester was made when its model may have said something else of how its engine
/// is put away: what the model says now is what counts.
fn last_marks(berth: &Berth) -> Value {
    let mut marks = json!({DELETION_COST: LEAVING});
    if let Some(place) = berth.shared.place(&berth.id.model).filter(|place| place.dual) {
        merge::into(&mut marks, &record::rest_annotations(place.variant.spec.idle.into()));
    }
    marks
}

/// No request passes, and the kubelet is told. One try: whoever does not answer lets nobody in either, and its Pod goes.
async fn shut(berth: &Berth, proxy: SocketAddr) {
    if !berth.place.dual
        && let Some(stub) = berth.stub(proxy)
        && let Err(error) = stub.close(true).await
    {
        tracing::debug!(engine = %berth.id, %error, "its stub was not told that it ends");
    }
    told_ready(berth, proxy, false).await;
}

pub(super) async fn told_ready(berth: &Berth, proxy: SocketAddr, ready: bool) {
    if !(berth.place.dual && ready)
        && let Some(stub) = berth.stub(proxy)
        && let Err(error) = stub.ready(ready).await
    {
        tracing::debug!(engine = %berth.id, %error, "its stub was not told whether it serves");
    }
}

async fn delete(berth: &Berth, seen: &Seen) -> bool {
    let api: Api<PodObject> = Api::namespaced(berth.shared.client.clone(), &seen.name.namespace);
    let done = berth.shared.writer.delete(&api, &seen.name.name, &seen.uid).await;
    done.inspect_err(|error| tracing::debug!(pod = %seen.name, %error, "the Pod was not deleted")).is_ok()
}

/// Writes annotations of this one Pod, and who wrote them.
pub(super) async fn mark(berth: &Berth, seen: &Seen, mut marks: Value) -> Result<(), Error> {
    let epoch = berth.shared.writer.claim()?.epoch;
    if let Some(marks) = marks.as_object_mut() {
        marks.insert(EPOCH.to_owned(), json!(epoch.to_string()));
    }
    let api: Api<PodObject> = Api::namespaced(berth.shared.client.clone(), &seen.name.namespace);
    let patch = json!({"metadata": {"uid": seen.uid, "annotations": marks}});
    berth.shared.writer.merge(&api, &seen.name.name, &patch).await.map(drop)
}

/// The Pod and where its stub listens, once it has an address; `None` when this gateway does not lead any more.
async fn usable(pod: &mut Pod) -> Option<(Arc<Seen>, SocketAddr)> {
    let has_address = |seen: &Option<Arc<Seen>>| seen.as_ref().is_some_and(|seen| seen.address.is_some());
    let seen = pod.wait_for(has_address).await.ok()?.clone()?;
    let address = SocketAddr::new(seen.address?, crate::controllers::workload::PROXY_PORT);
    Some((seen, address))
}

/// Ends when nothing will come of this start.
async fn trouble(berth: &Berth, mut pod: Pod) -> Cause {
    loop {
        let (cause, due) = judge(pod.borrow_and_update().as_deref(), berth.shared.common.clock.now());
        if let Some(cause) = cause {
            berth.explain(&pod).await;
            return cause;
        }
        let due = async {
            match due {
                Some(pause) => time::sleep(pause.duration()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            changed = pod.changed() => {
                if changed.is_err() {
                    return std::future::pending().await;
                }
            }
            () = due => {}
        }
    }
}

/// Why nothing will come of it; or when to look again.
fn judge(seen: Option<&Seen>, now: Tick) -> (Option<Cause>, Option<Millis>) {
    match seen.and_then(|seen| seen.trouble.as_ref()) {
        None => (None, None),
        Some(Trouble::Crashed { code, signal, .. }) => (Some(crashed(*code, *signal)), None),
        // A registry may answer the next time; the kubelet says when it has given that up for longer.
        Some(Trouble::Container { reason, .. }) if reason == "ErrImagePull" => (None, None),
        Some(Trouble::Container { .. } | Trouble::Server { .. }) => (Some(Cause::Unrunnable), None),
        Some(Trouble::Unschedulable { since, .. }) => {
            let by = *since + UNSCHEDULED;
            if by <= now { (Some(Cause::Unschedulable), None) } else { (None, Some(by.since(now))) }
        }
    }
}

async fn fail(berth: &Berth, cause: Cause) {
    let (engine, generation) = (berth.id.clone(), berth.generation);
    tracing::warn!(%engine, %generation, %cause, "it does not start");
    berth.shared.common.tell(Event::StartFailed { engine, generation, cause }).await;
}

/// The stub obeys a newer leader: this gateway has been replaced, and is about to hear it.
pub(super) async fn overruled(berth: &Berth) {
    tracing::warn!(engine = %berth.id, "its stub obeys another leader");
    std::future::pending().await
}

impl Berth {
    /// The stub in its Pod; `None`: this gateway's claim to lead is not fresh.
    pub(super) fn stub(&self, proxy: SocketAddr) -> Option<Stub> {
        let epoch = self.shared.writer.claim().ok()?.epoch;
        let token = self.shared.sidecar.key.token(&self.place.owner);
        Some(Stub::new(SocketAddr::new(proxy.ip(), SPI_PORT), token, epoch, self.generation))
    }
}
