//! The moments at which a node may need a plan without an event.

use super::{
    node::{PairingEngine, PairingEngineState, PairingNode, PendingCommand, RetryState},
    settings::PairingSettings,
};
use crate::units::Tick;

/// The earliest deadline after `now`.
pub(super) fn next(node: &PairingNode, settings: &PairingSettings, now: Tick) -> Option<Tick> {
    let of_engines = node.engines.values().flat_map(|engine| {
        let requester = engine.requester().and_then(|requester| node.requesters.get(requester));
        let deleting = requester.and_then(|requester| requester.observed.deleting_since);
        let hold = deleting.map(|since| since + settings.max_hold(&engine.sizes));
        let drain = requester.and_then(|requester| match engine.state {
            PairingEngineState::Draining { until, .. } => Some(requester.drain_end(engine.since, until)),
            _ => None,
        });
        let sleep = deleting.map(|since| since + settings.drain_timeout);
        of_engine(engine, settings).chain([hold, drain, sleep])
    });
    let of_requesters = node.requesters.values().flat_map(|requester| {
        let call_deadlines = of_calls(requester.pending.as_ref(), requester.retry);
        call_deadlines.into_iter().chain([Some(requester.not_before), requester.held_until(settings)])
    });
    let of_providers = node.providers.iter().filter(|(id, _)| id.is_launcher()).flat_map(|(id, provider)| {
        let call_deadlines = of_calls(provider.pending.as_ref(), provider.retry);
        let idle = node.idle_since(id).map(|since| since + settings.launcher_idle_timeout);
        let unseen =
            (provider.deleting && provider.uid.is_none()).then(|| provider.retry.at + settings.stop_timeout);
        call_deadlines.into_iter().chain([Some(provider.since + settings.start_timeout), idle, unseen])
    });
    let of_meters = node.accelerators.values().flat_map(|accelerator| {
        let lost = accelerator
            .last_reading
            .map(|(_, at)| at + settings.meter_lag + settings.meter_lag + settings.meter_lag);
        let gone_settled_at = accelerator.last_engine_gone.map(|at| at + settings.meter_lag);
        let slept = accelerator.last_sleep.map(|at| at + settings.meter_lag);
        [slept, gone_settled_at, lost.filter(|_| accelerator.needs_reading), Some(accelerator.not_before)]
    });
    let of_remains = node.vanished.iter().map(|vanished| vanished.until(node, settings));
    let all =
        of_engines.chain(of_requesters).chain(of_providers).chain(of_meters).chain(of_remains).flatten();
    all.filter(|at| *at > now).min()
}

fn of_engine(engine: &PairingEngine, settings: &PairingSettings) -> impl Iterator<Item = Option<Tick>> {
    let state = match engine.state {
        PairingEngineState::Unknown | PairingEngineState::Creating | PairingEngineState::Starting => {
            Some(engine.since + settings.start_timeout)
        }
        PairingEngineState::Draining { until, .. } => Some(until),
        PairingEngineState::Stopping { .. } => Some(engine.since + settings.stop_timeout),
        _ => None,
    };
    let again = matches!(engine.state, PairingEngineState::Stopping { .. })
        .then(|| engine.retry.at + settings.stop_timeout);
    of_calls(engine.pending.as_ref(), engine.retry).into_iter().chain([
        state,
        again,
        Some(engine.may_start_until),
        engine.cancelled_close.as_ref().map(|close| close.until),
        engine.stops_at(),
    ])
}

fn of_calls(call: Option<&PendingCommand>, retry: RetryState) -> [Option<Tick>; 2] {
    [call.map(|call| call.until), Some(retry.at)]
}
