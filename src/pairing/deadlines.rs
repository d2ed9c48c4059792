//! The moments at which something may have to be done on a node without anything being seen.

use super::{
    node::{Call, Engine, Node, Retry, State},
    settings::Settings,
};
use crate::units::Tick;

/// The first of them after `now`.
pub(super) fn next(node: &Node, settings: &Settings, now: Tick) -> Option<Tick> {
    let of_engines = node.engines.values().flat_map(|engine| {
        let requester = engine.requester().and_then(|requester| node.requesters.get(requester));
        let deleting = requester.and_then(|requester| requester.seen.deleting);
        let hold = deleting.map(|since| since + settings.hold(&engine.sizes));
        of_engine(engine, settings).chain([hold, deleting.map(|since| since + settings.drain)])
    });
    let of_requesters = node.requesters.values().flat_map(|requester| {
        let calls = of_calls(requester.call.as_ref(), requester.retry);
        calls.into_iter().chain([Some(requester.not_before)])
    });
    let of_providers = node.providers.iter().filter(|(id, _)| id.is_launcher()).flat_map(|(id, provider)| {
        let calls = of_calls(provider.call.as_ref(), provider.retry);
        let idle = node.idle_since(id).map(|since| since + settings.idle);
        let unseen = (provider.deleting && provider.uid.is_none()).then(|| provider.retry.at + settings.end);
        calls.into_iter().chain([Some(provider.since + settings.start), idle, unseen])
    });
    let of_meters = node.accelerators.values().flat_map(|known| {
        let lost = known.observed.map(|(_, at)| at + settings.settle + settings.settle + settings.settle);
        let gone = known.last_gone.map(|at| at + settings.settle);
        let slept = known.last_sleep.map(|at| at + settings.settle);
        [slept, gone, lost.filter(|_| known.doubted), Some(known.not_before)]
    });
    let of_remains = node.remains.iter().map(|remains| remains.until(node, settings));
    let all =
        of_engines.chain(of_requesters).chain(of_providers).chain(of_meters).chain(of_remains).flatten();
    all.filter(|at| *at > now).min()
}

fn of_engine(engine: &Engine, settings: &Settings) -> impl Iterator<Item = Option<Tick>> {
    let state = match engine.state {
        State::Unknown | State::Creating | State::Starting => Some(engine.since + settings.start),
        State::Draining { until, .. } => Some(until),
        State::Ending { .. } => Some(engine.since + settings.end),
        _ => None,
    };
    let again = matches!(engine.state, State::Ending { .. }).then(|| engine.retry.at + settings.end);
    of_calls(engine.call.as_ref(), engine.retry).into_iter().chain([
        state,
        again,
        Some(engine.may_start_until),
        engine.stops_at(),
    ])
}

fn of_calls(call: Option<&Call>, retry: Retry) -> [Option<Tick>; 2] {
    [call.map(|call| call.until), Some(retry.at)]
}
