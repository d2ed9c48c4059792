//! Who may use the API, for what, and how much of it.
//!
//! A key is known by its SHA-256 alone: neither the file nor the list made of it holds what a client sends. A key is found by
//! looking its hash up, so how long that takes says nothing of how near a guess was; and since keys are random, a fast
//! hash is enough, where a slow one made for passwords would be a way to keep the gateway busy.
//!
//! Even so a hash and a look-up for each request would be wasted on clients that keep their connection: each
//! connection remembers the last key that it was shown and found (`Remembered`), for as long as the same list of keys
//! holds. A reload makes another list, so a key that is taken away fails at its very next request.
//!
//! Counters belong to a key's name. They outlive reloads, a change of the hash (a new secret for the same team) or of
//! the limits included.

use std::{
    cell::RefCell,
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, PoisonError},
};

use arc_swap::{ArcSwap, Guard};
use aws_lc_rs::{constant_time, digest};
use rouse::{fault::Fault, model::ModelName};

use crate::{
    config::{self, Hash, Models},
    http::InFlight,
    metrics::{KeyMetrics, KeyOutcome},
};

mod account;
mod bill;
mod discreet;
mod headers;
#[cfg(test)]
mod simulation;
mod text;
mod window;

pub use account::Limits;
pub(crate) use account::{Account, Need};
pub(crate) use bill::Bill;
pub(crate) use discreet::discreet;
pub(crate) use headers::{challenge, note_limits};
pub(crate) use text::text;

/// One configured key, with what it has used.
pub struct Key {
    pub name: Arc<str>,
    /// A hash of the name.
    pub(crate) client: u64,
    pub priority: i32,
    /// Its streams get heartbeats while they wait, where a request does not say otherwise.
    pub(crate) heartbeat: bool,
    pub(crate) limits: Limits,
    models: Models,
    pub(crate) account: Arc<Account>,
    /// What its requests hold in bodies.
    pub(crate) bodies: Arc<InFlight>,
    pub(crate) metrics: Option<Arc<KeyMetrics>>,
}

/// The keys of the present configuration, shared by all cores.
pub(crate) struct Keys {
    table: ArcSwap<Table>,
    /// Held while a new table is made of an old one: the accounts of a name must not be made twice.
    making: Mutex<()>,
}

/// One list of keys, by their hashes.
#[derive(Default)]
pub(crate) struct Table {
    /// What this was made of. As long as it lives no other list can have its address.
    source: config::Keys,
    by_hash: HashMap<Hash, Arc<Key>>,
}

/// What a connection was last shown.
#[derive(Default)]
pub(crate) struct Remembered(RefCell<Option<Shown>>);

struct Shown {
    secret: Box<[u8]>,
    key: Arc<Key>,
    /// Where it was found.
    table: Arc<Table>,
}

/// A key as a request shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sent<'a> {
    pub(crate) secret: &'a [u8],
    /// Where it stands in the head, as people write it.
    pub(crate) header: &'static str,
}

impl Keys {
    pub(crate) fn new() -> Self {
        Self { table: ArcSwap::default(), making: Mutex::default() }
    }

    /// The table of this configuration. `metrics`: the counters of a name.
    pub(crate) fn table(
        &self,
        source: &config::Keys,
        metrics: impl Fn(&str) -> Option<Arc<KeyMetrics>>,
    ) -> Guard<Arc<Table>> {
        let table = self.table.load();
        if Arc::ptr_eq(&table.source, source) {
            return table;
        }
        let _alone = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.table.load();
        if !Arc::ptr_eq(&before.source, source) {
            self.table.store(Arc::new(Table::new(source, &before, metrics)));
        }
        self.table.load()
    }
}

impl Table {
    fn new(source: &config::Keys, before: &Self, metrics: impl Fn(&str) -> Option<Arc<KeyMetrics>>) -> Self {
        let known: BTreeMap<&str, &Arc<Key>> =
            before.by_hash.values().map(|key| (key.name.as_ref(), key)).collect();
        let by_hash = source
            .iter()
            .map(|key| {
                let old = known.get(key.name.as_ref());
                let made = Key {
                    name: Arc::clone(&key.name),
                    client: rouse::openai::hash(key.name.as_bytes()),
                    priority: key.priority,
                    heartbeat: key.heartbeat,
                    limits: key.limits,
                    models: key.models.clone(),
                    account: old.map_or_else(|| Arc::new(Account::new()), |old| Arc::clone(&old.account)),
                    bodies: old.map_or_else(Arc::default, |old| Arc::clone(&old.bodies)),
                    metrics: old.map_or_else(|| metrics(&key.name), |old| old.metrics.clone()),
                };
                (key.hash, Arc::new(made))
            })
            .collect();
        Self { source: Arc::clone(source), by_hash }
    }

    /// The configured key that the request sent; `sent` is `None` for a request without a key. `Ok(None)`: no keys are configured, and
    /// any request is served.
    pub(crate) fn authenticate(
        self: &Arc<Self>,
        sent: Option<Sent<'_>>,
        remembered: &Remembered,
    ) -> Result<Option<Arc<Key>>, Fault> {
        if self.source.is_empty() {
            return Ok(None);
        }
        let Sent { secret: shown, header } = sent.ok_or(Fault::MissingApiKey)?;
        if let Some(last) = &*remembered.0.borrow()
            && Arc::ptr_eq(&last.table, self)
            // Behind a proxy a connection may be shared by clients that do not trust each other.
            && constant_time::verify_slices_are_equal(&last.secret, shown).is_ok()
        {
            return Ok(Some(Arc::clone(&last.key)));
        }
        // What was found in an older list keeps that list, and the counters of its keys, from going.
        drop(remembered.0.take());
        let key = self
            .by_hash
            .get(&hash(shown))
            .ok_or_else(|| Fault::InvalidApiKey { header: header.to_owned() })?;
        let shown = Shown { secret: shown.into(), key: Arc::clone(key), table: Arc::clone(self) };
        *remembered.0.borrow_mut() = Some(shown);
        Ok(Some(Arc::clone(key)))
    }
}

impl Key {
    pub(crate) fn may_use(&self, model: &ModelName) -> bool {
        match &self.models {
            Models::All => true,
            Models::Some(models) => models.contains(model),
        }
    }

    /// Whether a request may use this model; one that may not is counted.
    pub(crate) fn lets_use(&self, model: &ModelName) -> bool {
        let may = self.may_use(model);
        if let Some(metrics) = self.metrics.as_ref().filter(|_| !may) {
            metrics.request(KeyOutcome::Forbidden);
        }
        may
    }

    pub(crate) const fn may_use_all(&self) -> bool {
        matches!(self.models, Models::All)
    }
}

/// SHA-256.
pub(crate) fn hash(key: &[u8]) -> Hash {
    let mut hash = Hash::default();
    hash.copy_from_slice(digest::digest(&digest::SHA256, key).as_ref());
    hash
}

#[cfg(test)]
impl Key {
    pub(crate) fn for_tests(name: &str, models: Models) -> Self {
        Self {
            name: name.into(),
            client: rouse::openai::hash(name.as_bytes()),
            priority: 0,
            heartbeat: true,
            limits: Limits::default(),
            models,
            account: Arc::new(Account::new()),
            bodies: Arc::default(),
            metrics: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn key(name: &str, secret: &str, requests: Option<u64>) -> config::Key {
        config::Key {
            name: name.into(),
            hash: hash(secret.as_bytes()),
            models: Models::Some(BTreeSet::new()),
            limits: Limits { requests, tokens: None },
            priority: 0,
            heartbeat: true,
        }
    }

    fn sent(secret: &str) -> Sent<'_> {
        Sent { secret: secret.as_bytes(), header: "api-key" }
    }

    fn found(table: &Arc<Table>, secret: &str, remembered: &Remembered) -> Option<Arc<Key>> {
        table.authenticate(Some(sent(secret)), remembered).ok().flatten()
    }

    #[test]
    fn a_key_is_found_by_its_hash_and_remembered_only_for_its_list() {
        assert_eq!(hash(b"abc")[..4], [0xba, 0x78, 0x16, 0xbf]);
        let (keys, here) = (Keys::new(), Remembered::default());
        let first: config::Keys = vec![key("a", "one", None), key("b", "two", None)].into();
        let table = keys.table(&first, |_| None);
        for _ in 0..2 {
            assert_eq!(found(&table, "one", &here).unwrap().name.as_ref(), "a");
        }
        assert_eq!(found(&table, "two", &here).unwrap().name.as_ref(), "b");
        assert!(found(&table, "three", &here).is_none());
        assert!(matches!(table.authenticate(None, &here), Err(Fault::MissingApiKey)));
        let unknown = table.authenticate(Some(sent("three")), &here);
        assert!(matches!(unknown, Err(Fault::InvalidApiKey { header }) if header == "api-key"));
        assert!(found(&table, "two", &here).is_some());
        let second: config::Keys = vec![key("a", "one", None)].into();
        let table = keys.table(&second, |_| None);
        assert!(found(&table, "two", &here).is_none(), "it was taken away");
        assert!(found(&table, "one", &here).is_some());
    }

    #[test]
    fn counters_survive_a_reload_and_a_new_secret() {
        let (keys, here) = (Keys::new(), Remembered::default());
        let table = keys.table(&vec![key("a", "one", Some(5))].into(), |_| None);
        let before = found(&table, "one", &here).unwrap();
        let changed: config::Keys = vec![key("a", "another", Some(7)), key("b", "two", None)].into();
        let table = keys.table(&changed, |_| None);
        assert!(Arc::ptr_eq(&table, &keys.table(&changed, |_| None)));
        let after = found(&table, "another", &here).unwrap();
        assert!(Arc::ptr_eq(&before.account, &after.account));
        assert_eq!(after.limits.requests, Some(7));
    }

    #[test]
    fn without_keys_everybody_is_let_in() {
        let table = Keys::new().table(&config::Keys::default(), |_| None);
        assert!(table.authenticate(None, &Remembered::default()).unwrap().is_none());
        assert!(table.authenticate(Some(sent("any")), &Remembered::default()).unwrap().is_none());
    }
}
