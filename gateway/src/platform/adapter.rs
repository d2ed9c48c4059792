//! How each kind of engine is spoken to: health, names, probes, sleep and wake, counters.
//!
//! Engines differ in small ways that must not leak into the life of an engine, so everything that asks "which kind?"
//! is here. An adapter holds no state of the engine: each call asks the engine itself, because what was true before a
//! restart of either side is not evidence. Calls are rare (probes, transitions), so each has a connection of its own
//! and cannot meet a stale one.

mod counters;
mod http;
pub mod paths;
mod sleep;

use std::{net::SocketAddr, time::Duration};

use rouse::{fault::Cause, fleet::event::Verdict};
use serde_json::{Value, json};

use crate::config::{Kind, Model, SleepApi, Task};

pub use counters::Counters;
use http::{Caller, Failure};

/// Speaks to one engine at one address.
#[derive(Debug)]
pub struct Adapter {
    kind: Kind,
    sleep: SleepApi,
    served_name: String,
    task: Task,
    caller: Caller,
}

/// What a health request told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    Good,
    /// It answered, with something else than success.
    Bad,
    /// No answer in time, or no connection.
    Silent,
}

impl Adapter {
    #[must_use]
    pub fn new(model: &Model, address: SocketAddr) -> Self {
        Self {
            kind: model.kind,
            sleep: model.sleep,
            served_name: model.served_name.clone(),
            task: model.task,
            caller: Caller::new(address, model.api_key.clone()),
        }
    }

    pub async fn health(&self, within: Duration) -> Health {
        let mut status = self.status_of("/health", within).await;
        // llama-cpp-python has no health route, and a custom engine need not have one: their list of models must do.
        if status == Ok(404) && matches!(self.kind, Kind::LlamaCpp | Kind::Custom) {
            status = self.status_of("/v1/models", within).await;
        }
        match status {
            Ok(200..=299) => Health::Good,
            Ok(_) => Health::Bad,
            Err(_) => Health::Silent,
        }
    }

    /// Whether the engine serves the model under the configured name. Engines that keep no list, or ignore the name
    /// in requests (llama.cpp's do), are believed.
    pub async fn serves(&self, within: Duration) -> Result<(), Cause> {
        if self.kind == Kind::LlamaCpp {
            return Ok(());
        }
        let Ok(reply) = self.caller.get("/v1/models", within).await else {
            return Ok(());
        };
        let list: Option<Value> = serde_json::from_slice(&reply.body).ok();
        let Some(served) = list.as_ref().and_then(|list| list.get("data")?.as_array()) else {
            return Ok(());
        };
        let names: Vec<&str> = served.iter().filter_map(|model| model.get("id")?.as_str()).collect();
        if names.is_empty() || names.contains(&self.served_name.as_str()) {
            return Ok(());
        }
        Err(Cause::WrongModel { serves: names.join(", ").chars().take(256).collect() })
    }

    /// Asks for the least work of the model's task: health and the list of models answer before an engine can serve.
    pub async fn probe(&self, within: Duration) -> Verdict {
        let model = &self.served_name;
        let answer = match self.task {
            Task::Generate => {
                let messages = json!([{"role": "user", "content": "1"}]);
                let chat = json!({"model": model, "messages": messages, "max_tokens": 1, "temperature": 0});
                let answer = self.caller.post("/v1/chat/completions", Some(&chat), within).await;
                // A base model has no chat template, and some servers no chat route.
                if answer.as_ref().is_ok_and(|reply| matches!(reply.status, 400 | 404)) {
                    let text = json!({"model": model, "prompt": "1", "max_tokens": 1, "temperature": 0});
                    self.caller.post("/v1/completions", Some(&text), within).await
                } else {
                    answer
                }
            }
            Task::Embed => {
                let body = json!({"model": model, "input": "1"});
                self.caller.post("/v1/embeddings", Some(&body), within).await
            }
            Task::Score => {
                let body = json!({"model": model, "text_1": "1", "text_2": "1"});
                self.caller.post("/score", Some(&body), within).await
            }
            Task::Transcribe | Task::None => return self.health_verdict(within).await,
        };
        match answer {
            Ok(reply) if reply.status < 500 => Verdict::Passed,
            Ok(_) => Verdict::Failed(Cause::Unhealthy),
            Err(failure) => Verdict::Failed(failure.cause()),
        }
    }

    /// What the engine's own counters say; `None` when it has none.
    pub async fn counters(&self, within: Duration) -> Option<Counters> {
        let reply = self.caller.get("/metrics", within).await.ok()?;
        (reply.status == 200).then(|| counters::parse(&reply.body, self.kind))?
    }

    async fn health_verdict(&self, within: Duration) -> Verdict {
        match self.health(within).await {
            Health::Good => Verdict::Passed,
            Health::Bad => Verdict::Failed(Cause::Unhealthy),
            Health::Silent => Verdict::Failed(Cause::Unreachable),
        }
    }

    async fn status_of(&self, path: &str, within: Duration) -> Result<u16, Failure> {
        self.caller.get(path, within).await.map(|reply| reply.status)
    }
}

#[cfg(test)]
mod tests;
