//! Plots of the figures.

use std::path::Path;

use plotters::prelude::*;

use crate::{
    cases::BenchCase,
    peers::ComparedProxy,
    report::{CompareResults, ResultCell, goals::FigureSpread},
};

const PLOT_SIZE: (u32, u32) = (900, 480);
const FONT: &str = "sans-serif";

/// A bar chart: each target with its median, minimum and maximum.
struct BarChart {
    file: &'static str,
    title: &'static str,
    axis: &'static str,
    case: BenchCase,
    figure: fn(&ResultCell) -> Option<f64>,
}

const BARS: [BarChart; 4] = [
    BarChart {
        file: "cpu-per-request.svg",
        title: "CPU per request, saturated",
        axis: "µs",
        case: BenchCase::Saturated,
        figure: ResultCell::cpu_per_unit,
    },
    BarChart {
        file: "cpu-per-event-400.svg",
        title: "CPU per event, 400 streams at 20 ms",
        axis: "µs",
        case: BenchCase::Streams400,
        figure: ResultCell::cpu_per_unit,
    },
    BarChart {
        file: "cpu-per-event-5000.svg",
        title: "CPU per event, 5,000 streams at 200 ms",
        axis: "µs",
        case: BenchCase::Streams5000,
        figure: ResultCell::cpu_per_unit,
    },
    BarChart {
        file: "memory-per-stream.svg",
        title: "Memory of an open stream, 5,000 of them",
        axis: "KiB",
        case: BenchCase::Streams5000,
        figure: |cell| Some(cell.per_stream()? / 1024.0),
    },
];

/// Writes every plot that has figures.
pub(crate) fn all(results: &CompareResults, folder: &Path) -> anyhow::Result<()> {
    for picture in &BARS {
        bars(results, picture, &folder.join(picture.file))?;
    }
    lags(results, BenchCase::Streams1000, &folder.join("lag-1000.svg"))?;
    lags(results, BenchCase::Streams0, &folder.join("lag-0ms.svg"))
}

fn bars(results: &CompareResults, picture: &BarChart, path: &Path) -> anyhow::Result<()> {
    let figures: Vec<(ComparedProxy, FigureSpread)> = ComparedProxy::ALL
        .into_iter()
        .filter_map(|target| {
            let spread = FigureSpread::from_figures(
                results.cells_of(picture.case, target).filter_map(picture.figure).collect(),
            )?;
            Some((target, spread))
        })
        .collect();
    let most = figures.iter().map(|(_, spread)| spread.max).fold(0.0, f64::max);
    if most <= 0.0 {
        return Ok(());
    }
    let area = SVGBackend::new(path, PLOT_SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let names: Vec<_> = figures.iter().map(|(target, _)| target.name()).collect();
    let mut chart = ChartBuilder::on(&area)
        .caption(picture.title, (FONT, 24))
        .margin(16)
        .x_label_area_size(36)
        .y_label_area_size(64)
        .build_cartesian_2d((0..figures.len()).into_segmented(), 0.0..most * 1.1)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .y_desc(picture.axis)
        .x_labels(figures.len() + 1)
        .x_label_formatter(&|place| match place {
            SegmentValue::CenterOf(nth) => names.get(*nth).map_or_else(String::new, |&name| name.to_owned()),
            _ => String::new(),
        })
        .label_style((FONT, 16))
        .draw()?;
    for (nth, (target, spread)) in figures.iter().enumerate() {
        let corners = [(SegmentValue::Exact(nth), 0.0), (SegmentValue::Exact(nth + 1), spread.median)];
        let mut bar = Rectangle::new(corners, colour(*target).filled());
        bar.set_margin(0, 0, 24, 24);
        chart.draw_series([bar])?;
        let line = [(SegmentValue::CenterOf(nth), spread.min), (SegmentValue::CenterOf(nth), spread.max)];
        chart.draw_series([PathElement::new(line, BLACK.stroke_width(2))])?;
    }
    area.present()?;
    Ok(())
}

/// Plots the lag by fraction of events, on a scale that widens towards 1: medians over rounds.
fn lags(results: &CompareResults, case: BenchCase, path: &Path) -> anyhow::Result<()> {
    let curves: Vec<(ComparedProxy, Vec<(f64, f64)>)> = ComparedProxy::ALL
        .into_iter()
        .filter_map(|target| Some((target, curve(results, case, target)?)))
        .collect();
    let most = curves.iter().flat_map(|(_, points)| points).map(|point| point.1).fold(0.0, f64::max);
    if most <= 0.0 {
        return Ok(());
    }
    let area = SVGBackend::new(path, PLOT_SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(format!("Event lag: {}", case.title()), (FONT, 24))
        .margin(16)
        .x_label_area_size(48)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..3.1, (0.01..most * 1.2).log_scale())?;
    chart
        .configure_mesh()
        .x_desc("share of events")
        .y_desc("ms")
        .x_labels(4)
        .x_label_formatter(&|nines: &f64| match nines.round() as i32 {
            1 => "90 %".to_owned(),
            2 => "99 %".to_owned(),
            3 => "99.9 %".to_owned(),
            _ => String::new(),
        })
        .label_style((FONT, 16))
        .draw()?;
    for (target, points) in &curves {
        let colour = colour(*target);
        chart
            .draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(2)))?
            .label(target.name())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], colour.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .label_font((FONT, 16))
        .draw()?;
    area.present()?;
    Ok(())
}

fn curve(results: &CompareResults, case: BenchCase, target: ComparedProxy) -> Option<Vec<(f64, f64)>> {
    let cells: Vec<_> = results.cells_of(case, target).filter(|cell| cell.lag_us.count > 0).collect();
    let points = cells.first()?.lag_us.points();
    let curve = points.iter().enumerate().filter_map(|(nth, (share, _))| {
        let of = |cell: &&ResultCell| cell.lag_us.points().get(nth).map(|point| point.1 as f64 / 1e3);
        let median = FigureSpread::from_figures(cells.iter().filter_map(of).collect())?.median;
        Some((-(1.0 - share).log10(), median.max(0.01)))
    });
    Some(curve.collect())
}

const fn colour(target: ComparedProxy) -> RGBColor {
    match target {
        ComparedProxy::Direct => RGBColor(150, 150, 150),
        ComparedProxy::Rouse => RGBColor(200, 60, 40),
        ComparedProxy::Stub => RGBColor(235, 150, 135),
        ComparedProxy::Nginx => RGBColor(40, 130, 70),
        ComparedProxy::Haproxy => RGBColor(50, 90, 170),
        ComparedProxy::SmgQuiet => RGBColor(235, 200, 120),
        ComparedProxy::Smg => RGBColor(210, 150, 30),
        ComparedProxy::Envoy => RGBColor(130, 70, 160),
        ComparedProxy::Litellm => RGBColor(90, 90, 60),
    }
}
