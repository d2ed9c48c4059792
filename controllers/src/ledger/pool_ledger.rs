//! Compare-and-set writes to the status of an AcceleratorPool, by the leader.
//!
//! A write begins with the object that the last write returned, or that the list of a takeover showed. The API server
//! refuses it if another writer was faster, and only then the object is read. So a switch between two engines waits for
//! one call, and a takeover reads all pools with one. An outcome without a write follows from a read only, because
//! nothing else shows that no newer leader has changed the ledger.

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use kube::{
    Api, Client, ResourceExt as _,
    api::{ListParams, PostParams},
    core::DeserializeGuard,
};
use tokio::{sync::watch, time};

use super::{stamp, total, update_sums};
use crate::{
    api_error::api_error_message,
    crd::{AcceleratorPool, AcceleratorPoolStatus, ledger::Ledger},
    election::Leadership,
    failpoint,
};
use rouse::units::Bytes;

/// Timeout of one call. The call may still have succeeded, so a retry reads the ledger first.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// Conflicts are rare: the only other writers are the pool's controller and a replaced leader that has not noticed yet.
const MAX_TRIES: u32 = 16;

/// Changes ledgers while this gateway leads.
#[derive(Clone, Debug)]
pub struct PoolLedger {
    pools: Api<AcceleratorPool>,
    leadership: watch::Receiver<Option<Leadership>>,
    /// The object that the last change or takeover returned, or that the last list of pools with reservations showed:
    /// ledgers in use are few. Every write takes it, so that a write without an answer leaves none.
    known: Arc<Mutex<BTreeMap<String, AcceleratorPool>>>,
}

/// Why a ledger was not changed. `E` is the refusal of the change itself.
#[derive(Debug, thiserror::Error)]
pub enum Error<E> {
    #[error(transparent)]
    Refused(E),
    #[error("this gateway is not the leader")]
    NotLeading,
    #[error(
        "pool '{pool}' has a leader of epoch {newer}: this gateway, which led in epoch {epoch}, was replaced"
    )]
    Replaced { pool: String, epoch: u64, newer: u64 },
    #[error("the pool '{0}' does not exist")]
    NoPool(String),
    #[error("the API server did not answer in time")]
    Timeout,
    #[error("the write conflicted with other writers {MAX_TRIES} times in a row")]
    Contended,
    #[error("{}", api_error_message(.0))]
    Api(#[source] Box<kube::Error>),
}

impl PoolLedger {
    #[must_use]
    pub fn new(client: Client, leadership: watch::Receiver<Option<Leadership>>) -> Self {
        Self { pools: Api::all(client), leadership, known: Arc::default() }
    }

    /// Stamps these pools with a new leader's epoch and returns their ledgers.
    ///
    /// A new leader calls this before it decides anything: afterwards no write of its predecessor that is still in
    /// flight can change the pools. A pool that no longer exists is left out. A pool that
    /// [`Self::pools_with_reservations`] has listed is written without another read, unless it has changed since.
    ///
    /// # Errors
    /// See [`Error`]. Some pools may already be stamped; a retry is safe.
    pub async fn take_over(
        &self,
        pools: &BTreeSet<String>,
    ) -> Result<BTreeMap<String, Ledger>, Error<Infallible>> {
        let mut ledgers = BTreeMap::new();
        for pool in pools {
            match self.write(pool, |status| Ok(status.ledger.clone())).await {
                Ok((ledger, written)) => {
                    self.remember(written);
                    ledgers.insert(pool.clone(), ledger);
                }
                Err(Error::NoPool(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(ledgers)
    }

    /// Lists the pools with reservations, and the namespaces of their models. Leaves out unreadable pools.
    ///
    /// The next write of each of them begins with what the list shows.
    ///
    /// # Errors
    /// The API server did not answer, or answered with an error.
    pub async fn pools_with_reservations(
        &self,
    ) -> Result<Vec<(String, BTreeSet<String>)>, Error<Infallible>> {
        let pools: Api<DeserializeGuard<AcceleratorPool>> = Api::all(self.pools.clone().into_client());
        let all = ListParams::default();
        let listed = time::timeout(CALL_TIMEOUT, pools.list(&all)).await.map_err(|_| Error::Timeout)?;
        let listed = listed.map_err(|error| Error::Api(Box::new(error)))?;
        // The objects of earlier terms are out of date, and some of their pools may be gone.
        self.lock_known().clear();
        let with_namespaces = |DeserializeGuard(pool): DeserializeGuard<AcceleratorPool>| {
            let pool = pool.ok()?;
            let reservations = pool.status.as_ref()?.ledger.reservations.iter();
            let namespaces: BTreeSet<String> =
                reservations.map(|entry| entry.model.namespace.clone()).collect();
            if namespaces.is_empty() {
                return None;
            }
            let name = pool.name_any();
            self.remember(Some(pool));
            Some((name, namespaces))
        };
        Ok(listed.items.into_iter().filter_map(with_namespaces).collect())
    }

    /// Applies `change` to the pool's ledger and writes it, and retries on a conflict.
    ///
    /// `change` gets the ledger and the pool's grantable memory, and runs again on each try. An unchanged ledger is not
    /// written unless its stamp is missing: the stamp must also protect a ledger that was only read.
    ///
    /// # Errors
    /// See [`Error`]. After `Timeout` and `Api` the change may have been written.
    pub async fn change<T, E>(
        &self,
        pool: &str,
        mut change: impl FnMut(&mut Ledger, Bytes) -> Result<T, E>,
    ) -> Result<T, Error<E>> {
        let change = |status: &mut AcceleratorPoolStatus| {
            let may_grant = total(status);
            change(&mut status.ledger, may_grant)
        };
        let (outcome, written) = self.write(pool, change).await?;
        self.remember(written);
        Ok(outcome)
    }

    /// Keeps the object for the pool's next write.
    fn remember(&self, object: Option<AcceleratorPool>) {
        let Some(mut object) = object else { return };
        // Managed fields are larger than the rest. The API server keeps its own where a write has none.
        object.metadata.managed_fields = None;
        self.lock_known().insert(object.name_any(), object);
    }

    /// Updates the rest of the pool's status: all but ledger, sums and stamp. `desired` gets the stored status.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn update_status(
        &self,
        pool: &str,
        desired: impl Fn(&AcceleratorPoolStatus) -> AcceleratorPoolStatus,
    ) -> Result<(), Error<Infallible>> {
        let change = |status: &mut AcceleratorPoolStatus| {
            let AcceleratorPoolStatus { epoch, ledger, .. } = status.clone();
            *status = AcceleratorPoolStatus { epoch, ledger, ..desired(status) };
            Ok(())
        };
        self.write(pool, change).await.map(drop)
    }

    /// Returns the outcome of `change`, and the object as written; `None` if nothing changed.
    async fn write<T, E>(
        &self,
        pool: &str,
        mut change: impl FnMut(&mut AcceleratorPoolStatus) -> Result<T, E>,
    ) -> Result<(T, Option<AcceleratorPool>), Error<E>> {
        // One epoch for all tries: a decision of one tenure must not be written in the next.
        let epoch = self.leading_epoch().ok_or(Error::NotLeading)?;
        let mut known = self.lock_known().remove(pool);
        for _ in 0..MAX_TRIES {
            let is_read = known.is_none();
            let mut object = match known.take() {
                Some(object) => object,
                None => self.read(pool).await?,
            };
            let before = object.status.take().unwrap_or_default();
            let mut status = before.clone();
            stamp(&mut status, epoch).map_err(|newer| {
                let pool = pool.to_owned();
                Error::Replaced { pool, epoch, newer }
            })?;
            let outcome = change(&mut status);
            // Last check before the write, and before anyone relies on an unchanged ledger. A process that is suspended
            // right here writes late, with the version it read: the stamp of the new leader has made that version
            // stale.
            if self.leading_epoch() != Some(epoch) {
                return Err(Error::NotLeading);
            }
            update_sums(&mut status);
            if !is_read && (outcome.is_err() || status == before) {
                continue;
            }
            let outcome = outcome.map_err(Error::Refused)?;
            if status == before {
                return Ok((outcome, None));
            }
            object.status = Some(status);
            if let Some(object) = self.replace(pool, &object).await? {
                return Ok((outcome, Some(object)));
            }
        }
        Err(Error::Contended)
    }

    fn lock_known(&self) -> MutexGuard<'_, BTreeMap<String, AcceleratorPool>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the epoch in which this gateway leads now.
    fn leading_epoch(&self) -> Option<u64> {
        self.leadership.borrow().filter(Leadership::is_valid).map(|claim| claim.epoch)
    }

    async fn read<E>(&self, pool: &str) -> Result<AcceleratorPool, Error<E>> {
        let found =
            time::timeout(CALL_TIMEOUT, self.pools.get_opt(pool)).await.map_err(|_| Error::Timeout)?;
        found.map_err(|error| Error::Api(Box::new(error)))?.ok_or_else(|| Error::NoPool(pool.to_owned()))
    }

    /// Returns the object as written; `None` if another writer was first.
    async fn replace<E>(
        &self,
        pool: &str,
        object: &AcceleratorPool,
    ) -> Result<Option<AcceleratorPool>, Error<E>> {
        failpoint::hit();
        let parameters = PostParams::default();
        let write = self.pools.replace_status(pool, &parameters, object);
        match time::timeout(CALL_TIMEOUT, write).await.map_err(|_| Error::Timeout)? {
            Ok(written) => Ok(Some(written)),
            Err(kube::Error::Api(status)) if status.is_conflict() => Ok(None),
            Err(kube::Error::Api(status)) if status.is_not_found() => Err(Error::NoPool(pool.to_owned())),
            Err(error) => Err(Error::Api(Box::new(error))),
        }
    }
}
