//! Scenarios: configuration, demand, faults, and actions at fixed times.

pub(super) mod random_scenario;
pub mod scripts;

use super::{client::SimulatedRequest, demand::RequestSource};
use crate::{
    fleet::event::OperatorAction,
    model::{AcceleratorId, EngineId, FleetConfig, ModelName, VariantName},
    units::{Bytes, Millis, Tick},
};

/// The initial state of a world. The same scenario always runs the same way.
#[derive(Clone, Debug)]
pub struct Scenario {
    pub name: String,
    pub seed: u64,
    pub start: Tick,
    pub configuration: FleetConfig,
    pub hardware: HardwareProfile,
    pub fault_rates: FaultRates,
    pub sources: Vec<RequestSource>,
    pub actions: Vec<(Millis, ScenarioAction)>,
}

/// Timing of the simulated hardware without faults.
#[derive(Clone, Copy, Debug)]
pub struct HardwareProfile {
    /// From the launch until the health check passes.
    pub start_time: (Millis, Millis),
    pub wake_time: (Millis, Millis),
    pub sleep_time: (Millis, Millis),
    pub stop_time: (Millis, Millis),
    pub first_byte: (Millis, Millis),
    /// How long a `Placed` takes; zero on one machine.
    pub placement_time: (Millis, Millis),
    /// From the confirmed sleep until the memory is free, unless it is late.
    pub release_time: (Millis, Millis),
    /// Interval between health probes of awake engines.
    pub health_interval: Millis,
    /// The meter attributes memory to engines.
    pub meter_per_process: bool,
    /// Interval of unrequested meter readings.
    pub meter_period: Option<Millis>,
}

/// Rates of faults: probabilities per occasion, or mean times between faults.
#[derive(Clone, Copy, Debug, Default)]
pub struct FaultRates {
    pub exit_at_start: f64,
    pub out_of_memory_at_start: f64,
    pub start_failed: f64,
    pub hang_at_start: f64,
    pub canary_fails: f64,
    pub wake_refused: f64,
    pub wake_hangs: f64,
    pub sleep_refused: f64,
    pub sleep_hangs: f64,
    /// The engine accepts the sleep command and stays awake.
    pub sleep_denied: f64,
    pub late_memory: f64,
    /// The residue is larger than declared.
    pub oversized_residue: f64,
    pub ignores_term: f64,
    pub reservation_conflict: f64,
    /// The client leaves at the moment it is granted its lease.
    pub leaves_at_grant: f64,
    /// Mean times between, over the whole world.
    pub engine_dies: Option<Millis>,
    pub engine_hangs: Option<Millis>,
    pub accelerator_lost: Option<Millis>,
    pub foreign_memory: Option<Millis>,
    pub reload: Option<Millis>,
    pub operator_action: Option<Millis>,
    pub gateway_restart: Option<Millis>,
    /// A stub closes its gate.
    pub stub_gate_closes: Option<Millis>,
}

/// A scripted action on the world.
#[derive(Clone, Debug)]
pub enum ScenarioAction {
    SendRequest(SimulatedRequest),
    OperatorAction(ModelName, OperatorAction),
    /// This many engines of the variant should run while the model is in use, which the configuration says is scaled.
    SetTarget(ModelName, VariantName, u32),
    /// The engine's next wake is refused.
    RefuseNextWake(EngineId),
    /// The engine's next sleep releases its memory this late.
    DelayNextRelease(EngineId, Millis),
    KillEngine(EngineId),
    HangEngine(EngineId),
    /// The engine's stub closes its gate (`true`) or opens it.
    SetStubGateClosed(EngineId, bool),
    LoseAccelerator(AcceleratorId),
    RestoreAccelerator(AcceleratorId),
    /// A foreign process uses this much of the accelerator; zero ends it.
    SetForeignMemory(AcceleratorId, Bytes),
    ReloadConfig(Box<FleetConfig>),
    /// The gateway is killed and starts again.
    RestartGateway,
    Shutdown {
        stop_engines: bool,
    },
}

impl Default for HardwareProfile {
    fn default() -> Self {
        Self {
            start_time: (Millis::secs(8), Millis::secs(8)),
            wake_time: (Millis(800), Millis(800)),
            sleep_time: (Millis(400), Millis(400)),
            stop_time: (Millis(300), Millis(300)),
            first_byte: (Millis(40), Millis(40)),
            placement_time: (Millis::ZERO, Millis::ZERO),
            release_time: (Millis(5), Millis(5)),
            health_interval: Millis::secs(5),
            meter_per_process: true,
            meter_period: None,
        }
    }
}

impl Scenario {
    /// A quiet world: no demand, no faults.
    #[must_use]
    pub fn new(name: &str, configuration: FleetConfig) -> Self {
        Self {
            name: name.to_owned(),
            seed: 0,
            start: Tick(1_000_000_000),
            configuration,
            hardware: HardwareProfile::default(),
            fault_rates: FaultRates::default(),
            sources: Vec::new(),
            actions: Vec::new(),
        }
    }

    /// Adds an action at a time after the start.
    #[must_use]
    pub fn at(mut self, after: Millis, action: ScenarioAction) -> Self {
        self.actions.push((after, action));
        self
    }
}
