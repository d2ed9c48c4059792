//! What is ordered of a launcher, and what is heard of it: it starts and ends engines inside its Pod, by REST.
//!
//! Every call carries the leader's epoch, and our launcher refuses an older one. Launchers of the public project, which have no
//! epochs and do not tell whether an engine answers, are understood as well: their engines are asked (`probes`). No launcher is believed anything about its own
//! answers' size.

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

pub use self::{
    instance::{InstanceRequest, LauncherInstance, engine_id, fingerprint, instance_id, matches_server},
    watch::LauncherWatchEvent,
};

/// Where a launcher listens.
pub const PORT: u16 = 8001;
/// Of all instances.
pub const INSTANCES: &str = "/v2/vllm/instances";

/// It answers at once; a call that takes longer has failed.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);
/// It starts nothing before it has heard of the accelerators, and their driver may hang.
const START_TIMEOUT: Duration = nvml::QUERY_TIMEOUT.saturating_add(CALL_TIMEOUT);
/// Ten seconds after SIGTERM an engine is killed, and half a minute later its launcher says that it does not end.
const STOP_TIMEOUT: Duration = Duration::from_secs(45);
/// Of what a refusal says.
const MAX_REFUSAL_CHARS: usize = 256;

/// Why a call had no effect, or none that is known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("the launcher does not answer: {0}")]
    Unreachable(#[from] HttpClientError),
    /// It has an instance of this id, or has heard a newer leader.
    #[error("the launcher answered: {0}")]
    Conflict(String),
    #[error("the launcher answered {status}: {text}")]
    Refused { status: u16, text: String },
}

impl Error {
    /// In the words of the decisions.
    #[must_use]
    pub const fn cause(&self) -> CommandFailure {
        match self {
            Self::Unreachable(_) => CommandFailure::Unreachable,
            Self::Conflict(_) => CommandFailure::Conflict,
            Self::Refused { .. } => CommandFailure::Refused,
        }
    }
}

/// All instances of a launcher.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct InstanceList {
    /// Of the last thing that happened to any of them.
    pub revision: u64,
    pub instances: Vec<LauncherInstance>,
}

/// One launcher, as this leader speaks to it.
#[derive(Debug)]
pub struct LauncherClient {
    address: SocketAddr,
    client: HttpClient,
    epoch: Epoch,
}

impl LauncherClient {
    /// `token`: for a launcher that was started with one.
    #[must_use]
    pub const fn new(address: SocketAddr, token: Option<String>, epoch: Epoch) -> Self {
        Self { address, client: HttpClient::new(address, token), epoch }
    }

    /// Calls are told to this one.
    #[must_use]
    pub fn observed(self, observer: Arc<dyn CallObserver>) -> Self {
        Self { client: self.client.with_observer(observer), ..self }
    }

    /// # Errors
    /// As [`Error`] says.
    pub async fn list(&self) -> Result<InstanceList, Error> {
        read(&checked(self.call(Method::GET, INSTANCES, None, CALL_TIMEOUT).await?)?)
    }

    /// Of the last thing that happened.
    async fn revision(&self) -> Result<u64, Error> {
        #[derive(Deserialize)]
        struct InstanceRevision {
            revision: u64,
        }
        let path = format!("{INSTANCES}?detail=false");
        let reply = checked(self.call(Method::GET, &path, None, CALL_TIMEOUT).await?)?;
        read(&reply).map(|InstanceRevision { revision }| revision)
    }

    /// Tells it who leads, so that it obeys nobody older from here on. The public launcher does not know what that is.
    ///
    /// # Errors
    /// [`Error::Conflict`] where it has heard of a newer one.
    pub async fn announce_epoch(&self) -> Result<(), Error> {
        let body = serde_json::to_value(EpochAnnouncement { epoch: self.epoch }).unwrap_or_default();
        let reply = self.call(Method::POST, EPOCH_PATH, Some(&body), CALL_TIMEOUT).await?;
        if reply.status == 404 { Ok(()) } else { checked(reply).map(drop) }
    }

    /// None: there is none of this id.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn get(&self, id: &str) -> Result<Option<LauncherInstance>, Error> {
        found(self.call(Method::GET, &path(id), None, CALL_TIMEOUT).await?)
    }

    /// Starts an engine under this id, and returns as soon as its process runs. A call without an answer may have started it.
    ///
    /// # Errors
    /// [`Error::Conflict`] where there is one of this id, whatever it was started with. [`Error::Refused`] where one of the
    /// accelerators is not known; the public launcher calls that a conflict, too.
    pub async fn put(&self, id: &str, wanted: &InstanceRequest) -> Result<LauncherInstance, Error> {
        // Texts only: nothing of it can fail.
        let body = serde_json::to_value(wanted).unwrap_or_default();
        read(&checked(self.call(Method::PUT, &path(id), Some(&body), START_TIMEOUT).await?)?)
    }

    /// Ends an engine, and returns when nothing of it is left: how it was last. None: there is none of this id.
    ///
    /// # Errors
    /// As [`Error`] says. What was begun goes on.
    pub async fn delete(&self, id: &str) -> Result<Option<LauncherInstance>, Error> {
        found(self.call(Method::DELETE, &path(id), None, STOP_TIMEOUT).await?)
    }

    /// As [`Self::delete`], and our launcher starts this life of it, and those before, no more: an order to do so may be under way
    /// still.
    ///
    /// # Errors
    /// As [`Error`] says. What was begun goes on.
    pub async fn delete_generation(
        &self,
        id: &str,
        life: Generation,
    ) -> Result<Option<LauncherInstance>, Error> {
        let path = format!("{}?generation={}", path(id), life.0);
        found(self.call(Method::DELETE, &path, None, STOP_TIMEOUT).await?)
    }

    /// Tells of all instances, and then of all that happens to them, until nobody listens: see [`LauncherWatchEvent`]. `wrap` makes a message
    /// of the channel.
    pub async fn watch<M>(&self, told: mpsc::Sender<M>, wrap: impl Fn(LauncherWatchEvent) -> M) {
        watch::run(self, &told, wrap).await;
    }

    async fn call(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        within: Duration,
    ) -> Result<HttpClientReply, HttpClientError> {
        self.client.call(method, path, body, Some(self.epoch), within).await
    }
}

/// Ids are ours and need no more than this; a launcher may hold others' that do.
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

/// Its reason, as both launchers send it, or whatever else was sent.
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
            (CommandFailure::Conflict, "the launcher answered: instance a already exists".to_owned())
        );
        assert_eq!(
            told(422, r#"{"detail":[{"type":"missing"}]}"#),
            (CommandFailure::Refused, r#"the launcher answered 422: [{"type":"missing"}]"#.to_owned())
        );
        assert_eq!(told(500, "oh").1, "the launcher answered 500: oh");
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
