//! Changes to a recorded machine that a simulation tries out.

use std::str::FromStr;

use crate::{
    model::{Accelerator, FleetConfig, ModelName, ModelSpec},
    units::{Bytes, Millis},
};

/// Differences from the recorded configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineChanges {
    pub accelerators: Option<AcceleratorCount>,
    /// `turns.maxTurn`. A longer `turns.residency` is shortened to it.
    pub max_turn: Option<Millis>,
    /// Memory of an awake engine on each of its accelerators, by model.
    pub memory: Vec<(ModelName, Bytes)>,
    pub pinned: Vec<ModelName>,
}

/// A number of accelerators: absolute (`4`), or relative to the recorded one (`+2`, `-1`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AcceleratorCount {
    Exactly(usize),
    More(usize),
    Fewer(usize),
}

/// Why changes do not fit a configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("'{0}' is not a number of accelerators: write 4, +2 or -1")]
    UnreadableCount(String),
    #[error("the machine would have {0} accelerators: it must have from 1 to {MAX_ACCELERATORS}")]
    CountOutOfRange(usize),
    #[error("the machine has no accelerator that could be copied")]
    NoAccelerator,
    #[error("maxTurn must be longer than 0")]
    ZeroTurn,
    #[error("the configuration has no model '{model}': it has {}", .known.join(", "))]
    UnknownModel { model: ModelName, known: Vec<String> },
}

/// Far more than one machine has.
const MAX_ACCELERATORS: usize = 1000;

impl MachineChanges {
    /// Whether nothing changes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the configuration with these changes.
    ///
    /// # Errors
    /// If it has no such model, or not as many accelerators.
    pub fn apply(&self, configuration: &FleetConfig) -> Result<FleetConfig, Error> {
        let mut changed = configuration.clone();
        if let Some(count) = self.accelerators {
            count.apply(&mut changed.accelerators)?;
        }
        if let Some(max_turn) = self.max_turn {
            if max_turn == Millis::ZERO {
                return Err(Error::ZeroTurn);
            }
            let turns = &mut changed.settings.turns;
            (turns.max_turn, turns.residency) = (max_turn, turns.residency.min(max_turn));
        }
        for (model, awake) in &self.memory {
            let memory = &mut model_mut(&mut changed, model)?.memory;
            (memory.awake, memory.asleep) = (*awake, memory.asleep.min(*awake));
        }
        for model in &self.pinned {
            model_mut(&mut changed, model)?.pinned = true;
        }
        Ok(changed)
    }
}

fn model_mut<'a>(configuration: &'a mut FleetConfig, model: &ModelName) -> Result<&'a mut ModelSpec, Error> {
    let models = &mut configuration.models;
    match models.iter().position(|spec| spec.name == *model) {
        Some(index) => Ok(&mut models[index]),
        None => {
            let known = models.iter().map(|spec| spec.name.to_string()).collect();
            Err(Error::UnknownModel { model: model.clone(), known })
        }
    }
}

impl AcceleratorCount {
    /// Removes the last accelerators, or adds copies of the largest.
    fn apply(self, accelerators: &mut Vec<Accelerator>) -> Result<(), Error> {
        let count = match self {
            Self::Exactly(count) => count,
            Self::More(more) => accelerators.len().saturating_add(more),
            Self::Fewer(fewer) => accelerators.len().saturating_sub(fewer),
        };
        if !(1..=MAX_ACCELERATORS).contains(&count) {
            return Err(Error::CountOutOfRange(count));
        }
        let largest = accelerators.iter().max_by_key(|accelerator| accelerator.capacity).cloned();
        let largest = largest.ok_or(Error::NoAccelerator)?;
        accelerators.truncate(count);
        let mut number = 0;
        while accelerators.len() < count {
            number += 1;
            let id = format!("added-{number}").into();
            if accelerators.iter().all(|accelerator| accelerator.id != id) {
                accelerators.push(Accelerator { id, ..largest.clone() });
            }
        }
        Ok(())
    }
}

impl FromStr for AcceleratorCount {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let signed = (text.strip_prefix('+'), text.strip_prefix('-'));
        let (kind, digits): (fn(usize) -> Self, &str) = match signed {
            (Some(more), _) => (Self::More, more),
            (_, Some(fewer)) => (Self::Fewer, fewer),
            _ => (Self::Exactly, text),
        };
        let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
        let count = digits.parse::<usize>().ok().filter(|_| is_number);
        count.map(kind).ok_or_else(|| Error::UnreadableCount(text.to_owned()))
    }
}
