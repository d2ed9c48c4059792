//! Reserves vLLM's memory if its command sets a share of the accelerator, whatever the model declares.

use rouse::{
    model::{Accelerator, AcceleratorRequirement},
    units::Bytes,
};

use super::{Config, EngineConfig, EngineKind, command_options, sets_kv_cache};

const UTILIZATION_FLAG: &str = "--gpu-memory-utilization";

impl Config {
    /// Reserves what such engines take instead of what is declared, if that is more. Idempotent.
    ///
    /// For accelerators of different sizes, the largest one that the model may use counts.
    pub fn reserve_memory_utilization(&mut self, accelerators: &[Accelerator], headroom: Bytes) {
        for spec in &mut self.core.models {
            let Some(share) = self.engines.get(&spec.name).and_then(|model| model.memory_utilization())
            else {
                continue;
            };
            let allowed = |accelerator: &&Accelerator| match &spec.accelerators {
                AcceleratorRequirement::Ids(ids) => ids.contains(&accelerator.id),
                AcceleratorRequirement::Count(_)
                | AcceleratorRequirement::InPool { .. }
                | AcceleratorRequirement::Slots { .. } => true,
            };
            let largest = accelerators.iter().filter(allowed).map(|accelerator| accelerator.capacity).max();
            let reserved = largest.map(|capacity| ((capacity + headroom).0 as f64 * share).ceil() as u64);
            spec.memory.awake = spec.memory.awake.max(Bytes(reserved.unwrap_or_default()));
        }
    }
}

impl EngineConfig {
    /// Returns the share of an accelerator's memory that the command sets as a number.
    ///
    /// A vLLM with a KV-cache size in bytes ignores the share.
    pub(super) fn memory_utilization(&self) -> Option<f64> {
        if self.kind != EngineKind::Vllm || sets_kv_cache(&self.command) {
            return None;
        }
        command_options::value(&self.command, UTILIZATION_FLAG)?
            .parse()
            .ok()
            .filter(|share| *share > 0.0 && *share <= 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse;

    fn awake(models: &str) -> Vec<Bytes> {
        let devices = "accelerators: [{id: small, memory: 24Gi}, {id: large, memory: 80Gi}]";
        let config = parse(&format!("{devices}\nmodels:\n{models}"), "test").unwrap();
        config.core.models.iter().map(|spec| spec.memory.awake).collect()
    }

    #[test]
    fn a_share_that_stands_in_the_command_is_booked_where_it_is_more_than_declared() {
        let model = |name: &str, more: &str, devices: &str| {
            format!(
                "  - {{name: {name}, memory: {{awake: 10Gi}}, accelerators: {devices}, engine: {{kind: vllm, command: \
                 [vllm, --port, '${{PORT}}', {more}]}}}}\n"
            )
        };
        let models = [
            model("own", "--gpu-memory-utilization, '0.5'", "[small]"),
            model("joined", "'--gpu_memory_utilization=0.5'", "[large]"),
            model("any", "'--gpu-memory-utilization 0.5'", "1"),
            model("script", r#"'exec vllm serve m --gpu-memory-utilization "0.5"; true'"#, "[large]"),
            model("less", "--gpu-memory-utilization, '0.25'", "[small]"),
            model("ours", "--gpu-memory-utilization, '${MEMORY_FRACTION}'", "1"),
            model("cache", "--gpu-memory-utilization, '0.9', --kv-cache-memory-bytes, '1000'", "1"),
            model("none", "--gpu-memory-utilization, '7'", "1"),
        ];
        let expected = [12, 40, 40, 40, 10, 10, 10, 10].map(Bytes::gib);
        assert_eq!(awake(&models.concat()), expected);
    }

    #[test]
    fn what_the_machine_turns_out_to_have_counts_and_twice_is_as_once() {
        let text = "models: [{name: m, memory: {awake: 10Gi}, engine: {kind: vllm, command: \
            [vllm, --port, '${PORT}', --gpu-memory-utilization, '0.5']}}]";
        let mut config = parse(text, "test").unwrap();
        let found = Accelerator { metered: true, ..Accelerator::new("gpu".into(), Bytes::gib(79)) };
        for _ in 0..2 {
            config.reserve_memory_utilization(std::slice::from_ref(&found), Bytes::gib(1));
            assert_eq!(config.core.models[0].memory.awake, Bytes::gib(40));
        }
    }
}
