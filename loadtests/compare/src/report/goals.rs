//! The performance goals, and whether they are met.

use crate::{
    cases::BenchCase,
    peers::ComparedProxy::{self, Direct, Nginx, Rouse, Smg, Stub},
    report::{CompareResults, ResultCell},
};

/// Whether a goal is met. An unmeasured goal is not met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GoalVerdict {
    Met,
    Acceptable,
    Missed,
    Unmeasured,
}

impl GoalVerdict {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Met => "met",
            Self::Acceptable => "acceptable",
            Self::Missed => "missed",
            Self::Unmeasured => "not measured",
        }
    }
}

/// The unit of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FigureUnit {
    /// A ratio to the other target.
    Times,
    Micros,
    Millis,
    KiB,
    MB,
    PerSecond,
    Count,
}

/// One performance goal.
pub(crate) struct PerformanceGoal {
    pub(crate) what: &'static str,
    /// Unit of the judged figure.
    pub(crate) unit: FigureUnit,
    pub(crate) goal: f64,
    pub(crate) acceptable: f64,
    /// Higher is better.
    pub(crate) at_least: bool,
    /// The judged figure, for each round.
    judged: fn(&CompareResults) -> Vec<f64>,
    /// The underlying figures in their own unit: ours, and the compared target's.
    pub(crate) reference: Option<ReferenceFigures>,
}

/// Absolute figures of Rouse and of the compared target.
pub(crate) struct ReferenceFigures {
    pub(crate) unit: FigureUnit,
    pub(crate) case: BenchCase,
    pub(crate) other: ComparedProxy,
    pub(crate) workers: (usize, usize),
    pub(crate) figure: fn(&ResultCell) -> Option<f64>,
}

/// The spread over rounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct FigureSpread {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl FigureSpread {
    pub(crate) fn from_figures(mut figures: Vec<f64>) -> Option<Self> {
        figures.sort_by(f64::total_cmp);
        let (&min, &max) = (figures.first()?, figures.last()?);
        let (low, high) = (figures.get((figures.len() - 1) / 2)?, figures.get(figures.len() / 2)?);
        Some(Self { median: f64::midpoint(*low, *high), min, max })
    }
}

impl PerformanceGoal {
    pub(crate) fn measured(&self, results: &CompareResults) -> Option<FigureSpread> {
        FigureSpread::from_figures((self.judged)(results))
    }

    pub(crate) fn verdict(&self, measured: Option<f64>) -> GoalVerdict {
        let Some(figure) = measured else { return GoalVerdict::Unmeasured };
        let keeps = |limit: f64| if self.at_least { figure >= limit } else { figure <= limit };
        match (keeps(self.goal), keeps(self.acceptable)) {
            (true, _) => GoalVerdict::Met,
            (_, true) => GoalVerdict::Acceptable,
            _ => GoalVerdict::Missed,
        }
    }
}

/// All goals, in the order of the table.
pub(crate) fn goals() -> Vec<PerformanceGoal> {
    let mut goals = speed();
    goals.extend(delays());
    goals.extend(footprint());
    goals
}

fn speed() -> Vec<PerformanceGoal> {
    let per_unit = |what, case, acceptable, judged| PerformanceGoal {
        what,
        unit: FigureUnit::Times,
        goal: 1.0,
        acceptable,
        at_least: false,
        judged,
        reference: Some(ReferenceFigures {
            unit: FigureUnit::Micros,
            case,
            other: Nginx,
            workers: (1, 1),
            figure: ResultCell::cpu_per_unit,
        }),
    };
    vec![
        per_unit("CPU per request, saturated", BenchCase::Saturated, 1.15, |results| {
            nginx_ratios(results, BenchCase::Saturated, ResultCell::cpu_per_unit)
        }),
        per_unit("CPU per event, 400 streams at 20 ms", BenchCase::Streams400, 1.1, |results| {
            nginx_ratios(results, BenchCase::Streams400, ResultCell::cpu_per_unit)
        }),
        per_unit("CPU per event, 5,000 streams at 200 ms", BenchCase::Streams5000, 1.1, |results| {
            nginx_ratios(results, BenchCase::Streams5000, ResultCell::cpu_per_unit)
        }),
        PerformanceGoal {
            what: "CPU per event of the stub, 400 streams at 20 ms, against the gateway",
            unit: FigureUnit::Times,
            goal: 1.0,
            acceptable: 1.1,
            at_least: false,
            judged: |results| {
                neighbour_ratios(results, BenchCase::Streams400, (Stub, Rouse), ResultCell::cpu_per_unit)
            },
            reference: Some(ReferenceFigures {
                unit: FigureUnit::Micros,
                case: BenchCase::Streams400,
                other: Stub,
                workers: (1, 1),
                figure: ResultCell::cpu_per_unit,
            }),
        },
        PerformanceGoal {
            what: "Requests per second of a core, against sglang-router",
            unit: FigureUnit::Times,
            goal: 6.0,
            acceptable: 4.0,
            at_least: true,
            judged: |results| ratios(results, BenchCase::Saturated, Smg, ResultCell::per_second),
            reference: Some(ReferenceFigures {
                unit: FigureUnit::PerSecond,
                case: BenchCase::Saturated,
                other: Smg,
                workers: (1, 1),
                figure: ResultCell::per_second,
            }),
        },
        PerformanceGoal {
            what: "CPU per request, 2 workers against 1",
            unit: FigureUnit::Times,
            goal: 1.05,
            acceptable: 1.1,
            at_least: false,
            judged: |results| {
                rounds(results, |round| {
                    let of = |workers| {
                        results
                            .cells_with_workers(BenchCase::Workers, Rouse, workers)
                            .find(|cell| cell.round == round)?
                            .cpu_per_unit()
                    };
                    Some(of(2)? / of(1)?)
                })
            },
            reference: Some(ReferenceFigures {
                unit: FigureUnit::Micros,
                case: BenchCase::Workers,
                other: Rouse,
                workers: (2, 1),
                figure: ResultCell::cpu_per_unit,
            }),
        },
    ]
}

fn delays() -> Vec<PerformanceGoal> {
    let first_byte = |what, case, judged| PerformanceGoal {
        what,
        unit: FigureUnit::Millis,
        goal: 1.0,
        acceptable: 2.0,
        at_least: false,
        judged,
        reference: Some(ReferenceFigures {
            unit: FigureUnit::Millis,
            case,
            other: Nginx,
            workers: (1, 1),
            figure: latency_p99_ms,
        }),
    };
    let lag = |what, case, acceptable_goal: (f64, f64), judged| PerformanceGoal {
        what,
        unit: FigureUnit::Times,
        goal: acceptable_goal.0,
        acceptable: acceptable_goal.1,
        at_least: false,
        judged,
        reference: Some(ReferenceFigures {
            unit: FigureUnit::Millis,
            case,
            other: Nginx,
            workers: (1, 1),
            figure: lag_p99_ms,
        }),
    };
    vec![
        lag("Event lag p99 at saturation, 200 streams at 0 ms", BenchCase::Streams0, (1.0, 1.5), |results| {
            nginx_ratios(results, BenchCase::Streams0, lag_p99_ms)
        }),
        first_byte("Added time to first byte p99, 1,000 streams", BenchCase::Opening, |results| {
            added(results, BenchCase::Opening, latency_p99_ms)
        }),
        first_byte("Added time to first byte p99, 5,000 streams", BenchCase::Streams5000, |results| {
            added(results, BenchCase::Streams5000, latency_p99_ms)
        }),
        lag("Added event lag p99, 1,000 streams at 20 ms", BenchCase::Streams1000, (1.5, 2.5), |results| {
            added_ratio(results, BenchCase::Streams1000, lag_p99_ms)
        }),
        PerformanceGoal {
            what: "Added p50 of 220 KB bodies, 150 in flight",
            unit: FigureUnit::Millis,
            goal: 1.0,
            acceptable: 2.0,
            at_least: false,
            judged: |results| added(results, BenchCase::Bodies, latency_p50_ms),
            reference: Some(ReferenceFigures {
                unit: FigureUnit::Millis,
                case: BenchCase::Bodies,
                other: Nginx,
                workers: (1, 1),
                figure: latency_p50_ms,
            }),
        },
        PerformanceGoal {
            what: "Added to a stream's longest stall while a 200 MB body is parsed on its core",
            unit: FigureUnit::Millis,
            goal: 5.0,
            acceptable: 20.0,
            at_least: false,
            judged: |results| added(results, BenchCase::Stall, longest_lag_ms),
            reference: Some(ReferenceFigures {
                unit: FigureUnit::Millis,
                case: BenchCase::Stall,
                other: Nginx,
                workers: (1, 1),
                figure: longest_lag_ms,
            }),
        },
    ]
}

fn footprint() -> Vec<PerformanceGoal> {
    let of_start = |what, unit, (goal, acceptable): (f64, f64), judged, figure| PerformanceGoal {
        what,
        unit,
        goal,
        acceptable,
        at_least: false,
        judged,
        reference: Some(ReferenceFigures {
            unit,
            case: BenchCase::Start,
            other: Nginx,
            workers: (1, 1),
            figure,
        }),
    };
    let alone = |what, unit, (goal, acceptable): (f64, f64), judged| PerformanceGoal {
        what,
        unit,
        goal,
        acceptable,
        at_least: false,
        judged,
        reference: None,
    };
    vec![
        PerformanceGoal {
            what: "Memory of an open stream, 5,000 of them",
            unit: FigureUnit::KiB,
            goal: 4.0,
            acceptable: 16.0,
            at_least: false,
            judged: |results| {
                results.cells_of(BenchCase::Streams5000, Rouse).filter_map(stream_kib).collect()
            },
            reference: Some(ReferenceFigures {
                unit: FigureUnit::KiB,
                case: BenchCase::Streams5000,
                other: Nginx,
                workers: (1, 1),
                figure: stream_kib,
            }),
        },
        of_start(
            "Memory when idle",
            FigureUnit::MB,
            (15.0, 20.0),
            |results| each_start(results, idle_mb),
            idle_mb,
        ),
        of_start(
            "From start to listening",
            FigureUnit::Millis,
            (100.0, 200.0),
            |results| each_start(results, listening_ms),
            listening_ms,
        ),
        alone("Stripped gateway", FigureUnit::MB, (20.0, 30.0), |results| {
            results.binary.map(|bytes| bytes as f64 / 1e6).into_iter().collect()
        }),
        alone(
            "Corrupted or reordered events and answers, whole run",
            FigureUnit::Count,
            (0.0, 0.0),
            |results| {
                let ours = || results.cells.iter().filter(|cell| matches!(cell.target, Rouse | Stub));
                let corrupted: u64 = ours().map(|cell| cell.corrupted).sum();
                ours().next().map(|_| corrupted as f64).into_iter().collect()
            },
        ),
    ]
}

fn each_start(results: &CompareResults, figure: fn(&ResultCell) -> Option<f64>) -> Vec<f64> {
    results.cells_of(BenchCase::Start, Rouse).filter_map(figure).collect()
}

fn idle_mb(cell: &ResultCell) -> Option<f64> {
    Some(cell.idle_bytes as f64 / 1e6)
}

fn listening_ms(cell: &ResultCell) -> Option<f64> {
    Some(cell.listening_ms)
}

fn stream_kib(cell: &ResultCell) -> Option<f64> {
    Some(cell.per_stream()? / 1024.0)
}

fn latency_p50_ms(cell: &ResultCell) -> Option<f64> {
    (cell.latency_us.count > 0).then(|| cell.latency_us.p50 as f64 / 1e3)
}

fn latency_p99_ms(cell: &ResultCell) -> Option<f64> {
    (cell.latency_us.count > 0).then(|| cell.latency_us.p99 as f64 / 1e3)
}

fn lag_p99_ms(cell: &ResultCell) -> Option<f64> {
    (cell.lag_us.count > 0).then(|| cell.lag_us.p99 as f64 / 1e3)
}

fn longest_lag_ms(cell: &ResultCell) -> Option<f64> {
    (cell.lag_us.count > 0).then(|| cell.lag_us.max as f64 / 1e3)
}

/// Ratios of Rouse's figure to that of the neighbouring nginx.
fn nginx_ratios(
    results: &CompareResults,
    case: BenchCase,
    figure: fn(&ResultCell) -> Option<f64>,
) -> Vec<f64> {
    neighbour_ratios(results, case, (Rouse, Nginx), figure)
}

/// Ratios of a target's figure to its neighbour's, group by group.
pub(crate) fn neighbour_ratios(
    results: &CompareResults,
    case: BenchCase,
    (target, other): (ComparedProxy, ComparedProxy),
    figure: fn(&ResultCell) -> Option<f64>,
) -> Vec<f64> {
    results
        .cells_of(case, target)
        .filter_map(|cell| {
            let beside = results.cells_of(case, other).find(|other| other.group == cell.group)?;
            let other = figure(beside)?;
            (other > 0.0).then_some(figure(cell)? / other)
        })
        .collect()
}

/// Ratios of Rouse's figure to another target's in the same round.
fn ratios(
    results: &CompareResults,
    case: BenchCase,
    other: ComparedProxy,
    figure: fn(&ResultCell) -> Option<f64>,
) -> Vec<f64> {
    rounds(results, |round| {
        let of = |target| results.cells_of(case, target).find(|cell| cell.round == round).and_then(figure);
        Some(of(Rouse)? / of(other)?)
    })
}

/// What a proxy adds to the direct figure of the same round.
pub(crate) fn added_by(
    results: &CompareResults,
    case: BenchCase,
    target: ComparedProxy,
    figure: fn(&ResultCell) -> Option<f64>,
) -> Vec<f64> {
    let direct = |round| results.cells_of(case, Direct).find(|cell| cell.round == round).and_then(figure);
    results.cells_of(case, target).filter_map(|cell| Some(figure(cell)? - direct(cell.round)?)).collect()
}

fn added(results: &CompareResults, case: BenchCase, figure: fn(&ResultCell) -> Option<f64>) -> Vec<f64> {
    added_by(results, case, Rouse, figure)
}

/// Ratios of what Rouse adds to what the neighbouring nginx adds. Nginx's part counts as at least a microsecond,
/// because noise could make it zero.
fn added_ratio(
    results: &CompareResults,
    case: BenchCase,
    figure_ms: fn(&ResultCell) -> Option<f64>,
) -> Vec<f64> {
    results
        .cells_of(case, Rouse)
        .filter_map(|cell| {
            let direct =
                results.cells_of(case, Direct).find(|other| other.round == cell.round).and_then(figure_ms)?;
            let nginx =
                results.cells_of(case, Nginx).find(|other| other.group == cell.group).and_then(figure_ms)?;
            Some((figure_ms(cell)? - direct).max(0.0) / (nginx - direct).max(1e-3))
        })
        .collect()
}

fn rounds(results: &CompareResults, of: impl Fn(u32) -> Option<f64>) -> Vec<f64> {
    (0..results.rounds).filter_map(of).collect()
}
