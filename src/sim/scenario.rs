//! What a world is made of: configuration, demand, faults, and deeds at fixed times.

pub(super) mod chance;
pub mod scripts;

use super::{client::Request, demand::Source};
use crate::{
    fleet::event::Order,
    model::{AcceleratorId, Configuration, EngineId, ModelName},
    units::{Bytes, Millis, Tick},
};

/// The beginning of a world. The same scenario always runs the same way.
#[derive(Clone, Debug)]
pub struct Scenario {
    pub name: String,
    pub seed: u64,
    pub start: Tick,
    pub configuration: Configuration,
    pub nature: Nature,
    pub faults: Faults,
    pub sources: Vec<Source>,
    pub deeds: Vec<(Millis, Deed)>,
}

/// How the simulated hardware behaves when nothing is wrong.
#[derive(Clone, Copy, Debug)]
pub struct Nature {
    /// From the launch until health answers.
    pub start: (Millis, Millis),
    pub wake: (Millis, Millis),
    pub sleep: (Millis, Millis),
    pub stop: (Millis, Millis),
    pub first_byte: (Millis, Millis),
    /// How long a `Placed` takes; zero on one machine.
    pub placing: (Millis, Millis),
    /// From the confirmed sleep until the memory is free, when it is not late.
    pub freeing: (Millis, Millis),
    /// Awake engines are probed this often.
    pub health: Millis,
    /// The meter tells which engine holds what.
    pub per_process: bool,
    /// Meters are also read unasked, this often.
    pub meter_period: Option<Millis>,
}

/// How often what goes wrong: probabilities per occasion, or mean times between.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    pub exit_at_start: f64,
    pub out_of_memory_at_start: f64,
    pub start_failed: f64,
    pub hang_at_start: f64,
    pub canary_fails: f64,
    pub wake_refused: f64,
    pub wake_hangs: f64,
    pub sleep_refused: f64,
    pub sleep_hangs: f64,
    /// The order to sleep is taken, and the engine stays awake.
    pub sleep_denied: f64,
    pub late_memory: f64,
    /// The residue turns out larger than declared.
    pub fat_residue: f64,
    pub ignores_term: f64,
    pub conflict: f64,
    /// The client leaves in the instant in which it is granted its lease.
    pub leaves_at_grant: f64,
    /// Mean times between, over the whole world.
    pub dies: Option<Millis>,
    pub hangs: Option<Millis>,
    pub accelerator_lost: Option<Millis>,
    pub foreign_memory: Option<Millis>,
    pub reload: Option<Millis>,
    pub order: Option<Millis>,
    pub restart: Option<Millis>,
    /// A stub closes its gate.
    pub gated: Option<Millis>,
}

/// Something that happens to the world at a fixed time.
#[derive(Clone, Debug)]
pub enum Deed {
    Ask(Request),
    Order(ModelName, Order),
    /// The engine's next wake is refused.
    RefuseWake(EngineId),
    /// The engine's next sleep gives its memory back this late.
    LateMemory(EngineId, Millis),
    Die(EngineId),
    Hang(EngineId),
    /// The stub in front of the engine lets nobody in from now on (`true`), or everybody.
    Gate(EngineId, bool),
    Lose(AcceleratorId),
    Return(AcceleratorId),
    /// Somebody else uses so much of the accelerator; zero ends it.
    Foreign(AcceleratorId, Bytes),
    Reload(Box<Configuration>),
    /// The gateway is killed and starts again.
    Restart,
    Shutdown {
        stop_engines: bool,
    },
}

impl Default for Nature {
    fn default() -> Self {
        Self {
            start: (Millis::secs(8), Millis::secs(8)),
            wake: (Millis(800), Millis(800)),
            sleep: (Millis(400), Millis(400)),
            stop: (Millis(300), Millis(300)),
            first_byte: (Millis(40), Millis(40)),
            placing: (Millis::ZERO, Millis::ZERO),
            freeing: (Millis(5), Millis(5)),
            health: Millis::secs(5),
            per_process: true,
            meter_period: None,
        }
    }
}

impl Scenario {
    /// A quiet world: no demand, no faults.
    #[must_use]
    pub fn new(name: &str, configuration: Configuration) -> Self {
        Self {
            name: name.to_owned(),
            seed: 0,
            start: Tick(1_000_000_000),
            configuration,
            nature: Nature::default(),
            faults: Faults::default(),
            sources: Vec::new(),
            deeds: Vec::new(),
        }
    }

    /// Adds a deed at a time after the start.
    #[must_use]
    pub fn at(mut self, after: Millis, deed: Deed) -> Self {
        self.deeds.push((after, deed));
        self
    }
}
