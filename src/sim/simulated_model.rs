//! The model that simulated worlds and tests start from.

use crate::{
    model::{
        AcceleratorRequirement, EngineMemory, IdlePolicy, ModelName, ModelSpec, QueueOverrides,
        RehearsalPolicy, ScaleUpEviction, SleepLevelPolicy,
    },
    saturation::Thresholds,
    units::Millis,
};

/// A model on one accelerator that sleeps only to make room, and whose engines start within a minute.
#[must_use]
pub fn simulated_model(name: impl Into<ModelName>, memory: EngineMemory) -> ModelSpec {
    ModelSpec {
        name: name.into(),
        aliases: Vec::new(),
        accelerators: AcceleratorRequirement::Count(1),
        memory,
        idle: IdlePolicy {
            sleep_after: None,
            stop_after: None,
            level: SleepLevelPolicy::Auto,
            rehearse: RehearsalPolicy::Never,
        },
        replicas: 1,
        pinned: false,
        min_replicas: 0,
        dependencies: Vec::new(),
        priority: 0,
        max_concurrency: None,
        start_timeout: Millis::secs(60),
        explicit_memory: false,
        can_sleep: true,
        fingerprint: 1,
        eviction: None,
        queue: QueueOverrides::default(),
        variants: Vec::new(),
        may_evict: ScaleUpEviction::default(),
        scaled: false,
        saturation_thresholds: Thresholds::default(),
    }
}
