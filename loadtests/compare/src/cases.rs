//! The benchmark cases and their loads.

use std::{fmt, str::FromStr, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{
    load::{MAX_OPENED_PER_SECOND, RequestLoad, RequestPace, ResponseCheck, StreamLoad},
    peers::{ComparedProxy, MODEL, RunningProxy},
};

pub(crate) mod memory;
pub(crate) mod order;
pub(crate) mod run;
pub(crate) mod stall;
pub(crate) mod watch;
pub(crate) mod wrk;

/// A benchmark case: one row of measurements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum BenchCase {
    /// As many requests as one core can process.
    Saturated,
    /// A thousand requests a second, on a fixed schedule.
    Fixed,
    #[serde(rename = "streams-400")]
    Streams400,
    #[serde(rename = "streams-1000")]
    Streams1000,
    /// A thousand streams, with as many events a second as the four hundred.
    Opening,
    #[serde(rename = "streams-5000")]
    Streams5000,
    /// 200 streams without pauses.
    #[serde(rename = "streams-0ms")]
    Streams0,
    /// Long prompts.
    Bodies,
    /// Only a start.
    Start,
    /// One worker and two, on both cores.
    Workers,
    /// Streams while a very long prompt arrives.
    Stall,
}

/// The load of a case.
#[derive(Clone, Debug)]
pub(crate) enum CaseLoad {
    Requests(RequestLoad),
    Streams(StreamLoad),
    /// Streams, and one body of 200 MB beside them.
    Stall(StreamLoad),
    Nothing,
}

impl BenchCase {
    pub(crate) const ALL: [Self; 11] = [
        Self::Saturated,
        Self::Fixed,
        Self::Streams400,
        Self::Streams1000,
        Self::Opening,
        Self::Streams5000,
        Self::Streams0,
        Self::Bodies,
        Self::Start,
        Self::Workers,
        Self::Stall,
    ];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Saturated => "saturated",
            Self::Fixed => "fixed",
            Self::Streams400 => "streams-400",
            Self::Streams1000 => "streams-1000",
            Self::Opening => "opening",
            Self::Streams5000 => "streams-5000",
            Self::Streams0 => "streams-0ms",
            Self::Bodies => "bodies",
            Self::Start => "start",
            Self::Workers => "workers",
            Self::Stall => "stall",
        }
    }

    pub(crate) const fn title(self) -> &'static str {
        match self {
            Self::Saturated => "Requests, saturated (64 connections, 1 KB in, 600 B out)",
            Self::Fixed => "Requests, 1,000 a second",
            Self::Streams400 => "400 streams, an event each 20 ms",
            Self::Streams1000 => "1,000 streams, an event each 20 ms",
            Self::Opening => "1,000 streams, an event each 50 ms",
            Self::Streams5000 => "5,000 streams, an event each 200 ms",
            Self::Streams0 => "200 streams without a pause",
            Self::Bodies => "220 KB bodies, 150 in flight through 1 s of engine time",
            Self::Start => "Start",
            Self::Workers => "Requests, saturated, not pinned, 1 and 2 workers",
            Self::Stall => "20 streams at 20 ms while a 200 MB body comes in",
        }
    }

    /// Whether the case is meaningful for `target`.
    pub(crate) fn applies_to(self, target: ComparedProxy) -> bool {
        match (self, target) {
            // The saturated case shows the cost of its log.
            (case, ComparedProxy::SmgQuiet) => case == Self::Saturated,
            // It reaches at most a hundred requests a second; other cases would time out.
            (case, ComparedProxy::Litellm) => matches!(case, Self::Saturated | Self::Start),
            // The stub's only goal is its cost per event, compared with Rouse.
            (case, ComparedProxy::Stub) => matches!(case, Self::Streams400 | Self::Start),
            // Every goal is measured against nginx. The others only give orientation, for which these cases are enough:
            // all targets in all cases would take three quarters of an hour. (sglang-router also rewrites requests, so
            // the engine would not find its response time in a long one.)
            (
                Self::Fixed | Self::Streams1000 | Self::Opening | Self::Streams0 | Self::Bodies,
                ComparedProxy::Haproxy | ComparedProxy::Smg,
            ) => false,
            (Self::Start, target) => target != ComparedProxy::Direct,
            (Self::Workers, target) => matches!(target, ComparedProxy::Rouse | ComparedProxy::Nginx),
            (Self::Stall, target) => {
                matches!(target, ComparedProxy::Direct | ComparedProxy::Rouse | ComparedProxy::Nginx)
            }
            _ => true,
        }
    }

    /// The load, for about `lasts`.
    pub(crate) fn load(self, target: ComparedProxy, proxy: &RunningProxy, lasts: Duration) -> CaseLoad {
        let requests = |connections, pace| RequestLoad {
            proxy: proxy.address,
            model: MODEL.to_owned(),
            key: proxy.key.clone(),
            connections,
            body: 1024,
            engine_time: Duration::ZERO,
            pace,
            duration: lasts,
            check: check(target),
        };
        let streams = |streams, interval_ms, events| StreamLoad {
            proxy: proxy.address,
            model: MODEL.to_owned(),
            key: proxy.key.clone(),
            streams,
            interval: Duration::from_millis(interval_ms),
            events,
            opened_per_second: MAX_OPENED_PER_SECOND,
            check: check(target),
        };
        let events = |interval_ms: u64, at_least: u32| {
            u32::try_from(lasts.as_millis() / u128::from(interval_ms)).unwrap_or(u32::MAX).max(at_least)
        };
        match self {
            Self::Saturated | Self::Workers => CaseLoad::Requests(requests(64, RequestPace::Closed)),
            Self::Fixed => CaseLoad::Requests(requests(32, RequestPace::Open { per_second: 1000.0 })),
            Self::Streams400 => CaseLoad::Streams(streams(400, 20, events(20, 25))),
            // Two thousand new streams a second plus fifty thousand events of the open streams fill a core, and the
            // first event's latency would measure that backlog. All streams are open together for the time of a
            // measurement.
            Self::Streams1000 => CaseLoad::Streams(StreamLoad {
                opened_per_second: 500,
                ..streams(1000, 20, events(20, 50) + 100)
            }),
            // Fifty thousand events a second also fill the core of engine and reader, so the first event would wait
            // behind their bursts. This is as many events as in the case with four hundred streams.
            Self::Opening => CaseLoad::Streams(StreamLoad {
                opened_per_second: 500,
                ..streams(1000, 50, events(50, 20) + 40)
            }),
            // Opening them takes two and a half seconds; all must then be open together for a while.
            Self::Streams5000 => CaseLoad::Streams(streams(5000, 200, events(200, 10) + 20)),
            Self::Streams0 => {
                let events = (lasts.as_secs_f64() * 1000.0) as u32;
                CaseLoad::Streams(streams(200, 0, events.max(200)))
            }
            Self::Bodies => CaseLoad::Requests(RequestLoad {
                body: 220_000,
                engine_time: Duration::from_secs(1),
                duration: lasts + Duration::from_secs(1),
                ..requests(400, RequestPace::Open { per_second: 150.0 })
            }),
            Self::Stall => CaseLoad::Stall(streams(20, 20, events(20, 300))),
            Self::Start => CaseLoad::Nothing,
        }
    }
}

/// LiteLLM rewrites responses, so only their content is checked.
const fn check(target: ComparedProxy) -> ResponseCheck {
    match target {
        ComparedProxy::Litellm => ResponseCheck::Content,
        _ => ResponseCheck::Bytes,
    }
}

impl fmt::Display for BenchCase {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.pad(self.name())
    }
}

impl FromStr for BenchCase {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names = Self::ALL.map(Self::name).join(", ");
        Self::ALL
            .into_iter()
            .find(|case| case.name() == text)
            .ok_or_else(|| format!("no such case; the cases are {names}"))
    }
}
