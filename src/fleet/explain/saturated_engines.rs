//! Saturated engines as the reason why an awake model takes no more requests.
//!
//! Each turn looks for them, because grants change what is full. Only a refusal or a report shows them, so the text is
//! made there.

use std::fmt;

use crate::{
    engine::saturation_limit::SaturationLimit,
    fleet::plan::Planner,
    model::{EngineId, ModelName},
};

/// Engines that the text names.
const MAX_LISTED_ENGINES: usize = 3;

/// The saturated engines of a model whose engines all have as many requests as they may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::fleet) struct SaturatedEngines {
    /// The first of them, at least one, with their reported load.
    listed: Vec<(EngineId, SaturationLimit)>,
    /// Number of the others.
    unlisted: usize,
}

impl Planner {
    /// Finds the saturated engines, if they are why no engine of this model takes a request.
    pub(in crate::fleet) fn saturated_engines(&self, model: &ModelName) -> Option<SaturatedEngines> {
        let limit = self.spec(model).and_then(|s| s.max_concurrency).unwrap_or(u32::MAX);
        let (mut listed, mut unlisted) = (Vec::new(), 0);
        for e in self.engines_of(model).filter(|e| e.serves()) {
            if !self.is_full(e, limit) {
                return None;
            }
            // Without a limit of its own, the engine is at `maxConcurrency`.
            match e.saturation_at(self.last_planned).filter(|load| load.leases.is_some()) {
                Some(load) if listed.len() < MAX_LISTED_ENGINES => listed.push((e.id.clone(), load)),
                Some(_) => unlisted += 1,
                None => {}
            }
        }
        (!listed.is_empty()).then_some(SaturatedEngines { listed, unlisted })
    }
}

/// Their load: `saturated: llama#0 (KV cache 91 % used, 12 requests in its queue) and 2 more`.
impl fmt::Display for SaturatedEngines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "saturated: ";
        for (engine, load) in &self.listed {
            write!(f, "{separator}{engine} ({load})")?;
            separator = ", ";
        }
        if self.unlisted > 0 { write!(f, " and {} more", self.unlisted) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Tick;

    #[test]
    fn the_text_names_each_listed_engine_with_its_load_and_counts_the_others() {
        let load = |waiting| SaturationLimit {
            leases: Some(1),
            until: Tick(1),
            kv_percent: Some(91),
            waiting: Some(waiting),
        };
        let listed = (0..2).map(|replica| (EngineId::new("m".into(), replica), load(replica + 1))).collect();
        let two = SaturatedEngines { listed, unlisted: 0 };
        let text = "saturated: m#0 (KV cache 91 % used, 1 request in its queue), \
                    m#1 (KV cache 91 % used, 2 requests in its queue)";
        assert_eq!(two.to_string(), text);
        assert_eq!(SaturatedEngines { unlisted: 2, ..two }.to_string(), format!("{text} and 2 more"));
    }
}
