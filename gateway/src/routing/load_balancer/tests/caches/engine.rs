//! A simulated engine: a KV cache of blocks, one prefill at a time, a limited batch, and a queue.

use std::collections::{BTreeMap, HashMap, VecDeque};

use rouse::units::Millis;
use rouse_net::engine_load::EngineLoad;

pub(super) const BLOCK_TOKENS: u64 = 256;
/// Room for 115,000 tokens.
const BLOCKS: usize = 450;
/// The most requests in the batch.
const SLOTS: usize = 24;
const PREFILL_TOKENS_PER_MILLI: u64 = 8;
/// The time that a prefill takes whatever the prompt's length.
const PREFILL_BASE: Millis = Millis(10);

/// A prompt: its blocks from the beginning, and those that its answer fills.
#[derive(Clone, Debug)]
pub(super) struct PromptBlocks {
    pub(super) tokens: u64,
    pub(super) blocks: Vec<u64>,
    pub(super) answer_blocks: Vec<u64>,
}

/// The prefill that has begun.
pub(super) struct StartedPrefill {
    pub(super) request: usize,
    /// Until the first token.
    pub(super) after: Millis,
}

#[derive(Default)]
pub(super) struct CachingEngine {
    queue: VecDeque<(usize, PromptBlocks)>,
    running: BTreeMap<usize, PromptBlocks>,
    prefills: bool,
    /// Number of requests that use each block.
    in_use: HashMap<u64, u32>,
    /// Blocks that no request uses: when each was last used, and the same in that order.
    cached: HashMap<u64, u64>,
    oldest: BTreeMap<u64, u64>,
    /// Counts the releases of blocks.
    releases: u64,
}

impl CachingEngine {
    pub(super) fn enqueue(&mut self, request: usize, prompt: PromptBlocks) {
        self.queue.push_back((request, prompt));
    }

    /// Begins the next prefill if there is room for its request.
    pub(super) fn begin(&mut self) -> Option<StartedPrefill> {
        let (_, prompt) = self.queue.front()?;
        if self.prefills || self.running.len() >= SLOTS {
            return None;
        }
        let all = || prompt.blocks.iter().chain(&prompt.answer_blocks);
        let needed = all().filter(|block| !self.in_use.contains_key(*block)).count();
        if self.in_use.len() + needed > BLOCKS && !self.in_use.is_empty() {
            return None;
        }
        let is_known = |block: &&u64| self.in_use.contains_key(*block) || self.cached.contains_key(*block);
        let known = prompt.blocks.iter().take_while(is_known).count() as u64;
        let (request, prompt) = self.queue.pop_front()?;
        prompt.blocks.iter().chain(&prompt.answer_blocks).for_each(|block| self.use_block(*block));
        while self.in_use.len() + self.cached.len() > BLOCKS
            && let Some((_, block)) = self.oldest.pop_first()
        {
            self.cached.remove(&block);
        }
        self.prefills = true;
        let missing = prompt.tokens.saturating_sub(known * BLOCK_TOKENS).max(1);
        self.running.insert(request, prompt);
        Some(StartedPrefill { request, after: PREFILL_BASE + Millis(missing / PREFILL_TOKENS_PER_MILLI) })
    }

    pub(super) const fn end_prefill(&mut self) {
        self.prefills = false;
    }

    /// Ends a request. Its blocks stay cached, the beginning of its prompt for the longest time.
    pub(super) fn end(&mut self, request: usize) {
        let Some(prompt) = self.running.remove(&request) else { return };
        for block in prompt.blocks.iter().chain(&prompt.answer_blocks).rev() {
            let Some(users) = self.in_use.get_mut(block) else { continue };
            *users -= 1;
            if *users == 0 {
                self.in_use.remove(block);
                self.releases += 1;
                self.cached.insert(*block, self.releases);
                self.oldest.insert(self.releases, *block);
            }
        }
    }

    fn use_block(&mut self, block: u64) {
        if let Some(released) = self.cached.remove(&block) {
            self.oldest.remove(&released);
        }
        *self.in_use.entry(block).or_default() += 1;
    }

    pub(super) fn load(&self) -> EngineLoad {
        EngineLoad {
            kv_use: Some(self.in_use.len() as f64 / BLOCKS as f64),
            waiting: Some(self.queue.len() as f64),
            running: Some(self.running.len() as f64),
        }
    }
}
