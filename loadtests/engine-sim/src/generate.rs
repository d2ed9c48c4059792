//! Serves one inference request from its body to its last byte. It is refused or queued, prefilled and generated; at
//! any point its client can disconnect, a sleep can abort it, or a fault can hit it.

mod immediate;
mod plan;

use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use serde_json::json;
use tokio::{select, time::Instant};

use crate::{
    api::SimApi,
    choice::TokenPiece,
    counters::{RequestEnd, RequestSlot, SimArrival},
    engine::SimEngine,
    faults::SimFault,
    frames::{AnswerIdentity, AnswerWriter},
    http1::{SimConnection, SimConnectionError, SimRequestHead},
    reply::{self, EventStream, ResponseEncoding, SimReply},
};

use immediate::ImmediateAnswer;
use plan::InferencePlan;

/// Faults that stop generation.
const STALLING_FAULTS: [SimFault; 3] = [SimFault::Hang, SimFault::StallStreams, SimFault::HealthWhileDead];
/// Interval between updates of the prompt counter in a long prefill.
const PREFILL_STEP: std::time::Duration = std::time::Duration::from_millis(20);

/// Counts one request on a client route.
pub(crate) fn record_arrival(engine: &SimEngine, head: &SimRequestHead, body: &Bytes) {
    let request_id = head.header("x-request-id").map(str::to_owned);
    let (unix_us, path, body_bytes) = (head.unix_us, head.path.clone(), body.len() as u64);
    engine.counters.record_arrival(SimArrival { unix_us, path, request_id, body_bytes });
}

/// Serves one request on an inference route.
pub(crate) async fn infer(
    engine: &SimEngine,
    conn: &mut SimConnection,
    (head, body): (&SimRequestHead, &Bytes),
    wire: &ResponseEncoding,
    api: SimApi,
) -> Result<(), SimConnectionError> {
    let serial = engine.serial();
    record_arrival(engine, head, body);
    if let Some(reply) = refusal(engine, api, head, serial) {
        return reply.send(conn, wire).await;
    }
    let name = AnswerIdentity::new(engine, api, serial, body);
    let plan = match InferencePlan::read(engine, api, head, body, &name) {
        Ok(plan) => plan,
        Err(reply) => return reply.send(conn, wire).await,
    };
    // Take the slot before checking: a sleep that begins in between sees the slot, and waits or aborts.
    let mut seat = RequestSlot::waiting(&engine.counters);
    let mut aborts = engine.aborts();
    if !engine.view().awake {
        seat.end(RequestEnd::Failed);
        engine.counters.requests_while_asleep.fetch_add(1, Relaxed);
        let message = "EngineCore encountered an issue. See stack trace (above) for the root cause.";
        return reply::api_error(api, 500, "InternalServerError", message, None).send(conn, wire).await;
    }
    let frames = AnswerWriter::new(api, name, &plan.model, plan.prompt_tokens, plan.echo.clone());
    let mut inference_job =
        InferenceJob { engine, wire, plan, slot: seat, frames, stream: None, events_sent: 0, tokens_made: 0 };
    let outcome = select! {
        biased;
        _ = aborts.changed() => JobOutcome::AbortedBySleep,
        result = inference_job.run(conn) => JobOutcome::Ended(result),
    };
    let result = match outcome {
        JobOutcome::Ended(result) => {
            inference_job.slot.end(match result {
                Ok(()) => RequestEnd::Finished,
                Err(SimConnectionError::Fault) => RequestEnd::Failed,
                Err(_) => RequestEnd::Aborted,
            });
            result
        }
        JobOutcome::AbortedBySleep => {
            // End the slot before the last write: a client that does not read must not delay the sleep.
            inference_job.slot.end(RequestEnd::AbortedBySleep);
            inference_job.finish(conn, Some("abort")).await
        }
    };
    drop(inference_job);
    result
}

enum JobOutcome {
    Ended(Result<(), SimConnectionError>),
    AbortedBySleep,
}

/// Checks faults and the API key before the body is parsed.
fn refusal(engine: &SimEngine, api: SimApi, head: &SimRequestHead, serial: u64) -> Option<SimReply> {
    let faults = &engine.faults;
    let key = engine.args.api_key.as_ref().map(|key| format!("Bearer {key}"));
    if key.is_some() && key.as_deref() != head.header("authorization") {
        return Some(SimReply::json(401, &json!({"error": "Unauthorized"})));
    }
    if faults.is_on(SimFault::TooManyRequests) {
        let reply = reply::api_error(api, 429, "TooManyRequests", "The engine is overloaded.", None);
        return Some(reply.with("retry-after", "1"));
    }
    if faults.take_one(SimFault::FailNext) {
        return Some(reply::api_error(api, 503, "ServiceUnavailable", "A fault was asked for.", None));
    }
    let status = faults.count(SimFault::Status).and_then(|status| u16::try_from(status).ok());
    // Spread evenly, without randomness: at a rate of a quarter exactly every fourth request fails.
    let share = faults.share(SimFault::ErrorRate).unwrap_or_default();
    let failed = (serial as f64 * share).floor() < ((serial + 1) as f64 * share).floor();
    let status = status.or_else(|| failed.then_some(500))?;
    Some(reply::api_error(api, status, "InternalServerError", "A fault was asked for.", None))
}

struct InferenceJob<'a> {
    engine: &'a SimEngine,
    wire: &'a ResponseEncoding,
    plan: InferencePlan,
    slot: RequestSlot,
    frames: AnswerWriter,
    stream: Option<EventStream<'a>>,
    /// Events sent, of any kind.
    events_sent: u64,
    /// Tokens generated for each choice.
    tokens_made: u64,
}

impl InferenceJob<'_> {
    async fn run(&mut self, conn: &mut SimConnection) -> Result<(), SimConnectionError> {
        let long = self.engine.faults.time(SimFault::LongPrefill);
        self.unless_client_left(conn, self.engine.faults.wait_until_cleared(&[SimFault::HealthWhileDead]))
            .await?;
        // Send the head before a place is free, like vLLM.
        if long.is_none() {
            self.begin(conn).await?;
        }
        let _place = self.unless_client_left(conn, self.engine.acquire_running()).await?;
        self.slot.start_running();
        let ready = Instant::now() + long.unwrap_or(self.engine.args.ttft);
        if long.is_some() {
            self.prefill_slowly(conn, ready).await?;
        }
        self.wait_until(conn, ready).await?;
        self.slot.record_prefill(self.plan.prompt_tokens);
        if self.plan.api.generates() {
            self.begin(conn).await?;
            self.generate(conn, ready).await?;
        }
        self.finish(conn, None).await
    }

    /// Sends the head of a stream, once.
    async fn begin(&mut self, conn: &mut SimConnection) -> Result<(), SimConnectionError> {
        if self.plan.stream && self.stream.is_none() {
            self.stream = Some(EventStream::begin(conn, self.wire).await?);
        }
        Ok(())
    }

    async fn prefill_slowly(
        &mut self,
        conn: &mut SimConnection,
        ready: Instant,
    ) -> Result<(), SimConnectionError> {
        loop {
            let next = Instant::now() + PREFILL_STEP;
            if next >= ready {
                return Ok(());
            }
            self.wait_until(conn, next).await?;
            self.slot.record_prefill(1);
        }
    }

    async fn generate(&mut self, conn: &mut SimConnection, first: Instant) -> Result<(), SimConnectionError> {
        if self.stream.is_some() {
            let opening = self.frames.opening(&self.plan.choices);
            self.events(conn, &opening).await?;
        }
        let mut next = first;
        for i in 0..self.plan.tokens {
            if i > 0 {
                next += self.engine.args.itl;
                self.wait_until(conn, next).await?;
            }
            // Catch up after a late wake-up, but not after a stall.
            let now = Instant::now();
            if now > next + self.engine.args.itl {
                next = now;
            }
            self.tokens_made = i + 1;
            self.slot.record_step(self.plan.choices.iter().filter(|choice| i < choice.tokens).count() as u64);
            if self.stream.is_some() {
                self.send_token(conn, i).await?;
            }
        }
        Ok(())
    }

    /// Sends token `i` of each choice that has one.
    async fn send_token(&mut self, conn: &mut SimConnection, i: u64) -> Result<(), SimConnectionError> {
        for n in 0..self.plan.choices.len() {
            let choice = &self.plan.choices[n];
            if i < choice.tokens {
                let last = (i + 1 == choice.tokens).then_some(choice.finish);
                let events = self.frames.token(n as u64, &choice.piece(i), last);
                self.events(conn, &events).await?;
            }
        }
        Ok(())
    }

    /// Sends the rest of the response. `finish` is the reason if the choices are incomplete.
    async fn finish(
        &mut self,
        conn: &mut SimConnection,
        finish: Option<&str>,
    ) -> Result<(), SimConnectionError> {
        if conn.has_incomplete_write() {
            return Err(SimConnectionError::ClientLeft);
        }
        if !self.plan.stream {
            return self.answer(finish)?.send(conn, self.wire).await;
        }
        self.begin(conn).await?;
        let InferencePlan { choices, usage, api, tokens, .. } = &self.plan;
        let mut events = Vec::new();
        if finish.is_some() && self.tokens_made < *tokens && matches!(api, SimApi::Chat | SimApi::Completions)
        {
            let silence = TokenPiece { text: "".into(), call: None };
            events.extend((0..choices.len()).flat_map(|n| self.frames.token(n as u64, &silence, finish)));
        }
        events.extend(self.frames.closing(choices, self.tokens_made, *usage, finish));
        self.events(conn, &events).await?;
        match self.stream.take() {
            Some(stream) => stream.end(conn).await,
            None => Ok(()),
        }
    }

    /// The complete non-streaming response. An immediate answer cannot be truncated.
    fn answer(&self, finish: Option<&str>) -> Result<SimReply, SimConnectionError> {
        let InferencePlan { choices, immediate: whole, text_only: bare, .. } = &self.plan;
        match whole {
            ImmediateAnswer::Generated if *bare => {
                let text: String =
                    choices.iter().map(|choice| choice.text_so_far(self.tokens_made)).collect();
                Ok(SimReply::text("text/plain; charset=utf-8", text))
            }
            ImmediateAnswer::Generated => {
                Ok(SimReply::json(200, &self.frames.whole(choices, self.tokens_made, finish)))
            }
            _ if finish.is_some() => Err(SimConnectionError::Fault),
            ImmediateAnswer::Json(body) => Ok(SimReply::json(200, body)),
            ImmediateAnswer::Audio(bytes) => Ok(SimReply::bytes("audio/mpeg", bytes.clone())),
        }
    }

    async fn events(
        &mut self,
        conn: &mut SimConnection,
        events: &[String],
    ) -> Result<(), SimConnectionError> {
        for event in events {
            self.event(conn, event).await?;
        }
        Ok(())
    }

    /// Sends one event, unless a fault ends the stream or the process here.
    async fn event(&mut self, conn: &mut SimConnection, event: &str) -> Result<(), SimConnectionError> {
        let Some(stream) = &mut self.stream else {
            return Ok(());
        };
        let now = |fault| self.engine.faults.count(fault).is_some_and(|events| events <= self.events_sent);
        if now(SimFault::DieMidStream) {
            self.engine.fatal.exit(1);
            return std::future::pending().await;
        }
        if now(SimFault::CutMidStream) {
            conn.reset();
            return Err(SimConnectionError::Fault);
        }
        if now(SimFault::FinMidStream) {
            return Err(SimConnectionError::Fault);
        }
        self.events_sent += 1;
        stream.event(conn, event.as_bytes()).await
    }

    /// Waits until `until`, and longer while a fault stalls generation. Ends at once when the client disconnects.
    async fn wait_until(&self, conn: &mut SimConnection, until: Instant) -> Result<(), SimConnectionError> {
        let due = async {
            if until > Instant::now() {
                tokio::time::sleep_until(until).await;
            }
            self.engine.faults.wait_until_cleared(&STALLING_FAULTS).await;
        };
        self.unless_client_left(conn, due).await
    }

    async fn unless_client_left<T>(
        &self,
        conn: &mut SimConnection,
        work: impl Future<Output = T>,
    ) -> Result<T, SimConnectionError> {
        select! {
            biased;
            done = work => Ok(done),
            broken = conn.client_left() => Err(broken),
        }
    }
}
