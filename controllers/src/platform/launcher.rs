//! Client of a launcher, which starts and stops engines inside its Pod through a REST API.
//!
//! Every call carries the leader's epoch, and our launcher refuses an older epoch. Launchers of the public project
//! work, too: they have no epochs and do not report whether an engine answers, so `probes` polls their engines. The
//! client limits the size of every response itself.

mod instance;
pub mod pod;
mod probes;
mod watch;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use http::Method;
use rouse::{pairing::event::CommandFailure, units::Generation};
use rouse_net::{
    http_client::{CallObserver, HttpClient, HttpClientError, HttpClientReply},
    nvml,
    stub_api::{EPOCH_PATH, Epoch, EpochAnnouncement},
};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;
use tokio::sync::mpsc;

pub(crate) use self::instance::same_server;
pub use self::{
    instance::{
        InstanceRequest, LauncherInstance, engine_id, fingerprint, instance_id, matches_server,
        patched_fingerprint,
    },
    watch::LauncherWatchEvent,
};

/// Port that a launcher listens on.
pub const PORT: u16 = 8001;
/// Path of the list of instances.
pub const INSTANCES: &str = "/v2/vllm/instances";

/// Timeout of most calls: a launcher answers them at once.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);
/// Timeout of a start: a launcher queries the accelerators first, and their driver may hang.
const START_TIMEOUT: Duration = nvml::QUERY_TIMEOUT.saturating_add(CALL_TIMEOUT);
/// Timeout of a stop: a launcher kills an engine ten seconds after SIGTERM, and reports half a minute later if it does
/// not end.
const STOP_TIMEOUT: Duration = Duration::from_secs(45);
/// Maximum characters of a refusal's text.
const MAX_REFUSAL_CHARS: usize = 256;

/// Why a call had no effect, or none that is known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("the call to the launcher failed: {0}")]
    Unreachable(#[from] HttpClientError),
    /// The launcher has an instance of this id, or has seen a newer leader.
    #[error("the launcher rejected the call: {0}")]
    Conflict(String),
    #[error("the launcher returned status {status}: {text}")]
    Refused { status: u16, text: String },
}

impl Error {
    /// Returns the cause as the pairing logic names it.
    #[must_use]
    pub const fn cause(&self) -> CommandFailure {
        match self {
            Self::Unreachable(_) => CommandFailure::Unreachable,
            Self::Conflict(_) => CommandFailure::Conflict,
            Self::Refused { .. } => CommandFailure::Refused,
        }
    }
}

/// Whether a launcher refuses the orders of replaced leaders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EpochSupport {
    Fenced,
    /// The public launcher obeys every caller.
    Unknown,
}

/// All instances of a launcher.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct InstanceList {
    /// Revision of the last event of any instance.
    pub revision: u64,
    pub instances: Vec<LauncherInstance>,
}

/// Client of one launcher, with the epoch of this leader.
#[derive(Debug)]
pub struct LauncherClient {
    address: SocketAddr,
    client: HttpClient,
    epoch: Epoch,
}

impl LauncherClient {
    /// `token`: for a launcher that was started with a token.
    #[must_use]
    pub const fn new(address: SocketAddr, token: Option<String>, epoch: Epoch) -> Self {
        Self { address, client: HttpClient::new(address, token), epoch }
    }

    /// Reports every call to this observer.
    #[must_use]
    pub fn observed(self, observer: Arc<dyn CallObserver>) -> Self {
        Self { client: self.client.with_observer(observer), ..self }
    }

    /// # Errors
    /// See [`Error`].
    pub async fn list(&self) -> Result<InstanceList, Error> {
        read(&checked(self.call(Method::GET, INSTANCES, None, CALL_TIMEOUT).await?)?)
    }

    /// Returns the revision of the launcher's last event.
    async fn revision(&self) -> Result<u64, Error> {
        #[derive(Deserialize)]
        struct InstanceRevision {
            revision: u64,
        }
        let path = format!("{INSTANCES}?detail=false");
        let reply = checked(self.call(Method::GET, &path, None, CALL_TIMEOUT).await?)?;
        read(&reply).map(|InstanceRevision { revision }| revision)
    }

    /// Announces this leader's epoch: from here on the launcher refuses older leaders. The public launcher knows no
    /// epochs.
    ///
    /// # Errors
    /// [`Error::Conflict`] if the launcher has seen a newer leader.
    pub async fn announce_epoch(&self) -> Result<EpochSupport, Error> {
        let body = serde_json::to_value(EpochAnnouncement { epoch: self.epoch }).unwrap_or_default();
        let reply = self.call(Method::POST, EPOCH_PATH, Some(&body), CALL_TIMEOUT).await?;
        if reply.status == 404 {
            return Ok(EpochSupport::Unknown);
        }
        checked(reply).map(|_| EpochSupport::Fenced)
    }

    /// Returns the instance of this id, if there is one.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn get(&self, id: &str) -> Result<Option<LauncherInstance>, Error> {
        found(self.call(Method::GET, &path(id), None, CALL_TIMEOUT).await?)
    }

    /// Starts an engine under this id, and returns as soon as its process runs. An unanswered call may have started it.
    ///
    /// # Errors
    /// [`Error::Conflict`] if an instance has this id, whatever its options. [`Error::Refused`] if one of the
    /// accelerators is unknown; the public launcher calls that a conflict, too.
    pub async fn put(&self, id: &str, request: &InstanceRequest) -> Result<LauncherInstance, Error> {
        // Only texts, so this cannot fail.
        let body = serde_json::to_value(request).unwrap_or_default();
        read(&checked(self.call(Method::PUT, &path(id), Some(&body), START_TIMEOUT).await?)?)
    }

    /// Stops an engine and returns its last state once nothing of it is left; `None` if no instance has this id.
    ///
    /// # Errors
    /// See [`Error`]. A stop that has begun continues.
    pub async fn delete(&self, id: &str) -> Result<Option<LauncherInstance>, Error> {
        found(self.call(Method::DELETE, &path(id), None, STOP_TIMEOUT).await?)
    }

    /// Stops an engine as [`Self::delete`] does, and bars this generation and earlier ones from our launcher.
    ///
    /// A start order may still be under way; our launcher refuses it from then on.
    ///
    /// # Errors
    /// See [`Error`]. A stop that has begun continues.
    pub async fn delete_generation(
        &self,
        id: &str,
        generation: Generation,
    ) -> Result<Option<LauncherInstance>, Error> {
        let path = format!("{}?generation={}", path(id), generation.0);
        found(self.call(Method::DELETE, &path, None, STOP_TIMEOUT).await?)
    }

    /// Sends all instances and then all their events, until the receiver closes: see [`LauncherWatchEvent`].
    ///
    /// `wrap` turns an event into a message of the channel.
    pub async fn watch<M>(&self, tx: mpsc::Sender<M>, wrap: impl Fn(LauncherWatchEvent) -> M) {
        watch::run(self, &tx, wrap).await;
    }

    async fn call(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        timeout: Duration,
    ) -> Result<HttpClientReply, HttpClientError> {
        self.client.call(method, path, body, Some(self.epoch), timeout).await
    }
}

/// Escapes the id. Our ids need no escaping, but a launcher may hold others.
fn path(id: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    let segment: String = id
        .bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect();
    format!("{INSTANCES}/{segment}")
}

fn found(reply: HttpClientReply) -> Result<Option<LauncherInstance>, Error> {
    if reply.status == 404 { Ok(None) } else { read(&checked(reply)?).map(Some) }
}

fn checked(reply: HttpClientReply) -> Result<HttpClientReply, Error> {
    match reply.status {
        200..=299 => Ok(reply),
        409 => Err(Error::Conflict(detail(&reply.body))),
        status => Err(Error::Refused { status, text: detail(&reply.body) }),
    }
}

fn read<T: DeserializeOwned>(reply: &HttpClientReply) -> Result<T, Error> {
    serde_json::from_slice(&reply.body).map_err(|_| HttpClientError::Broken.into())
}

/// Returns the refusal's reason as both launchers send it, or else the raw body.
fn detail(body: &[u8]) -> String {
    #[derive(Deserialize)]
    struct LauncherErrorBody {
        detail: Value,
    }
    let text = match serde_json::from_slice(body) {
        Ok(LauncherErrorBody { detail: Value::String(text) }) => text,
        Ok(LauncherErrorBody { detail }) => detail.to_string(),
        Err(_) => String::from_utf8_lossy(body).into_owned(),
    };
    text.chars().take(MAX_REFUSAL_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_told_in_the_words_of_the_decisions() {
        let told = |status, body: &'static str| {
            let reply = HttpClientReply { status, body: body.into(), gated: false };
            let error = checked(reply).unwrap_err();
            (error.cause(), error.to_string())
        };
        assert_eq!(
            told(409, r#"{"detail":"instance a already exists"}"#),
            (
                CommandFailure::Conflict,
                "the launcher rejected the call: instance a already exists".to_owned()
            )
        );
        assert_eq!(
            told(422, r#"{"detail":[{"type":"missing"}]}"#),
            (CommandFailure::Refused, r#"the launcher returned status 422: [{"type":"missing"}]"#.to_owned())
        );
        assert_eq!(told(500, "oh").1, "the launcher returned status 500: oh");
        let long: &'static str = "x".repeat(10_000).leak();
        assert!(told(503, long).1.len() < 300);
        assert_eq!(Error::from(HttpClientError::Timeout).cause(), CommandFailure::Unreachable);
    }

    #[test]
    fn an_id_is_one_segment_of_a_path_whatever_it_holds() {
        assert_eq!(path("0af-1_B"), "/v2/vllm/instances/0af-1_B");
        assert_eq!(path("../a?b#ü"), "/v2/vllm/instances/%2E%2E%2Fa%3Fb%23%C3%BC");
    }
}
