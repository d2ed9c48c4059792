//! The write: compare-and-set on the status of an AcceleratorPool, by whoever leads.

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    time::Duration,
};

use kube::{
    Api, Client, ResourceExt as _,
    api::{ListParams, PostParams},
    core::DeserializeGuard,
};
use tokio::{sync::watch, time};

use super::{stamp, total, update_sums};
use crate::controllers::{
    api_error::api_error_message,
    crd::{AcceleratorPool, AcceleratorPoolStatus, ledger::Ledger},
    election::Leadership,
    failpoint,
};
use rouse::units::Bytes;

/// A call that takes longer has failed. Whether it was carried out is not known: the ledger is read before it is made
/// again.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// Others write a pool rarely: its controller its totals, and a leader that was replaced and does not know it yet.
const MAX_TRIES: u32 = 16;

/// Changes ledgers, while this gateway leads.
#[derive(Clone, Debug)]
pub struct PoolLedger {
    pools: Api<AcceleratorPool>,
    leadership: watch::Receiver<Option<Leadership>>,
}

/// Why a ledger was not changed; with `E`, that the change itself said no.
#[derive(Debug, thiserror::Error)]
pub enum Error<E> {
    #[error(transparent)]
    Refused(E),
    #[error("this gateway does not lead, or no longer")]
    NotLeading,
    #[error(
        "pool '{pool}' is under the leader of epoch {newer}, and this gateway leads in {epoch}: it was replaced"
    )]
    Replaced { pool: String, epoch: u64, newer: u64 },
    #[error("there is no pool '{0}'")]
    NoPool(String),
    #[error("the API server did not answer in time")]
    Timeout,
    #[error("others were quicker {MAX_TRIES} times in a row")]
    Contended,
    #[error("{}", api_error_message(.0))]
    Api(#[source] Box<kube::Error>),
}

impl PoolLedger {
    #[must_use]
    pub fn new(client: Client, claim: watch::Receiver<Option<Leadership>>) -> Self {
        Self { pools: Api::all(client), leadership: claim }
    }

    /// What a new leader does before it decides anything: puts these pools under its epoch, so that nothing its
    /// predecessor still has under way can change them. Their ledgers, as nobody else changes them from now on; a pool
    /// that is gone is left out.
    ///
    /// # Errors
    /// As [`Error`] says; some of the pools may be stamped then. Nothing is lost by asking again.
    pub async fn take_over(
        &self,
        pools: &BTreeSet<String>,
    ) -> Result<BTreeMap<String, Ledger>, Error<Infallible>> {
        let mut ledgers = BTreeMap::new();
        for pool in pools {
            match self.write(pool, |status| Ok(status.ledger.clone())).await {
                Ok(ledger) => drop(ledgers.insert(pool.clone(), ledger)),
                Err(Error::NoPool(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(ledgers)
    }

    /// The pools that have reservations, with the namespaces whose models these are. A pool that cannot be read is left out.
    ///
    /// # Errors
    /// The API server did not answer, or with an error.
    pub async fn pools_with_reservations(
        &self,
    ) -> Result<Vec<(String, BTreeSet<String>)>, Error<Infallible>> {
        let pools: Api<DeserializeGuard<AcceleratorPool>> = Api::all(self.pools.clone().into_client());
        let all = ListParams::default();
        let listed = time::timeout(CALL_TIMEOUT, pools.list(&all)).await.map_err(|_| Error::Timeout)?;
        let listed = listed.map_err(|error| Error::Api(Box::new(error)))?;
        let who = |DeserializeGuard(pool): DeserializeGuard<AcceleratorPool>| {
            let pool = pool.ok()?;
            let reservations = pool.status.as_ref()?.ledger.reservations.iter();
            let namespaces: BTreeSet<String> =
                reservations.map(|entry| entry.model.namespace.clone()).collect();
            (!namespaces.is_empty()).then(|| (pool.name_any(), namespaces))
        };
        Ok(listed.items.into_iter().filter_map(who).collect())
    }

    /// Reads the pool, changes its ledger and writes it; again, when another wrote meanwhile. `change` is given the
    /// ledger and what may be granted of the pool, and is asked anew each time. Without a change nothing is written,
    /// but for the stamp where it is missing: also what is left as it is, is relied upon.
    ///
    /// # Errors
    /// As [`Error`] says; after `Timeout` and `Api` the change may have been made.
    pub async fn change<T, E>(
        &self,
        pool: &str,
        mut change: impl FnMut(&mut Ledger, Bytes) -> Result<T, E>,
    ) -> Result<T, Error<E>> {
        let change = |status: &mut AcceleratorPoolStatus| {
            let may_grant = total(status);
            change(&mut status.ledger, may_grant)
        };
        self.write(pool, change).await
    }

    /// As [`Self::change`], of what the status says beside the ledger, its sums and its stamp. `wanted` is given what is
    /// stored.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn update_status(
        &self,
        pool: &str,
        wanted: impl Fn(&AcceleratorPoolStatus) -> AcceleratorPoolStatus,
    ) -> Result<(), Error<Infallible>> {
        let change = |status: &mut AcceleratorPoolStatus| {
            let AcceleratorPoolStatus { epoch, ledger, .. } = status.clone();
            *status = AcceleratorPoolStatus { epoch, ledger, ..wanted(status) };
            Ok(())
        };
        self.write(pool, change).await
    }

    async fn write<T, E>(
        &self,
        pool: &str,
        mut change: impl FnMut(&mut AcceleratorPoolStatus) -> Result<T, E>,
    ) -> Result<T, Error<E>> {
        // One tenure: what was decided in one is not written in the next.
        let epoch = self.leading_epoch().ok_or(Error::NotLeading)?;
        for _ in 0..MAX_TRIES {
            let mut object = self.read(pool).await?;
            let before = object.status.take().unwrap_or_default();
            let mut status = before.clone();
            stamp(&mut status, epoch).map_err(|newer| {
                let pool = pool.to_owned();
                Error::Replaced { pool, epoch, newer }
            })?;
            let outcome = change(&mut status);
            // The last look before the write, and before anybody acts on what is there already. A process that is
            // stopped right here writes late, with the version that it read: the stamp of whoever leads then has made
            // that an old one.
            if self.leading_epoch() != Some(epoch) {
                return Err(Error::NotLeading);
            }
            let outcome = outcome.map_err(Error::Refused)?;
            update_sums(&mut status);
            if status == before {
                return Ok(outcome);
            }
            object.status = Some(status);
            if self.replace(pool, &object).await? {
                return Ok(outcome);
            }
        }
        Err(Error::Contended)
    }

    /// In which epoch this gateway leads, now.
    fn leading_epoch(&self) -> Option<u64> {
        self.leadership.borrow().filter(Leadership::is_valid).map(|claim| claim.epoch)
    }

    async fn read<E>(&self, pool: &str) -> Result<AcceleratorPool, Error<E>> {
        let found =
            time::timeout(CALL_TIMEOUT, self.pools.get_opt(pool)).await.map_err(|_| Error::Timeout)?;
        found.map_err(|error| Error::Api(Box::new(error)))?.ok_or_else(|| Error::NoPool(pool.to_owned()))
    }

    /// `false`: another wrote meanwhile.
    async fn replace<E>(&self, pool: &str, object: &AcceleratorPool) -> Result<bool, Error<E>> {
        failpoint::hit();
        let parameters = PostParams::default();
        let write = self.pools.replace_status(pool, &parameters, object);
        match time::timeout(CALL_TIMEOUT, write).await.map_err(|_| Error::Timeout)? {
            Ok(_) => Ok(true),
            Err(kube::Error::Api(status)) if status.is_conflict() => Ok(false),
            Err(kube::Error::Api(status)) if status.is_not_found() => Err(Error::NoPool(pool.to_owned())),
            Err(error) => Err(Error::Api(Box::new(error))),
        }
    }
}
