//! One inference request from its body to its last byte: refused, queued, prefilled, generated, and at any of these moments
//! abandoned by its client, aborted by a sleep, or hit by a fault.

mod at_once;
mod plan;

use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use serde_json::json;
use tokio::{select, time::Instant};

use crate::{
    api::Api,
    counters::{Arrival, End, Seat},
    engine::Engine,
    faults::Fault,
    frames::{Frames, Name},
    http1::{Broken, Conn, Head},
    reply::{self, EventStream, Reply, Wire},
    voice::Piece,
};

use at_once::Whole;
use plan::Plan;

/// Faults under which nothing is generated.
const STALLS: [Fault; 3] = [Fault::Hang, Fault::StallStreams, Fault::HealthWhileDead];
/// Between two moves of the prompt counter in a long prefill.
const PREFILL_STEP: std::time::Duration = std::time::Duration::from_millis(20);

/// Counts one request on a route that is for clients.
pub(crate) fn arrived(engine: &Engine, head: &Head, body: &Bytes) {
    let request_id = head.header("x-request-id").map(str::to_owned);
    let (unix_us, path, body_bytes) = (head.unix_us, head.path.clone(), body.len() as u64);
    engine.counters.arrived(Arrival { unix_us, path, request_id, body_bytes });
}

/// Serves one request on an inference route.
pub(crate) async fn infer(
    engine: &Engine,
    conn: &mut Conn,
    (head, body): (&Head, &Bytes),
    wire: &Wire,
    api: Api,
) -> Result<(), Broken> {
    let serial = engine.serial();
    arrived(engine, head, body);
    if let Some(reply) = refusal(engine, api, head, serial) {
        return reply.send(conn, wire).await;
    }
    let name = Name::new(engine, api, serial, body);
    let plan = match Plan::read(engine, api, head, body, &name) {
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
        return reply::refusal(api, 500, "InternalServerError", message, None).send(conn, wire).await;
    }
    let frames = Frames::new(api, name, &plan.model, plan.prompt_tokens, plan.echo.clone());
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
            job.finish(conn, Some("abort")).await
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
fn refusal(engine: &Engine, api: Api, head: &Head, serial: u64) -> Option<Reply> {
    let faults = &engine.faults;
    let key = engine.args.api_key.as_ref().map(|key| format!("Bearer {key}"));
    if key.is_some() && key.as_deref() != head.header("authorization") {
        return Some(Reply::json(401, &json!({"error": "Unauthorized"})));
    }
    if faults.on(Fault::TooManyRequests) {
        let reply = reply::refusal(api, 429, "TooManyRequests", "The engine is overloaded.", None);
        return Some(reply.with("retry-after", "1"));
    }
    if faults.take(Fault::FailNext) {
        return Some(reply::refusal(api, 503, "ServiceUnavailable", "A fault was asked for.", None));
    }
    let status = faults.count(Fault::Status).and_then(|status| u16::try_from(status).ok());
    // Spread evenly and without chance: a test with a rate of a quarter sees every fourth request fail.
    let share = faults.share(Fault::ErrorRate).unwrap_or_default();
    let failed = (serial as f64 * share).floor() < ((serial + 1) as f64 * share).floor();
    let status = status.or_else(|| failed.then_some(500))?;
    Some(reply::refusal(api, status, "InternalServerError", "A fault was asked for.", None))
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
        if self.plan.api.generates() {
            self.begin(conn).await?;
            self.generate(conn, ready).await?;
        }
        self.finish(conn, None).await
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
        if self.stream.is_some() {
            let opening = self.frames.opening(&self.plan.voices);
            self.events(conn, &opening).await?;
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
            self.made = i + 1;
            self.seat.generated(self.plan.voices.iter().filter(|voice| i < voice.tokens).count() as u64);
            if self.stream.is_some() {
                self.say(conn, i).await?;
            }
        }
        Ok(())
    }

    /// Sends token `i` of each choice that has one.
    async fn say(&mut self, conn: &mut Conn, i: u64) -> Result<(), Broken> {
        for n in 0..self.plan.voices.len() {
            let voice = &self.plan.voices[n];
            if i < voice.tokens {
                let last = (i + 1 == voice.tokens).then_some(voice.finish);
                let events = self.frames.token(n as u64, &voice.piece(i), last);
                self.events(conn, &events).await?;
            }
        }
        Ok(())
    }

    /// Sends what is left to send; `finish` is the reason when the voices did not come to their ends.
    async fn finish(&mut self, conn: &mut Conn, finish: Option<&str>) -> Result<(), Broken> {
        if conn.broke_off() {
            return Err(Broken::Gone);
        }
        if !self.plan.stream {
            return self.answer(finish)?.send(conn, self.wire).await;
        }
        self.begin(conn).await?;
        let Plan { voices, usage, api, tokens, .. } = &self.plan;
        let mut events = Vec::new();
        if finish.is_some() && self.made < *tokens && matches!(api, Api::Chat | Api::Completions) {
            let silence = Piece { text: "".into(), call: None };
            events.extend((0..voices.len()).flat_map(|n| self.frames.token(n as u64, &silence, finish)));
        }
        events.extend(self.frames.closing(voices, self.made, *usage, finish));
        self.events(conn, &events).await?;
        match self.stream.take() {
            Some(stream) => stream.end(conn).await,
            None => Ok(()),
        }
    }

    /// The whole answer, where none is streamed. What is made at once cannot end half-way.
    fn answer(&self, finish: Option<&str>) -> Result<Reply, Broken> {
        let Plan { voices, whole, bare, .. } = &self.plan;
        match whole {
            Whole::Nothing if *bare => {
                let said: String = voices.iter().map(|voice| voice.said(self.made)).collect();
                Ok(Reply::text("text/plain; charset=utf-8", said))
            }
            Whole::Nothing => Ok(Reply::json(200, &self.frames.whole(voices, self.made, finish))),
            _ if finish.is_some() => Err(Broken::Fault),
            Whole::Json(body) => Ok(Reply::json(200, body)),
            Whole::Sound(bytes) => Ok(Reply::bytes("audio/mpeg", bytes.clone())),
        }
    }

    async fn events(&mut self, conn: &mut Conn, events: &[String]) -> Result<(), Broken> {
        for event in events {
            self.event(conn, event).await?;
        }
        Ok(())
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
