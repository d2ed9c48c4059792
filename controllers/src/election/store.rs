//! Stores the election's record in a Lease object.

use std::time::Duration;

use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    api::{ObjectMeta, PostParams},
};

use super::state::{LeaseRecord, LeaseVersion};
use crate::api_error::api_error_message;

/// Why a lease call failed. The election retries after each of these.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    #[error("another gateway changed the lease first")]
    Conflict,
    #[error("the API server did not answer in time")]
    Timeout,
    #[error("the lease's leaseTransitions has reached its maximum: delete the Lease")]
    EpochExhausted,
    #[error("the API server returned a lease without uid or resourceVersion")]
    Unversioned,
    #[error("{}", api_error_message(.0))]
    Refused(#[source] Box<kube::Error>),
}

impl LeaseError {
    /// Whether the API server is unreachable or failing: timeout, transport error or status 500 and above.
    pub(super) fn is_unreachable(&self) -> bool {
        match self {
            Self::Timeout => true,
            Self::Refused(error) => !matches!(**error, kube::Error::Api(ref status) if status.code < 500),
            Self::Conflict | Self::EpochExhausted | Self::Unversioned => false,
        }
    }
}

/// Storage of the election record: compare-and-set by version.
pub trait LeaseStore: Send + Sync + 'static {
    fn get(&self) -> impl Future<Output = Result<Option<(LeaseRecord, LeaseVersion)>, LeaseError>> + Send;
    /// Creates the record. Returns [`LeaseError::Conflict`] if there is one already.
    fn create(&self, record: &LeaseRecord) -> impl Future<Output = Result<LeaseVersion, LeaseError>> + Send;
    /// Replaces the record. Returns [`LeaseError::Conflict`] if the version changed or the record is gone.
    fn replace(
        &self,
        record: &LeaseRecord,
        version: &LeaseVersion,
    ) -> impl Future<Output = Result<LeaseVersion, LeaseError>> + Send;
}

/// One Lease of `coordination.k8s.io/v1`.
#[derive(Clone, Debug)]
pub struct KubeLeaseStore {
    api: Api<Lease>,
    name: String,
}

impl KubeLeaseStore {
    #[must_use]
    pub fn new(client: Client, namespace: &str, name: &str) -> Self {
        Self { api: Api::namespaced(client, namespace), name: name.to_owned() }
    }

    fn object(&self, record: &LeaseRecord, version: Option<&LeaseVersion>) -> Result<Lease, LeaseError> {
        let now = MicroTime(Timestamp::now());
        let spec = LeaseSpec {
            // Empty rather than absent, so that people see that the lease is free.
            holder_identity: Some(record.holder.clone().unwrap_or_default()),
            lease_duration_seconds: i32::try_from(record.duration.as_secs()).ok(),
            lease_transitions: Some(i32::try_from(record.epoch).map_err(|_| LeaseError::EpochExhausted)?),
            acquire_time: Some(now.clone()),
            renew_time: Some(now),
            ..LeaseSpec::default()
        };
        let metadata = ObjectMeta {
            name: Some(self.name.clone()),
            uid: version.map(|version| version.object.clone()),
            resource_version: version.map(|version| version.number.clone()),
            ..ObjectMeta::default()
        };
        Ok(Lease { metadata, spec: Some(spec) })
    }
}

impl LeaseStore for KubeLeaseStore {
    async fn get(&self) -> Result<Option<(LeaseRecord, LeaseVersion)>, LeaseError> {
        let Some(lease) = self.api.get_opt(&self.name).await? else { return Ok(None) };
        let version = version(&lease)?;
        Ok(Some((record(lease.spec.unwrap_or_default()), version)))
    }

    async fn create(&self, record: &LeaseRecord) -> Result<LeaseVersion, LeaseError> {
        version(&self.api.create(&PostParams::default(), &self.object(record, None)?).await?)
    }

    async fn replace(&self, record: &LeaseRecord, before: &LeaseVersion) -> Result<LeaseVersion, LeaseError> {
        let lease = self.object(record, Some(before))?;
        version(&self.api.replace(&self.name, &PostParams::default(), &lease).await?)
    }
}

/// Reads the record. Foreign programs may write invalid numbers; those become 0.
fn record(spec: LeaseSpec) -> LeaseRecord {
    LeaseRecord {
        holder: spec.holder_identity.filter(|holder| !holder.is_empty()),
        epoch: spec.lease_transitions.and_then(|n| u64::try_from(n).ok()).unwrap_or(0),
        duration: Duration::from_secs(
            spec.lease_duration_seconds.and_then(|n| u64::try_from(n).ok()).unwrap_or(0),
        ),
    }
}

fn version(lease: &Lease) -> Result<LeaseVersion, LeaseError> {
    match (&lease.metadata.uid, &lease.metadata.resource_version) {
        (Some(object), Some(number)) => Ok(LeaseVersion { object: object.clone(), number: number.clone() }),
        _ => Err(LeaseError::Unversioned),
    }
}

impl From<kube::Error> for LeaseError {
    fn from(error: kube::Error) -> Self {
        let quicker = |status: &kube::core::Status| {
            status.is_conflict() || status.is_already_exists() || status.is_not_found()
        };
        match &error {
            kube::Error::Api(status) if quicker(status) => Self::Conflict,
            _ => Self::Refused(Box::new(error)),
        }
    }
}
