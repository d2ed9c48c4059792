//! The usage of one key: requests and tokens of the last minute, and the learned cost of its requests.
//!
//! A request's token count is unknown when it arrives. So the request reserves its expected tokens and settles when its
//! engine reports the usage. Tokens count in the minute in which their request was admitted, as with OpenAI's limits.
//! Counting tokens when they are generated would have to keep room for everything that running streams may still
//! produce, and so would refuse work that fits.
//!
//! **The estimate decides how near the limit a key gets.** Reserving `max_tokens`, which most clients set far too high,
//! wastes the difference while the request runs. So the account learns, for each model, the mean length of its answers
//! to this key and the ratio of used to estimated tokens. The ratio makes the mean error zero for any tokenizer. A
//! stream that exceeds its reservation reserves more as it runs, and the excess over the limit becomes debt (see
//! [`super::sliding_window`]): a wrong estimate delays requests, but no usage escapes the limit.
//!
//! **An engine may miscount.** A reported usage beyond the most that the request could cost is charged up to a minute's
//! limit and teaches nothing, and a merely unusual usage teaches little at first. Otherwise one absurd number would
//! lock its key out for days, and again at each later check of its limit.
//!
//! A request that outlives its minute can be charged later but gets no refund, because the room that it held has
//! expired. Its surplus becomes credit for the next request that needs more; otherwise a key with long streams would
//! pay for every estimation error twice.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use rouse::{
    fault::{Fault, RateLimitUnit, RateLimitUsage},
    model::ModelName,
    units::{Millis, Tick},
};
use rouse_config::RateLimits;
use rouse_net::openai::sse::TokenUsage;

use super::sliding_window::{MINUTE, SlidingWindow, WindowSlot};

/// The assumed tokens of an answer while the model is unknown.
const DEFAULT_ANSWER_TOKENS: f64 = 256.0;
/// The assumed bytes of a request's body per prompt token, before the account has learned the ratio.
const BYTES_PER_TOKEN: u64 = 4;
/// The decay of learned values per request: about 64 requests are remembered.
const DECAY_FACTOR: f64 = 1.0 - 1.0 / 64.0;
/// The weight of the assumed answer length, in answers.
const PRIOR_ANSWERS: f64 = 2.0;
/// The weight of the assumed ratio of 1, in tokens.
const PRIOR_TOKENS: f64 = 1000.0;
/// One answer counts for at most this multiple of the expectation. A lasting change is learned within a few requests.
const MAX_OUTLIER_FACTOR: f64 = 16.0;
/// The largest contexts of today's models. Caps a request's cost beyond its visible content (an image by its address, a
/// conversation that its engine keeps), for a key without a limit.
const MAX_CONTEXT_TOKENS: u64 = 1 << 20;

/// The counters of one key. They last as long as a key of this name is configured.
#[derive(Debug)]
pub(crate) struct QuotaAccount(Mutex<QuotaState>);

#[derive(Debug)]
struct QuotaState {
    requests: SlidingWindow,
    tokens: SlidingWindow,
    /// Unused reserved tokens of requests that outlived their minute.
    credit: u64,
    estimators: BTreeMap<ModelName, TokenEstimator>,
}

/// The learned costs of requests for one model.
#[derive(Clone, Copy, Debug, Default)]
struct TokenEstimator {
    /// The sums of estimated tokens, before the correction, and of used tokens.
    estimated_tokens: f64,
    used_tokens: f64,
    answer_count: f64,
    answer_tokens: f64,
}

/// Facts about a request before it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TokenEstimateInput {
    /// Bytes of text in the request's body.
    pub(crate) text_bytes: usize,
    pub(crate) max_tokens: Option<u32>,
    /// Whether the request generates tokens; an embedding or a score does not.
    pub(crate) generates: bool,
}

/// A request's reservation in the counters. Ends with [`QuotaAccount::settle`] or [`QuotaAccount::refund`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct QuotaReservation {
    /// The expected prompt part of `tokens`.
    pub(crate) prompt: u64,
    pub(crate) tokens: u64,
    raw_estimate: f64,
    /// One token for each byte of text, and the answer's maximum.
    max_plausible_tokens: u64,
    request_slot: WindowSlot,
    /// The slot of the admission, and the tokens reserved there.
    admitted: (WindowSlot, u64),
    /// The slot of the last raise, and the tokens reserved there.
    raised: (WindowSlot, u64),
}

/// The remaining part of a limit, and the time until all of it is available.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QuotaStatus {
    pub(crate) limit: u64,
    pub(crate) remaining: u64,
    pub(crate) reset: Millis,
}

impl QuotaAccount {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(QuotaState {
            requests: SlidingWindow::new(),
            tokens: SlidingWindow::new(),
            credit: 0,
            estimators: BTreeMap::new(),
        }))
    }

    /// Reserves a request and its expected tokens, both or neither. A request expected to exceed the whole limit is
    /// admitted when no other usage counts: the expectation may be wrong, and the real usage is charged.
    pub(crate) fn reserve(
        &self,
        limits: &RateLimits,
        model: &ModelName,
        need: TokenEstimateInput,
        now: Tick,
    ) -> Result<QuotaReservation, Fault> {
        let state = &mut *self.lock_at(limits, now);
        let (prompt, tokens, raw) = state.estimators.get(model).copied().unwrap_or_default().estimate(need);
        let limit = limits.requests.unwrap_or(u64::MAX);
        if !state.requests.has_room(limit, 1) {
            return Err(rate_limited(&state.requests, RateLimitUnit::Requests, limit, 1, now));
        }
        let most = limits.tokens.unwrap_or(u64::MAX);
        let tokens = tokens.min(most);
        if !state.tokens.has_room(most, tokens) {
            return Err(rate_limited(&state.tokens, RateLimitUnit::Tokens, most, tokens, now));
        }
        let (request, token) = (state.requests.take(limit, 1), state.tokens.take(most, tokens));
        let (admitted, raised) = ((token, tokens), (token, 0));
        let (prompt, most) = (prompt.min(tokens), need.max_plausible_tokens());
        Ok(QuotaReservation {
            prompt,
            tokens,
            raw_estimate: raw,
            max_plausible_tokens: most,
            request_slot: request,
            admitted,
            raised,
        })
    }

    /// Reserves more tokens for a running request that exceeds its reservation.
    pub(crate) fn raise(
        &self,
        limits: &RateLimits,
        reservation: &mut QuotaReservation,
        tokens: u64,
        now: Tick,
    ) {
        let more = tokens.saturating_sub(reservation.tokens);
        if more > 0 {
            let slot = self.lock_at(limits, now).tokens.take(limits.tokens.unwrap_or(u64::MAX), more);
            reservation.raised = (slot, more);
            reservation.tokens += more;
        }
    }

    /// Charges the usage of a finished request. `learn`: the engine counted it, and the answer is complete.
    pub(crate) fn settle(
        &self,
        limits: &RateLimits,
        model: &ModelName,
        reservation: QuotaReservation,
        (used, learn): (TokenUsage, bool),
        now: Tick,
    ) {
        let state = &mut *self.lock_at(limits, now);
        if learn {
            state.estimators.entry(model.clone()).or_default().learn(reservation.raw_estimate, used);
        }
        state.apply_usage(limits, reservation, used.prompt.saturating_add(used.completion));
    }

    /// Releases the reservation of a request that never reached an engine, as if it had not arrived.
    pub(crate) fn refund(&self, limits: &RateLimits, reservation: QuotaReservation, now: Tick) {
        let state = &mut *self.lock_at(limits, now);
        state.requests.refund(reservation.request_slot, 1);
        state.tokens.refund(reservation.admitted.0, reservation.tokens);
    }

    /// The status of requests, then of tokens. `None`: no limit.
    pub(crate) fn status(&self, limits: &RateLimits, now: Tick) -> [Option<QuotaStatus>; 2] {
        let state = &*self.lock_at(limits, now);
        let of = |limit: Option<u64>, window: &SlidingWindow| {
            limit.map(|limit| QuotaStatus {
                limit,
                remaining: limit.saturating_sub(window.used()),
                reset: window.time_until_empty(limit, now),
            })
        };
        [of(limits.requests, &state.requests), of(limits.tokens, &state.tokens)]
    }

    /// Locks the counters and advances them to `now`.
    fn lock_at(&self, limits: &RateLimits, now: Tick) -> MutexGuard<'_, QuotaState> {
        // The state is plain numbers, so it stays consistent even if a holder panicked.
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.requests.advance(limits.requests.unwrap_or(u64::MAX), now);
        state.tokens.advance(limits.tokens.unwrap_or(u64::MAX), now);
        state
    }
}

impl TokenEstimateInput {
    fn max_plausible_tokens(self) -> u64 {
        let answer = self.max_tokens.filter(|_| self.generates).map_or(0, u64::from);
        (self.text_bytes as u64).saturating_add(answer)
    }
}

impl QuotaReservation {
    /// Limits a reported usage to the most that is plausible for an answer of this many bytes.
    pub(crate) fn clamp_usage(&self, reported: TokenUsage, answer: u64, limits: &RateLimits) -> TokenUsage {
        let most =
            self.max_plausible_tokens.saturating_add(answer).max(limits.tokens.unwrap_or(MAX_CONTEXT_TOKENS));
        let prompt = reported.prompt.min(most);
        TokenUsage { prompt, completion: reported.completion.min(most - prompt) }
    }
}

impl QuotaState {
    fn apply_usage(&mut self, limits: &RateLimits, reservation: QuotaReservation, used: u64) {
        let limit = limits.tokens.unwrap_or(u64::MAX);
        if let Some(more) = used.checked_sub(reservation.tokens) {
            let covered = more.min(self.credit);
            self.credit -= covered;
            self.tokens.take(limit, more - covered);
            return;
        }
        let mut less = reservation.tokens - used;
        // Tokens raised later were seen to be used, so the last raise returns its surplus first.
        for (slot, amount) in [reservation.raised, reservation.admitted] {
            let back = less.min(amount);
            if self.tokens.refund(slot, back) {
                less -= back;
            }
        }
        // At most a tenth of a minute's limit: the credit covers errors and is not for saving up.
        self.credit = self.credit.saturating_add(less).min(limit / 10);
    }
}

impl TokenEstimator {
    /// The prompt, all tokens, and all tokens before the correction.
    fn estimate(self, need: TokenEstimateInput) -> (u64, u64, f64) {
        let prompt = (need.text_bytes as u64 / BYTES_PER_TOKEN) as f64;
        let answer = match need.max_tokens {
            _ if !need.generates => 0.0,
            Some(most) => self.mean_answer_tokens().min(f64::from(most)),
            None => self.mean_answer_tokens(),
        };
        let (raw, factor) = (prompt + answer, self.correction_factor());
        ((prompt * factor) as u64, (raw * factor) as u64, raw)
    }

    /// The mean number of tokens of an answer.
    fn mean_answer_tokens(self) -> f64 {
        (self.answer_tokens + PRIOR_ANSWERS * DEFAULT_ANSWER_TOKENS) / (self.answer_count + PRIOR_ANSWERS)
    }

    /// The ratio of used to estimated tokens.
    fn correction_factor(self) -> f64 {
        (self.used_tokens + PRIOR_TOKENS) / (self.estimated_tokens + PRIOR_TOKENS)
    }

    fn learn(&mut self, raw: f64, used: TokenUsage) {
        let (prompt, completion) = (used.prompt as f64, used.completion as f64);
        let actual = (prompt + completion)
            .min(MAX_OUTLIER_FACTOR * (raw * self.correction_factor()).max(PRIOR_TOKENS));
        let answer =
            completion.min(MAX_OUTLIER_FACTOR * self.mean_answer_tokens().max(DEFAULT_ANSWER_TOKENS));
        self.estimated_tokens = self.estimated_tokens * DECAY_FACTOR + raw;
        self.used_tokens = self.used_tokens * DECAY_FACTOR + actual;
        self.answer_count = self.answer_count * DECAY_FACTOR + 1.0;
        self.answer_tokens = self.answer_tokens * DECAY_FACTOR + answer;
    }
}

fn rate_limited(window: &SlidingWindow, unit: RateLimitUnit, limit: u64, requested: u64, now: Tick) -> Fault {
    Fault::RateLimited {
        rate: RateLimitUsage { unit, limit, used: window.used(), requested, window: MINUTE },
        retry_after: window.time_until_room(limit, requested, now),
    }
}

#[cfg(test)]
mod tests;
