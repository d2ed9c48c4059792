//! Putting an engine to sleep and waking it, in the sequence of the calls it understands.
//!
//! None of these calls has a deadline of its own worth the name: how long a sleep or a wake may take depends on the
//! bytes it moves, and the decisions hold that clock. What is here only keeps a dead peer from being waited for for
//! ever; the caller drops the call when it is told to stop.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::{self, Instant};

use super::{Adapter, EngineHealth, SleepApi};
use rouse::{engine::SLEEP_DENIAL_TIMEOUT, fault::FailureCause, model::SleepLevel};

/// Longer than any deadline the decisions set.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(15 * 60);
/// One small question.
const QUERY_TIMEOUT: Duration = Duration::from_secs(5);
/// Requests that nobody waits for any more are gone from an engine within milliseconds; counters that show some for
/// longer than this are stuck, or the engine is used behind our back.
const STUCK_COUNTERS_AFTER: Duration = Duration::from_millis(500);
/// So long after the order the counters must be still.
const IDLE_TIMEOUT: Duration = Duration::from_secs(3);

impl Adapter {
    /// Puts the engine to sleep; returns when it says that it sleeps, or that it does not.
    ///
    /// # Errors
    /// [`FailureCause::SleepDenied`]: it took the order, and is awake. It can serve at once.
    pub async fn sleep(&self, level: SleepLevel) -> Result<(), FailureCause> {
        match self.profile.sleep {
            SleepApi::None => return Err(FailureCause::Refused),
            // `mode=wait` finishes what runs instead of aborting it. Versions without it ignore the parameter.
            SleepApi::Vllm => {
                self.wait_until_idle().await?;
                let path = format!("/sleep?level={}&mode=wait", level.number());
                self.post_command(&path, None).await?;
            }
            SleepApi::Sglang => {
                self.wait_until_idle().await?;
                self.post_command("/flush_cache", None).await?;
                self.post_command("/release_memory_occupation", Some(&json!({}))).await?;
            }
        }
        self.wait_until_asleep().await
    }

    /// After the order to sleep was taken. Some versions answer then, and not when it is carried out.
    ///
    /// Only an engine that says so itself is awake. One that gives no answer to the first question cannot tell, and its word that it took
    /// the order counts; but once it has denied, nothing but its word that it sleeps does, and silence proves neither.
    async fn wait_until_asleep(&self) -> Result<(), FailureCause> {
        let (mut denied, mut denies_since): (bool, Option<Instant>) = (false, None);
        let mut gap = Duration::from_millis(5);
        loop {
            match self.is_asleep(QUERY_TIMEOUT).await {
                Some(true) => return Ok(()),
                None if !denied => return Ok(()),
                None => denies_since = None,
                Some(false) => {
                    denied = true;
                    let since = *denies_since.get_or_insert_with(Instant::now);
                    if Instant::now() - since >= SLEEP_DENIAL_TIMEOUT.duration() {
                        return Err(FailureCause::SleepDenied);
                    }
                }
            }
            time::sleep(gap).await;
            gap = (gap * 2).min(Duration::from_millis(200));
        }
    }

    /// Gives the wake orders; the engine is usable once its health is good and [`Self::is_asleep`] denies.
    pub async fn wake(&self, level: SleepLevel) -> Result<(), FailureCause> {
        match (self.profile.sleep, level) {
            (SleepApi::Vllm, SleepLevel::One) => self.post_command("/wake_up", None).await,
            // Weights first, then their content, then the cache, which still describes what the engine held before:
            // without the last two steps a level-2 sleeper answers with noise.
            (SleepApi::Vllm, SleepLevel::Two) => {
                self.post_command("/wake_up?tags=weights", None).await?;
                let reload = json!({"method": "reload_weights"});
                self.post_command("/collective_rpc", Some(&reload)).await?;
                self.post_command("/wake_up?tags=kv_cache", None).await?;
                self.post_command("/reset_prefix_cache", None).await
            }
            (SleepApi::Sglang, SleepLevel::One) => {
                self.post_command("/resume_memory_occupation", Some(&json!({}))).await
            }
            (SleepApi::Sglang, SleepLevel::Two) => {
                let weights = json!({"tags": ["weights"]});
                self.post_command("/resume_memory_occupation", Some(&weights)).await?;
                let path = self.model_path().await?;
                let reload = json!({"model_path": path});
                self.post_command("/update_weights_from_disk", Some(&reload)).await?;
                let cache = json!({"tags": ["kv_cache"]});
                self.post_command("/resume_memory_occupation", Some(&cache)).await
            }
            (SleepApi::None, _) => Err(FailureCause::Refused),
        }
    }

    /// Whether the engine says that it sleeps; `None` when it cannot tell.
    pub async fn is_asleep(&self, within: Duration) -> Option<bool> {
        if self.profile.sleep != SleepApi::Vllm {
            return None;
        }
        let reply = self.client.get("/is_sleeping", within).await.ok()?;
        let answer: Value = serde_json::from_slice(&reply.body).ok()?;
        answer.get("is_sleeping")?.as_bool()
    }

    /// Health is good and the engine does not say that it sleeps.
    ///
    /// # Errors
    /// What it says instead, in words for people.
    pub async fn check_awake(&self, within: Duration) -> Result<(), String> {
        match self.health_with_reason(within).await {
            (EngineHealth::Healthy, _) if self.is_asleep(within).await == Some(true) => {
                Err("it says that it sleeps".to_owned())
            }
            (EngineHealth::Healthy, _) => Ok(()),
            (_, words) => Err(words),
        }
    }

    /// Sleep with work in flight crashes engines: their own counters must agree that there is none.
    ///
    /// vLLM publishes its gauges with each step, and takes none when the last requests were aborted rather than
    /// finished: they then stay up until somebody asks for something. So, when they seem stuck, one token is asked for.
    async fn wait_until_idle(&self) -> Result<(), FailureCause> {
        let began = Instant::now();
        let mut nudged = false;
        let mut gap = Duration::from_millis(5);
        while let Some(counters) = self.counters(QUERY_TIMEOUT).await {
            let waited = Instant::now() - began;
            if counters.running == 0 && counters.waiting == 0 {
                break;
            }
            if waited >= IDLE_TIMEOUT {
                return Err(FailureCause::Refused);
            }
            if waited >= STUCK_COUNTERS_AFTER && !nudged {
                nudged = true;
                let verdict = self.probe(IDLE_TIMEOUT - waited).await;
                tracing::debug!(?verdict, "its counters seemed stuck");
            }
            time::sleep(gap).await;
            gap = (gap * 2).min(Duration::from_millis(200));
        }
        Ok(())
    }

    async fn model_path(&self) -> Result<String, FailureCause> {
        let reply = self.client.get("/get_model_info", QUERY_TIMEOUT).await;
        let reply = reply.map_err(|failure| failure.cause())?;
        let info: Option<Value> = serde_json::from_slice(&reply.body).ok();
        let path = info.as_ref().and_then(|info| info.get("model_path")?.as_str());
        path.map(str::to_owned).ok_or(FailureCause::Refused)
    }

    async fn post_command(&self, path: &str, body: Option<&Value>) -> Result<(), FailureCause> {
        match self.client.post(path, body, COMMAND_TIMEOUT).await {
            Ok(reply) if reply.success() => Ok(()),
            Ok(reply) => {
                tracing::warn!(path, status = reply.status, "the engine refused");
                Err(FailureCause::Refused)
            }
            Err(failure) => Err(failure.cause()),
        }
    }
}
