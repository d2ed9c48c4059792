//! The plots of a simulation as SVG: four panels over one time axis, with a line for each autoscaler.
//!
//! The lines differ in colour and in dashes, and the colours of texts follow the reader's light or dark scheme.

use rouse::sim::saturation::{LoadReport, LoadSample};

const WIDTH: f64 = 860.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 844.0;
const FIRST_PANEL: f64 = 76.0;
const PANEL_HEIGHT: f64 = 120.0;
const PANEL_DISTANCE: f64 = 164.0;
/// Distance from the last panel to the end of the picture, for the labels of the time.
const FOOT: f64 = 48.0;
/// More points than this are not visible.
const MAX_POINTS: usize = 390;
/// From this many seconds on, the time is in hours.
const HOURS_FROM: f64 = 10_800.0;

const STYLE: &str = "\
text{fill:#333}\
.grid{stroke:#888;stroke-opacity:.3}\
.line{fill:none;stroke-width:1.7;stroke-linejoin:round}\
.rouse{stroke:#2f7de1}\
.hpa{stroke:#df7a1c;stroke-dasharray:7 3}\
.keda{stroke:#2a9d5c;stroke-dasharray:2 3}\
@media(prefers-color-scheme:dark){text{fill:#ddd}}";

struct PlotPanel {
    title: &'static str,
    value: fn(&LoadSample) -> Option<f64>,
}

const PANELS: [PlotPanel; 4] = [
    PlotPanel { title: "Replicas", value: |sample| Some(f64::from(sample.replicas)) },
    PlotPanel { title: "Requests that wait", value: |sample| Some(f64::from(sample.waiting)) },
    PlotPanel { title: "Time to first token, in seconds", value: |sample| sample.ttft },
    PlotPanel { title: "Cost so far", value: |sample| Some(sample.cost) },
];

/// Maps values from 0 to `end` onto pixels.
struct PlotAxis {
    end: f64,
    /// Distance between two labels.
    step: f64,
    from: f64,
    to: f64,
}

/// Draws all panels.
pub(super) fn render(title: &str, reports: &[LoadReport]) -> String {
    let seconds = |sample: &LoadSample| sample.at.0 as f64 / 1000.0;
    let samples = || reports.iter().flat_map(|report| &report.samples);
    let lasts = samples().map(seconds).fold(60.0, f64::max);
    let (unit, unit_name) = if lasts >= HOURS_FROM { (3600.0, "hours") } else { (60.0, "minutes") };
    let time = PlotAxis { end: lasts / unit, step: round_step(lasts / unit / 12.0), from: LEFT, to: RIGHT };

    let bottom = FIRST_PANEL + PANEL_DISTANCE * (PANELS.len() - 1) as f64 + PANEL_HEIGHT;
    let height = bottom + FOOT;
    let title = escape(title);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<title>{title}</title>\n<style>{STYLE}</style>\n\
         <text x=\"{LEFT}\" y=\"22\" font-size=\"14\">{title}</text>\n"
    );
    svg.push_str(&legend(reports));
    for (index, panel) in PANELS.iter().enumerate() {
        let top = FIRST_PANEL + PANEL_DISTANCE * index as f64;
        let highest = samples().filter_map(panel.value).fold(0.0, f64::max);
        let values = PlotAxis::with_whole_steps(highest, top + PANEL_HEIGHT, top);
        svg.push_str(&frame(panel.title, &time, &values));
        // The first report is drawn last, above the others.
        for report in reports.iter().rev() {
            let points = report.samples.chunks(report.samples.len().div_ceil(MAX_POINTS).max(1));
            let points = points.filter_map(|chunk| {
                let highest = chunk.iter().filter_map(panel.value).reduce(f64::max)?;
                let x = time.position(seconds(chunk.first()?) / unit);
                Some(format!("{x:.1},{:.1}", values.position(highest)))
            });
            let (class, points) = (report.autoscaler, points.collect::<Vec<_>>().join(" "));
            svg.push_str(&format!("<polyline class=\"line {class}\" points=\"{points}\"/>\n"));
        }
    }
    let middle = f64::midpoint(LEFT, RIGHT);
    svg.push_str(&format!(
        "<text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">Time, in {unit_name}</text>\n</svg>\n",
        height - 10.0
    ));
    svg
}

fn legend(reports: &[LoadReport]) -> String {
    let entry = |(index, report): (usize, &LoadReport)| {
        let (x, name) = (LEFT + 110.0 * index as f64, report.autoscaler);
        format!(
            "<line class=\"line {name}\" x1=\"{x}\" x2=\"{}\" y1=\"40\" y2=\"40\"/>\n\
             <text x=\"{}\" y=\"44\">{name}</text>\n",
            x + 36.0,
            x + 44.0,
        )
    };
    reports.iter().enumerate().map(entry).collect()
}

/// The title of a panel, its grid and the labels of both axes.
fn frame(title: &str, time: &PlotAxis, values: &PlotAxis) -> String {
    let mut svg = format!("<text x=\"{LEFT}\" y=\"{}\">{title}</text>\n", values.to - 8.0);
    for value in values.labels() {
        let (y, label) = (values.position(value), values.label(value));
        svg.push_str(&format!(
            "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{RIGHT}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\n\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>\n",
            LEFT - 6.0,
            y + 4.0,
        ));
    }
    for value in time.labels() {
        let (x, label, bottom) = (time.position(value), time.label(value), values.from);
        svg.push_str(&format!(
            "<line class=\"grid\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{}\" y2=\"{bottom}\"/>\n\
             <text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{label}</text>\n",
            values.to,
            bottom + 16.0,
        ));
    }
    svg
}

impl PlotAxis {
    /// An axis whose end is the first label that is not below `highest`.
    fn with_whole_steps(highest: f64, from: f64, to: f64) -> Self {
        let highest = if highest > 0.0 { highest } else { 1.0 };
        let step = round_step(highest / 4.0);
        Self { end: (highest / step).ceil() * step, step, from, to }
    }

    fn position(&self, value: f64) -> f64 {
        self.from + (self.to - self.from) * value / self.end
    }

    fn labels(&self) -> impl Iterator<Item = f64> {
        let count = (self.end / self.step + 1e-9).floor() as u32;
        (0..=count).map(|index| f64::from(index) * self.step)
    }

    fn label(&self, value: f64) -> String {
        let decimals = (-self.step.log10().floor()).max(0.0) as usize;
        format!("{value:.decimals$}")
    }
}

/// The smallest of 1, 2 and 5 times a power of ten that is not below `least`.
fn round_step(least: f64) -> f64 {
    let magnitude = 10_f64.powf(least.log10().floor());
    let steps = [1.0, 2.0, 5.0].map(|digit| digit * magnitude);
    steps.into_iter().find(|step| *step >= least).unwrap_or(10.0 * magnitude)
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use rouse::{sim::saturation::AutoscalerKind, units::Millis};

    use super::*;

    fn report(autoscaler: AutoscalerKind, samples: u64) -> LoadReport {
        let sample = |index: u64| LoadSample {
            at: Millis::secs(15 * index),
            replicas: 3,
            waiting: 40,
            ttft: index.is_multiple_of(2).then_some(0.25),
            cost: index as f64 / 100.0,
        };
        LoadReport {
            autoscaler,
            saturated_seconds: 0,
            replica_hours: 0.0,
            cost: 0.0,
            ttft_mean: 0.0,
            ttft_p99: 0.0,
            mean_queue: 0.0,
            samples: (1..=samples).map(sample).collect(),
        }
    }

    #[test]
    fn each_panel_has_a_line_for_each_autoscaler_within_the_picture() {
        let svg = render("a<b & c", &AutoscalerKind::ALL.map(|kind| report(kind, 5760)));
        assert_eq!(svg.matches("<polyline").count(), 12);
        assert!(svg.contains("a&lt;b &amp; c") && !svg.contains("a<b"), "{svg}");
        for name in ["rouse", "hpa", "keda", "Replicas", "Requests that wait", "Time, in hours"] {
            assert!(svg.contains(&format!(">{name}</text>")), "{name}");
        }
        for line in svg.split(" points=\"").skip(1) {
            let points: Vec<&str> = line.split('"').next().unwrap().split(' ').collect();
            assert!((300..=MAX_POINTS).contains(&points.len()), "{} points", points.len());
            for point in points {
                let (x, y) = point.split_once(',').unwrap();
                let (x, y): (f64, f64) = (x.parse().unwrap(), y.parse().unwrap());
                assert!((LEFT..=RIGHT).contains(&x) && (FIRST_PANEL..=WIDTH).contains(&y), "{point}");
            }
        }
    }

    #[test]
    fn a_short_trace_is_in_minutes_and_one_without_samples_is_a_picture_too() {
        assert!(render("t", &[report(AutoscalerKind::Rouse, 100)]).contains("Time, in minutes"));
        let empty = render("t", &[report(AutoscalerKind::Rouse, 0)]);
        assert!(empty.ends_with("</svg>\n") && !empty.contains("NaN") && !empty.contains("inf"), "{empty}");
    }

    #[test]
    fn labels_are_round_and_reach_beyond_the_highest_value() {
        for (highest, end, labels) in [(7.3, "8", 5), (0.26, "0.3", 4), (1.0, "1.0", 3), (99.0, "100", 3)] {
            let axis = PlotAxis::with_whole_steps(highest, 100.0, 0.0);
            assert_eq!(axis.label(axis.end), end, "{highest}");
            assert_eq!(axis.labels().count(), labels, "{highest}");
            assert!(axis.position(axis.end).abs() < 1e-9);
        }
    }
}
