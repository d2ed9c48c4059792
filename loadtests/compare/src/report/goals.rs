//! What is promised, and whether it was kept.

use crate::{
    cases::Case,
    peers::Target::{self, Direct, Nginx, Rouse, Smg, Stub},
    report::{Cell, Results},
};

/// A kept, half kept or broken promise. What was not measured is not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Met,
    Acceptable,
    Missed,
    Unmeasured,
}

impl Verdict {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Met => "met",
            Self::Acceptable => "acceptable",
            Self::Missed => "missed",
            Self::Unmeasured => "not measured",
        }
    }
}

/// How a figure is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    /// So many times the other's.
    Times,
    Micros,
    Millis,
    KiB,
    MB,
    PerSecond,
    Count,
}

/// One promise.
pub(crate) struct Goal {
    pub(crate) what: &'static str,
    /// What is judged.
    pub(crate) unit: Unit,
    pub(crate) goal: f64,
    pub(crate) acceptable: f64,
    /// More is better.
    pub(crate) at_least: bool,
    /// The figure that is judged, of each round.
    judged: fn(&Results) -> Vec<f64>,
    /// The figures behind it, in their own unit: ours, and whose beside it.
    pub(crate) behind: Option<Behind>,
}

/// Absolute figures of Rouse and of the one it is compared with.
pub(crate) struct Behind {
    pub(crate) unit: Unit,
    pub(crate) case: Case,
    pub(crate) other: Target,
    pub(crate) workers: (usize, usize),
    pub(crate) figure: fn(&Cell) -> Option<f64>,
}

/// Over rounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl Spread {
    pub(crate) fn of(mut figures: Vec<f64>) -> Option<Self> {
        figures.sort_by(f64::total_cmp);
        let (&min, &max) = (figures.first()?, figures.last()?);
        let (low, high) = (figures.get((figures.len() - 1) / 2)?, figures.get(figures.len() / 2)?);
        Some(Self { median: f64::midpoint(*low, *high), min, max })
    }
}

impl Goal {
    pub(crate) fn measured(&self, results: &Results) -> Option<Spread> {
        Spread::of((self.judged)(results))
    }

    pub(crate) fn verdict(&self, measured: Option<f64>) -> Verdict {
        let Some(figure) = measured else { return Verdict::Unmeasured };
        let keeps = |limit: f64| if self.at_least { figure >= limit } else { figure <= limit };
        match (keeps(self.goal), keeps(self.acceptable)) {
            (true, _) => Verdict::Met,
            (_, true) => Verdict::Acceptable,
            _ => Verdict::Missed,
        }
    }
}

/// All promises, in the order of the table.
pub(crate) fn goals() -> Vec<Goal> {
    let mut goals = speed();
    goals.extend(delays());
    goals.extend(footprint());
    goals
}

fn speed() -> Vec<Goal> {
    let per_unit = |what, case, acceptable, judged| Goal {
        what,
        unit: Unit::Times,
        goal: 1.0,
        acceptable,
        at_least: false,
        judged,
        behind: Some(Behind {
            unit: Unit::Micros,
            case,
            other: Nginx,
            workers: (1, 1),
            figure: Cell::cpu_per_unit,
        }),
    };
    vec![
        per_unit("CPU per request, saturated", Case::Saturated, 1.15, |results| {
            paired(results, Case::Saturated, Cell::cpu_per_unit)
        }),
        per_unit("CPU per event, 400 streams at 20 ms", Case::Streams400, 1.1, |results| {
            paired(results, Case::Streams400, Cell::cpu_per_unit)
        }),
        per_unit("CPU per event, 5,000 streams at 200 ms", Case::Streams5000, 1.1, |results| {
            paired(results, Case::Streams5000, Cell::cpu_per_unit)
        }),
        Goal {
            what: "CPU per event of the stub, 400 streams at 20 ms, against the gateway",
            unit: Unit::Times,
            goal: 1.0,
            acceptable: 1.1,
            at_least: false,
            judged: |results| beside(results, Case::Streams400, (Stub, Rouse), Cell::cpu_per_unit),
            behind: Some(Behind {
                unit: Unit::Micros,
                case: Case::Streams400,
                other: Stub,
                workers: (1, 1),
                figure: Cell::cpu_per_unit,
            }),
        },
        Goal {
            what: "Requests per second of a core, against sglang-router",
            unit: Unit::Times,
            goal: 6.0,
            acceptable: 4.0,
            at_least: true,
            judged: |results| ratios(results, Case::Saturated, Smg, Cell::per_second),
            behind: Some(Behind {
                unit: Unit::PerSecond,
                case: Case::Saturated,
                other: Smg,
                workers: (1, 1),
                figure: Cell::per_second,
            }),
        },
        Goal {
            what: "CPU per request, 2 workers against 1",
            unit: Unit::Times,
            goal: 1.05,
            acceptable: 1.1,
            at_least: false,
            judged: |results| {
                rounds(results, |round| {
                    let of = |workers| {
                        results
                            .with(Case::Workers, Rouse, workers)
                            .find(|cell| cell.round == round)?
                            .cpu_per_unit()
                    };
                    Some(of(2)? / of(1)?)
                })
            },
            behind: Some(Behind {
                unit: Unit::Micros,
                case: Case::Workers,
                other: Rouse,
                workers: (2, 1),
                figure: Cell::cpu_per_unit,
            }),
        },
    ]
}

fn delays() -> Vec<Goal> {
    let first_byte = |what, case, judged| Goal {
        what,
        unit: Unit::Millis,
        goal: 1.0,
        acceptable: 2.0,
        at_least: false,
        judged,
        behind: Some(Behind {
            unit: Unit::Millis,
            case,
            other: Nginx,
            workers: (1, 1),
            figure: latency_p99_ms,
        }),
    };
    let lag = |what, case, acceptable_goal: (f64, f64), judged| Goal {
        what,
        unit: Unit::Times,
        goal: acceptable_goal.0,
        acceptable: acceptable_goal.1,
        at_least: false,
        judged,
        behind: Some(Behind { unit: Unit::Millis, case, other: Nginx, workers: (1, 1), figure: lag_p99_ms }),
    };
    vec![
        lag("Event lag p99 at saturation, 200 streams at 0 ms", Case::Streams0, (1.0, 1.5), |results| {
            paired(results, Case::Streams0, lag_p99_ms)
        }),
        first_byte("Added time to first byte p99, 1,000 streams", Case::Opening, |results| {
            added(results, Case::Opening, latency_p99_ms)
        }),
        first_byte("Added time to first byte p99, 5,000 streams", Case::Streams5000, |results| {
            added(results, Case::Streams5000, latency_p99_ms)
        }),
        lag("Added event lag p99, 1,000 streams at 20 ms", Case::Streams1000, (1.5, 2.5), |results| {
            added_ratio(results, Case::Streams1000, lag_p99_ms)
        }),
        Goal {
            what: "Added p50 of 220 KB bodies, 150 in flight",
            unit: Unit::Millis,
            goal: 1.0,
            acceptable: 2.0,
            at_least: false,
            judged: |results| added(results, Case::Bodies, latency_p50_ms),
            behind: Some(Behind {
                unit: Unit::Millis,
                case: Case::Bodies,
                other: Nginx,
                workers: (1, 1),
                figure: latency_p50_ms,
            }),
        },
        Goal {
            what: "Added to a stream's longest stall while a 200 MB body is parsed on its core",
            unit: Unit::Millis,
            goal: 5.0,
            acceptable: 20.0,
            at_least: false,
            judged: |results| added(results, Case::Stall, longest_lag_ms),
            behind: Some(Behind {
                unit: Unit::Millis,
                case: Case::Stall,
                other: Nginx,
                workers: (1, 1),
                figure: longest_lag_ms,
            }),
        },
    ]
}

fn footprint() -> Vec<Goal> {
    let of_start = |what, unit, (goal, acceptable): (f64, f64), judged, figure| Goal {
        what,
        unit,
        goal,
        acceptable,
        at_least: false,
        judged,
        behind: Some(Behind { unit, case: Case::Start, other: Nginx, workers: (1, 1), figure }),
    };
    let alone = |what, unit, (goal, acceptable): (f64, f64), judged| Goal {
        what,
        unit,
        goal,
        acceptable,
        at_least: false,
        judged,
        behind: None,
    };
    vec![
        Goal {
            what: "Memory of an open stream, 5,000 of them",
            unit: Unit::KiB,
            goal: 4.0,
            acceptable: 16.0,
            at_least: false,
            judged: |results| results.of(Case::Streams5000, Rouse).filter_map(stream_kib).collect(),
            behind: Some(Behind {
                unit: Unit::KiB,
                case: Case::Streams5000,
                other: Nginx,
                workers: (1, 1),
                figure: stream_kib,
            }),
        },
        of_start("Memory when idle", Unit::MB, (15.0, 20.0), |results| each_start(results, idle_mb), idle_mb),
        of_start(
            "From start to listening",
            Unit::Millis,
            (100.0, 200.0),
            |results| each_start(results, listening_ms),
            listening_ms,
        ),
        alone("Stripped gateway", Unit::MB, (20.0, 30.0), |results| {
            results.binary.map(|bytes| bytes as f64 / 1e6).into_iter().collect()
        }),
        alone("Corrupted or reordered events and answers, whole run", Unit::Count, (0.0, 0.0), |results| {
            let ours = || results.cells.iter().filter(|cell| matches!(cell.target, Rouse | Stub));
            let corrupted: u64 = ours().map(|cell| cell.corrupted).sum();
            ours().next().map(|_| corrupted as f64).into_iter().collect()
        }),
    ]
}

fn each_start(results: &Results, figure: fn(&Cell) -> Option<f64>) -> Vec<f64> {
    results.of(Case::Start, Rouse).filter_map(figure).collect()
}

fn idle_mb(cell: &Cell) -> Option<f64> {
    Some(cell.idle_bytes as f64 / 1e6)
}

fn listening_ms(cell: &Cell) -> Option<f64> {
    Some(cell.listening_ms)
}

fn stream_kib(cell: &Cell) -> Option<f64> {
    Some(cell.per_stream()? / 1024.0)
}

fn latency_p50_ms(cell: &Cell) -> Option<f64> {
    (cell.latency_us.count > 0).then(|| cell.latency_us.p50 as f64 / 1e3)
}

fn latency_p99_ms(cell: &Cell) -> Option<f64> {
    (cell.latency_us.count > 0).then(|| cell.latency_us.p99 as f64 / 1e3)
}

fn lag_p99_ms(cell: &Cell) -> Option<f64> {
    (cell.lag_us.count > 0).then(|| cell.lag_us.p99 as f64 / 1e3)
}

fn longest_lag_ms(cell: &Cell) -> Option<f64> {
    (cell.lag_us.count > 0).then(|| cell.lag_us.max as f64 / 1e3)
}

/// Rouse's figure over that of nginx beside it.
fn paired(results: &Results, case: Case, figure: fn(&Cell) -> Option<f64>) -> Vec<f64> {
    beside(results, case, (Rouse, Nginx), figure)
}

/// A target's figure over that of another beside it, group by group.
pub(crate) fn beside(
    results: &Results,
    case: Case,
    (target, other): (Target, Target),
    figure: fn(&Cell) -> Option<f64>,
) -> Vec<f64> {
    results
        .of(case, target)
        .filter_map(|cell| {
            let beside = results.of(case, other).find(|other| other.group == cell.group)?;
            let other = figure(beside)?;
            (other > 0.0).then_some(figure(cell)? / other)
        })
        .collect()
}

/// Rouse's figure over another's of the same round.
fn ratios(results: &Results, case: Case, other: Target, figure: fn(&Cell) -> Option<f64>) -> Vec<f64> {
    rounds(results, |round| {
        let of = |target| results.of(case, target).find(|cell| cell.round == round).and_then(figure);
        Some(of(Rouse)? / of(other)?)
    })
}

/// What a proxy adds to asking the engine itself in the same round.
pub(crate) fn added_by(
    results: &Results,
    case: Case,
    target: Target,
    figure: fn(&Cell) -> Option<f64>,
) -> Vec<f64> {
    let direct = |round| results.of(case, Direct).find(|cell| cell.round == round).and_then(figure);
    results.of(case, target).filter_map(|cell| Some(figure(cell)? - direct(cell.round)?)).collect()
}

fn added(results: &Results, case: Case, figure: fn(&Cell) -> Option<f64>) -> Vec<f64> {
    added_by(results, case, Rouse, figure)
}

/// What Rouse adds over what nginx beside it adds. Nginx adds a microsecond at least, or noise would divide by nothing.
fn added_ratio(results: &Results, case: Case, figure_ms: fn(&Cell) -> Option<f64>) -> Vec<f64> {
    results
        .of(case, Rouse)
        .filter_map(|cell| {
            let direct =
                results.of(case, Direct).find(|other| other.round == cell.round).and_then(figure_ms)?;
            let nginx =
                results.of(case, Nginx).find(|other| other.group == cell.group).and_then(figure_ms)?;
            Some((figure_ms(cell)? - direct).max(0.0) / (nginx - direct).max(1e-3))
        })
        .collect()
}

fn rounds(results: &Results, of: impl Fn(u32) -> Option<f64>) -> Vec<f64> {
    (0..results.rounds).filter_map(of).collect()
}
