//! Token capacity: how many tokens a replica takes, and how many more replicas the demand needs.
//!
//! The arithmetic of the public project's second analyzer. Here it sizes a step; whether there is one, the spare
//! capacity decides.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use super::{
    ReplicaMetrics, Role, Thresholds, VariantState,
    analysis::{mean, replicas_for},
};
use crate::model::VariantName;

/// Observations of one kind that are kept.
const OBSERVATIONS: usize = 10;
/// Mean outputs below this many tokens are short, then medium.
const SHORT_OUTPUT: f64 = 100.0;
const MEDIUM_OUTPUT: f64 = 500.0;

/// The KV cache of one replica, in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TokenMetrics {
    pub used: f64,
    /// Blocks times block size.
    pub total: f64,
}

/// Mean lengths of the requests of a model, in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TokenLengths {
    pub input: f64,
    pub output: f64,
}

/// What an engine's flags say about its capacity.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct EngineTokenLimits {
    /// Most tokens of one batch.
    pub batched: u32,
    /// Most sequences of one batch.
    pub sequences: u32,
    /// Size of the KV cache in tokens, if a replica has reported it before.
    pub total: Option<f64>,
}

/// Capacity of one replica of a variant, in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TokenCapacity {
    /// Limit by the KV cache; `None` if its size is unknown.
    pub k1: Option<f64>,
    /// Limit by computation; `None` if nothing tells it.
    pub k2: Option<f64>,
    pub per_replica: f64,
}

/// Demand and capacity of a model, or of one role of it, in tokens.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TokenAnalysis {
    pub variants: BTreeMap<VariantName, TokenCapacity>,
    pub demand: f64,
    /// Capacity of the replicas that report.
    pub supply: f64,
    /// The same with those that are pending.
    pub anticipated: f64,
    /// Capacity that is missing, and capacity that is not needed.
    pub required: f64,
    pub spare: f64,
    /// Replicas that report, and those of them that report tokens.
    pub replicas: u32,
    pub measured: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum OutputClass {
    Short,
    Medium,
    Long,
}

/// Tokens in use of full replicas, by type and number of accelerators and by the length of outputs.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct TokenHistory {
    observed: BTreeMap<(String, u32, OutputClass), VecDeque<f64>>,
}

/// One role's load, as the token arithmetic reads it.
pub(super) struct TokenLoad<'a> {
    pub(super) role: Role,
    /// Sorted by name, so that observations are recorded in one order.
    pub(super) replicas: &'a [&'a ReplicaMetrics],
    pub(super) states: &'a [VariantState],
    pub(super) lengths: Option<TokenLengths>,
    /// Requests that wait at the gateways.
    pub(super) parked: u32,
}

impl Default for EngineTokenLimits {
    fn default() -> Self {
        Self { batched: 8192, sequences: 256, total: None }
    }
}

impl TokenLengths {
    fn class(self) -> OutputClass {
        match self.output {
            output if output < SHORT_OUTPUT => OutputClass::Short,
            output if output < MEDIUM_OUTPUT => OutputClass::Medium,
            _ => OutputClass::Long,
        }
    }

    /// Tokens that one waiting request adds.
    fn of_request(self, role: Role) -> f64 {
        if role == Role::Prefill { self.input } else { self.input + self.output }
    }
}

impl EngineTokenLimits {
    /// The limit by computation: as many requests as a batch takes, each with half of its output made.
    #[must_use]
    pub fn derived(&self, lengths: TokenLengths) -> Option<f64> {
        let TokenLengths { input, output } = lengths;
        let requests = f64::from(self.batched) * output / (input + output);
        let limit = requests.min(f64::from(self.sequences)) * (input + output / 2.0);
        (limit.is_finite() && limit > 0.0).then_some(limit)
    }
}

impl TokenHistory {
    fn record(&mut self, state: &VariantState, lengths: TokenLengths, tokens: f64) {
        let kept = self.observed.entry(Self::key(state, lengths)).or_default();
        kept.push_back(tokens);
        if kept.len() > OBSERVATIONS {
            kept.pop_front();
        }
    }

    fn mean(&self, state: &VariantState, lengths: TokenLengths) -> Option<f64> {
        let kept = self.observed.get(&Self::key(state, lengths))?;
        let count = u32::try_from(kept.len()).unwrap_or(u32::MAX);
        Some(mean(kept.iter().sum(), count))
    }

    fn key(state: &VariantState, lengths: TokenLengths) -> (String, u32, OutputClass) {
        (state.accelerator.clone(), state.gpus_per_replica(), lengths.class())
    }
}

impl TokenAnalysis {
    /// Compares demand with capacity, and records what full replicas have in use. `None` if nothing has a size.
    pub(super) fn new(
        load: &TokenLoad<'_>,
        thresholds: &Thresholds,
        history: &mut TokenHistory,
    ) -> Option<Self> {
        let mut analysis = Self::default();
        let per_request = load.lengths.map_or(0.0, |lengths| lengths.of_request(load.role));
        analysis.demand = f64::from(load.parked) * per_request;
        for metrics in load.replicas {
            let waiting = metrics.waiting.filter(|waiting| waiting.is_finite()).unwrap_or_default();
            analysis.demand += metrics.tokens.map_or(0.0, |tokens| tokens.used) + waiting * per_request;
            analysis.replicas += 1;
            analysis.measured += u32::from(metrics.tokens.is_some());
        }
        for state in load.states {
            let reporting: Vec<&ReplicaMetrics> =
                load.replicas.iter().copied().filter(|metrics| metrics.variant == state.variant).collect();
            let capacities = reporting
                .iter()
                .filter_map(|metrics| of_replica(metrics, state, load.lengths, thresholds, history));
            let Some(capacity) =
                median(capacities.collect()).or_else(|| of_flags(state, load.lengths, thresholds))
            else {
                continue;
            };
            let count = u32::try_from(reporting.len()).unwrap_or(u32::MAX);
            analysis.supply += f64::from(count) * capacity.per_replica;
            analysis.anticipated += f64::from(count.saturating_add(state.pending)) * capacity.per_replica;
            analysis.variants.insert(state.variant.clone(), capacity);
        }
        if analysis.variants.is_empty() {
            return None;
        }
        analysis.required = (analysis.demand / thresholds.scale_up - analysis.anticipated).max(0.0);
        analysis.spare = (analysis.supply - analysis.demand / thresholds.scale_down).max(0.0);
        Some(analysis)
    }

    /// How many more replicas the demand needs, at least one; `None` unless every replica reports tokens.
    pub(super) fn shortage(&self) -> Option<u32> {
        if self.replicas == 0 || self.measured < self.replicas {
            return None;
        }
        Some(replicas_for(self.required, mean(self.supply, self.replicas)).max(1))
    }
}

/// Capacity of a replica that reports tokens.
fn of_replica(
    metrics: &ReplicaMetrics,
    state: &VariantState,
    lengths: Option<TokenLengths>,
    thresholds: &Thresholds,
    history: &mut TokenHistory,
) -> Option<TokenCapacity> {
    let tokens = metrics.tokens.filter(|tokens| tokens.total > 0.0)?;
    let lengths = lengths.unwrap_or_default();
    let is_full = metrics.waiting.is_some_and(|waiting| waiting >= thresholds.queue_length);
    let k2 = if is_full && tokens.used > 0.0 {
        history.record(state, lengths, tokens.used);
        Some(tokens.used)
    } else {
        let derived = || state.limits.and_then(|limits| limits.derived(lengths));
        history.mean(state, lengths).or_else(derived)
    };
    let k1 = tokens.total * thresholds.kv_cache;
    Some(TokenCapacity { k1: Some(k1), k2, per_replica: k2.map_or(k1, |k2| k1.min(k2)) })
}

/// Capacity of a variant without a replica that reports, from its engine's flags.
fn of_flags(
    state: &VariantState,
    lengths: Option<TokenLengths>,
    thresholds: &Thresholds,
) -> Option<TokenCapacity> {
    let limits = state.limits?;
    let k1 = limits.total.map(|total| total * thresholds.kv_cache);
    let k2 = limits.derived(lengths.unwrap_or_default());
    let least = k1.into_iter().chain(k2).reduce(f64::min);
    Some(TokenCapacity { k1, k2, per_replica: least.unwrap_or_else(|| f64::from(limits.batched)) })
}

/// The middle one by capacity. Of an even number, the mean of the middle two.
fn median(mut capacities: Vec<TokenCapacity>) -> Option<TokenCapacity> {
    capacities.sort_by(|capacity, other| capacity.per_replica.total_cmp(&other.per_replica));
    let upper = *capacities.get(capacities.len() / 2)?;
    let lower = *capacities.get((capacities.len() - 1) / 2)?;
    Some(TokenCapacity { per_replica: f64::midpoint(lower.per_replica, upper.per_replica), ..upper })
}
