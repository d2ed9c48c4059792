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
//! comes, and what exceeds the limit in the end is owed (see [`super::window`]): a wrong estimate delays, it does not
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
    fault::{Fault, Rate, RateUnit},
    model::ModelName,
    openai::sse::Usage,
    units::{Millis, Tick},
};

use super::window::{MINUTE, Slot, Window};

/// Tokens of an answer while nothing is known of its model.
const ANSWER: f64 = 256.0;
/// Bytes of a request's body for each token of its prompt, before that was learned.
const BYTES_PER_TOKEN: u64 = 4;
/// What is learned fades with this factor at each request: some 64 of them are remembered.
const FADE: f64 = 1.0 - 1.0 / 64.0;
/// How many requests' worth of the first assumption is mixed into what is learned.
const PRIOR: f64 = 2.0;
/// Tokens that the proportion is assumed over, likewise.
const PRIOR_TOKENS: f64 = 1000.0;
/// One answer teaches at most so many times what was expected. What stays as large is learned within a few.
const OUTLIER: f64 = 16.0;
/// What a request can cost beyond what is seen of it (an image by its address, a conversation that its engine keeps), for a
/// key without a limit: the largest contexts of today's models.
const CONTEXT: u64 = 1 << 20;

/// Limits per minute; `None` where there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    pub requests: Option<u64>,
    pub tokens: Option<u64>,
}

/// One key's counters. They live as long as a key of this name is configured.
#[derive(Debug)]
pub(crate) struct Account(Mutex<State>);

#[derive(Debug)]
struct State {
    requests: Window,
    tokens: Window,
    /// Tokens that requests which outlived their minute had reserved and not used.
    credit: u64,
    learned: BTreeMap<ModelName, Learned>,
}

/// What requests for one model turned out to be.
#[derive(Clone, Copy, Debug, Default)]
struct Learned {
    /// Estimated before the correction, and used.
    raw: f64,
    actual: f64,
    answers: f64,
    answered: f64,
}

/// What is known of a request before it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Need {
    /// Bytes of text in its body.
    pub(crate) text: usize,
    pub(crate) max_tokens: Option<u32>,
    /// It makes tokens; an embedding or a score does not.
    pub(crate) generates: bool,
}

/// A request's place in the counters. Ends with [`Account::settle`] or [`Account::give_back`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reservation {
    /// Of `tokens`, what is expected to be the prompt.
    pub(crate) prompt: u64,
    pub(crate) tokens: u64,
    raw: f64,
    /// A token for each byte of text, and what the answer may have.
    most: u64,
    request: Slot,
    /// When it was admitted, and how much it took then.
    admitted: (Slot, u64),
    /// When it last took more, and how much.
    raised: (Slot, u64),
}

/// How much of a limit is left, and when all of it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Standing {
    pub(crate) limit: u64,
    pub(crate) remaining: u64,
    pub(crate) reset: Millis,
}

impl Account {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(State {
            requests: Window::new(),
            tokens: Window::new(),
            credit: 0,
            learned: BTreeMap::new(),
        }))
    }

    /// Takes a request and its expected tokens, both or neither. A request expected to use more than the limit is
    /// admitted when nothing else counts: the expectation may be wrong, and what it really uses is charged.
    pub(crate) fn reserve(
        &self,
        limits: &Limits,
        model: &ModelName,
        need: Need,
        now: Tick,
    ) -> Result<Reservation, Fault> {
        let state = &mut *self.at(limits, now);
        let (prompt, tokens, raw) = state.learned.get(model).copied().unwrap_or_default().expect(need);
        let limit = limits.requests.unwrap_or(u64::MAX);
        if !state.requests.has_room(limit, 1) {
            return Err(refusal(&state.requests, RateUnit::Requests, limit, 1, now));
        }
        let most = limits.tokens.unwrap_or(u64::MAX);
        let tokens = tokens.min(most);
        if !state.tokens.has_room(most, tokens) {
            return Err(refusal(&state.tokens, RateUnit::Tokens, most, tokens, now));
        }
        let (request, token) = (state.requests.take(limit, 1), state.tokens.take(most, tokens));
        let (admitted, raised) = ((token, tokens), (token, 0));
        let (prompt, most) = (prompt.min(tokens), need.most());
        Ok(Reservation { prompt, tokens, raw, most, request, admitted, raised })
    }

    /// More is used than was reserved, before the end.
    pub(crate) fn raise(&self, limits: &Limits, reservation: &mut Reservation, tokens: u64, now: Tick) {
        let more = tokens.saturating_sub(reservation.tokens);
        if more > 0 {
            let slot = self.at(limits, now).tokens.take(limits.tokens.unwrap_or(u64::MAX), more);
            reservation.raised = (slot, more);
            reservation.tokens += more;
        }
    }

    /// It is over and used so much. `learn`: the engine counted it, and it is a whole answer.
    pub(crate) fn settle(
        &self,
        limits: &Limits,
        model: &ModelName,
        reservation: Reservation,
        (used, learn): (Usage, bool),
        now: Tick,
    ) {
        let state = &mut *self.at(limits, now);
        if learn {
            state.learned.entry(model.clone()).or_default().learn(reservation.raw, used);
        }
        state.correct(limits, reservation, used.prompt.saturating_add(used.completion));
    }

    /// It never reached an engine: as if it had not come.
    pub(crate) fn give_back(&self, limits: &Limits, reservation: Reservation, now: Tick) {
        let state = &mut *self.at(limits, now);
        state.requests.give_back(reservation.request, 1);
        state.tokens.give_back(reservation.admitted.0, reservation.tokens);
    }

    /// Requests, then tokens; `None` where there is no limit.
    pub(crate) fn standing(&self, limits: &Limits, now: Tick) -> [Option<Standing>; 2] {
        let state = &*self.at(limits, now);
        let of = |limit: Option<u64>, window: &Window| {
            limit.map(|limit| Standing {
                limit,
                remaining: limit.saturating_sub(window.used()),
                reset: window.until_empty(limit, now),
            })
        };
        [of(limits.requests, &state.requests), of(limits.tokens, &state.tokens)]
    }

    /// The counters as of now.
    fn at(&self, limits: &Limits, now: Tick) -> MutexGuard<'_, State> {
        // Plain numbers: whoever panicked left them whole.
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.requests.advance(limits.requests.unwrap_or(u64::MAX), now);
        state.tokens.advance(limits.tokens.unwrap_or(u64::MAX), now);
        state
    }
}

impl Need {
    fn most(self) -> u64 {
        let answer = self.max_tokens.filter(|_| self.generates).map_or(0, u64::from);
        (self.text as u64).saturating_add(answer)
    }
}

impl Reservation {
    /// What of a count can be so, for an answer of so many bytes.
    pub(crate) fn bound(&self, told: Usage, answer: u64, limits: &Limits) -> Usage {
        let most = self.most.saturating_add(answer).max(limits.tokens.unwrap_or(CONTEXT));
        let prompt = told.prompt.min(most);
        Usage { prompt, completion: told.completion.min(most - prompt) }
    }
}

impl State {
    fn correct(&mut self, limits: &Limits, reservation: Reservation, used: u64) {
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
            if self.tokens.give_back(slot, back) {
                less -= back;
            }
        }
        // A tenth of a minute at most: it is for errors, not for saving up.
        self.credit = self.credit.saturating_add(less).min(limit / 10);
    }
}

impl Learned {
    /// Prompt, all tokens, and the latter before its correction.
    fn expect(self, need: Need) -> (u64, u64, f64) {
        let prompt = (need.text as u64 / BYTES_PER_TOKEN) as f64;
        let answer = match need.max_tokens {
            _ if !need.generates => 0.0,
            Some(most) => self.mean().min(f64::from(most)),
            None => self.mean(),
        };
        let (raw, factor) = (prompt + answer, self.factor());
        ((prompt * factor) as u64, (raw * factor) as u64, raw)
    }

    /// Tokens of an answer.
    fn mean(self) -> f64 {
        (self.answered + PRIOR * ANSWER) / (self.answers + PRIOR)
    }

    /// What was used, of what was estimated.
    fn factor(self) -> f64 {
        (self.actual + PRIOR_TOKENS) / (self.raw + PRIOR_TOKENS)
    }

    fn learn(&mut self, raw: f64, used: Usage) {
        let (prompt, completion) = (used.prompt as f64, used.completion as f64);
        let actual = (prompt + completion).min(OUTLIER * (raw * self.factor()).max(PRIOR_TOKENS));
        let answer = completion.min(OUTLIER * self.mean().max(ANSWER));
        self.raw = self.raw * FADE + raw;
        self.actual = self.actual * FADE + actual;
        self.answers = self.answers * FADE + 1.0;
        self.answered = self.answered * FADE + answer;
    }
}

fn refusal(window: &Window, unit: RateUnit, limit: u64, requested: u64, now: Tick) -> Fault {
    Fault::RateLimited {
        rate: Rate { unit, limit, used: window.used(), requested, window: MINUTE },
        retry_after: window.until_room(limit, requested, now),
    }
}

#[cfg(test)]
mod tests;
