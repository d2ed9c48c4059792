//! Events of requesters' and providers' Pods: what was done with them, and why somebody waits.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use rouse::{
    pairing::{
        command::{Farewell, OfRequester, Order, Step, Why},
        ids::{NodeName, RequesterId},
    },
    units::Millis,
};
use tokio::{task::JoinSet, time};

use super::{
    Finished,
    directory::{Directory, Requester},
    job::Job,
};
use crate::{
    controllers::{
        crd::ledger::ObjectName,
        news::{News, Reason},
        recorder::{Herald, Notice, Regarding},
    },
    metrics::Path,
};

/// Who waits longer than this is told why; and again after as long, where it is for something else by then.
const PATIENCE: Duration = Duration::from_secs(10);

pub(super) struct Tidings {
    herald: Herald,
    waiting: BTreeMap<RequesterId, Waiting>,
}

#[derive(Debug)]
struct Waiting {
    node: NodeName,
    why: String,
    told: Option<String>,
}

impl Tidings {
    pub(super) const fn new(herald: Herald) -> Self {
        Self { herald, waiting: BTreeMap::new() }
    }

    pub(super) fn forget(&mut self) {
        self.waiting.clear();
    }

    pub(super) fn tell(&self, notices: impl IntoIterator<Item = Notice>) {
        notices.into_iter().for_each(|notice| self.herald.tell(notice));
    }

    /// It has its engine, this long after its stub began to run.
    pub(super) fn served(&self, own: &Requester, path: Path, took: Millis) {
        let how = match path {
            Path::Hot => "was woken",
            Path::Warm => "was started in a launcher that was there",
            Path::Cold => "was started in a new Pod",
        };
        tracing::info!(requester = %own.name, how, %took, "its engine serves it");
        self.tell([of(own, Reason::Served.news(format!("its engine {how}, and serves it after {took}")))]);
    }

    /// What it asks for cannot be had, and why.
    pub(super) fn failed(&self, own: &Requester, why: &str) {
        self.tell([of(own, Reason::Failed.news(why.to_owned()))]);
    }

    /// Its Pod's grace is too short for its engine, and what would be long enough.
    pub(super) fn short_grace(&self, own: &Requester, why: &str) {
        tracing::warn!(requester = %own.name, why, "a requester's grace is too short");
        self.tell([of(own, Reason::ShortGrace.news(why.to_owned()))]);
    }

    /// Why requesters of these nodes wait by now.
    pub(super) fn wait(
        &mut self,
        looked: &[NodeName],
        reasons: &BTreeMap<(NodeName, RequesterId), String>,
        tasks: &mut JoinSet<Finished>,
    ) {
        let looked: BTreeSet<&NodeName> = looked.iter().collect();
        self.waiting.retain(|id, known| {
            !looked.contains(&known.node) || reasons.contains_key(&(known.node.clone(), id.clone()))
        });
        for ((node, id), why) in reasons {
            if let Some(known) = self.waiting.get_mut(id) {
                known.why.clone_from(why);
                continue;
            }
            self.waiting.insert(id.clone(), Waiting { node: node.clone(), why: why.clone(), told: None });
            later(id.clone(), tasks);
        }
    }

    /// Some time has passed.
    pub(super) fn look(&mut self, id: RequesterId, directory: &Directory, tasks: &mut JoinSet<Finished>) {
        let Some(known) = self.waiting.get_mut(&id) else { return };
        if known.told.as_ref() != Some(&known.why) {
            known.told = Some(known.why.clone());
            let news = Reason::Waiting.news(known.why.clone());
            let notice = directory.requester(&id).map(|own| of(own, news));
            self.tell(notice);
        }
        later(id, tasks);
    }
}

fn later(id: RequesterId, tasks: &mut JoinSet<Finished>) {
    tasks.spawn(async move {
        time::sleep(PATIENCE).await;
        Finished::Waited(id)
    });
}

/// What is to be told once this order has been carried out.
pub(super) fn once_done(job: &Job) -> Vec<Notice> {
    let requester = |news: News| job.requester.as_ref().map(|own| of(own, news));
    let provider = |news: News| job.provider.as_ref().map(|own| notice(&own.name, own.uid.as_str(), news));
    match &job.command.order {
        Order::Requester { step: OfRequester::Delete { why }, .. } => {
            requester(farewell(*why)).into_iter().collect()
        }
        Order::Engine { engine, step: Step::Sleep { level, .. }, .. } => {
            let news = Reason::Slept.news(format!("{engine} sleeps at level {}", level.number()));
            provider(news).into_iter().collect()
        }
        Order::Engine { engine, step: Step::End { why }, .. } => {
            let reason = if is_failure(*why) { Reason::Failed } else { Reason::Ended };
            let to_requester = requester(reason.news(format!("its engine is ended: {why}")));
            let to_provider = provider(reason.news(format!("{engine} is ended: {why}")));
            to_requester.into_iter().chain(to_provider).collect()
        }
        _ => Vec::new(),
    }
}

fn farewell(why: Farewell) -> News {
    Reason::Deleted.news(format!("it is deleted, so that another one is made: {why}"))
}

/// Something is wrong with the engine, and not with who wants it.
pub(super) const fn is_failure(why: Why) -> bool {
    match why {
        Why::StartFailed | Why::WakeFailed | Why::CanaryFailed | Why::SleepFailed | Why::Lost => true,
        Why::Unneeded
        | Why::Idle
        | Why::Evicted
        | Why::Displaced
        | Why::Obsolete
        | Why::Adapters
        | Why::Overdue
        | Why::Leaving => false,
    }
}

fn of(own: &Requester, news: News) -> Notice {
    notice(&own.name, own.id.as_str(), news)
}

fn notice(name: &ObjectName, uid: &str, news: News) -> Notice {
    Notice { regarding: Regarding::Pod, object: name.clone(), uid: uid.to_owned(), news }
}
