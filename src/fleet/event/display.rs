//! Texts of events, for golden scenarios and for people who read a journal.
//!
//! Apart from the events, because a text is no input of any decision.

use std::fmt;

use super::{CanaryVerdict, Event, GatewayDemand, OperatorAction};
use crate::{model::AcceleratorId, units::pluralize};

/// Text for golden scenarios and for people who read a journal. The generation is left out: an engine has one at a
/// time.
impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Configured { configuration } => {
                let plural = |n: usize| if n == 1 { "" } else { "s" };
                let (models, gpus) = (configuration.models.len(), configuration.accelerators.len());
                write!(f, "configured: {models} model{}, {gpus} accelerator{}", plural(models), plural(gpus))
            }
            Self::MeasurementsRestored { model, variant, .. } if variant.is_default() => {
                write!(f, "measurements of {model} restored")
            }
            Self::MeasurementsRestored { model, variant, .. } => {
                write!(f, "measurements of variant {variant} of {model} restored")
            }
            Self::FailureRestored { engine, at, failure, .. } => {
                write!(f, "failure of {engine} restored: {}", failure.describe(*at))
            }
            Self::AdoptionDone => f.write_str("adoption of running engines is complete"),
            Self::Arrived { waiter } => {
                let kind = if waiter.stream { "stream" } else { "request" };
                write!(f, "waiter {} arrives: a {kind} for {}", waiter.id.0, waiter.model)
            }
            Self::Left { waiter } => write!(f, "waiter {} leaves", waiter.0),
            Self::GateSampled { engine, leases, .. } => {
                write!(f, "{engine} has {leases} lease{}", if *leases == 1 { "" } else { "s" })
            }
            Self::EjectionChanged { engine, until: Some(_), .. } => {
                write!(f, "{engine} is ejected: its requests fail")
            }
            Self::EjectionChanged { engine, .. } => write!(f, "{engine} is no longer ejected"),
            Self::SaturationChanged { engine, limit: Some(limit), .. } => {
                write!(f, "{engine} is saturated: {limit}")?;
                limit.leases.map_or(Ok(()), |leases| {
                    write!(f, "; it gets at most {} of this gateway", pluralize(leases, "request"))
                })
            }
            Self::SaturationChanged { engine, .. } => write!(f, "{engine} is no longer saturated"),
            Self::StubGateClosed { engine, .. } => {
                write!(f, "the stub of {engine} reports a closed gate")
            }
            Self::StubGateOpened { engine, .. } => write!(f, "the stub of {engine} opened its gate"),
            Self::Served { model, key, tokens } => write!(f, "{model} served {tokens} tokens to {key}"),
            Self::FairnessRestored { model, .. } => write!(f, "fairness counters of {model} restored"),
            Self::StateRestored { state } => write!(f, "state restored: {}", state.summary()),
            Self::RemoteDemand { gateway, demand: Some(demand) } => {
                let sum =
                    |of: fn(&GatewayDemand) -> u32| demand.values().map(|d| u64::from(of(d))).sum::<u64>();
                let (waiting, in_flight) = (sum(|d| d.waiting), sum(|d| d.in_flight));
                write!(f, "{gateway} reports {waiting} waiting and {in_flight} in-flight requests")
            }
            Self::RemoteDemand { gateway, demand: None } => write!(f, "{gateway} is gone"),
            Self::LeadershipChanged { leads: true } => f.write_str("this gateway leads"),
            Self::LeadershipChanged { .. } => f.write_str("another gateway leads"),
            Self::ApiServerChanged { answers: true } => f.write_str("the cluster's API server answers"),
            Self::ApiServerChanged { .. } => f.write_str("the cluster's API server does not answer"),
            Self::PeersChanged { exist: true } => f.write_str("other gateways exist"),
            Self::PeersChanged { .. } => f.write_str("no other gateway exists"),
            Self::GenerationFloor { generation } => {
                write!(f, "new engine generations start above {generation}")
            }
            Self::Published { engine, published: Some(published), .. } => {
                write!(f, "{engine} is published as {:?}", published.state)
            }
            Self::Published { engine, .. } => write!(f, "{engine} is published as not running"),
            Self::Drained { engine, .. } => write!(f, "{engine} is drained"),
            Self::Canary { engine, verdict, .. } => write!(f, "the first answer of {engine}: {verdict}"),
            Self::Placed { engine, accelerators, .. } => {
                let names: Vec<_> = accelerators.iter().map(AcceleratorId::as_str).collect();
                write!(f, "{engine} is placed on {}", names.join(" and "))
            }
            Self::Conflict { engine, .. } => {
                write!(f, "{engine} is not placed: another reservation came first")
            }
            Self::Started { engine, .. } => write!(f, "{engine} runs"),
            Self::Profiled { engine, .. } => write!(f, "{engine} has measured its memory"),
            Self::Ready { engine, .. } => write!(f, "{engine} is ready"),
            Self::Slept { engine, level, .. } => write!(f, "{engine} sleeps at level {}", level.number()),
            Self::SleepFailed { engine, cause, .. } => write!(f, "{engine} failed to fall asleep: {cause}"),
            Self::WakeFailed { engine, cause, .. } => write!(f, "{engine} failed to wake: {cause}"),
            Self::StartFailed { engine, cause, .. } => write!(f, "{engine} failed to start: {cause}"),
            Self::Gone { engine, cause, .. } => write!(f, "{engine} is gone: {cause}"),
            Self::Diagnostics { engine, diagnostics: symptoms, .. } => {
                write!(f, "{engine} does not serve{}", symptoms.describe())
            }
            Self::Health { engine, ok, progressed, .. } => {
                let health = if *ok { "healthy" } else { "not healthy" };
                let progress = if *progressed { ", makes progress" } else { "" };
                write!(f, "{engine} is {health}{progress}")
            }
            Self::MeterRead { accelerator, used, .. } => write!(f, "{accelerator} has {used} in use"),
            Self::UsageObserved { engine, used, .. } => write!(f, "{engine} uses {used} of an accelerator"),
            Self::ResidueMeasured { engine, bytes, .. } => {
                write!(f, "{engine} keeps {bytes} of each accelerator while it sleeps")
            }
            Self::UsageAfterSleep { engine, used, .. } => {
                write!(f, "{engine} has fallen asleep, and these are in use:")?;
                used.iter().try_for_each(|(accelerator, used)| write!(f, " {used} on {accelerator}"))
            }
            Self::AcceleratorLost { accelerator } => write!(f, "{accelerator} is lost"),
            Self::AcceleratorRecovered { accelerator } => write!(f, "{accelerator} recovered"),
            Self::Adopted { engine, found, .. } => {
                let state = match found.asleep {
                    Some(level) => format!("asleep at level {}", level.number()),
                    None if found.ready => "awake".to_owned(),
                    None => "not ready".to_owned(),
                };
                write!(f, "{engine} was found running, {state}")
            }
            Self::OperatorRequest { operation, model, action: order } => {
                write!(f, "order {}: {order} {model}", operation.0)
            }
            Self::Desired { model, variant, replicas, reason } if variant.is_default() => {
                write!(f, "{model} should have {}: {reason}", pluralize(replicas, "engine"))
            }
            Self::Desired { model, variant, replicas, reason } => {
                write!(f, "{model} should have {} of {variant}: {reason}", pluralize(replicas, "engine"))
            }
            Self::Shutdown { stop_engines: true } => f.write_str("shutdown: the engines stop"),
            Self::Shutdown { .. } => f.write_str("shutdown: the engines keep running"),
        }
    }
}

impl fmt::Display for CanaryVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Passed => f.write_str("passed"),
            Self::Failed(cause) => write!(f, "failed: {cause}"),
            Self::Inconclusive => f.write_str("inconclusive"),
        }
    }
}

impl fmt::Display for OperatorAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Wake => f.write_str("wake"),
            Self::Sleep { level: None } => f.write_str("sleep"),
            Self::Sleep { level: Some(level) } => write!(f, "sleep at level {}", level.number()),
            Self::Stop => f.write_str("stop"),
            Self::Pin => f.write_str("pin"),
            Self::Unpin => f.write_str("unpin"),
        }
    }
}
