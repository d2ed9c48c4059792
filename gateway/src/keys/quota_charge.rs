//! The charge of one request to its key, from admission to the end of its last part.
//!
//! Every part that may outlive the others shares the charge: the job while it waits, the answer while it streams, an
//! answer that is read to its end after its client disconnected. The drop of the last holder settles the charge with
//! the usage known by then. So no way out of a request skips the settlement, whichever part ends first.
//!
//! The settled usage, from best to worst:
//!
//! * The usage that the engine reported, if the answer is complete, as far as the usage is plausible for the request.
//! * Otherwise an estimate, marked as such: for a stream, one token per event with content; for any other answer, the
//!   reserved tokens.
//! * Zero tokens and not even a request, if no engine began: a refusal of the queue, an unreachable engine.

use std::{
    cell::Cell,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use rouse::{
    fault::{DisconnectPhase, ExchangeTimeout, Fault, RateLimitUnit},
    model::ModelName,
    units::Tick,
};
use rouse_net::{
    lease::TickClock,
    openai::sse::{ResponseFacts, TokenUsage},
    relay::ExchangeOutcome,
};
use tokio::time::Instant;

use super::{ApiKey, TokenEstimateInput, account::QuotaReservation};
use crate::metrics::KeyOutcome;

/// The step in which a stream reserves tokens beyond its reservation.
const RESERVE_STEP_TOKENS: u64 = 64;
/// The step in which a running stream reports served tokens to the decisions, in weighted tokens.
const REPORT_STEP_WEIGHT: u64 = 64;

pub(crate) struct QuotaCharge {
    key: Arc<ApiKey>,
    model: ModelName,
    clock: TickClock,
    /// Whether the client requested a stream. The answer itself may differ.
    stream: bool,
    /// Taken when the charge is settled.
    reservation: Cell<Option<QuotaReservation>>,
    stage: Cell<ChargeStage>,
    events: Cell<u64>,
    /// Bytes of the answer.
    bytes_out: Cell<u64>,
    usage: Cell<Option<TokenUsage>>,
    /// The key's served tokens, which the decisions read, and this request's part that is already reported.
    served_tokens: Arc<AtomicU64>,
    reported_weight: Cell<u64>,
}

/// The progress of a request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ChargeStage {
    /// No engine has begun the request.
    Waiting,
    /// An engine began, and produced nothing.
    EngineStarted,
    /// An engine refused the request.
    Refused,
    Answering,
    Complete,
}

impl QuotaCharge {
    /// Admits a request within its key's limits. The error says when to retry.
    pub(crate) fn admit(
        key: &Arc<ApiKey>,
        model: &ModelName,
        need: TokenEstimateInput,
        stream: bool,
        (served, clock, now): (Arc<AtomicU64>, TickClock, Tick),
    ) -> Result<Rc<Self>, Fault> {
        let reserved = key.account.reserve(&key.limits, model, need, now);
        if let Some(metrics) = &key.metrics {
            metrics.count_request(match &reserved {
                Ok(_) => KeyOutcome::Admitted,
                Err(Fault::RateLimited { rate, .. }) if rate.unit == RateLimitUnit::Tokens => {
                    KeyOutcome::TokenLimited
                }
                Err(_) => KeyOutcome::RequestLimited,
            });
        }
        Ok(Rc::new(Self {
            key: Arc::clone(key),
            model: model.clone(),
            clock,
            stream,
            reservation: Cell::new(Some(reserved?)),
            stage: Cell::new(ChargeStage::Waiting),
            events: Cell::new(0),
            bytes_out: Cell::new(0),
            usage: Cell::new(None),
            served_tokens: served,
            reported_weight: Cell::new(0),
        }))
    }

    /// Records that an engine's head arrived.
    pub(crate) fn head_received(&self, success: bool) {
        self.stage.set(if success { ChargeStage::Answering } else { ChargeStage::Refused });
    }

    /// Discards an engine's refusal that is not relayed: the request waits for another engine.
    pub(crate) fn reset_for_retry(&self) {
        if self.stage.get() == ChargeStage::Refused {
            self.stage.set(ChargeStage::Waiting);
            self.usage.set(None);
            self.events.set(0);
        }
    }

    /// Adds relayed bytes of the answer.
    pub(crate) fn add_bytes_out(&self, bytes: usize) {
        self.bytes_out.set(self.bytes_out.get() + bytes as u64);
    }

    /// Records the facts that the answer has shown so far.
    pub(crate) fn record_facts(&self, facts: &ResponseFacts) {
        self.record_facts_at(facts, || self.clock.now());
    }

    pub(super) fn record_facts_at(&self, facts: &ResponseFacts, now: impl FnOnce() -> Tick) {
        self.usage.set(facts.usage);
        self.events.set(facts.events);
        let Some(mut reservation) = self.reservation.get() else { return };
        let used = reservation.prompt + facts.events;
        if facts.events > 0 {
            self.report_served(
                TokenUsage { prompt: reservation.prompt, completion: facts.events },
                REPORT_STEP_WEIGHT,
            );
        }
        if facts.events > 0 && used > reservation.tokens {
            self.key.account.raise(&self.key.limits, &mut reservation, used + RESERVE_STEP_TOKENS, now());
            self.reservation.set(Some(reservation));
        }
    }

    /// Records the end of an exchange at `now`.
    pub(crate) fn exchange_ended(&self, outcome: &ExchangeOutcome, now: Instant) {
        let course = match (outcome, self.stage.get()) {
            (ExchangeOutcome::Complete, ChargeStage::Answering) => ChargeStage::Complete,
            (
                ExchangeOutcome::Failed(Fault::EngineTimeout { timeout: ExchangeTimeout::Connect, .. }),
                course,
            ) => course,
            (
                ExchangeOutcome::ClientLeft(DisconnectPhase::Headers)
                | ExchangeOutcome::Failed(Fault::EngineTimeout { .. }),
                ChargeStage::Waiting,
            ) => ChargeStage::EngineStarted,
            (_, course) => course,
        };
        self.stage.set(course);
        if course == ChargeStage::Complete {
            // A complete answer is final, and the body's holder may keep it for long.
            self.settle(|| self.clock.tick_at(now));
        }
    }

    /// Reports the served tokens to the decisions, once they exceed the reported ones by `at_least`. Generating a token
    /// takes about twice the work of reading one.
    fn report_served(&self, served: TokenUsage, at_least: u64) {
        let weighed = served.prompt.saturating_add(served.completion.saturating_mul(2));
        let more = weighed.saturating_sub(self.reported_weight.get());
        if more >= at_least {
            self.reported_weight.set(weighed);
            self.served_tokens.fetch_add(more, Ordering::Relaxed);
        }
    }

    /// The used tokens, and whether the engine counted them.
    fn used(&self, reservation: &QuotaReservation) -> (TokenUsage, bool) {
        let reported = self.usage.get();
        let clamped =
            reported.map(|usage| reservation.clamp_usage(usage, self.bytes_out.get(), &self.key.limits));
        match (self.stage.get(), clamped) {
            (ChargeStage::Complete, Some(used)) => return (used, clamped == reported),
            (ChargeStage::Refused, _) => return (clamped.unwrap_or_default(), clamped == reported),
            _ => {}
        }
        let whole = self.stage.get() == ChargeStage::Complete;
        let made = match (self.events.get(), clamped) {
            // The first event of a chat names the role and carries no text.
            (events @ 1.., _) => events - 1,
            (0, Some(_)) => 0,
            // A stream that broke before its first event. A complete answer without events was no stream.
            (0, None) if self.stream && !whole => 0,
            (0, None) => reservation.tokens.saturating_sub(reservation.prompt),
        };
        let clamped = clamped.unwrap_or_default();
        let prompt = if clamped.prompt > 0 { clamped.prompt } else { reservation.prompt };
        (TokenUsage { prompt, completion: made.max(clamped.completion) }, false)
    }

    /// Settles the charge once; later calls do nothing.
    pub(super) fn settle(&self, now: impl FnOnce() -> Tick) {
        let Some(reservation) = self.reservation.take() else { return };
        let now = now();
        let key = &self.key;
        if self.stage.get() == ChargeStage::Waiting {
            key.account.refund(&key.limits, reservation, now);
            return;
        }
        let (used, counted) = self.used(&reservation);
        let learn = counted && self.stage.get() == ChargeStage::Complete;
        self.report_served(used, 1);
        key.account.settle(&key.limits, &self.model, reservation, (used, learn), now);
        if let Some(metrics) = &key.metrics {
            metrics.count_tokens(used, counted);
        }
    }
}

impl Drop for QuotaCharge {
    fn drop(&mut self) {
        self.settle(|| self.clock.now());
    }
}

#[cfg(test)]
mod tests {
    use rouse::units::Millis;

    use super::*;
    use crate::keys::QuotaAccount;
    use rouse_config::ModelAccess;
    use rouse_config::RateLimits;

    fn key(tokens: u64) -> Arc<ApiKey> {
        let limits = RateLimits { requests: Some(10), tokens: Some(tokens) };
        Arc::new(ApiKey { limits, ..ApiKey::for_tests("k", ModelAccess::All) })
    }

    fn open(key: &Arc<ApiKey>, stream: bool) -> Rc<QuotaCharge> {
        let need = TokenEstimateInput { text_bytes: 400, max_tokens: Some(50), generates: true };
        let clock = TickClock::new(Instant::now(), Tick(1_000_000));
        QuotaCharge::admit(key, &"m".into(), need, stream, (Arc::default(), clock, clock.now())).unwrap()
    }

    /// The requests and tokens that count now.
    fn used(key: &ApiKey) -> (u64, u64) {
        let standing = key.account.status(&key.limits, Tick(1_000_000));
        let [requests, tokens] = standing.map(|s| s.map_or(0, |s| s.limit - s.remaining));
        (requests, tokens)
    }

    fn facts(events: u64, usage: Option<(u64, u64)>) -> ResponseFacts {
        let usage = usage.map(|(prompt, completion)| TokenUsage { prompt, completion });
        ResponseFacts { events, usage, ..ResponseFacts::default() }
    }

    #[test]
    fn what_the_engine_counted_replaces_the_reservation() {
        let key = key(1000);
        let charge = open(&key, true);
        assert_eq!(used(&key), (1, 150));
        let served = Arc::clone(&charge.served_tokens);
        charge.head_received(true);
        charge.record_facts(&facts(12, Some((90, 11))));
        charge.exchange_ended(&ExchangeOutcome::Complete, Instant::now());
        assert_eq!(used(&key), (1, 101), "with its last byte");
        drop(charge);
        assert_eq!(used(&key), (1, 101));
        // The tokens reported while the stream ran exceed the final count, and a report cannot be withdrawn.
        assert_eq!(served.load(Ordering::Relaxed), 100 + 2 * 12);
    }

    #[test]
    fn a_count_that_cannot_be_costs_at_most_a_minute_and_teaches_nothing() {
        for told in [(u64::from(u32::MAX), 11), (90, u64::MAX)] {
            let key = key(1000);
            let charge = open(&key, true);
            charge.head_received(true);
            charge.record_facts(&facts(12, Some(told)));
            charge.exchange_ended(&ExchangeOutcome::Complete, Instant::now());
            drop(charge);
            assert_eq!(used(&key), (1, 1000), "{told:?}");
            let later = Tick(1_000_000) + Millis::secs(62);
            let need = TokenEstimateInput { text_bytes: 400, max_tokens: Some(50), generates: true };
            let next = key.account.reserve(&key.limits, &"m".into(), need, later).expect("nothing is owed");
            assert_eq!(next.tokens, 150, "{told:?}");
        }
        // A long answer is charged in full, beyond the limit.
        let key = key(1000);
        let charge = open(&key, false);
        charge.head_received(true);
        charge.add_bytes_out(40_000);
        charge.record_facts(&facts(0, Some((90, 9000))));
        charge.exchange_ended(&ExchangeOutcome::Complete, Instant::now());
        let [_, tokens] = key.account.status(&key.limits, Tick(1_000_000));
        assert!(tokens.is_some_and(|tokens| tokens.reset > Millis::secs(8 * 60)), "{tokens:?}");
    }

    #[test]
    fn what_never_reached_an_engine_is_given_back_and_a_refusal_of_an_engine_costs_a_request() {
        let key = key(1000);
        let charge = open(&key, false);
        charge.exchange_ended(
            &ExchangeOutcome::Failed(Fault::EngineUnreachable { model: "m".into() }),
            Instant::now(),
        );
        drop(charge);
        assert_eq!(used(&key), (0, 0));
        let charge = open(&key, false);
        charge.head_received(false);
        charge.exchange_ended(&ExchangeOutcome::Complete, Instant::now());
        drop(charge);
        assert_eq!(used(&key), (1, 0));
    }

    #[test]
    fn an_engine_that_failed_its_trial_leaves_no_trace_in_the_bill() {
        let key = key(1000);
        let failed = |stream| {
            let charge = open(&key, stream);
            charge.head_received(false);
            charge.record_facts(&facts(1, Some((7, 7))));
            charge.exchange_ended(&ExchangeOutcome::ClientLeft(DisconnectPhase::Streaming), Instant::now());
            charge.reset_for_retry();
            charge
        };
        drop(failed(false));
        assert_eq!(used(&key), (0, 0), "refused in the queue afterwards");
        let charge = failed(true);
        charge.exchange_ended(&ExchangeOutcome::ClientLeft(DisconnectPhase::Headers), Instant::now());
        drop(charge);
        assert_eq!(used(&key), (1, 100), "the next engine was at work");
    }

    #[test]
    fn what_is_charged_follows_what_the_answer_is_whatever_was_asked_for() {
        let key = key(1000);
        let charge = open(&key, false);
        charge.head_received(true);
        charge.record_facts(&facts(401, None));
        assert_eq!(used(&key), (1, 501 + RESERVE_STEP_TOKENS), "an engine that streams unasked");
        charge.exchange_ended(&ExchangeOutcome::ClientLeft(DisconnectPhase::Streaming), Instant::now());
        drop(charge);
        assert_eq!(used(&key), (1, 500));
        let charge = open(&key, true);
        charge.head_received(true);
        charge.record_facts(&facts(0, None));
        charge.exchange_ended(&ExchangeOutcome::Complete, Instant::now());
        drop(charge);
        assert_eq!(used(&key), (2, 650), "a document where a stream was asked for");
    }

    #[test]
    fn a_client_that_leaves_pays_for_what_was_made_for_it() {
        let key = key(1000);
        let charge = open(&key, true);
        charge.head_received(true);
        charge.record_facts(&facts(21, None));
        charge.exchange_ended(&ExchangeOutcome::ClientLeft(DisconnectPhase::Streaming), Instant::now());
        drop(charge);
        assert_eq!(used(&key), (1, 120));
        let charge = open(&key, true);
        charge.exchange_ended(&ExchangeOutcome::ClientLeft(DisconnectPhase::Headers), Instant::now());
        drop(charge);
        assert_eq!(used(&key), (2, 220));
    }

    #[test]
    fn a_stream_that_says_more_than_was_reserved_takes_more_as_it_goes() {
        let key = key(300);
        let charge = open(&key, true);
        charge.head_received(true);
        charge.record_facts(&facts(500, None));
        assert!(used(&key).1 >= 300, "{:?}", used(&key));
        assert!(key.account.reserve(&key.limits, &"m".into(), asked(), Tick(1_000_001)).is_err());
        charge.exchange_ended(&ExchangeOutcome::Complete, Instant::now());
        drop(charge);
    }

    fn asked() -> TokenEstimateInput {
        TokenEstimateInput { text_bytes: 4, max_tokens: Some(1), generates: true }
    }

    #[test]
    fn a_fresh_account_has_all_of_its_limits() {
        let limits = RateLimits { requests: Some(3), tokens: None };
        let [requests, tokens] = QuotaAccount::new().status(&limits, Tick(1));
        assert_eq!(requests.map(|s| (s.limit, s.remaining, s.reset.0)), Some((3, 3, 0)));
        assert_eq!(tokens, None);
    }
}
