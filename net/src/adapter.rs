//! The protocol of each kind of engine: health, names, probes, sleep and wake, counters.
//!
//! Engines differ in small ways that must not leak into the engine's lifecycle, so every branch on the kind of engine
//! is here. An adapter holds no state of the engine: each call asks the engine itself, because an answer from before a
//! restart of either side is not evidence. Calls are few (probes, transitions, readings of the load), so each call
//! opens its own connection and cannot meet a stale one.

mod counters;
pub mod paths;
mod sleep;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use serde_json::{Value, json};

use crate::{
    backend_origin::BackendOrigin,
    engine_load::{EngineLoad, LoadAnswer},
    http_client::{CallObserver, HttpClient},
};
use rouse::{fault::FailureCause, fleet::event::CanaryVerdict};

pub use counters::EngineCounters;

/// Text of [`Adapter::exercise`]: some hundred tokens, which fit into the context of every model.
const EXERCISE_WORD: &str = "word ";
const EXERCISE_WORDS: usize = 100;
/// Tokens of its answer.
const EXERCISE_TOKENS: u32 = 16;

/// The calls that an engine understands for sleep and wake.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SleepApi {
    /// The engine cannot sleep, so it is stopped instead.
    #[default]
    None,
    /// `/sleep`, `/wake_up`, `/is_sleeping`.
    Vllm,
    /// `/release_memory_occupation`, `/resume_memory_occupation`.
    Sglang,
}

/// The server program of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineKind {
    Vllm,
    Sglang,
    LlamaCpp,
    Custom,
}

/// The request that the readiness probe sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeTask {
    Generate,
    Embed,
    Score,
    Transcribe,
    None,
}

/// How to talk to one engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineProfile {
    pub kind: EngineKind,
    pub sleep: SleepApi,
    /// The model's name as the engine knows it.
    pub served_name: String,
    pub task: ProbeTask,
    /// Sent as a bearer token when the engine requires one.
    pub api_key: Option<String>,
}

/// Client for one engine at one address.
#[derive(Debug)]
pub struct Adapter {
    profile: EngineProfile,
    client: HttpClient,
}

/// Result of a health request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineHealth {
    Healthy,
    /// The engine answered with a status other than success.
    Unhealthy,
    /// A stub that forwards no requests answered, so the engine's health is unknown. Trust this only for an engine that
    /// is known to be behind a stub, since any server can set the mark.
    Gated,
    /// No answer in time, or no connection.
    Unreachable,
}

impl Adapter {
    #[must_use]
    pub fn new(profile: EngineProfile, address: SocketAddr) -> Self {
        let client = HttpClient::new(address, profile.api_key.clone());
        Self { profile, client }
    }

    /// Sets the origin when the listener is a backend that another operator runs.
    #[must_use]
    pub fn with_origin(self, origin: Option<Arc<BackendOrigin>>) -> Self {
        Self { client: self.client.with_origin(origin), ..self }
    }

    /// Reports each finished call to `observer`.
    #[must_use]
    pub fn with_observer(self, observer: Arc<dyn CallObserver>) -> Self {
        Self { client: self.client.with_observer(observer), ..self }
    }

    /// Sends a health request.
    pub async fn health(&self, within: Duration) -> EngineHealth {
        self.health_with_reason(within).await.0
    }

    /// As [`Self::health`], with a reason for humans.
    async fn health_with_reason(&self, within: Duration) -> (EngineHealth, String) {
        let mut path = "/health";
        let mut reply = self.client.get(path, within).await;
        // llama-cpp-python has no health route, and a custom engine may lack one, so fall back to the list of models.
        let absent = reply.as_ref().is_ok_and(|reply| reply.status == 404);
        if absent && matches!(self.profile.kind, EngineKind::LlamaCpp | EngineKind::Custom) {
            path = "/v1/models";
            reply = self.client.get(path, within).await;
        }
        match reply {
            Ok(reply) if reply.success() => (EngineHealth::Healthy, format!("GET {path} succeeded")),
            Ok(reply) if reply.gated => {
                (EngineHealth::Gated, "the engine's stub forwards no requests".to_owned())
            }
            Ok(reply) => (EngineHealth::Unhealthy, format!("GET {path} returned status {}", reply.status)),
            Err(failure) => (EngineHealth::Unreachable, format!("GET {path}: {failure}")),
        }
    }

    /// Checks that the engine serves the model under the configured name.
    ///
    /// llama.cpp ignores the name in requests, so it always passes. An engine without a readable list of models passes
    /// too.
    ///
    /// # Errors
    /// [`FailureCause::WrongModel`]: the engine lists models, and none has the configured name.
    pub async fn check_served_name(&self, within: Duration) -> Result<(), FailureCause> {
        if self.profile.kind == EngineKind::LlamaCpp {
            return Ok(());
        }
        let Ok(reply) = self.client.get("/v1/models", within).await else {
            return Ok(());
        };
        let list: Option<Value> = serde_json::from_slice(&reply.body).ok();
        let Some(served) = list.as_ref().and_then(|list| list.get("data")?.as_array()) else {
            return Ok(());
        };
        let names: Vec<&str> = served.iter().filter_map(|model| model.get("id")?.as_str()).collect();
        if names.is_empty() || names.contains(&self.profile.served_name.as_str()) {
            return Ok(());
        }
        let serves = names.join(", ").chars().take(256).collect();
        Err(FailureCause::WrongModel { serves, configured: self.profile.served_name.as_str().into() })
    }

    /// Sends the smallest request of the model's task. Health and the list of models answer before an engine can serve.
    /// The verdict is inconclusive only when the response carries the mark of a stub that forwards no requests.
    pub async fn probe(&self, within: Duration) -> CanaryVerdict {
        self.send_request("1", 1, within).await
    }

    /// Sends a request of the model's task that is long enough to make the engine take all its memory.
    pub async fn exercise(&self, within: Duration) -> CanaryVerdict {
        self.send_request(&EXERCISE_WORD.repeat(EXERCISE_WORDS), EXERCISE_TOKENS, within).await
    }

    async fn send_request(&self, text: &str, tokens: u32, within: Duration) -> CanaryVerdict {
        let model = &self.profile.served_name;
        let answer = match self.profile.task {
            ProbeTask::Generate => {
                let messages = json!([{"role": "user", "content": text}]);
                let chat =
                    json!({"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0});
                let answer = self.client.post("/v1/chat/completions", Some(&chat), within).await;
                // A base model has no chat template, and some servers have no chat route.
                if answer.as_ref().is_ok_and(|reply| matches!(reply.status, 400 | 404)) {
                    let plain =
                        json!({"model": model, "prompt": text, "max_tokens": tokens, "temperature": 0});
                    self.client.post("/v1/completions", Some(&plain), within).await
                } else {
                    answer
                }
            }
            ProbeTask::Embed => {
                let body = json!({"model": model, "input": text});
                self.client.post("/v1/embeddings", Some(&body), within).await
            }
            ProbeTask::Score => {
                let body = json!({"model": model, "text_1": text, "text_2": text});
                self.client.post("/score", Some(&body), within).await
            }
            ProbeTask::Transcribe | ProbeTask::None => return self.health_verdict(within).await,
        };
        match answer {
            Ok(reply) if reply.status < 500 => CanaryVerdict::Passed,
            Ok(reply) if reply.gated => CanaryVerdict::Inconclusive,
            Ok(_) => CanaryVerdict::Failed(FailureCause::Unhealthy),
            Err(failure) => CanaryVerdict::Failed(failure.cause()),
        }
    }

    /// Reads the engine's own counters; `None` when it has none.
    pub async fn counters(&self, within: Duration) -> Option<EngineCounters> {
        counters::parse(&self.metrics_page(within).await?)
    }

    /// Reads the engine's load; `None` when it reports none.
    pub async fn load(&self, within: Duration) -> Option<EngineLoad> {
        self.load_answer(within).await.load()
    }

    /// Reads the engine's load. Without one, reports whether the engine has no metrics or the reading failed.
    pub async fn load_answer(&self, within: Duration) -> LoadAnswer {
        match self.client.get("/metrics", within).await {
            Ok(reply) if reply.status == 200 => LoadAnswer::from_page(&reply.body),
            // llama.cpp answers 501 unless it was started with `--metrics`.
            Ok(reply) if matches!(reply.status, 401 | 403 | 404 | 405 | 501) => LoadAnswer::NoMetrics,
            Ok(_) | Err(_) => LoadAnswer::Failed,
        }
    }

    async fn metrics_page(&self, within: Duration) -> Option<Bytes> {
        let reply = self.client.get("/metrics", within).await.ok()?;
        (reply.status == 200).then_some(reply.body)
    }

    async fn health_verdict(&self, within: Duration) -> CanaryVerdict {
        match self.health(within).await {
            EngineHealth::Healthy => CanaryVerdict::Passed,
            EngineHealth::Unhealthy => CanaryVerdict::Failed(FailureCause::Unhealthy),
            EngineHealth::Gated => CanaryVerdict::Inconclusive,
            EngineHealth::Unreachable => CanaryVerdict::Failed(FailureCause::Unreachable),
        }
    }
}

#[cfg(test)]
mod tests;
