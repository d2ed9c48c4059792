//! The key from which gateways derive the tokens that stubs require.
//!
//! Orders to a stub open and close its gate and set its engine's address, and the Pod network is open to every Pod of a
//! cluster. So a stub obeys no caller without a token.
//!
//! * Each model has a token of its own: the key's HMAC over the model's object. A process that obtains one, for example
//!   in the network of the same Pod, can give orders to that model's stubs only.
//! * Each launcher has a token too, over its Pod's namespace and name: it starts programs that can reach all
//!   accelerators of its node.
//! * A stub gets the token's hash as a flag. So the models' namespaces need no Secret and no right to one, and reading
//!   Pods reveals no token.
//! * The key is in one Secret in the gateways' own namespace. The manifest that grants the gateways' rights creates it
//!   empty, and gateways may read and update it by name. The first gateway that finds it empty fills it, with the
//!   version that it read: of two concurrent gateways, one adopts the other's key.

use std::{fmt, time::Duration};

use aws_lc_rs::{digest, hmac, rand};
use k8s_openapi::{ByteString, api::core::v1::Secret};
use kube::{Api, Client, api::PostParams};
use tokio::time;

use super::{api_error::api_error_message, crd::ledger::ObjectName, workload::ModelRef};

/// Name of the Secret; the gateways' rights cover this name.
pub const SECRET: &str = "rouse-stub-key";
/// Entry of the key in the Secret.
const ENTRY: &str = "key";
const KEY_BYTES: usize = 32;
/// Timeout of one API call.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// The key that all gateways of one installation share.
#[derive(Clone, PartialEq, Eq)]
pub struct StubKey([u8; KEY_BYTES]);

/// Why the key could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "the Secret {SECRET}, which holds the key of the stubs' tokens, does not exist in the namespace {0}: apply \
         charts/rouse/rbac/gateway.yaml"
    )]
    Missing(String),
    #[error(
        "this gateway may not read and update the Secret {SECRET}: {0}; apply charts/rouse/rbac/gateway.yaml"
    )]
    Forbidden(String),
    #[error(
        "the entry {ENTRY} of the Secret {SECRET} is not a key of {KEY_BYTES} bytes: remove the entry, and a gateway \
         creates a new key"
    )]
    Unfit,
    #[error("the system returned no random bytes for a new key")]
    NoRandomness,
    #[error("the API server did not answer in time")]
    Timeout,
    #[error("{}", api_error_message(.0))]
    Api(Box<kube::Error>),
}

impl Error {
    /// Whether a retry may succeed.
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
    /// Loads the key from the gateways' namespace, or creates it if there is none.
    ///
    /// # Errors
    /// See [`Error`].
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
                // Another gateway wrote first; all gateways use its key.
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

    /// Returns the token for this model's stubs.
    #[must_use]
    pub fn token(&self, model: &ModelRef) -> String {
        // Neither names nor uids contain a slash.
        self.sign(&format!("{}/{}/{}", model.object.namespace, model.object.name, model.uid))
    }

    /// Returns the hash by which these stubs verify the token.
    #[must_use]
    pub fn hash(&self, model: &ModelRef) -> String {
        hash(&self.token(model))
    }

    /// Returns the token for the launcher in this Pod.
    #[must_use]
    pub fn launcher_token(&self, pod: &ObjectName) -> String {
        // The empty part keeps this apart from every model's text, which has none.
        self.sign(&format!("launcher//{}/{}", pod.namespace, pod.name))
    }

    /// Returns the hash by which that launcher verifies the token.
    #[must_use]
    pub fn launcher_hash(&self, pod: &ObjectName) -> String {
        hash(&self.launcher_token(pod))
    }

    fn sign(&self, whose: &str) -> String {
        let key = hmac::Key::new(hmac::HMAC_SHA256, &self.0);
        hex(hmac::sign(&key, whose.as_bytes()).as_ref())
    }
}

/// Never prints the key.
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
