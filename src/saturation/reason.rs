//! Targets, and the sentence that says why each is what it is.

use std::{cmp::Ordering, fmt};

use serde::{Deserialize, Serialize};

use super::{ModelAnalysis, RefusalCause, Role, ScaleUpCause, ThresholdError, Transition, VariantState};
use crate::{
    model::VariantName,
    units::{Millis, pluralize},
};

/// How many replicas of a variant should be awake.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Target {
    pub variant: VariantName,
    pub role: Role,
    pub replicas: u32,
    pub reason: TargetReason,
}

/// Why a target is what it is, with the numbers that decided. Shown as a sentence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum TargetReason {
    /// Enough capacity is spare, and not enough to take a replica away.
    Steady {
        spare_kv: f64,
        spare_queue: f64,
    },
    /// No replica reports.
    NoMetrics,
    /// The load of some replicas is unknown, which forbids a step down.
    Unknown {
        unknown: u32,
        replicas: u32,
    },
    Transition(Transition),
    /// A replica or more is added. The step is lost where the variant is at its ceiling.
    ScaleUp {
        cause: ScaleUpCause,
        spare_kv: f64,
        spare_queue: f64,
        from: u32,
        to: u32,
        shortage: u32,
    },
    /// A replica is taken away. The step is lost where the variant is at its floor.
    ScaleDown {
        remaining_spare_kv: f64,
        remaining_spare_queue: f64,
        from: u32,
        to: u32,
    },
    /// A step down that is not carried out yet is taken back, because the model needs the replica again.
    ScaleDownCancelled {
        desired: u32,
    },
    /// A replica would be added, but no variant can have one more.
    NoneToRaise {
        cause: ScaleUpCause,
    },
    /// A replica would be taken away, but each variant is at its floor.
    NoneToLower,
    /// A step down waits until it has been safe for long enough.
    Stabilizing {
        remaining: Millis,
    },
    Floor {
        min: u32,
    },
    Ceiling {
        max: u32,
    },
    /// The model sleeps, and this variant starts for the requests that wait.
    FromZero {
        parked: u32,
    },
    /// The model sleeps, requests wait, and no variant fits.
    NoneFits {
        parked: u32,
    },
    /// The model sleeps, and no request waits.
    Asleep,
    /// Nothing was requested for this long, so the model goes to zero.
    IdleToZero {
        idle_for: Millis,
    },
    /// One replica is kept, of the cheapest variant.
    KeepOne,
    /// Another autoscaler set the number.
    External,
    /// Accelerators are free for only this many of the wanted replicas.
    Limited {
        wanted: u32,
        to: u32,
        accelerator: String,
    },
    /// The variant gets no further replica for now.
    Refused {
        cause: RefusalCause,
    },
    /// The thresholds contradict themselves, so nothing is decided.
    BadThresholds {
        error: String,
    },
}

impl Target {
    pub(super) fn new(state: &VariantState, replicas: u32, reason: TargetReason) -> Self {
        Self { variant: state.variant.clone(), role: state.role, replicas, reason }
    }

    /// A target without a new decision, within the bounds of the variant.
    pub(super) fn held(state: &VariantState, reason: TargetReason) -> Self {
        Self::bounded(state, state.held(), reason)
    }

    /// A target within the bounds of the variant. If they change the number, they are the reason.
    pub(super) fn bounded(state: &VariantState, replicas: u32, reason: TargetReason) -> Self {
        let bounded = state.clamp(replicas);
        let reason = match bounded.cmp(&replicas) {
            Ordering::Greater => TargetReason::Floor { min: bounded },
            Ordering::Less => TargetReason::Ceiling { max: bounded },
            Ordering::Equal => reason,
        };
        Self::new(state, bounded, reason)
    }
}

impl TargetReason {
    pub(super) const fn steady(analysis: &ModelAnalysis) -> Self {
        Self::Steady { spare_kv: analysis.avg_spare_kv, spare_queue: analysis.avg_spare_queue }
    }

    pub(super) fn bad_thresholds(error: &ThresholdError) -> Self {
        Self::BadThresholds { error: error.to_string() }
    }
}

impl fmt::Display for ScaleUpCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "enough capacity is spare",
            Self::Kv => "too little KV cache is spare",
            Self::Queue => "the queues are too long",
            Self::Both => "too little KV cache is spare, and the queues are too long",
            Self::Saturated => "half of the replicas are saturated",
        })
    }
}

/// Mean spare capacity, as a part of a sentence.
struct Spare(f64, f64);

impl fmt::Display for Spare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} % of the KV cache and {:.1} places in the queue", self.0 * 100.0, self.1)
    }
}

impl fmt::Display for TargetReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Steady { spare_kv, spare_queue } => {
                write!(
                    f,
                    "no step is needed: each replica has on average {} to spare",
                    Spare(*spare_kv, *spare_queue)
                )
            }
            Self::NoMetrics => f.write_str("no replica reports its load, so nothing changes"),
            Self::Unknown { unknown, replicas } => {
                write!(
                    f,
                    "the load of {unknown} of {} is unknown, so none is taken away",
                    pluralize(replicas, "replica")
                )
            }
            Self::Transition(transition) => write!(f, "an earlier decision takes effect: {transition}"),
            Self::ScaleUp { cause, spare_kv, spare_queue, from, to, shortage } => {
                write!(f, "{cause}: ")?;
                if to > from {
                    write!(f, "{} more (from {from} to {to})", pluralize(to - from, "replica"))?;
                } else {
                    write!(f, "{} needed, but the ceiling is {to}", pluralize(shortage, "more replica"))?;
                }
                write!(f, "; spare on average: {}", Spare(*spare_kv, *spare_queue))
            }
            Self::ScaleDown { remaining_spare_kv, remaining_spare_queue, from, to } => {
                if to < from {
                    write!(f, "{} less (from {from} to {to})", pluralize(from - to, "replica"))?;
                } else {
                    write!(f, "a replica less would do, but the floor is {to}")?;
                }
                write!(f, "; spare without it: {}", Spare(*remaining_spare_kv, *remaining_spare_queue))
            }
            Self::ScaleDownCancelled { desired } => {
                write!(f, "the step down to {desired} is taken back: the load has risen")
            }
            Self::NoneToRaise { cause } => write!(f, "{cause}, but no variant can have one more replica"),
            Self::NoneToLower => f.write_str("a replica less would do, but no variant may have fewer"),
            Self::Stabilizing { remaining } => {
                write!(f, "a replica less would do, and is taken away if that still holds in {remaining}")
            }
            Self::Floor { min } => write!(f, "at least {} must run", pluralize(min, "replica")),
            Self::Ceiling { max } => write!(f, "at most {} may run", pluralize(max, "replica")),
            Self::FromZero { .. }
            | Self::NoneFits { .. }
            | Self::Asleep
            | Self::IdleToZero { .. }
            | Self::KeepOne => self.fmt_zero(f),
            Self::External => f.write_str("another autoscaler set the number"),
            Self::Limited { wanted, to, accelerator } => {
                let of_type = if accelerator.is_empty() { "" } else { " of type " };
                write!(f, "{wanted} wanted, but accelerators{of_type}{accelerator} are free for {to} only")
            }
            Self::Refused { cause } => write!(f, "{cause}"),
            Self::BadThresholds { error } => write!(f, "the thresholds are refused: {error}"),
        }
    }
}

impl TargetReason {
    /// The reasons of a model at zero, or on its way there or back.
    fn fmt_zero(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::FromZero { parked } => {
                write!(
                    f,
                    "the model sleeps and {} waiting: the cheapest variant that fits starts",
                    requests(*parked)
                )
            }
            Self::NoneFits { parked } => {
                write!(f, "the model sleeps and {} waiting, but no variant fits", requests(*parked))
            }
            Self::IdleToZero { idle_for } => write!(f, "nothing was requested for {idle_for}"),
            Self::KeepOne => f.write_str("one replica is kept, of the cheapest variant"),
            _ => f.write_str("the model sleeps, and no request waits"),
        }
    }
}

fn requests(parked: u32) -> String {
    format!("{} {}", pluralize(parked, "request"), if parked == 1 { "is" } else { "are" })
}
