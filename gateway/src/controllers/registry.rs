//! What objects are told: the leader's view of every model and pool, written where it differs from what is there.
//!
//! One task has the index, what the decisions say (facts), and what is stored; it writes an object's status again only when
//! the last write of it has ended. Each write carries the version that was seen, so that what a replaced leader still has on
//! its way is refused; whoever is refused waits for the newer version, which is on its way to it, and looks again.

mod nodes;

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
    condition::ACCEPTED,
    crd::{InferenceModel, InferenceModelStatus, ledger::ObjectName},
    index::{Index, Served, Settled},
    news::{News, Reason},
    recorder::{Herald, Notice, Regarding},
    status::{self, Facts, Seen},
    writer::{Error, Writer},
};

/// After a failure a status is written again so much later.
const AGAIN: Duration = Duration::from_secs(2);
/// After a refusal.
const REFUSED: Duration = Duration::from_secs(10);
/// So many statuses are written at once.
const AT_ONCE: usize = 8;

/// Writes statuses.
pub struct Registry {
    client: Client,
    writer: Writer,
    books: Books,
    clock: Clock,
    herald: Herald,
    facts: BTreeMap<ModelName, Facts>,
    /// The version of each model's object, as it was last seen or written.
    versions: BTreeMap<ObjectName, String>,
    /// The AcceleratorNodes that there are.
    nodes: BTreeMap<String, nodes::Stored>,
    /// Pools that models use. Another installation in the same cluster may have pools of its own.
    pools: BTreeSet<String>,
    due: BTreeSet<What>,
    writing: BTreeSet<What>,
    writes: JoinSet<Ended>,
}

/// What came to its end.
enum Ended {
    Write(What, Result<(), Error>, Option<Notice>),
    /// The pause after a write that failed.
    Pause(What),
}

/// Whose status. What may be booked in pools stands first: starts wait for it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum What {
    Pool(String),
    Model(ObjectName),
    Node(String),
}

impl Registry {
    #[must_use]
    pub fn new(client: Client, writer: Writer, books: Books, clock: Clock, herald: Herald) -> Self {
        Self {
            client,
            writer,
            books,
            clock,
            herald,
            facts: BTreeMap::new(),
            versions: BTreeMap::new(),
            nodes: BTreeMap::new(),
            pools: BTreeSet::new(),
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
        let objects = facts.keys().filter_map(|model| settled.objects.get(model));
        self.due.extend(objects.cloned().map(What::Model));
        self.facts.extend(facts);
    }

    /// Everything may be otherwise: this gateway has begun to lead.
    pub fn all(&mut self, settled: &Settled) {
        self.changed(&Settled::default(), settled);
        self.due.extend(self.nodes.keys().cloned().map(What::Node));
    }

    /// The objects mean something else than before: whose status may be another is looked at, and no other.
    pub fn changed(&mut self, before: &Settled, now: &Settled) {
        let served = now.served.iter().filter(|(object, served)| before.served.get(object) != Some(served));
        let served = served.map(|(object, _)| object);
        let rejected = now.rejected.iter().filter(|(object, why)| before.rejected.get(object) != Some(why));
        let objects = served.chain(rejected.map(|(object, _)| object));
        self.due.extend(objects.cloned().map(What::Model));
        let used: BTreeSet<String> = now.served.values().filter_map(|served| served.pool.clone()).collect();
        let newly = |pool: Option<&String>| pool.is_some_and(|p| used.contains(p) && !self.pools.contains(p));
        let pools = now.pools.iter();
        let pools = pools.filter(|(name, pool)| newly(Some(name)) || before.pools.get(*name) != Some(pool));
        self.due.extend(pools.map(|(name, _)| What::Pool(name.clone())));
        let nodes = now
            .nodes
            .iter()
            .filter(|(name, place)| newly(place.pool.as_ref()) || before.nodes.get(*name) != Some(place));
        let gone = before.nodes.keys().filter(|name| !now.nodes.contains_key(*name));
        self.due.extend(nodes.map(|(name, _)| name).chain(gone).cloned().map(What::Node));
        self.pools = used;
        self.facts.retain(|model, _| now.objects.contains_key(model));
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
            Some(Ok(Ended::Write(what, outcome, notice))) => {
                if let Some(notice) = notice.filter(|_| outcome.is_ok()) {
                    self.herald.tell(notice);
                }
                self.wrote(what, outcome);
            }
        }
    }

    /// This happened to models.
    pub fn happened(&self, happened: Vec<(ModelName, News)>, settled: &Settled) {
        for (model, news) in happened {
            let Some(object) = settled.objects.get(&model) else { continue };
            // A backend that answers or does not was neither started nor stopped by anybody.
            let ours = |served: &&Served| served.pool.is_some();
            let Some(served) = settled.served.get(object).filter(ours) else { continue };
            self.tell(object, served.uid.as_ref(), news);
        }
    }

    /// Its object is gone.
    pub fn lost(&mut self, object: &ObjectName) {
        self.versions.remove(object);
        self.due.remove(&What::Model(object.clone()));
    }

    /// The object is gone, and this gateway decides.
    pub fn deleted(&self, object: &ObjectName, settled: &Settled) {
        let news = Reason::Deleted.news("the model is no longer served, and its engines are put away");
        self.tell(object, settled.uid(object), news);
    }

    fn tell(&self, object: &ObjectName, uid: Option<&String>, news: News) {
        let (object, uid) = (object.clone(), uid.cloned().unwrap_or_default());
        self.herald.tell(Notice { regarding: Regarding::Model, object, uid, news });
    }

    fn wrote(&mut self, what: What, outcome: Result<(), Error>) {
        match outcome {
            // What was written comes back by the watch, and so does what was in the way.
            Ok(()) | Err(Error::Conflict | Error::Gone | Error::NotLeading) => {}
            Err(error) => {
                // What is refused today may not be tomorrow: rights and admission are others' to mend.
                let pause = if matches!(error, Error::Invalid(_)) { REFUSED } else { AGAIN };
                tracing::warn!(?what, %error, ?pause, "a status was not written; it is tried again");
                self.writes.spawn(async move {
                    time::sleep(pause).await;
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
        let mut rows = None;
        while self.writing.len() < AT_ONCE {
            let Some(what) = self.due.iter().find(|what| !self.writing.contains(*what)).cloned() else {
                return;
            };
            self.due.remove(&what);
            match &what {
                What::Model(object) => self.model(index, settled, object),
                What::Pool(pool) => self.pool(index, settled, pool),
                What::Node(node) => {
                    self.node(settled, rows.get_or_insert_with(|| nodes::rows(index, settled)), node);
                }
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
        let notice = first_word(stored, &wanted).map(|news| Notice {
            regarding: Regarding::Model,
            object: object.clone(),
            uid: settled.uid(object).cloned().unwrap_or_default(),
            news,
        });
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
            Ended::Write(what, outcome.map(drop), notice)
        });
    }

    fn pool(&mut self, index: &Index, settled: &Settled, name: &str) {
        let Some(pool) = settled.pools.get(name).filter(|_| self.pools.contains(name)) else { return };
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
            Ended::Write(what, outcome.map_err(Error::from), None)
        });
    }
}

/// What a status has to say that is the first of its object, or of a generation of it.
fn first_word(stored: Option<&InferenceModelStatus>, wanted: &InferenceModelStatus) -> Option<News> {
    let reason = match stored {
        None => Reason::Created,
        Some(stored) if stored.observed_generation != wanted.observed_generation => Reason::Updated,
        Some(_) => return None,
    };
    let accepted = wanted.conditions.iter().find(|condition| condition.type_ == ACCEPTED)?;
    let refused = accepted.status != "True";
    let message = &accepted.message;
    Some(reason.news(if refused { format!("it is not served: {message}") } else { message.clone() }))
}
