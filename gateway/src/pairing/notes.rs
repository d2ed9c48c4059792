//! What requesters' users are told: the annotation `status`, as the public project writes it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use rouse::{model::AcceleratorId, pairing::ids::RequesterId};
use serde_json::{Value, json};
use tokio::{task::JoinSet, time};

use super::{
    Finished,
    directory::{Directory, Requester},
    facts::Facts,
    hands::Hands,
};
use crate::controllers::dual::keys;

/// A requester is told no more often than that.
const PAUSE: Duration = Duration::from_secs(1);

/// A stub that was asked in vain so often, within some seconds, does not merely begin.
const UNHEARD: u32 = 6;

/// What is to be told, and to whom.
#[derive(Debug, Default)]
pub(super) struct Notes {
    /// What the last order about each came to, where its user has to mend something.
    errors: BTreeMap<RequesterId, String>,
    due: BTreeSet<RequesterId>,
    writing: BTreeSet<RequesterId>,
    /// Whose accelerators were written on their Pods.
    named: BTreeSet<RequesterId>,
}

impl Notes {
    pub(super) fn error(&mut self, id: RequesterId, error: String) {
        self.errors.insert(id.clone(), error);
        self.due.insert(id);
    }

    /// Its stub has not answered yet, for longer than one that begins may take.
    pub(super) fn unheard(&mut self, own: &Requester, failures: u32) {
        if failures >= UNHEARD && !self.errors.contains_key(&own.id) {
            let at = own.admin.map_or_else(|| "an address that is not known".to_owned(), |at| at.to_string());
            let error = format!("its stub does not say at {at} which accelerators it has; it is asked again");
            self.error(own.id.clone(), error);
        }
    }

    /// What was in its way is not any more.
    pub(super) fn mended(&mut self, id: &RequesterId) {
        if self.errors.remove(id).is_some() {
            self.due.insert(id.clone());
        }
    }

    /// What the last order about it came to.
    pub(super) fn error_of(&self, id: &RequesterId) -> Option<&str> {
        self.errors.get(id).map(String::as_str)
    }

    /// Something of it may be otherwise.
    pub(super) fn look(&mut self, id: RequesterId) {
        self.due.insert(id);
    }

    pub(super) fn gone(&mut self, id: &RequesterId) {
        self.errors.remove(id);
        self.due.remove(id);
        self.named.remove(id);
    }

    /// Who waits has its accelerators named on its Pod, as far as they are known. Who gets an engine at once has that written
    /// with all else.
    pub(super) fn waits(
        &mut self,
        own: &Requester,
        accelerators: &[AcceleratorId],
        hands: &Arc<Hands>,
        tasks: &mut JoinSet<Finished>,
    ) {
        if accelerators.is_empty() || !own.accelerators.is_empty() || !self.named.insert(own.id.clone()) {
            return;
        }
        let (name, hands) = (own.name.clone(), Arc::clone(hands));
        let annotations = json!({keys::ACCELERATORS: keys::listed(accelerators)});
        let patch = json!({"metadata": {"uid": own.id.as_str(), "annotations": annotations}});
        tasks.spawn(async move {
            hands.note(&name, &patch).await;
            Finished::Asked(None)
        });
    }

    /// It was told something, and some time has passed.
    pub(super) fn may_write(&mut self, id: RequesterId) {
        self.writing.remove(&id);
        self.due.insert(id);
    }

    pub(super) fn write(
        &mut self,
        directory: &Directory,
        facts: &Facts,
        hands: &Arc<Hands>,
        tasks: &mut JoinSet<Finished>,
    ) {
        let due: Vec<_> = self.due.iter().filter(|id| !self.writing.contains(*id)).cloned().collect();
        for id in due {
            self.due.remove(&id);
            let Some(own) = directory.requester(&id) else { continue };
            let Some(text) = self.news(own, facts) else { continue };
            self.writing.insert(id.clone());
            let (name, hands) = (own.name.clone(), Arc::clone(hands));
            tasks.spawn(async move {
                hands.tell_status(&name, &id, &text).await;
                time::sleep(PAUSE).await;
                Finished::Noted(id)
            });
        }
    }

    /// What the annotation is to be, if it is not that already.
    fn news(&self, own: &Requester, facts: &Facts) -> Option<String> {
        let asked = own.asked.as_ref().zip(own.node.as_ref()).map(|(asked, node)| match asked {
            Ok(asked) => asked.on(node, facts).err().map(|doubt| doubt.to_string()),
            Err(error) => Some(error.to_string()),
        });
        let errors: Vec<&String> = asked
            .as_ref()
            .and_then(Option::as_ref)
            .or_else(|| self.errors.get(&own.id))
            .into_iter()
            .collect();
        // It has nothing to be told, and was told nothing.
        if errors.is_empty() && own.status.is_none() {
            return None;
        }
        let errors = if errors.is_empty() { Value::Null } else { json!(errors) };
        let text = json!({"Errors": errors}).to_string();
        (own.status.as_ref() != Some(&text)).then_some(text)
    }
}
