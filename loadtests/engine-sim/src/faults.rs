//! The faults that the engine injects on request. The command line and `/sim/faults` share one table of typed values,
//! so every fault can be set at start, enabled in the middle of a stream, and cleared again.

use std::{collections::BTreeMap, str::FromStr, sync::Mutex, sync::PoisonError, time::Duration};

use clap::ValueEnum;
use serde_json::Value;
use thiserror::Error;
use tokio::sync::watch;

use crate::units;

/// The faults by name; `README.md` says what each does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum SimFault {
    RefuseWake,
    HangWake,
    RefuseSleep,
    HangSleep,
    IgnoreSleep,
    Hang,
    StallStreams,
    DieMidStream,
    CutMidStream,
    FinMidStream,
    HealthWhileDead,
    CorruptAfterWake,
    IgnoreSigterm,
    LateMemory,
    Gzip,
    GzipAlways,
    EarlyHints,
    #[value(name = "100s")]
    Interim,
    Trailers,
    EarlyResponse,
    SlowStart,
    ExitAtStart,
    OomAtStart,
    WrongModelName,
    NoHealth,
    ErrorRate,
    Status,
    FailNext,
    LongPrefill,
    KvUse,
    QueueLength,
    NoMetrics,
    #[value(name = "429")]
    TooManyRequests,
    CloseDelimited,
    StaleKeepalive,
}

/// A fault's value, in the unit that its name implies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FaultAmount {
    On,
    Count(u64),
    Time(Duration),
    Share(f64),
}

/// One `NAME[=VALUE]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FaultSetting {
    pub fault: SimFault,
    pub amount: FaultAmount,
}

#[derive(Debug, Error)]
pub enum Error {
    #[error("there is no fault `{0}`")]
    Unknown(String),
    #[error("fault `{0}` needs a {1}")]
    Missing(String, &'static str),
    #[error("fault `{0}` cannot take `{1}`: it needs a {2}")]
    Invalid(String, String, &'static str),
}

impl SimFault {
    fn name(self) -> String {
        self.to_possible_value().map(|v| v.get_name().to_owned()).unwrap_or_default()
    }

    fn from_name(name: &str) -> Result<Self, Error> {
        <Self as ValueEnum>::from_str(name, false).map_err(|_| Error::Unknown(name.to_owned()))
    }

    /// A description of the value's type; `None` for a switch.
    fn value_kind(self) -> Option<&'static str> {
        match self {
            Self::DieMidStream | Self::CutMidStream | Self::FinMidStream => Some("number of events"),
            Self::FailNext | Self::QueueLength => Some("number of requests"),
            Self::ExitAtStart => Some("exit code"),
            Self::Status => Some("status code"),
            Self::LateMemory | Self::SlowStart | Self::LongPrefill | Self::StaleKeepalive => Some("duration"),
            Self::ErrorRate | Self::KvUse => Some("share from 0 to 1"),
            _ => None,
        }
    }

    fn amount(self, value: Option<&str>) -> Result<FaultAmount, Error> {
        let Some(wants) = self.value_kind() else {
            return Ok(FaultAmount::On);
        };
        let text = value.ok_or_else(|| Error::Missing(self.name(), wants))?;
        let invalid = || Error::Invalid(self.name(), text.to_owned(), wants);
        Ok(match wants {
            "duration" => FaultAmount::Time(units::duration(text).map_err(|_| invalid())?),
            "share from 0 to 1" => {
                let share: f64 = text.parse().map_err(|_| invalid())?;
                if !(0.0..=1.0).contains(&share) {
                    return Err(invalid());
                }
                FaultAmount::Share(share)
            }
            _ => FaultAmount::Count(text.parse().map_err(|_| invalid())?),
        })
    }
}

impl FromStr for FaultSetting {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let (name, value) = text.split_once('=').map_or((text, None), |(n, v)| (n, Some(v)));
        let fault = SimFault::from_name(name)?;
        Ok(Self { fault, amount: fault.amount(value)? })
    }
}

/// The active faults.
#[derive(Debug)]
pub(crate) struct ActiveFaults {
    set: Mutex<BTreeMap<SimFault, FaultAmount>>,
    /// Notifies of every change. Tasks stalled by a fault continue when it is cleared.
    changed: watch::Sender<()>,
}

impl ActiveFaults {
    pub(crate) fn new(settings: &[FaultSetting]) -> Self {
        let set = settings.iter().map(|s| (s.fault, s.amount)).collect();
        Self { set: Mutex::new(set), changed: watch::Sender::new(()) }
    }

    /// Applies `{"name": value | null}`, all or nothing.
    pub(crate) fn apply(&self, changes: &serde_json::Map<String, Value>) -> Result<(), Error> {
        let mut parsed = Vec::new();
        for (name, value) in changes {
            let fault = SimFault::from_name(name)?;
            let amount = match value {
                Value::Null | Value::Bool(false) => None,
                Value::Bool(true) => Some(fault.amount(None)?),
                Value::String(text) => Some(fault.amount(Some(text))?),
                other => Some(fault.amount(Some(&other.to_string()))?),
            };
            parsed.push((fault, amount));
        }
        let mut set = self.set.lock().unwrap_or_else(PoisonError::into_inner);
        for (fault, amount) in parsed {
            match amount {
                Some(amount) => set.insert(fault, amount),
                None => set.remove(&fault),
            };
        }
        drop(set);
        self.changed.send_replace(());
        Ok(())
    }

    pub(crate) fn is_on(&self, fault: SimFault) -> bool {
        self.get(fault).is_some()
    }

    pub(crate) fn count(&self, fault: SimFault) -> Option<u64> {
        self.get(fault).and_then(|a| if let FaultAmount::Count(n) = a { Some(n) } else { None })
    }

    pub(crate) fn time(&self, fault: SimFault) -> Option<Duration> {
        self.get(fault).and_then(|a| if let FaultAmount::Time(t) = a { Some(t) } else { None })
    }

    pub(crate) fn share(&self, fault: SimFault) -> Option<f64> {
        self.get(fault).and_then(|a| if let FaultAmount::Share(s) = a { Some(s) } else { None })
    }

    /// Decrements a counted fault. Returns whether any was left.
    pub(crate) fn take_one(&self, fault: SimFault) -> bool {
        let mut set = self.set.lock().unwrap_or_else(PoisonError::into_inner);
        match set.get_mut(&fault) {
            Some(FaultAmount::Count(left)) if *left > 0 => {
                *left -= 1;
                true
            }
            _ => false,
        }
    }

    /// Waits until none of `faults` is active.
    pub(crate) async fn wait_until_cleared(&self, faults: &[SimFault]) {
        // The common case, checked for each token of each stream.
        if !faults.iter().any(|f| self.is_on(*f)) {
            return;
        }
        let mut changed = self.changed.subscribe();
        while faults.iter().any(|f| self.is_on(*f)) {
            if changed.changed().await.is_err() {
                return;
            }
        }
    }

    fn get(&self, fault: SimFault) -> Option<FaultAmount> {
        self.set.lock().unwrap_or_else(PoisonError::into_inner).get(&fault).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_typed_by_their_name() {
        let parse = |text: &str| text.parse::<FaultSetting>();
        assert_eq!(parse("die-mid-stream=3").unwrap().amount, FaultAmount::Count(3));
        assert_eq!(parse("late-memory=1.5s").unwrap().amount, FaultAmount::Time(Duration::from_millis(1500)));
        assert_eq!(parse("429").unwrap().fault, SimFault::TooManyRequests);
        assert!(parse("die-mid-stream").is_err());
        assert!(parse("error-rate=2").is_err());
        assert!(parse("no-such-fault").is_err());
    }

    #[test]
    fn a_bad_change_changes_nothing() {
        let faults = ActiveFaults::new(&[]);
        let changes = serde_json::json!({"hang": true, "nonsense": true});
        assert!(faults.apply(changes.as_object().unwrap()).is_err());
        assert!(!faults.is_on(SimFault::Hang));
    }
}
