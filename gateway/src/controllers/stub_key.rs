//! The key of which gateways make the tokens that stubs demand.
//!
//! Whoever gives a stub orders opens and closes its gate and says where its engine is, and the network of Pods is open to every
//! Pod of a cluster. So a stub obeys nobody without a token.
//!
//! * Each model has a token of its own, the key's HMAC over its object. Whoever gets to see one, as what runs in the network of
//!   the same Pod may, can give orders to that model's stubs and to no others.
//! * So has each launcher, of its Pod's namespace and name: it starts programs where all accelerators of its node are.
//! * A stub is told the token's hash, as a flag. So there is no Secret where models are and no right to any, and who may read
//!   Pods learns no token.
//! * The key is in one Secret of the gateways' own namespace. The manifest that gives gateways their rights makes it, empty, and
//!   they may read and update it by its name. The first that finds it empty fills it, in the version that it read: of two
//!   that come at once, one takes the other's.

use std::{fmt, time::Duration};

use aws_lc_rs::{digest, hmac, rand};
use k8s_openapi::{ByteString, api::core::v1::Secret};
use kube::{Api, Client, api::PostParams};
use tokio::time;

use super::{api_error::api_error_message, crd::ledger::ObjectName, workload::ModelRef};

/// The Secret's name: the rights are for this one.
pub const SECRET: &str = "rouse-stub-key";
/// Where the key is in it.
const ENTRY: &str = "key";
const KEY_BYTES: usize = 32;
/// A call that takes longer has failed.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// As all gateways of one installation have it.
#[derive(Clone, PartialEq, Eq)]
pub struct StubKey([u8; KEY_BYTES]);

/// Why there is none.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "there is no Secret {SECRET} in the namespace {0}, which keeps the key of the stubs' tokens: apply charts/rouse/rbac/gateway.yaml"
    )]
    Missing(String),
    #[error(
        "this gateway may not read and update the Secret {SECRET}: {0}; apply charts/rouse/rbac/gateway.yaml"
    )]
    Forbidden(String),
    #[error(
        "the entry {ENTRY} of the Secret {SECRET} is no key of {KEY_BYTES} bytes: remove the entry, and a gateway makes one"
    )]
    Unfit,
    #[error("there are no random bytes to be had for a key")]
    NoRandomness,
    #[error("the API server did not answer in time")]
    Timeout,
    #[error("{}", api_error_message(.0))]
    Api(Box<kube::Error>),
}

impl Error {
    /// It may be otherwise the next time.
    #[must_use]
    pub const fn is_transient(&self) -> bool {
        matches!(self, Self::Timeout | Self::Api(_))
    }
}

impl From<kube::Error> for Error {
    fn from(error: kube::Error) -> Self {
        match &error {
            kube::Error::Api(status) if status.is_forbidden() => Self::Forbidden(status.message.clone()),
            _ => Self::Api(Box::new(error)),
        }
    }
}

impl StubKey {
    /// That of the gateways whose own namespace this is; made, where there is none yet.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn load_or_create(client: &Client, namespace: &str) -> Result<Self, Error> {
        let secrets: Api<Secret> = Api::namespaced(client.clone(), namespace);
        loop {
            let found = with_timeout(secrets.get_opt(SECRET)).await?;
            let mut secret = found.ok_or_else(|| Error::Missing(namespace.to_owned()))?;
            let entries = secret.data.get_or_insert_default();
            if let Some(ByteString(bytes)) = entries.get(ENTRY) {
                return bytes.as_slice().try_into().map(Self).map_err(|_| Error::Unfit);
            }
            let key = Self::made()?;
            entries.insert(ENTRY.to_owned(), ByteString(key.0.to_vec()));
            match with_timeout(secrets.replace(SECRET, &PostParams::default(), &secret)).await {
                Ok(_) => return Ok(key),
                // Another was quicker, and its key is everybody's.
                Err(Error::Api(error)) if matches!(&*error, kube::Error::Api(status) if status.is_conflict()) =>
                    {}
                Err(error) => return Err(error),
            }
        }
    }

    fn made() -> Result<Self, Error> {
        let mut bytes = [0; KEY_BYTES];
        rand::fill(&mut bytes).map_err(|_| Error::NoRandomness)?;
        Ok(Self(bytes))
    }

    #[cfg(test)]
    pub(crate) const fn example() -> Self {
        Self([7; KEY_BYTES])
    }

    /// What the stubs of this model are shown.
    #[must_use]
    pub fn token(&self, model: &ModelRef) -> String {
        // No name and no uid has a slash in it.
        self.sign(&format!("{}/{}/{}", model.object.namespace, model.object.name, model.uid))
    }

    /// What they know it by.
    #[must_use]
    pub fn hash(&self, model: &ModelRef) -> String {
        hash(&self.token(model))
    }

    /// What the launcher in this Pod is shown.
    #[must_use]
    pub fn launcher_token(&self, pod: &ObjectName) -> String {
        // No model's: of those no part is empty.
        self.sign(&format!("launcher//{}/{}", pod.namespace, pod.name))
    }

    /// What it knows it by.
    #[must_use]
    pub fn launcher_hash(&self, pod: &ObjectName) -> String {
        hash(&self.launcher_token(pod))
    }

    fn sign(&self, whose: &str) -> String {
        let key = hmac::Key::new(hmac::HMAC_SHA256, &self.0);
        hex(hmac::sign(&key, whose.as_bytes()).as_ref())
    }
}

/// A key is never told.
impl fmt::Debug for StubKey {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("StubKey")
    }
}

async fn with_timeout<T>(call: impl Future<Output = kube::Result<T>>) -> Result<T, Error> {
    time::timeout(CALL_TIMEOUT, call).await.map_err(|_| Error::Timeout)?.map_err(Error::from)
}

fn hash(token: &str) -> String {
    hex(digest::digest(&digest::SHA256, token.as_bytes()).as_ref())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_model_has_a_token_of_its_own_and_stubs_know_it_by_its_hash() {
        let key = StubKey::example();
        let owner = |namespace: &str, name: &str, uid: &str| ModelRef {
            object: ObjectName::new(namespace, name),
            uid: uid.to_owned(),
        };
        let one = owner("team", "qwen", "u1");
        let token = key.token(&one);
        assert_eq!(token, StubKey::example().token(&one), "every gateway makes the same");
        assert_eq!(key.hash(&one), hex(digest::digest(&digest::SHA256, token.as_bytes()).as_ref()));
        for other in [owner("other", "qwen", "u1"), owner("team", "llama", "u1"), owner("team", "qwen", "u2")]
        {
            assert_ne!(key.token(&other), token);
        }
        assert_ne!(StubKey([8; KEY_BYTES]).token(&one), token);
        let launcher = key.launcher_token(&one.object);
        assert_ne!(launcher, token);
        assert_ne!(launcher, key.launcher_token(&ObjectName::new("other", "qwen")));
        assert_eq!(key.launcher_hash(&one.object), hash(&launcher));
        assert_eq!(format!("{key:?}"), "StubKey");
    }
}
