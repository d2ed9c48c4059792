//! The sizes of engines and the lengths of their requests, for models whose steps are sized in tokens.

use std::collections::BTreeMap;

use rouse::{
    model::EngineId,
    saturation::{AwakeEngine, ReplicaMetrics, TokenLengths, TokenMetrics},
    units::Generation,
};
use rouse_net::engine_load::{EngineTokens, LengthCounter};

/// The last reading of each engine. A size does not grow old: it is set when the engine starts.
#[derive(Debug, Default)]
pub(super) struct TokenReadings(BTreeMap<EngineId, (Generation, EngineTokens)>);

impl TokenReadings {
    pub(super) fn add(&mut self, engine: EngineId, generation: Generation, tokens: EngineTokens) {
        self.0.insert(engine, (generation, tokens));
    }

    /// Forgets the engines that are not awake.
    pub(super) fn retain(&mut self, is_awake: impl Fn(&EngineId) -> bool) {
        self.0.retain(|engine, _| is_awake(engine));
    }

    /// Sets the tokens of the replicas whose size is known. Returns the mean lengths of the requests, if any has ended.
    pub(super) fn apply(
        &self,
        awake: &[AwakeEngine],
        replicas: &mut [ReplicaMetrics],
    ) -> Option<TokenLengths> {
        let (mut prompts, mut outputs) = (LengthCounter::default(), LengthCounter::default());
        for engine in awake {
            let Some(tokens) = self.of(engine) else { continue };
            (prompts, outputs) = (prompts.plus(tokens.prompts), outputs.plus(tokens.outputs));
            let name = engine.id.to_string();
            let Some(metrics) = replicas.iter_mut().find(|metrics| metrics.replica == name) else { continue };
            let size = tokens.kv_cache.zip(metrics.kv_use.filter(|share| share.is_finite()));
            metrics.tokens = size.map(|(total, share)| TokenMetrics { used: share * total, total });
        }
        let (input, output) = prompts.mean().zip(outputs.mean())?;
        Some(TokenLengths { input, output })
    }

    fn of(&self, engine: &AwakeEngine) -> Option<&EngineTokens> {
        let (generation, tokens) = self.0.get(&engine.id)?;
        (*generation == engine.generation).then_some(tokens)
    }
}

#[cfg(test)]
mod tests {
    use rouse::units::Tick;

    use super::*;

    fn engine(replica: u32, generation: u64) -> AwakeEngine {
        let id = EngineId::new("m".into(), replica);
        AwakeEngine { id, generation: Generation(generation), address: None, since: Tick::default() }
    }

    fn metrics(engine: &AwakeEngine, kv_use: Option<f64>) -> ReplicaMetrics {
        ReplicaMetrics { replica: engine.id.to_string(), kv_use, ..ReplicaMetrics::default() }
    }

    fn tokens(size: f64, prompt: f64, output: f64) -> EngineTokens {
        let length = |tokens| LengthCounter { tokens, requests: 1.0 };
        EngineTokens { kv_cache: Some(size), prompts: length(prompt), outputs: length(output) }
    }

    #[test]
    fn a_replica_has_tokens_where_its_size_and_its_use_are_known() {
        let engines = [engine(0, 1), engine(1, 1), engine(2, 7)];
        let mut readings = TokenReadings::default();
        readings.add(engines[0].id.clone(), Generation(1), tokens(1000.0, 100.0, 30.0));
        readings.add(engines[1].id.clone(), Generation(1), tokens(1000.0, 300.0, 10.0));
        readings.add(engines[2].id.clone(), Generation(6), tokens(1000.0, 9000.0, 9000.0));
        let mut replicas: Vec<ReplicaMetrics> =
            [Some(0.5), None, Some(0.5)].iter().zip(&engines).map(|(kv, one)| metrics(one, *kv)).collect();
        let lengths = readings.apply(&engines, &mut replicas);
        assert_eq!(lengths, Some(TokenLengths { input: 200.0, output: 20.0 }));
        let found: Vec<Option<TokenMetrics>> = replicas.iter().map(|metrics| metrics.tokens).collect();
        assert_eq!(found, [Some(TokenMetrics { used: 500.0, total: 1000.0 }), None, None]);

        readings.retain(|_| false);
        let mut replicas = vec![metrics(&engines[0], Some(0.5))];
        assert_eq!(readings.apply(&engines, &mut replicas), None);
        assert_eq!(replicas[0].tokens, None);
    }
}
