//! What objects are told: the leader's view of every model and pool, written where it differs from what is there.
//!
//! One task has the index, what the decisions say (facts), and what is stored; it writes an object's status again only when
//! the last write of it has ended. Each write carries the version that was seen, so that what a replaced leader still has on
//! its way is refused; whoever is refused waits for the newer version, which is on its way to it, and looks again.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use kube::{Api, Client, Resource as _};
use rouse::{lease::Clock, model::ModelName, units::Millis};
use serde_json::json;
use tokio::{task::JoinSet, time};

use super::{
    booking::Books,
    crd::{InferenceModel, ledger::ObjectName},
    index::{Index, Settled},
    status::{self, Facts, Seen},
    writer::{Error, Writer},
};

/// After a failure a status is written again so much later.
const AGAIN: Duration = Duration::from_secs(2);
/// So many statuses are written at once.
const AT_ONCE: usize = 8;

/// Writes statuses.
pub struct Registry {
    client: Client,
    writer: Writer,
    books: Books,
    clock: Clock,
    facts: BTreeMap<ModelName, Facts>,
    /// The version of each model's object, as it was last seen or written.
    versions: BTreeMap<ObjectName, String>,
    due: BTreeSet<What>,
    writing: BTreeSet<What>,
    writes: JoinSet<Ended>,
}

/// What came to its end.
enum Ended {
    Write(What, Result<(), Error>),
    /// The pause after a write that failed.
    Pause(What),
}

/// Whose status.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum What {
    Model(ObjectName),
    Pool(String),
}

impl Registry {
    #[must_use]
    pub fn new(client: Client, writer: Writer, books: Books, clock: Clock) -> Self {
        Self {
            client,
            writer,
            books,
            clock,
            facts: BTreeMap::new(),
            versions: BTreeMap::new(),
            due: BTreeSet::new(),
            writing: BTreeSet::new(),
            writes: JoinSet::new(),
        }
    }

    /// This version of a model's object was seen.
    pub fn saw(&mut self, model: &InferenceModel) {
        let name = super::settle::object_name(model);
        if let Some(version) = model.meta().resource_version.clone() {
            self.versions.insert(name.clone(), version);
        }
        self.due.insert(What::Model(name));
    }

    /// The decisions say this now.
    pub fn told(&mut self, facts: BTreeMap<ModelName, Facts>, settled: &Settled) {
        let objects = settled.served.iter().filter(|(_, served)| facts.contains_key(&served.spec.name));
        self.due.extend(objects.map(|(object, _)| What::Model(object.clone())));
        self.facts.extend(facts);
    }

    /// Everything may be otherwise: the objects mean something else, or this gateway has begun to lead.
    pub fn all(&mut self, settled: &Settled) {
        let objects = settled.served.keys().chain(settled.rejected.keys()).cloned().map(What::Model);
        self.due.extend(objects.chain(settled.pools.keys().cloned().map(What::Pool)));
        let served: BTreeSet<&ModelName> = settled.served.values().map(|served| &served.spec.name).collect();
        self.facts.retain(|model, _| served.contains(model));
    }

    /// When a write has ended. For ever, while there is none.
    pub async fn written(&mut self) {
        match self.writes.join_next().await {
            None => std::future::pending().await,
            Some(Err(error)) => tracing::error!(%error, "a write of a status died"),
            Some(Ok(Ended::Pause(what))) => {
                self.writing.remove(&what);
                self.due.insert(what);
            }
            Some(Ok(Ended::Write(what, outcome))) => self.wrote(what, outcome),
        }
    }

    fn wrote(&mut self, what: What, outcome: Result<(), Error>) {
        match outcome {
            // What was written comes back by the watch, and so does what was in the way.
            Ok(()) | Err(Error::Conflict | Error::Gone | Error::NotLeading) => {}
            // It would be refused again; another one is written when there is something else to say.
            Err(error @ Error::Invalid(_)) => tracing::error!(?what, %error, "a status is refused"),
            Err(error) => {
                tracing::warn!(?what, %error, "a status was not written; it is tried again");
                self.writes.spawn(async move {
                    time::sleep(AGAIN).await;
                    Ended::Pause(what)
                });
                return;
            }
        }
        self.writing.remove(&what);
    }

    /// Starts the writes that are due, if this gateway leads.
    pub fn write(&mut self, index: &Index, settled: &Settled) {
        if self.writer.claim().is_err() {
            return;
        }
        let due: Vec<What> = self.due.iter().filter(|what| !self.writing.contains(*what)).cloned().collect();
        for what in due {
            if self.writing.len() >= AT_ONCE {
                return;
            }
            self.due.remove(&what);
            match &what {
                What::Model(object) => self.model(index, settled, object),
                What::Pool(pool) => self.pool(index, settled, pool),
            }
        }
    }

    fn model(&mut self, index: &Index, settled: &Settled, object: &ObjectName) {
        let served = settled.served.get(object);
        let seen = match (served, settled.rejected.get(object)) {
            (Some(served), _) => Seen::Served(served),
            (None, Some(rejected)) => Seen::Rejected(rejected),
            (None, None) => return,
        };
        let nothing = Facts::default();
        let facts = served.and_then(|served| self.facts.get(&served.spec.name)).unwrap_or(&nothing);
        let stored = index.model_status(object);
        let wanted = status::model_status(seen, facts, stored, self.clock.now());
        let patience = served.map_or(Millis::ZERO, |served| status::patience(&served.spec.idle));
        if !status::model_differs(stored, &wanted, patience) {
            return;
        }
        let Some(version) = self.versions.get(object) else { return };
        let patch = json!({
            "apiVersion": "rouse.dev/v1alpha1",
            "kind": "InferenceModel",
            "metadata": {"name": object.name, "namespace": object.namespace, "resourceVersion": version},
            "status": wanted,
        });
        let api: Api<InferenceModel> = Api::namespaced(self.client.clone(), &object.namespace);
        let (writer, what) = (self.writer.clone(), What::Model(object.clone()));
        self.writing.insert(what.clone());
        let name = object.name.clone();
        self.writes.spawn(async move {
            let outcome = writer.apply_status(&api, &name, &patch).await;
            Ended::Write(what, outcome.map(drop))
        });
    }

    fn pool(&mut self, index: &Index, settled: &Settled, name: &str) {
        // Another installation in the same cluster may have pools of its own.
        let ours = settled.served.values().any(|served| served.pool.as_deref() == Some(name));
        let Some(pool) = settled.pools.get(name).filter(|_| ours) else { return };
        let now = self.clock.now();
        let wanted = status::pool_status(pool, index.pool_status(name), now);
        if !status::pool_differs(index.pool_status(name), &wanted) {
            return;
        }
        let (books, pool) = (self.books.clone(), pool.clone());
        let what = What::Pool(name.to_owned());
        self.writing.insert(what.clone());
        let name = name.to_owned();
        self.writes.spawn(async move {
            let outcome = books.survey(&name, |stored| status::pool_status(&pool, Some(stored), now)).await;
            Ended::Write(what, outcome.map_err(Error::from))
        });
    }
}
