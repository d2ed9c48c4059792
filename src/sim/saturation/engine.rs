//! One simulated engine: a batch, a KV cache, and a queue for what does not fit.
//!
//! The model of its speed is small on purpose. The engine reads a prompt at a fixed rate and answers nobody meanwhile.
//! Otherwise one step gives each running request one token, and takes longer the more requests run. The KV cache holds
//! the prompts and what has been written so far. If it is full, the youngest request goes back to the front of the
//! queue, and its tokens are read again later. vLLM does all of this, in finer steps.

use std::{cmp::Ordering, collections::VecDeque};

/// How much an engine holds, and how fast it is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EngineSpeed {
    /// Tokens that fit into the KV cache.
    pub kv_tokens: f64,
    /// Most requests in the batch.
    pub max_batch: usize,
    /// Tokens of prompts that it reads in a second.
    pub prefill_rate: f64,
    /// Seconds of one step without requests.
    pub step: f64,
    /// Seconds that each running request adds to a step.
    pub step_per_request: f64,
}

/// Share of the KV cache that admitting another request may fill: running requests grow.
const ADMISSION_LIMIT: f64 = 0.99;

/// A request in a queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueuedRequest {
    /// Seconds after the start.
    pub(super) arrived: f64,
    /// Tokens to read before the next token can be written.
    pub(super) prompt: f64,
    /// Tokens that remain to be written.
    pub(super) output: f64,
    /// Whether its client has got its first token.
    pub(super) answered: bool,
}

#[derive(Clone, Copy, Debug)]
struct RunningRequest {
    queued: QueuedRequest,
    /// [`SimulatedEngine::written`] when it started.
    from: f64,
    /// The same when its answer ends.
    until: f64,
}

#[derive(Clone, Debug)]
pub(super) struct SimulatedEngine {
    speed: EngineSpeed,
    /// Seconds after the start to which the engine is simulated. A prompt may carry it beyond the time asked for.
    clock: f64,
    /// Tokens that a request which ran from the beginning would have written. All running requests write at this rate.
    written: f64,
    waiting: VecDeque<QueuedRequest>,
    /// In the order of their start.
    running: Vec<RunningRequest>,
    /// Sum of each running request's prompt, less `written` at its start.
    kv_base: f64,
}

impl Default for EngineSpeed {
    /// About an 8-billion-parameter model on a GPU with 24 GiB.
    fn default() -> Self {
        Self {
            kv_tokens: 64_000.0,
            max_batch: 64,
            prefill_rate: 8000.0,
            step: 0.020,
            step_per_request: 0.0004,
        }
    }
}

impl EngineSpeed {
    /// An engine with this many times the memory and the speed.
    #[must_use]
    pub fn times(self, factor: f64) -> Self {
        Self {
            kv_tokens: self.kv_tokens * factor,
            max_batch: self.max_batch,
            prefill_rate: self.prefill_rate * factor,
            step: self.step / factor,
            step_per_request: self.step_per_request / factor,
        }
    }
}

impl SimulatedEngine {
    pub(super) const fn new(speed: EngineSpeed, ready: f64) -> Self {
        Self {
            speed,
            clock: ready,
            written: 0.0,
            waiting: VecDeque::new(),
            running: Vec::new(),
            kv_base: 0.0,
        }
    }

    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// Used fraction of the KV cache, as the engine reports it.
    pub(super) fn kv_use(&self) -> f64 {
        (self.kv_tokens() / self.speed.kv_tokens).clamp(0.0, 1.0)
    }

    /// Orders engines by their load: the shorter queue first, then the emptier KV cache.
    pub(super) fn compare_load(&self, other: &Self) -> Ordering {
        self.waiting.len().cmp(&other.waiting.len()).then(self.kv_use().total_cmp(&other.kv_use()))
    }

    /// Adds a request to the queue. Requests come in the order of their arrival.
    pub(super) fn enqueue(&mut self, request: QueuedRequest, first_tokens: &mut Vec<f64>) {
        // An idle engine must not start the request before it arrives.
        self.advance(request.arrived, first_tokens);
        self.waiting.push_back(request);
    }

    /// Simulates up to this second. Appends the seconds that each client waited for its first token.
    pub(super) fn advance(&mut self, until: f64, first_tokens: &mut Vec<f64>) {
        while self.clock < until {
            if !self.admit_next(first_tokens) && !self.decode(until) {
                self.clock = until;
            }
        }
    }

    /// When the requests arrived whose clients still wait for their first token.
    pub(super) fn unanswered(&self) -> impl Iterator<Item = f64> {
        self.waiting.iter().filter(|request| !request.answered).map(|request| request.arrived)
    }

    fn kv_tokens(&self) -> f64 {
        self.kv_base + self.running.len() as f64 * self.written
    }

    fn step_seconds(&self) -> f64 {
        self.speed.step + self.speed.step_per_request * self.running.len() as f64
    }

    /// Reads the prompt of the first request in the queue, if it fits. A request alone always fits.
    fn admit_next(&mut self, first_tokens: &mut Vec<f64>) -> bool {
        let Some(next) = self.waiting.front().copied() else { return false };
        let fits = self.running.len() < self.speed.max_batch
            && self.kv_tokens() + next.prompt <= self.speed.kv_tokens * ADMISSION_LIMIT;
        if !fits && !self.running.is_empty() {
            return false;
        }
        self.waiting.pop_front();
        self.clock += next.prompt / self.speed.prefill_rate;
        if self.running.is_empty() {
            (self.kv_base, self.written) = (0.0, 0.0);
        }
        let until = self.written + next.output;
        self.kv_base += next.prompt - self.written;
        self.running.push(RunningRequest {
            queued: QueuedRequest { answered: true, ..next },
            from: self.written,
            until,
        });
        if !next.answered {
            first_tokens.push(self.clock + self.step_seconds() - next.arrived);
        }
        true
    }

    /// Writes tokens until a request ends, the KV cache is full, or the time is over. Returns false without requests.
    fn decode(&mut self, until: f64) -> bool {
        let ends = self.running.iter().map(|request| request.until).enumerate();
        let Some((first, end)) = ends.min_by(|a, b| a.1.total_cmp(&b.1)) else { return false };
        let to_end = end - self.written;
        // A request alone may outgrow the KV cache; in truth it would fail.
        let to_full = match self.running.len() {
            1 => f64::INFINITY,
            running => (self.speed.kv_tokens - self.kv_tokens()).max(0.0) / running as f64,
        };
        let (step, tokens) = (self.step_seconds(), to_end.min(to_full));
        let in_time = (until - self.clock) / step;
        if in_time < tokens {
            self.written += in_time;
            self.clock = until;
            return true;
        }
        self.written += tokens;
        self.clock += tokens * step;
        if to_end <= to_full {
            self.take_out(first);
        } else {
            self.preempt();
        }
        true
    }

    fn take_out(&mut self, index: usize) -> RunningRequest {
        let request = self.running.remove(index);
        self.kv_base -= request.queued.prompt - request.from;
        request
    }

    /// Puts the youngest request back. What it has written belongs to its prompt from now on.
    fn preempt(&mut self) {
        let Some(youngest) = self.running.len().checked_sub(1) else { return };
        let request = self.take_out(youngest);
        self.waiting.push_front(QueuedRequest {
            prompt: request.queued.prompt + self.written - request.from,
            output: (request.until - self.written).max(1.0),
            ..request.queued
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPEED: EngineSpeed = EngineSpeed {
        kv_tokens: 1000.0,
        max_batch: 4,
        prefill_rate: 100.0,
        step: 0.1,
        step_per_request: 0.1,
    };

    fn request(arrived: f64, prompt: f64, output: f64) -> QueuedRequest {
        QueuedRequest { arrived, prompt, output, answered: false }
    }

    fn engine(requests: &[QueuedRequest]) -> (SimulatedEngine, Vec<f64>) {
        let (mut engine, mut first_tokens) = (SimulatedEngine::new(SPEED, 0.0), Vec::new());
        requests.iter().for_each(|request| engine.enqueue(*request, &mut first_tokens));
        (engine, first_tokens)
    }

    #[test]
    fn a_request_alone_takes_its_prompt_and_its_steps() {
        let (mut engine, mut first_tokens) = engine(&[request(5.0, 100.0, 10.0)]);
        engine.advance(6.5, &mut first_tokens);
        // One second for the prompt, 0.2 for a step.
        assert!((first_tokens[0] - 1.2).abs() < 1e-9, "{first_tokens:?}");
        assert!((engine.kv_use() - 0.1025).abs() < 1e-9, "{}", engine.kv_use());
        engine.advance(7.99, &mut first_tokens);
        assert!(!engine.is_idle());
        engine.advance(8.01, &mut first_tokens);
        assert!(engine.is_idle());
        assert_eq!(first_tokens.len(), 1);
    }

    #[test]
    fn more_requests_than_the_batch_holds_wait_and_steps_get_longer() {
        let (mut engine, mut first_tokens) = engine(&[request(0.0, 10.0, 100.0); 6]);
        engine.advance(1.0, &mut first_tokens);
        assert_eq!((engine.running.len(), engine.waiting()), (4, 2));
        assert_eq!(engine.unanswered().count(), 2);
        // Steps of four take 0.5 s: they end 50 s after the four prompts.
        engine.advance(50.3, &mut first_tokens);
        assert_eq!((engine.running.len(), engine.waiting()), (4, 2));
        engine.advance(51.0, &mut first_tokens);
        assert_eq!((engine.running.len(), engine.waiting()), (2, 0));
    }

    #[test]
    fn a_full_cache_puts_the_youngest_back_and_it_is_answered_once() {
        let (mut engine, mut first_tokens) = engine(&[request(0.0, 400.0, 300.0); 2]);
        // Both run from second 8 on; each has written 100 tokens when the cache is full.
        engine.advance(37.9, &mut first_tokens);
        assert_eq!((engine.running.len(), engine.waiting()), (2, 0));
        engine.advance(38.5, &mut first_tokens);
        assert_eq!((engine.running.len(), engine.waiting()), (1, 1));
        assert!((engine.waiting[0].prompt - 500.0).abs() < 1e-6, "{:?}", engine.waiting[0]);
        engine.advance(1000.0, &mut first_tokens);
        assert!(engine.is_idle());
        assert_eq!(first_tokens.len(), 2);
    }

    #[test]
    fn the_shorter_queue_goes_before_the_emptier_cache() {
        let (queued, _) = engine(&[request(0.0, 1.0, 1.0)]);
        let (mut busy, mut first_tokens) = engine(&[request(0.0, 100.0, 100.0)]);
        busy.advance(2.0, &mut first_tokens);
        let (idle, _) = engine(&[]);
        assert_eq!(busy.compare_load(&queued), Ordering::Less);
        assert_eq!(idle.compare_load(&busy), Ordering::Less);
    }
}
