//! Reads the tolerations of a Warmup.

use rouse::warmup::{TaintEffect, TolerationOperator, WarmupToleration};

use super::problems::Problems;
use crate::crd::warmup::TolerationSpec;

/// Reads the tolerations. The decisions see by them on which nodes a Pod would not be scheduled.
pub(super) fn tolerations(problems: &mut Problems, written: &[TolerationSpec]) -> Vec<WarmupToleration> {
    let indexed = written.iter().enumerate();
    indexed.map(|(index, written)| read(problems, &format!("tolerations[{index}]"), written)).collect()
}

fn read(problems: &mut Problems, at: &str, written: &TolerationSpec) -> WarmupToleration {
    let key = written.key.as_deref().filter(|key| !key.is_empty());
    let value = written.value.as_deref().unwrap_or_default();
    if let Some(key) = key {
        problems.check_label(at, key, value);
    }
    let operator = match written.operator.as_deref().filter(|operator| !operator.is_empty()) {
        None | Some("Equal") => TolerationOperator::Equal,
        Some("Exists") => TolerationOperator::Exists,
        Some(other) => {
            problems.add(format!("{at}.operator '{}' must be Equal or Exists", other.escape_debug()));
            TolerationOperator::Exists
        }
    };
    match operator {
        TolerationOperator::Equal if key.is_none() => {
            problems.add(format!("{at} has no key: set the key, or operator Exists to tolerate every taint"));
        }
        TolerationOperator::Exists if !value.is_empty() => {
            problems.add(format!("{at}.value is not for operator Exists: remove it, or use operator Equal"));
        }
        TolerationOperator::Equal | TolerationOperator::Exists => {}
    }
    let effect = match written.effect.as_deref().filter(|effect| !effect.is_empty()) {
        None => None,
        Some("NoSchedule") => Some(TaintEffect::NoSchedule),
        Some("PreferNoSchedule") => Some(TaintEffect::PreferNoSchedule),
        Some("NoExecute") => Some(TaintEffect::NoExecute),
        Some(other) => {
            problems.add(format!(
                "{at}.effect '{}' must be NoSchedule, PreferNoSchedule or NoExecute",
                other.escape_debug()
            ));
            None
        }
    };
    if written.toleration_seconds.is_some() && effect != Some(TaintEffect::NoExecute) {
        problems.add(format!("{at}.tolerationSeconds is only for effect NoExecute: remove it"));
    }
    WarmupToleration { key: key.map(str::to_owned), operator, value: value.to_owned(), effect }
}
