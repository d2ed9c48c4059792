//! Writes objects on behalf of the leader. Pool statuses and the Lease have writers of their own, and every gateway
//! writes its own GatewayReplica.
//!
//! Every write checks the claim first, has a timeout, and is counted. Versions cover a claim that is lost between that
//! check and the write's arrival: each change carries the version that was read or decided on, so it fails once the
//! next leader has written the object. [`fence`] describes the fences of writes to Pods. `docs/architecture.md` lists all
//! writes with their fences.

pub mod fence;

use std::{convert::Infallible, fmt::Debug, sync::Arc, time::Duration};

use http::{Request, header::CONTENT_TYPE};
use kube::{
    Api, Resource,
    api::{Patch, PatchParams},
    core::Status,
};
use prometheus::IntCounterVec;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::{
    sync::{Semaphore, SemaphorePermit, watch},
    time::{self, Instant},
};

use self::fence::{Fence, SeenObject};

use super::{api_error::api_error_message, election::Leadership, failpoint, ledger, slot_patch::json_patch};

/// Field manager of the fields that Rouse writes.
pub const MANAGER: &str = "rouse";
/// Timeout of one write with its retries, without the wait for a permit; the write may still have succeeded.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of calls in flight; further ones wait. Each has a connection to the API server, with buffers at both
/// ends: thousands of engines that start at once would open thousands.
const MAX_IN_FLIGHT: usize = 64;
/// How often a fenced write is tried while a kubelet changes the object's version.
const MAX_TRIES: u32 = 5;

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
    permits: Arc<Semaphore>,
}

/// Counts one write as in flight until it ends.
struct InFlightWrite<'a> {
    all: &'a watch::Sender<u32>,
    _permit: Option<SemaphorePermit<'a>>,
}

impl ObjectWriter {
    #[must_use]
    pub fn new(leadership: watch::Receiver<Option<Leadership>>, writes: IntCounterVec) -> Self {
        let permits = Arc::new(Semaphore::new(MAX_IN_FLIGHT));
        Self { leadership, writes, in_flight: watch::Sender::new(0), permits }
    }

    /// Returns a writer with permits of its own, so that its many writes delay no others.
    #[must_use]
    pub(crate) fn with_own_limit(&self, max_in_flight: usize) -> Self {
        Self { permits: Arc::new(Semaphore::new(max_in_flight)), ..self.clone() }
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

    /// Returns the claim, like [`Self::leadership`], if it is that of this epoch.
    ///
    /// # Errors
    /// As for [`Self::leadership`], or this gateway leads in another term.
    pub(crate) fn leadership_in(&self, epoch: u64) -> Result<Leadership, Error> {
        let claim = self.leadership()?;
        if claim.epoch == epoch { Ok(claim) } else { Err(Error::NotLeading) }
    }

    /// Whether this gateway still leads, even if its renewal is late.
    #[must_use]
    pub(crate) fn may_lead(&self) -> bool {
        self.leadership.borrow().as_ref().is_some_and(Leadership::is_valid)
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
        let _permit = self.permits.acquire().await.ok();
        let found = time::timeout(CALL_TIMEOUT, api.get_opt(name)).await.map_err(|_| Error::Timeout)?;
        found.map_err(Error::from)
    }

    /// Reads an object that a decision of this epoch is about to write.
    ///
    /// # Errors
    /// [`Error::NotLeading`] if a newer leader has written the object. See [`Error`].
    pub async fn get_for_write<K>(&self, api: &Api<K>, name: &str, epoch: u64) -> Result<Option<K>, Error>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        let found = self.get(api, name).await?;
        if let Some(found) = &found {
            let seen = SeenObject::of(found.meta());
            self.confirm(&seen, epoch, Instant::now() + CALL_TIMEOUT).await?;
        }
        Ok(found)
    }

    /// Creates an object, with strict field validation.
    ///
    /// # Errors
    /// [`Error::Conflict`] if the object exists. See [`Error`].
    pub async fn create<K>(&self, api: &Api<K>, object: &Value) -> Result<K, Error>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        let path = format!("{}?fieldManager={MANAGER}&fieldValidation=Strict", api.resource_url());
        let request = Request::post(path)
            .header(CONTENT_TYPE, "application/json")
            .body(object.to_string().into_bytes())
            .map_err(|error| Error::Invalid(error.to_string()))?;
        self.call_with::<K, _>(api.clone().into_client().request(request), creation_error).await
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
    /// Sets this leader's epoch on the object. Retries while other writers only change what Rouse does not write.
    ///
    /// # Errors
    /// [`Error::Conflict`] if the decision no longer fits the object; [`Error::Gone`] if another object has the name.
    /// See [`Error`].
    pub async fn patch_fenced<K>(
        &self,
        api: &Api<K>,
        name: &str,
        fence: &Fence,
        patch: &Value,
    ) -> Result<(), Error>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        let parameters = PatchParams { field_manager: Some(MANAGER.to_owned()), ..PatchParams::default() };
        let parameters = &parameters;
        let written = self.write_fenced(api, name, fence, |seen| {
            let patch = Patch::Strategic(fence.stamped(patch, seen));
            async move { api.patch(name, parameters, &patch).await }
        });
        written.await.map(drop)
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

    /// Applies a JSON Patch to an object's status. The tests in it are its fence.
    ///
    /// # Errors
    /// [`Error::Conflict`] if one of its tests fails. See [`Error`].
    pub(crate) async fn patch_status_json<K>(
        &self,
        api: &Api<K>,
        name: &str,
        operations: &Value,
    ) -> Result<K, Error>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        let patch = json_patch(operations)?;
        let parameters = PatchParams { field_manager: Some(MANAGER.to_owned()), ..PatchParams::default() };
        self.call_with::<K, _>(api.patch_status(name, &parameters, &patch), json_patch_error).await
    }

    /// Deletes an object. Succeeds if the object is already gone. Retries as [`Self::patch_fenced`] does.
    ///
    /// # Errors
    /// [`Error::Conflict`] if the decision no longer fits the object. See [`Error`].
    pub async fn delete_fenced<K>(&self, api: &Api<K>, name: &str, fence: &Fence) -> Result<(), Error>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        let deleted = self.write_fenced(api, name, fence, |seen| {
            let parameters = seen.delete_params();
            async move { api.delete(name, &parameters).await }
        });
        match deleted.await {
            Ok(_) | Err(Error::Gone) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Deletes an object in exactly this version. Succeeds if the object is already gone.
    ///
    /// # Errors
    /// [`Error::Conflict`] if the object has changed. See [`Error`].
    pub(crate) async fn delete_exact<K>(
        &self,
        api: &Api<K>,
        name: &str,
        seen: &SeenObject,
    ) -> Result<(), Error>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        let parameters = seen.delete_params();
        match self.call::<K, _>(api.delete(name, &parameters)).await {
            Ok(_) | Err(Error::Gone) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Writes an object in the version that the decision saw, or in a later one in which the decision still stands.
    async fn write_fenced<K, T, F>(
        &self,
        api: &Api<K>,
        name: &str,
        fence: &Fence,
        write: impl Fn(&SeenObject) -> F,
    ) -> Result<T, Error>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
        F: Future<Output = kube::Result<T>>,
    {
        let mut seen = fence.seen.clone();
        // Without a permit: a forged epoch waits here for a renewal.
        self.confirm(&seen, fence.epoch, Instant::now() + CALL_TIMEOUT).await?;
        let _under_way = self.begin().await;
        let deadline = Instant::now() + CALL_TIMEOUT;
        for attempt in 0..MAX_TRIES {
            // A decision of one tenure must not be written in the next.
            self.leadership_in(fence.epoch)?;
            if attempt == 0 {
                failpoint::hit();
            }
            match self.send::<K, T>(write(&seen), deadline, Error::from).await {
                Err(Error::Conflict) => {}
                outcome => return outcome,
            }
            let found = time::timeout_at(deadline, api.get_opt(name)).await.map_err(|_| Error::Timeout)?;
            let now = SeenObject::of(found?.ok_or(Error::Gone)?.meta());
            if !now.is_same_object(&seen) {
                return Err(Error::Gone);
            }
            // A newer leader's write ends this one, whatever it wrote.
            self.confirm(&now, fence.epoch, deadline).await?;
            if !fence.allows(&now) {
                return Err(Error::Conflict);
            }
            seen = now;
        }
        Err(Error::Conflict)
    }

    /// Checks that no newer leader has written the object.
    ///
    /// A user can put any epoch on a Pod. A renewal of the Lease that this gateway has sent since the read proves that
    /// no newer leader exists.
    async fn confirm(&self, seen: &SeenObject, epoch: u64, deadline: Instant) -> Result<(), Error> {
        if !seen.is_newer_than(epoch) {
            return Ok(());
        }
        let (read, mut claims) = (Instant::now(), self.leadership.clone());
        let decided = |claim: &Option<Leadership>| {
            claim.as_ref().is_none_or(|claim| claim.epoch != epoch || claim.is_renewed_since(read))
        };
        let renewed = match time::timeout_at(deadline, claims.wait_for(decided)).await {
            Ok(Ok(claim)) => claim.as_ref().is_some_and(|claim| claim.epoch == epoch),
            Ok(Err(_)) | Err(_) => false,
        };
        if renewed {
            tracing::warn!(?seen, epoch, "the epoch on an object is ignored: no leader has it");
            return Ok(());
        }
        Err(Error::NotLeading)
    }

    /// Waits until another write may begin. Callers check leadership after this wait.
    async fn begin(&self) -> InFlightWrite<'_> {
        // Nothing closes the semaphore.
        let permit = self.permits.acquire().await.ok();
        self.in_flight.send_modify(|under_way| *under_way += 1);
        InFlightWrite { all: &self.in_flight, _permit: permit }
    }

    // Not `async`, which would keep the call twice.
    fn call<K: Resource<DynamicType = ()>, T>(
        &self,
        call: impl Future<Output = kube::Result<T>>,
    ) -> impl Future<Output = Result<T, Error>> {
        self.call_with::<K, T>(call, Error::from)
    }

    /// Calls the API server. `classify` interprets its error for this kind of write.
    async fn call_with<K: Resource<DynamicType = ()>, T>(
        &self,
        call: impl Future<Output = kube::Result<T>>,
        classify: fn(kube::Error) -> Error,
    ) -> Result<T, Error> {
        let epoch = self.leadership()?.epoch;
        let _under_way = self.begin().await;
        // A decision of one term must not be written in the next, however long it waited.
        self.leadership_in(epoch)?;
        failpoint::hit();
        self.send::<K, T>(call, Instant::now() + CALL_TIMEOUT, classify).await
    }

    /// Sends one write, and counts it.
    async fn send<K: Resource<DynamicType = ()>, T>(
        &self,
        call: impl Future<Output = kube::Result<T>>,
        deadline: Instant,
        classify: fn(kube::Error) -> Error,
    ) -> Result<T, Error> {
        let outcome = match time::timeout_at(deadline, call).await {
            Ok(outcome) => outcome.map_err(classify),
            Err(_) => Err(Error::Timeout),
        };
        self.writes.with_label_values(&[K::kind(&()).as_ref(), outcome_label(&outcome)]).inc();
        outcome
    }
}

impl Drop for InFlightWrite<'_> {
    fn drop(&mut self) {
        self.all.send_modify(|under_way| *under_way -= 1);
    }
}

/// Returns the label of a write's outcome in metrics.
pub(crate) fn outcome_label<T>(outcome: &Result<T, Error>) -> &'static str {
    outcome.as_ref().map_or_else(Error::label, |_| "done")
}

impl Error {
    const fn label(&self) -> &'static str {
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

/// Reads the error of a creation.
///
/// A conflict is about another object then, such as a quota that has changed at the same time: the object was not
/// created, and the next try may succeed.
fn creation_error(error: kube::Error) -> Error {
    let is_of_another = matches!(&error, kube::Error::Api(status) if status.is_conflict());
    if is_of_another { Error::Api(Arc::new(error)) } else { Error::from(error) }
}

/// Reads the error of a JSON Patch.
///
/// The API server reports a test that failed like an object that it refuses, but without a cause.
pub(crate) fn json_patch_error(error: kube::Error) -> Error {
    let has_causes = |status: &Status| status.details.as_ref().is_some_and(|all| !all.causes.is_empty());
    match &error {
        kube::Error::Api(status) if status.code == 422 && !has_causes(status) => Error::Conflict,
        _ => Error::from(error),
    }
}

#[cfg(test)]
mod tests;
