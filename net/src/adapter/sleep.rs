//! Puts an engine to sleep and wakes it, with the calls that it understands.
//!
//! The duration of a sleep or a wake depends on the bytes that it moves, and the decisions in `rouse` set that
//! deadline. The timeouts here only bound the wait for a dead peer. The caller drops the call when it must stop.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::{self, Instant};

use super::{Adapter, EngineHealth, SleepApi};
use rouse::{engine::SLEEP_DENIAL_TIMEOUT, fault::FailureCause, model::SleepLevel};

/// Exceeds every deadline that the decisions set.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(15 * 60);
/// Timeout of one small query.
const QUERY_TIMEOUT: Duration = Duration::from_secs(5);
/// Abandoned requests leave an engine within milliseconds. Counters that show requests for longer than this are stuck,
/// or another client uses the engine directly.
const STUCK_COUNTERS_AFTER: Duration = Duration::from_millis(500);
/// The counters must reach zero within this time, or the sleep is refused.
const IDLE_TIMEOUT: Duration = Duration::from_secs(3);

impl Adapter {
    /// Puts the engine to sleep. Returns once the engine reports that it sleeps, or denies it.
    ///
    /// # Errors
    /// [`FailureCause::SleepDenied`]: the engine accepted the order and stays awake. It can serve at once.
    pub async fn sleep(&self, level: SleepLevel) -> Result<(), FailureCause> {
        match self.profile.sleep {
            SleepApi::None => return Err(FailureCause::Refused),
            // `mode=wait` finishes running requests instead of aborting them. Versions without it ignore the parameter.
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

    /// Waits for the engine to fall asleep after it accepted the sleep order. Some versions answer the order before
    /// they have carried it out.
    ///
    /// Only the engine's own report proves that it is awake. When the first query yields no answer, the engine cannot
    /// report its state, and the accepted order counts as asleep. After one denial, only a report of sleep counts as
    /// asleep: silence then proves neither state.
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

    /// Sends the wake calls. The engine is usable once [`Self::check_awake`] succeeds.
    pub async fn wake(&self, level: SleepLevel) -> Result<(), FailureCause> {
        match (self.profile.sleep, level) {
            (SleepApi::Vllm, SleepLevel::One) => self.post_command("/wake_up", None).await,
            // Weights first, then their content, then the cache, which still describes the old content. Without the
            // last two steps, an engine that slept at level 2 generates noise.
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

    /// Asks whether the engine sleeps; `None` when it does not report that.
    pub async fn is_asleep(&self, within: Duration) -> Option<bool> {
        if self.profile.sleep != SleepApi::Vllm {
            return None;
        }
        let reply = self.client.get("/is_sleeping", within).await.ok()?;
        let answer: Value = serde_json::from_slice(&reply.body).ok()?;
        answer.get("is_sleeping")?.as_bool()
    }

    /// Checks that the engine is healthy and does not report that it sleeps.
    ///
    /// # Errors
    /// The reason, for humans.
    pub async fn check_awake(&self, within: Duration) -> Result<(), String> {
        match self.health_with_reason(within).await {
            (EngineHealth::Healthy, _) if self.is_asleep(within).await == Some(true) => {
                Err("the engine reports that it sleeps".to_owned())
            }
            (EngineHealth::Healthy, _) => Ok(()),
            (_, reason) => Err(reason),
        }
    }

    /// Waits until the engine's own counters show no work. Sleep with work in flight crashes engines.
    ///
    /// vLLM publishes its gauges with each step, and takes no step after its last requests were aborted rather than
    /// finished. The gauges then stay up until the next request. So when they seem stuck, this sends a probe for one
    /// token. An engine without counters counts as idle.
    async fn wait_until_idle(&self) -> Result<(), FailureCause> {
        let began = Instant::now();
        let mut nudged = false;
        let mut gap = Duration::from_millis(5);
        while let Some(counters) = self.counters(QUERY_TIMEOUT).await {
            let waited = Instant::now() - began;
            if counters.load.is_idle() {
                break;
            }
            if waited >= IDLE_TIMEOUT {
                return Err(FailureCause::Refused);
            }
            if waited >= STUCK_COUNTERS_AFTER && !nudged {
                nudged = true;
                let verdict = self.probe(IDLE_TIMEOUT - waited).await;
                tracing::debug!(?verdict, "engine counters seemed stuck, sent a probe");
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
                tracing::warn!(path, status = reply.status, "engine rejected the call");
                Err(FailureCause::Refused)
            }
            Err(failure) => Err(failure.cause()),
        }
    }
}
