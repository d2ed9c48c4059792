//! Transitions: while an earlier decision takes effect, the model is not decided anew.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};

use super::{ModelAnalysis, Profile, RefusalCause, VariantState};
use crate::{model::VariantName, units::pluralize};

/// Why a model is in transition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Transition {
    /// The last decision is not carried out yet.
    Ordered { variant: VariantName, desired: u32, current: u32 },
    /// Replicas are starting or waking.
    Pending { variant: VariantName, pending: u32 },
    /// Not as many replicas report as there are. Only [`Profile::Doc`] asks.
    Reporting { variant: VariantName, reporting: u32, current: u32 },
}

impl Transition {
    /// Returns the first reason why the model is in transition, by the names of the variants.
    ///
    /// [`Profile::Doc`] and [`Profile::Latest`] ask only variants that report. Replicas whose starts keep failing are
    /// not waited for: they would keep the model in transition for as long as they fail.
    pub(super) fn find(
        profile: Profile,
        analysis: &ModelAnalysis,
        states: &BTreeMap<&VariantName, &VariantState>,
        refused: &BTreeMap<VariantName, RefusalCause>,
    ) -> Option<Self> {
        let of_pending = |state: &VariantState| {
            let keeps_failing = refused.get(&state.variant) == Some(&RefusalCause::StartFailed);
            if keeps_failing { None } else { Self::of_pending(state) }
        };
        if profile == Profile::Rouse {
            return states.values().find_map(|state| Self::of_orders(state).or_else(|| of_pending(state)));
        }
        analysis.variants.iter().find_map(|(variant, reported)| {
            let state = states.get(variant).copied();
            let ordered = state.and_then(Self::of_orders);
            if profile == Profile::Latest {
                return ordered.or_else(|| state.and_then(of_pending));
            }
            let current = state.map_or(0, |state| state.current);
            let reporting = reported.replicas;
            ordered.or_else(|| {
                let variant = variant.clone();
                (reporting != current).then_some(Self::Reporting { variant, reporting, current })
            })
        })
    }

    fn of_orders(state: &VariantState) -> Option<Self> {
        let (variant, desired, current) = (state.variant.clone(), state.held(), state.current);
        (desired != current).then_some(Self::Ordered { variant, desired, current })
    }

    fn of_pending(state: &VariantState) -> Option<Self> {
        let (variant, pending) = (state.variant.clone(), state.pending);
        (pending > 0).then_some(Self::Pending { variant, pending })
    }
}

impl fmt::Display for Transition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ordered { variant, desired, current } => {
                write!(f, "variant {variant} has {} of the desired {desired}", pluralize(current, "replica"))
            }
            Self::Pending { variant, pending } => {
                write!(f, "{} of variant {variant} not serving yet", pluralize(pending, "replica"))
            }
            Self::Reporting { variant, reporting, current } => {
                write!(f, "{reporting} of {} of variant {variant} report", pluralize(current, "replica"))
            }
        }
    }
}
