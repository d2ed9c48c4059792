//! API keys: which clients may use the API, for which models, and how much.
//!
//! The gateway knows a key only by its SHA-256: neither the file nor the table made from it holds the secret that a
//! client sends. A key is found by looking its hash up, so the lookup time reveals nothing about how close a guess was.
//! Keys are random, so a fast hash is enough; a slow password hash would only let clients keep the gateway busy.
//!
//! Hashing and looking up a key for every request would be wasted on clients that keep their connection. So each
//! connection caches the last key that it presented successfully (`AuthCache`), as long as the key table stays the
//! same. A reload with changed keys makes a new table, so a removed key fails at its next request.
//!
//! Counters belong to a key's name. They survive reloads, including a changed hash (a new secret for the same team) and
//! changed limits.

use std::{
    cell::RefCell,
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, PoisonError},
};

use arc_swap::{ArcSwap, Guard};
use aws_lc_rs::{constant_time, digest};
use rouse::{fault::Fault, model::ModelName};
use rouse_config::{KeyHash, ModelAccess, RateLimits};

use crate::{
    http::BodyByteCounter,
    metrics::{KeyMetrics, KeyOutcome},
};

mod account;
mod headers;
mod prompt_size;
mod quota_charge;
mod redact;
#[cfg(test)]
mod simulation;
mod sliding_window;

pub(crate) use account::{QuotaAccount, TokenEstimateInput};
pub(crate) use headers::{add_challenge, add_limit_headers};
pub(crate) use prompt_size::prompt_text_bytes;
pub(crate) use quota_charge::QuotaCharge;
pub(crate) use redact::redact;

/// The name of the key of requests that come through the admin API.
pub(crate) const OPERATOR_KEY_NAME: &str = "admin";

/// One configured key and its counters.
pub struct ApiKey {
    pub name: Arc<str>,
    /// A hash of the name.
    pub(crate) client_hash: u64,
    pub priority: i32,
    /// Whether the key's waiting streams get heartbeats, unless a request overrides it.
    pub(crate) heartbeat: bool,
    pub(crate) limits: RateLimits,
    models: ModelAccess,
    pub(crate) account: Arc<QuotaAccount>,
    /// The bytes of request bodies held for this key.
    pub(crate) body_bytes: Arc<BodyByteCounter>,
    pub(crate) metrics: Option<Arc<KeyMetrics>>,
}

/// The keys of the current configuration, shared by all cores.
pub(crate) struct ApiKeyStore {
    table: ArcSwap<ApiKeyTable>,
    /// Held while a new table is built from the old one, so that no name gets two accounts.
    rebuild_lock: Mutex<()>,
}

/// One list of keys, indexed by their hashes.
#[derive(Default)]
pub(crate) struct ApiKeyTable {
    /// The list that this table was built from. While the table holds it, no other list can have its address.
    source: rouse_config::KeyConfigs,
    by_hash: HashMap<KeyHash, Arc<ApiKey>>,
}

/// The key that a connection last presented successfully.
#[derive(Default)]
pub(crate) struct AuthCache(RefCell<Option<CachedAuth>>);

struct CachedAuth {
    secret: Box<[u8]>,
    key: Arc<ApiKey>,
    /// The table that the key was found in.
    table: Arc<ApiKeyTable>,
}

/// A key as a request presents it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PresentedKey<'a> {
    pub(crate) secret: &'a [u8],
    /// The header that carries the key, spelled for error messages.
    pub(crate) header: &'static str,
}

impl ApiKeyStore {
    pub(crate) fn new() -> Self {
        Self { table: ArcSwap::default(), rebuild_lock: Mutex::default() }
    }

    /// The table of this configuration. `metrics`: looks up the counters of a name.
    pub(crate) fn table(
        &self,
        source: &rouse_config::KeyConfigs,
        metrics: impl Fn(&str) -> Option<Arc<KeyMetrics>>,
    ) -> Guard<Arc<ApiKeyTable>> {
        let table = self.table.load();
        if Arc::ptr_eq(&table.source, source) {
            return table;
        }
        let _alone = self.rebuild_lock.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.table.load();
        if !Arc::ptr_eq(&before.source, source) {
            self.table.store(Arc::new(ApiKeyTable::new(source, &before, metrics)));
        }
        self.table.load()
    }
}

impl ApiKeyTable {
    fn new(
        source: &rouse_config::KeyConfigs,
        before: &Self,
        metrics: impl Fn(&str) -> Option<Arc<KeyMetrics>>,
    ) -> Self {
        let known: BTreeMap<&str, &Arc<ApiKey>> =
            before.by_hash.values().map(|key| (key.name.as_ref(), key)).collect();
        let by_hash = source
            .iter()
            .map(|key| {
                let old = known.get(key.name.as_ref());
                let made = ApiKey {
                    name: Arc::clone(&key.name),
                    client_hash: rouse_net::openai::stable_hash(key.name.as_bytes()),
                    priority: key.priority,
                    heartbeat: key.heartbeat,
                    limits: key.limits,
                    models: key.models.clone(),
                    account: old
                        .map_or_else(|| Arc::new(QuotaAccount::new()), |old| Arc::clone(&old.account)),
                    body_bytes: old.map_or_else(Arc::default, |old| Arc::clone(&old.body_bytes)),
                    metrics: old.map_or_else(|| metrics(&key.name), |old| old.metrics.clone()),
                };
                (key.hash, Arc::new(made))
            })
            .collect();
        Self { source: Arc::clone(source), by_hash }
    }

    /// Finds the configured key that the request sent; `sent` is `None` for a request without a key. `Ok(None)`: no
    /// keys are configured, and any request is served.
    pub(crate) fn authenticate(
        self: &Arc<Self>,
        sent: Option<PresentedKey<'_>>,
        cache: &AuthCache,
    ) -> Result<Option<Arc<ApiKey>>, Fault> {
        if self.source.is_empty() {
            return Ok(None);
        }
        let PresentedKey { secret, header } = sent.ok_or(Fault::MissingApiKey)?;
        if let Some(last) = &*cache.0.borrow()
            && Arc::ptr_eq(&last.table, self)
            // Constant time: behind a proxy, clients that do not trust each other may share a connection.
            && constant_time::verify_slices_are_equal(&last.secret, secret).is_ok()
        {
            return Ok(Some(Arc::clone(&last.key)));
        }
        // A cached key of an older table keeps that table and its keys' counters alive.
        drop(cache.0.take());
        let key = self
            .by_hash
            .get(&sha256(secret))
            .ok_or_else(|| Fault::InvalidApiKey { header: header.to_owned() })?;
        let cached = CachedAuth { secret: secret.into(), key: Arc::clone(key), table: Arc::clone(self) };
        *cache.0.borrow_mut() = Some(cached);
        Ok(Some(Arc::clone(key)))
    }
}

impl ApiKey {
    /// The key of requests that come through the admin API.
    pub(crate) fn for_operators(metrics: Option<Arc<KeyMetrics>>) -> Self {
        Self {
            name: OPERATOR_KEY_NAME.into(),
            client_hash: rouse_net::openai::stable_hash(OPERATOR_KEY_NAME.as_bytes()),
            priority: 0,
            heartbeat: true,
            limits: RateLimits::default(),
            models: ModelAccess::All,
            account: Arc::new(QuotaAccount::new()),
            body_bytes: Arc::default(),
            metrics,
        }
    }

    pub(crate) fn may_use(&self, model: &ModelName) -> bool {
        match &self.models {
            ModelAccess::All => true,
            ModelAccess::Only(models) => models.contains(model),
        }
    }

    /// Whether a request may use this model. Counts a refusal in the key's metrics.
    pub(crate) fn authorize_model(&self, model: &ModelName) -> bool {
        let may = self.may_use(model);
        if let Some(metrics) = self.metrics.as_ref().filter(|_| !may) {
            metrics.count_request(KeyOutcome::Forbidden);
        }
        may
    }

    pub(crate) const fn may_use_all(&self) -> bool {
        matches!(self.models, ModelAccess::All)
    }
}

pub(crate) fn sha256(key: &[u8]) -> KeyHash {
    let mut hash = KeyHash::default();
    hash.copy_from_slice(digest::digest(&digest::SHA256, key).as_ref());
    hash
}

#[cfg(test)]
impl ApiKey {
    pub(crate) fn for_tests(name: &str, models: ModelAccess) -> Self {
        Self {
            name: name.into(),
            client_hash: rouse_net::openai::stable_hash(name.as_bytes()),
            priority: 0,
            heartbeat: true,
            limits: RateLimits::default(),
            models,
            account: Arc::new(QuotaAccount::new()),
            body_bytes: Arc::default(),
            metrics: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn key(name: &str, secret: &str, requests: Option<u64>) -> rouse_config::KeyConfig {
        rouse_config::KeyConfig {
            name: name.into(),
            hash: sha256(secret.as_bytes()),
            models: ModelAccess::Only(BTreeSet::new()),
            limits: RateLimits { requests, tokens: None },
            priority: 0,
            heartbeat: true,
        }
    }

    fn sent(secret: &str) -> PresentedKey<'_> {
        PresentedKey { secret: secret.as_bytes(), header: "api-key" }
    }

    fn found(table: &Arc<ApiKeyTable>, secret: &str, cache: &AuthCache) -> Option<Arc<ApiKey>> {
        table.authenticate(Some(sent(secret)), cache).ok().flatten()
    }

    #[test]
    fn a_key_is_found_by_its_hash_and_remembered_only_for_its_list() {
        assert_eq!(sha256(b"abc")[..4], [0xba, 0x78, 0x16, 0xbf]);
        let (keys, here) = (ApiKeyStore::new(), AuthCache::default());
        let first: rouse_config::KeyConfigs = vec![key("a", "one", None), key("b", "two", None)].into();
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
        let second: rouse_config::KeyConfigs = vec![key("a", "one", None)].into();
        let table = keys.table(&second, |_| None);
        assert!(found(&table, "two", &here).is_none(), "it was taken away");
        assert!(found(&table, "one", &here).is_some());
    }

    #[test]
    fn counters_survive_a_reload_and_a_new_secret() {
        let (keys, here) = (ApiKeyStore::new(), AuthCache::default());
        let table = keys.table(&vec![key("a", "one", Some(5))].into(), |_| None);
        let before = found(&table, "one", &here).unwrap();
        let changed: rouse_config::KeyConfigs =
            vec![key("a", "another", Some(7)), key("b", "two", None)].into();
        let table = keys.table(&changed, |_| None);
        assert!(Arc::ptr_eq(&table, &keys.table(&changed, |_| None)));
        let after = found(&table, "another", &here).unwrap();
        assert!(Arc::ptr_eq(&before.account, &after.account));
        assert_eq!(after.limits.requests, Some(7));
    }

    #[test]
    fn without_keys_everybody_is_let_in() {
        let table = ApiKeyStore::new().table(&rouse_config::KeyConfigs::default(), |_| None);
        assert!(table.authenticate(None, &AuthCache::default()).unwrap().is_none());
        assert!(table.authenticate(Some(sent("any")), &AuthCache::default()).unwrap().is_none());
    }
}
