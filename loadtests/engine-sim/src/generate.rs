//! One inference request from its body to its last byte: refused, queued, prefilled, generated, and at any of these moments
//! abandoned by its client, aborted by a sleep, or hit by a fault.

mod plan;

use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use serde_json::json;
use tokio::{select, time::Instant};

use crate::{
    ask::Api,
    counters::{Arrival, End, Seat},
    engine::Engine,
    faults::Fault,
    frames::{Frames, Usage},
    http1::{Broken, Conn, Head},
    reply::{EventStream, Reply, Wire},
};

use plan::Plan;

/// Faults under which nothing is generated.
const STALLS: [Fault; 3] = [Fault::Hang, Fault::StallStreams, Fault::HealthWhileDead];
/// Between two moves of the prompt counter in a long prefill.
const PREFILL_STEP: std::time::Duration = std::time::Duration::from_millis(20);

/// Serves one request on an inference route.
pub(crate) async fn infer(
    engine: &Engine,
    conn: &mut Conn,
    (head, body): (&Head, &Bytes),
    wire: &Wire,
    api: Api,
) -> Result<(), Broken> {
    let serial = engine.serial();
    let request_id = head.header("x-request-id").map(str::to_owned);
    engine.counters.arrived(Arrival { unix_us: head.unix_us, path: head.path.clone(), request_id });
    if let Some(reply) = refusal(engine, head, serial) {
        return reply.send(conn, wire).await;
    }
    let plan = match Plan::read(engine, api, body) {
        Ok(plan) => plan,
        Err(reply) => return reply.send(conn, wire).await,
    };
    // The seat before the look: a sleep that begins in between sees it and waits or aborts.
    let mut seat = Seat::waiting(&engine.counters);
    let mut aborts = engine.aborts();
    if !engine.view().awake {
        seat.leave(End::Failed);
        engine.counters.requests_while_asleep.fetch_add(1, Relaxed);
        let message = "EngineCore encountered an issue. See stack trace (above) for the root cause.";
        return Reply::error(500, "InternalServerError", message, None).send(conn, wire).await;
    }
    let frames = Frames::new(api, &plan.model, serial);
    let mut job = Job { engine, wire, plan, seat, frames, stream: None, events: 0, made: 0 };
    let outcome = select! {
        biased;
        _ = aborts.changed() => Outcome::AbortedBySleep,
        result = job.run(conn) => Outcome::Ended(result),
    };
    let result = match outcome {
        Outcome::Ended(result) => {
            job.seat.leave(match result {
                Ok(()) => End::Finished,
                Err(Broken::Fault) => End::Failed,
                Err(_) => End::Aborted,
            });
            result
        }
        Outcome::AbortedBySleep => {
            // Before the last words: a client that reads nothing must not hold up the sleep.
            job.seat.leave(End::AbortedBySleep);
            job.finish(conn, "abort").await
        }
    };
    drop(job);
    result
}

enum Outcome {
    Ended(Result<(), Broken>),
    AbortedBySleep,
}

/// What faults and the key have to say before the body is looked at.
fn refusal(engine: &Engine, head: &Head, serial: u64) -> Option<Reply> {
    let faults = &engine.faults;
    let key = engine.args.api_key.as_ref().map(|key| format!("Bearer {key}"));
    if key.is_some() && key.as_deref() != head.header("authorization") {
        return Some(Reply::json(401, &json!({"error": "Unauthorized"})));
    }
    if faults.on(Fault::TooManyRequests) {
        let reply = Reply::error(429, "TooManyRequests", "The engine is overloaded.", None);
        return Some(reply.with("retry-after", "1"));
    }
    let status = faults.count(Fault::Status).and_then(|status| u16::try_from(status).ok());
    // Spread evenly and without chance: a test with a rate of a quarter sees every fourth request fail.
    let share = faults.share(Fault::ErrorRate).unwrap_or_default();
    let failed = (serial as f64 * share).floor() < ((serial + 1) as f64 * share).floor();
    let status = status.or_else(|| failed.then_some(500))?;
    Some(Reply::error(status, "InternalServerError", "A fault was asked for.", None))
}

struct Job<'a> {
    engine: &'a Engine,
    wire: &'a Wire,
    plan: Plan,
    seat: Seat,
    frames: Frames,
    stream: Option<EventStream<'a>>,
    /// Events sent, of any kind.
    events: u64,
    /// Tokens made of each choice.
    made: u64,
}

impl Job<'_> {
    async fn run(&mut self, conn: &mut Conn) -> Result<(), Broken> {
        let long = self.engine.faults.time(Fault::LongPrefill);
        self.unless_gone(conn, self.engine.faults.cleared(&[Fault::HealthWhileDead])).await?;
        // The head goes out before there is a place, as vLLM's does.
        if long.is_none() {
            self.begin(conn).await?;
        }
        let _place = self.unless_gone(conn, self.engine.seat()).await?;
        self.seat.run();
        let ready = Instant::now() + long.unwrap_or(self.engine.args.ttft);
        if long.is_some() {
            self.prefill_slowly(conn, ready).await?;
        }
        self.pace(conn, ready).await?;
        self.seat.prefilled(self.plan.prompt_tokens);
        if self.plan.api != Api::Embeddings {
            self.begin(conn).await?;
            self.generate(conn, ready).await?;
        }
        self.finish(conn, self.plan.finish).await
    }

    /// Sends the head of a stream, once.
    async fn begin(&mut self, conn: &mut Conn) -> Result<(), Broken> {
        if self.plan.stream && self.stream.is_none() {
            self.stream = Some(EventStream::begin(conn, self.wire).await?);
        }
        Ok(())
    }

    async fn prefill_slowly(&mut self, conn: &mut Conn, ready: Instant) -> Result<(), Broken> {
        loop {
            let next = Instant::now() + PREFILL_STEP;
            if next >= ready {
                return Ok(());
            }
            self.pace(conn, next).await?;
            self.seat.prefilled(1);
        }
    }

    async fn generate(&mut self, conn: &mut Conn, first: Instant) -> Result<(), Broken> {
        for event in self.frames.opening(self.plan.voices.len() as u64) {
            self.event(conn, &event).await?;
        }
        let mut next = first;
        for i in 0..self.plan.tokens {
            if i > 0 {
                next += self.engine.args.itl;
                self.pace(conn, next).await?;
            }
            // A late wake-up is made up for, a stall is not.
            let now = Instant::now();
            if now > next + self.engine.args.itl {
                next = now;
            }
            let last = (i + 1 == self.plan.tokens).then_some(self.plan.finish);
            self.made = i + 1;
            self.seat.generated(self.plan.voices.len() as u64);
            for n in 0..self.plan.voices.len() {
                if self.stream.is_some() {
                    let event = self.frames.token(n as u64, &self.plan.voices[n].token(i), last);
                    self.event(conn, &event).await?;
                }
            }
        }
        Ok(())
    }

    /// Sends what is left to send, with the given finish reason.
    async fn finish(&mut self, conn: &mut Conn, finish: &str) -> Result<(), Broken> {
        if conn.broke_off() {
            return Err(Broken::Gone);
        }
        let Plan { voices, prompt_tokens, api, stream, .. } = &self.plan;
        let usage = Usage { prompt: *prompt_tokens, completion: self.made * voices.len() as u64 };
        let aborted = finish == "abort";
        if !*stream {
            let texts: Vec<String> = voices.iter().map(|voice| voice.text(self.made)).collect();
            let body = match api {
                Api::Embeddings if aborted => return Err(Broken::Fault),
                Api::Embeddings => self.plan.embeddings(),
                _ => self.frames.whole(&texts, usage, finish),
            };
            return Reply::json(200, &body).send(conn, self.wire).await;
        }
        self.begin(conn).await?;
        let Plan { voices, usage: show, api, .. } = &self.plan;
        let mut events = Vec::new();
        if aborted && self.made < self.plan.tokens && *api != Api::Responses {
            events.extend((0..voices.len()).map(|n| self.frames.token(n as u64, "", Some(finish))));
        }
        let text = if *api == Api::Responses {
            voices.iter().map(|v| v.text(self.made)).collect()
        } else {
            String::new()
        };
        events.extend(self.frames.closing(usage, *show, &text, finish));
        for event in events {
            self.event(conn, &event).await?;
        }
        match self.stream.take() {
            Some(stream) => stream.end(conn).await,
            None => Ok(()),
        }
    }

    /// Sends one event, unless a fault ends the stream or the process here.
    async fn event(&mut self, conn: &mut Conn, event: &str) -> Result<(), Broken> {
        let Some(stream) = &mut self.stream else {
            return Ok(());
        };
        let now = |fault| self.engine.faults.count(fault).is_some_and(|events| events <= self.events);
        if now(Fault::DieMidStream) {
            self.engine.fatal.die(1);
            return std::future::pending().await;
        }
        if now(Fault::CutMidStream) {
            conn.reset();
            return Err(Broken::Fault);
        }
        if now(Fault::FinMidStream) {
            return Err(Broken::Fault);
        }
        self.events += 1;
        stream.event(conn, event.as_bytes()).await
    }

    /// Waits until `then`, and on while a fault holds generation up; ends at once when the client leaves.
    async fn pace(&self, conn: &mut Conn, then: Instant) -> Result<(), Broken> {
        let due = async {
            if then > Instant::now() {
                tokio::time::sleep_until(then).await;
            }
            self.engine.faults.cleared(&STALLS).await;
        };
        self.unless_gone(conn, due).await
    }

    async fn unless_gone<T>(&self, conn: &mut Conn, what: impl Future<Output = T>) -> Result<T, Broken> {
        select! {
            biased;
            done = what => Ok(done),
            broken = conn.gone() => Err(broken),
        }
    }
}
