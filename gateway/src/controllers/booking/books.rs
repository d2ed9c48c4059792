//! The write: compare-and-set on the status of an AcceleratorPool, by whoever leads.

use std::time::Duration;

use kube::{Api, Client, api::PostParams};
use tokio::{sync::watch, time};

use super::{sum_up, total};
use crate::controllers::{
    crd::{AcceleratorPool, ledger::Ledger},
    election::Claim,
};
use rouse::units::Bytes;

/// A call that takes longer has failed. Whether it was carried out is not known: the ledger is read before it is made
/// again.
const CALL: Duration = Duration::from_secs(5);
/// Others write a pool rarely: its controller its totals, and a leader that was replaced and does not know it yet.
const TRIES: u32 = 16;

/// Changes ledgers, while this gateway leads.
#[derive(Clone, Debug)]
pub struct Books {
    pools: Api<AcceleratorPool>,
    claim: watch::Receiver<Option<Claim>>,
}

/// Why a ledger was not changed; with `E`, that the change itself said no.
#[derive(Debug, thiserror::Error)]
pub enum Error<E> {
    #[error(transparent)]
    Refused(E),
    #[error("this gateway does not lead, or no longer")]
    NotLeading,
    #[error("there is no pool '{0}'")]
    NoPool(String),
    #[error("the API server did not answer in time")]
    Late,
    #[error("others were quicker {TRIES} times in a row")]
    Contended,
    #[error("the API server says: {0}")]
    Api(#[source] Box<kube::Error>),
}

impl Books {
    #[must_use]
    pub fn new(client: Client, claim: watch::Receiver<Option<Claim>>) -> Self {
        Self { pools: Api::all(client), claim }
    }

    /// Reads the pool, changes its ledger and writes it; again, when another wrote meanwhile. `change` is given the
    /// ledger and what may be granted of the pool, and is asked anew each time. Without a change nothing is written.
    ///
    /// # Errors
    /// As [`Error`] says; after `Late` and `Api` the change may have been made.
    pub async fn change<T, E>(
        &self,
        pool: &str,
        mut change: impl FnMut(&mut Ledger, Bytes) -> Result<T, E>,
    ) -> Result<T, Error<E>> {
        for _ in 0..TRIES {
            let found = time::timeout(CALL, self.pools.get_opt(pool)).await;
            let found = found.map_err(|_| Error::Late)?.map_err(|error| Error::Api(Box::new(error)))?;
            let mut object = found.ok_or_else(|| Error::NoPool(pool.to_owned()))?;
            let mut status = object.status.take().unwrap_or_default();
            let before = status.ledger.clone();
            let may_grant = total(&status);
            let outcome = change(&mut status.ledger, may_grant).map_err(Error::Refused)?;
            let same = status.ledger == before;
            sum_up(&mut status);
            object.status = Some(status);
            // The last look before the write, and before anybody acts on what is there already. A process that is stopped right here writes late, with the version that it
            // read: whatever was written meanwhile refuses it.
            if !self.claim.borrow().is_some_and(|claim| claim.holds()) {
                return Err(Error::NotLeading);
            }
            if same {
                return Ok(outcome);
            }
            let parameters = PostParams::default();
            let write = self.pools.replace_status(pool, &parameters, &object);
            match time::timeout(CALL, write).await {
                Ok(Ok(_)) => return Ok(outcome),
                Ok(Err(kube::Error::Api(status))) if status.is_conflict() => {}
                Ok(Err(error)) => return Err(Error::Api(Box::new(error))),
                Err(_) => return Err(Error::Late),
            }
        }
        Err(Error::Contended)
    }
}
