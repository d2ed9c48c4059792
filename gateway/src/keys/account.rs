//! What one key has used: requests and tokens of the last minute, and what its requests usually cost.
//!
//! How many tokens a request will use is not known when it comes, so it reserves what it is expected to use and
//! settles when its engine has told. Tokens count in the minute in which their request was admitted, which is also
//! what OpenAI's limits do; counting them when they are generated would have to keep room for all that running streams
//! may yet say, and so refuse work that fits.
//!
//! **The estimate decides how near the limit a key gets.** Reserving `max_tokens`, which most clients set far too
//! high, wastes the difference for as long as the request runs. So the expectation is learned for each model: the mean
//! length of its answers to this key, and the proportion between what was estimated and what was used. The latter
//! makes the mean error zero whatever the tokenizer is. What a stream says beyond its reservation is reserved as it
//! comes, and what exceeds the limit in the end is owed (see [`super::sliding_window`]): a wrong estimate delays, it does not
//! leak.
//!
//! **An engine may miscount.** What is told beyond everything that the request could have cost is charged up to a
//! minute's limit and teaches nothing, and what is only unusual teaches little at first: one absurd number would else lock
//! its key out for days, and again each time its limit is looked at.
//!
//! A request that outlives its minute can be charged later but gets nothing back: the room it held is past. Its surplus
//! is kept as credit for the next one that needs more, or a key with long streams would pay for every error twice.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use rouse::{
    fault::{Fault, RateLimitUnit, RateLimitUsage},
    model::ModelName,
    units::{Millis, Tick},
};
use rouse_net::openai::sse::TokenUsage;

use super::sliding_window::{MINUTE, SlidingWindow, WindowSlot};

/// Tokens of an answer while nothing is known of its model.
const DEFAULT_ANSWER_TOKENS: f64 = 256.0;
/// Bytes of a request's body for each token of its prompt, before that was learned.
const BYTES_PER_TOKEN: u64 = 4;
/// What is learned fades with this factor at each request: some 64 of them are remembered.
const DECAY_FACTOR: f64 = 1.0 - 1.0 / 64.0;
/// How many requests' worth of the first assumption is mixed into what is learned.
const PRIOR_ANSWERS: f64 = 2.0;
/// Tokens that the proportion is assumed over, likewise.
const PRIOR_TOKENS: f64 = 1000.0;
/// One answer teaches at most so many times what was expected. What stays as large is learned within a few.
const MAX_OUTLIER_FACTOR: f64 = 16.0;
/// What a request can cost beyond what is seen of it (an image by its address, a conversation that its engine keeps), for a
/// key without a limit: the largest contexts of today's models.
const MAX_CONTEXT_TOKENS: u64 = 1 << 20;

/// Limits per minute; `None` where there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RateLimits {
    pub requests: Option<u64>,
    pub tokens: Option<u64>,
}

/// One key's counters. They live as long as a key of this name is configured.
#[derive(Debug)]
pub(crate) struct QuotaAccount(Mutex<QuotaState>);

#[derive(Debug)]
struct QuotaState {
    requests: SlidingWindow,
    tokens: SlidingWindow,
    /// Tokens that requests which outlived their minute had reserved and not used.
    credit: u64,
    estimators: BTreeMap<ModelName, TokenEstimator>,
}

/// What requests for one model turned out to be.
#[derive(Clone, Copy, Debug, Default)]
struct TokenEstimator {
    /// Estimated before the correction, and used.
    estimated_tokens: f64,
    used_tokens: f64,
    answer_count: f64,
    answer_tokens: f64,
}

/// What is known of a request before it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TokenEstimateInput {
    /// Bytes of text in its body.
    pub(crate) text_bytes: usize,
    pub(crate) max_tokens: Option<u32>,
    /// It makes tokens; an embedding or a score does not.
    pub(crate) generates: bool,
}

/// A request's place in the counters. Ends with [`QuotaAccount::settle`] or [`QuotaAccount::refund`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct QuotaReservation {
    /// Of `tokens`, what is expected to be the prompt.
    pub(crate) prompt: u64,
    pub(crate) tokens: u64,
    raw_estimate: f64,
    /// A token for each byte of text, and what the answer may have.
    max_plausible_tokens: u64,
    request_slot: WindowSlot,
    /// When it was admitted, and how much it took then.
    admitted: (WindowSlot, u64),
    /// When it last took more, and how much.
    raised: (WindowSlot, u64),
}

/// How much of a limit is left, and when all of it is.
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

    /// Takes a request and its expected tokens, both or neither. A request expected to use more than the limit is
    /// admitted when nothing else counts: the expectation may be wrong, and what it really uses is charged.
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

    /// More is used than was reserved, before the end.
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

    /// It is over and used so much. `learn`: the engine counted it, and it is a whole answer.
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

    /// It never reached an engine: as if it had not come.
    pub(crate) fn refund(&self, limits: &RateLimits, reservation: QuotaReservation, now: Tick) {
        let state = &mut *self.lock_at(limits, now);
        state.requests.refund(reservation.request_slot, 1);
        state.tokens.refund(reservation.admitted.0, reservation.tokens);
    }

    /// Requests, then tokens; `None` where there is no limit.
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

    /// The counters as of now.
    fn lock_at(&self, limits: &RateLimits, now: Tick) -> MutexGuard<'_, QuotaState> {
        // Plain numbers: whoever panicked left them whole.
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
    /// What of a count can be so, for an answer of so many bytes.
    pub(crate) fn clamp_usage(&self, told: TokenUsage, answer: u64, limits: &RateLimits) -> TokenUsage {
        let most =
            self.max_plausible_tokens.saturating_add(answer).max(limits.tokens.unwrap_or(MAX_CONTEXT_TOKENS));
        let prompt = told.prompt.min(most);
        TokenUsage { prompt, completion: told.completion.min(most - prompt) }
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
        // What was taken in between was seen to be used.
        for (slot, taken) in [reservation.raised, reservation.admitted] {
            let back = less.min(taken);
            if self.tokens.refund(slot, back) {
                less -= back;
            }
        }
        // A tenth of a minute at most: it is for errors, not for saving up.
        self.credit = self.credit.saturating_add(less).min(limit / 10);
    }
}

impl TokenEstimator {
    /// Prompt, all tokens, and the latter before its correction.
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

    /// Tokens of an answer.
    fn mean_answer_tokens(self) -> f64 {
        (self.answer_tokens + PRIOR_ANSWERS * DEFAULT_ANSWER_TOKENS) / (self.answer_count + PRIOR_ANSWERS)
    }

    /// What was used, of what was estimated.
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
