//! What the controller's unit tests share.

use rouse::{
    model::SleepLevelPolicy,
    pairing::{
        event::{EngineRecord, MemorySizes},
        ids::{EngineFingerprint, PairingEngineId, ProviderMode},
    },
    units::{Bytes, Generation, Tick},
};

/// The record of an engine with its own Pod, with these sizes on `GPU-1`, without a requester.
pub(super) fn engine_record(awake: Bytes, asleep: Bytes, host: Bytes) -> EngineRecord {
    EngineRecord {
        engine: PairingEngineId {
            mode: ProviderMode::Sleep,
            accelerators: ["GPU-1".into()].into(),
            fingerprint: EngineFingerprint(7),
        },
        generation: Generation(1),
        sizes: MemorySizes { awake, asleep, host },
        level: SleepLevelPolicy::Auto,
        stop_after: None,
        requester: None,
        last_used: Tick(0),
    }
}
