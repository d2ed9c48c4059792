//! Writes objects on behalf of the leader. Pool statuses and the Lease have writers of their own, and every gateway
//! writes its own GatewayReplica.
//!
//! Every write checks the claim first, has a timeout, and is counted. Versions cover a claim that is lost between that
//! check and the write's arrival: each change carries the version that was read, and a new leader writes every object
//! that it takes over before it decides anything.

use std::{convert::Infallible, fmt::Debug, sync::Arc, time::Duration};

use http::{Request, header::CONTENT_TYPE};
use kube::{
    Api, Resource,
    api::{DeleteParams, Patch, PatchParams, Preconditions},
};
use prometheus::IntCounterVec;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::{sync::watch, time};

use super::{api_error::api_error_message, election::Leadership, failpoint, ledger};

/// Field manager of the fields that Rouse writes.
pub const MANAGER: &str = "rouse";
/// Timeout of one call; the call may still have succeeded.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a write failed, or has an unknown outcome.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    #[error("this gateway is not the leader")]
    NotLeading,
    #[error("another writer changed the object first")]
    Conflict,
    #[error("the object no longer exists")]
    Gone,
    /// The API server refuses the write (400, 403 or 422), and a plain retry will fail too.
    #[error("{0}")]
    Invalid(String),
    #[error("the API server did not answer in time")]
    Timeout,
    #[error("{}", api_error_message(.0))]
    Api(Arc<kube::Error>),
}

/// Writes while this gateway leads.
#[derive(Clone, Debug)]
pub struct ObjectWriter {
    leadership: watch::Receiver<Option<Leadership>>,
    /// Counted by kind and outcome.
    writes: IntCounterVec,
    in_flight: watch::Sender<u32>,
}

/// Counts one write as in flight until it ends.
struct InFlightWrite<'a>(&'a watch::Sender<u32>);

impl ObjectWriter {
    #[must_use]
    pub fn new(leadership: watch::Receiver<Option<Leadership>>, writes: IntCounterVec) -> Self {
        Self { leadership, writes, in_flight: watch::Sender::new(0) }
    }

    /// Completes when no write is in flight. Without the claim no new write begins.
    pub async fn wait_idle(&self) {
        // `self` holds the sender, so this cannot fail.
        drop(self.in_flight.subscribe().wait_for(|under_way| *under_way == 0).await);
    }

    /// Returns the claim that allows a write now.
    ///
    /// # Errors
    /// This gateway does not lead, or its renewal is late.
    pub fn leadership(&self) -> Result<Leadership, Error> {
        self.leadership.borrow().filter(Leadership::is_fresh).ok_or(Error::NotLeading)
    }

    /// Returns the claim, like [`Self::leadership`]. If the renewal is late, waits for it until the claim expires.
    ///
    /// # Errors
    /// As for [`Self::leadership`].
    pub async fn wait_leadership(&self) -> Result<Leadership, Error> {
        let mut claims = self.leadership.clone();
        let remaining = claims.borrow().as_ref().map_or(Duration::ZERO, Leadership::remaining);
        let fresh = claims.wait_for(|claim| claim.as_ref().is_none_or(Leadership::is_fresh));
        // Renewed, lost or timed out: the claim that is current now decides.
        drop(time::timeout(remaining, fresh).await);
        self.leadership()
    }

    /// Reads the current object.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn get<K>(&self, api: &Api<K>, name: &str) -> Result<Option<K>, Error>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        let found = time::timeout(CALL_TIMEOUT, api.get_opt(name)).await.map_err(|_| Error::Timeout)?;
        found.map_err(Error::from)
    }

    /// Creates an object, with strict field validation. Returns `Conflict` if the object exists.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn create<K>(&self, api: &Api<K>, object: &Value) -> Result<K, Error>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        let path = format!("{}?fieldManager={MANAGER}&fieldValidation=Strict", api.resource_url());
        let request = Request::post(path)
            .header(CONTENT_TYPE, "application/json")
            .body(object.to_string().into_bytes())
            .map_err(|error| Error::Invalid(error.to_string()))?;
        self.call::<K, _>(api.clone().into_client().request(request)).await
    }

    /// Applies a whole object server-side. A `resourceVersion` in it must match the stored one.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn apply<K>(&self, api: &Api<K>, name: &str, object: &Value) -> Result<K, Error>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        let parameters = PatchParams::apply(MANAGER).force();
        self.call::<K, _>(api.patch(name, &parameters, &Patch::Apply(object))).await
    }

    /// Applies a JSON merge patch to an object.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn patch_merge<K>(&self, api: &Api<K>, name: &str, patch: &Value) -> Result<K, Error>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        let parameters = PatchParams { field_manager: Some(MANAGER.to_owned()), ..PatchParams::default() };
        self.call::<K, _>(api.patch(name, &parameters, &Patch::Merge(patch))).await
    }

    /// Applies a strategic merge patch to an object of a built-in kind, whose lists have merge keys.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn patch_strategic<K>(&self, api: &Api<K>, name: &str, patch: &Value) -> Result<K, Error>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        let parameters = PatchParams { field_manager: Some(MANAGER.to_owned()), ..PatchParams::default() };
        self.call::<K, _>(api.patch(name, &parameters, &Patch::Strategic(patch))).await
    }

    /// Applies an object's status server-side. A `resourceVersion` in it must match the stored one.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn apply_status<K>(&self, api: &Api<K>, name: &str, object: &Value) -> Result<K, Error>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        let parameters = PatchParams::apply(MANAGER).force();
        self.call::<K, _>(api.patch_status(name, &parameters, &Patch::Apply(object))).await
    }

    /// Deletes the object with this uid. Succeeds if the object is already gone.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn delete<K>(&self, api: &Api<K>, name: &str, uid: &str) -> Result<(), Error>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        let preconditions = Preconditions { uid: Some(uid.to_owned()), resource_version: None };
        let parameters = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        match self.call::<K, _>(api.delete(name, &parameters)).await {
            // A conflict means that another object has the name now.
            Ok(_) | Err(Error::Gone | Error::Conflict) => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn call<K: Resource<DynamicType = ()>, T>(
        &self,
        call: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, Error> {
        let _under_way = InFlightWrite::begin(&self.in_flight);
        self.leadership()?;
        failpoint::hit();
        let outcome = match time::timeout(CALL_TIMEOUT, call).await {
            Ok(outcome) => outcome.map_err(Error::from),
            Err(_) => Err(Error::Timeout),
        };
        let label = match &outcome {
            Ok(_) => "done",
            Err(error) => error.label(),
        };
        self.writes.with_label_values(&[K::kind(&()).as_ref(), label]).inc();
        outcome
    }
}

impl<'a> InFlightWrite<'a> {
    fn begin(all: &'a watch::Sender<u32>) -> Self {
        all.send_modify(|under_way| *under_way += 1);
        Self(all)
    }
}

impl Drop for InFlightWrite<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|under_way| *under_way -= 1);
    }
}

impl Error {
    /// Returns the outcome's label in metrics.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        match self {
            Self::NotLeading => "not_leading",
            Self::Conflict => "conflict",
            Self::Gone => "gone",
            Self::Invalid(_) => "invalid",
            Self::Timeout => "late",
            Self::Api(_) => "failed",
        }
    }
}

impl From<ledger::Error<Infallible>> for Error {
    fn from(error: ledger::Error<Infallible>) -> Self {
        match error {
            ledger::Error::Refused(never) => match never {},
            ledger::Error::NotLeading | ledger::Error::Replaced { .. } => Self::NotLeading,
            ledger::Error::NoPool(_) => Self::Gone,
            ledger::Error::Timeout => Self::Timeout,
            ledger::Error::Contended => Self::Conflict,
            ledger::Error::Api(error) => Self::from(*error),
        }
    }
}

impl From<kube::Error> for Error {
    fn from(error: kube::Error) -> Self {
        match &error {
            kube::Error::Api(status) if status.is_conflict() || status.is_already_exists() => Self::Conflict,
            kube::Error::Api(status) if status.is_not_found() => Self::Gone,
            kube::Error::Api(status) if matches!(status.code, 400 | 403 | 422) => {
                Self::Invalid(status.message.clone())
            }
            _ => Self::Api(Arc::new(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use prometheus::Opts;

    use super::*;

    #[tokio::test]
    async fn a_renewal_that_is_late_is_waited_for_and_a_claim_that_is_lost_is_not() {
        let aged = |seconds| Some(Leadership::aged(7, Duration::from_secs(seconds)));
        let claims = watch::Sender::new(aged(0));
        let writes = IntCounterVec::new(Opts::new("writes", "of a test"), &["kind", "outcome"]).unwrap();
        let writer = ObjectWriter::new(claims.subscribe(), writes);
        assert_eq!(writer.wait_leadership().await.unwrap().epoch, 7);

        for (told, led) in [(aged(0), true), (None, false)] {
            claims.send_replace(aged(6));
            assert!(matches!(writer.leadership(), Err(Error::NotLeading)));
            let waiting = tokio::spawn({
                let writer = writer.clone();
                async move { writer.wait_leadership().await.is_ok() }
            });
            tokio::task::yield_now().await;
            assert!(!waiting.is_finished());
            claims.send_replace(told);
            assert_eq!(waiting.await.unwrap(), led);
        }

        claims.send_replace(aged(10));
        assert!(
            matches!(writer.wait_leadership().await, Err(Error::NotLeading)),
            "another may decide by now"
        );
    }
}
