//! Three loads whose requests share beginnings.

use rouse::units::{Millis, Tick};
use rouse_net::openai::routing_fields::ConversationKey;

use super::{
    super::super::super::{Rng, rng::mix64},
    engine::{BLOCK_TOKENS, PromptBlocks},
};

/// The requests of a run.
pub(super) const REQUESTS: usize = 4000;
const TOKEN_TIME: Millis = Millis(25);
/// Mean length of an answer.
const ANSWER_TOKENS: f64 = 150.0;
/// Mean length of what a user writes in a later turn, and the time between an answer and that turn.
const LATER_TOKENS: f64 = 400.0;
const THINKING_MILLIS: f64 = 8_000.0;
/// Begins the numbers of conversations, above those of system prompts.
const FIRST_CONVERSATION: u64 = 1_000_000;

/// A conversation at one of its turns.
#[derive(Clone, Debug)]
pub(super) struct SimulatedConversation {
    pub(super) next_at: Tick,
    pub(super) key: ConversationKey,
    id: u64,
    /// Its turns do not depend on the other conversations.
    seed: u64,
    /// The number and the tokens of its system prompt.
    system: Option<(u64, u64)>,
    /// Tokens of its own, without the system prompt and the next answer.
    tokens: u64,
    answer: u64,
    turns_left: u64,
}

impl SimulatedConversation {
    pub(super) fn generation_time(&self) -> Millis {
        Millis(self.answer * TOKEN_TIME.0)
    }

    /// Sets its key by the rules of `openai/routing_fields/prefix.rs`: that of the larger part.
    fn set_key(&mut self, is_first: bool) {
        let shared = self.system.filter(|(_, tokens)| *tokens >= self.tokens);
        self.key = match shared {
            // Another seed places the popular ones elsewhere on the ring.
            Some((system, _)) => ConversationKey { hash: mix64(self.seed << 32 | system), is_new: false },
            None => ConversationKey { hash: mix64(self.id), is_new: is_first },
        };
    }

    pub(super) fn prompt(&self) -> PromptBlocks {
        let blocks_of = |id: u64, from: u64, end: u64| {
            (from / BLOCK_TOKENS..end / BLOCK_TOKENS).map(move |n| mix64(id << 16 | n))
        };
        let (system, system_tokens) = self.system.unwrap_or_default();
        let blocks = blocks_of(system, 0, system_tokens).chain(blocks_of(self.id, 0, self.tokens));
        let mut answer_blocks: Vec<u64> =
            blocks_of(self.id, self.tokens, self.tokens + self.answer).collect();
        // The last block is not full, so no other request can use it.
        answer_blocks.push(mix64(!(self.id << 16 | self.turns_left)));
        PromptBlocks { tokens: system_tokens + self.tokens, blocks: blocks.collect(), answer_blocks }
    }

    /// Returns the next turn after an answer that has ended `now`, if there is one.
    pub(super) fn next_turn(mut self, now: Tick) -> Option<Self> {
        self.turns_left = self.turns_left.checked_sub(1)?;
        let rng = Rng::seeded(mix64(self.seed ^ mix64(self.id << 16 | self.turns_left)));
        self.tokens += self.answer + 20 + exponential(&rng, LATER_TOKENS) as u64;
        self.answer = answer(&rng);
        self.next_at = now + Millis(exponential(&rng, THINKING_MILLIS) as u64);
        self.set_key(false);
        Some(self)
    }
}

/// Makes the conversations of a load. Two with the same seed make the same.
pub(super) struct ConversationSource {
    seed: u64,
    rng: Rng,
    /// Mean time between two conversations, in milliseconds.
    pause: f64,
    /// Tokens of each system prompt, and the exponent by which their popularity falls.
    systems: Vec<u64>,
    skew: f64,
    /// The share of the conversations without a system prompt.
    unique: f64,
    /// Mean tokens of a first turn with and without a system prompt.
    first_tokens: f64,
    unique_tokens: f64,
    /// Mean number of later turns.
    later_turns: f64,
}

impl ConversationSource {
    /// 24 system prompts of 4,000 to 12,000 tokens: one engine's cache holds about 14 of them. Single requests.
    pub(super) fn system_prompts(seed: u64) -> Self {
        let source = Self { pause: 140.0, skew: 1.3, first_tokens: 200.0, ..Self::new(seed) };
        source.with_systems(24, 4_000, 12_000)
    }

    /// Conversations of seven turns on average, with short system prompts.
    pub(super) fn conversations(seed: u64) -> Self {
        let source = Self { pause: 2_000.0, first_tokens: 1_700.0, later_turns: 6.0, ..Self::new(seed) };
        source.with_systems(4, 1_000, 1_001)
    }

    /// A quarter of the requests has one of four system prompts, and the others have nothing in common.
    pub(super) fn mixed(seed: u64) -> Self {
        let (first_tokens, unique_tokens) = (250.0, 2_500.0);
        let source =
            Self { pause: 111.0, skew: 1.0, unique: 0.75, first_tokens, unique_tokens, ..Self::new(seed) };
        source.with_systems(4, 3_000, 3_001)
    }

    fn new(seed: u64) -> Self {
        Self {
            seed,
            rng: Rng::seeded(mix64(seed)),
            pause: 0.0,
            systems: Vec::new(),
            skew: 0.0,
            unique: 0.0,
            first_tokens: 0.0,
            unique_tokens: 0.0,
            later_turns: 0.0,
        }
    }

    fn with_systems(mut self, number: u64, from: u64, to: u64) -> Self {
        self.systems = (0..number).map(|_| from + self.rng.next_u64() % (to - from)).collect();
        self
    }

    /// Returns the first turn of every conversation.
    pub(super) fn arrivals(&self) -> Vec<SimulatedConversation> {
        let (mut at, mut requests, mut all) = (1_000.0, 0, Vec::new());
        while requests < REQUESTS {
            at += exponential(&self.rng, self.pause);
            let id = FIRST_CONVERSATION + all.len() as u64;
            let is_unique = fraction(&self.rng) < self.unique;
            let system = if is_unique { None } else { Some(self.draw_system()) };
            let mean = if is_unique { self.unique_tokens } else { self.first_tokens };
            let turns_left = exponential(&self.rng, self.later_turns) as u64;
            let mut conversation = SimulatedConversation {
                next_at: Tick(at as u64),
                key: ConversationKey { hash: 0, is_new: true },
                id,
                seed: self.seed,
                system,
                // From a half to one and a half of the mean.
                tokens: (mean * (0.5 + fraction(&self.rng))) as u64,
                answer: answer(&self.rng),
                turns_left,
            };
            conversation.set_key(true);
            requests += 1 + turns_left as usize;
            all.push(conversation);
        }
        all
    }

    /// Draws a system prompt, by its popularity.
    fn draw_system(&self) -> (u64, u64) {
        let weights = || (1..=self.systems.len()).map(|rank| (rank as f64).powf(-self.skew));
        let mut lot = fraction(&self.rng) * weights().sum::<f64>();
        let systems = (0u64..).zip(&self.systems).map(|(system, tokens)| (system, *tokens));
        let mut drawn = (0, 0);
        for (system, weight) in systems.zip(weights()) {
            drawn = system;
            lot -= weight;
            if lot < 0.0 {
                break;
            }
        }
        drawn
    }
}

fn answer(rng: &Rng) -> u64 {
    10 + exponential(rng, ANSWER_TOKENS) as u64
}

/// A number from 0 to 1, never 1.
fn fraction(rng: &Rng) -> f64 {
    (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

fn exponential(rng: &Rng, mean: f64) -> f64 {
    -mean * (1.0 - fraction(rng)).ln()
}
