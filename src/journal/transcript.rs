//! Renders a journal as a transcript: events, commands, and the changes of the report.
//!
//! Times count from the start, so that transcripts of two runs can be compared. The golden scenarios are such
//! transcripts.

use crate::{
    fleet::{command::Command, event::Event, report::Report},
    journal::{self, JournalLine},
    model::ModelName,
    units::{Millis, Tick},
};

/// Replays the journal and renders it. Turns with no command and no changed reason are left out, as are gate samples
/// and health probes that only confirm.
#[must_use]
pub fn render_transcript(lines: &[JournalLine]) -> String {
    let start = lines.first().map_or(Tick(0), JournalLine::at);
    let mut text = String::new();
    let mut last = Report::default();
    // The turns that the first header counts are missing from an earlier file, not from this one.
    let mut known_dropped = None;
    for gateway_run in lines.chunk_by(|_, next| !matches!(next, JournalLine::Header { .. })) {
        if let Some(JournalLine::Header { at, dropped, .. }) = gateway_run.first() {
            let missing = dropped.saturating_sub(known_dropped.unwrap_or(*dropped));
            if missing > 0 {
                let at = format_offset(at.since(start));
                text += &format!("{at}\n    {missing} turns are missing: they could not be written\n");
            }
            known_dropped = Some(*dropped);
        }
        render_gateway_run(gateway_run, start, &mut last, &mut text);
    }
    text
}

fn render_gateway_run(gateway_run: &[JournalLine], start: Tick, last: &mut Report, text: &mut String) {
    journal::replay(gateway_run, |at, events, plan, fleet| {
        let events: Vec<&Event> = events.iter().filter(|event| is_shown(event)).collect();
        let report = fleet.report(plan);
        let changes = report_changes(last, &report);
        let readings = events.iter().all(|event| matches!(event, Event::MeterRead { .. }));
        let only_reads = plan.commands.iter().all(|command| matches!(command, Command::ReadMeter { .. }));
        if readings && only_reads && changes.is_empty() {
            return;
        }
        *last = report;
        *text += &(format_offset(at.since(start)) + "\n");
        text.extend(events.iter().map(|event| format!("    {event}\n")));
        text.extend(plan.commands.iter().map(|command| format!("  > {command}\n")));
        text.extend(changes.iter().map(|change| format!("  = {}\n", relativize_times(change, start))));
    });
}

/// `+0:12.345`
fn format_offset(since: Millis) -> String {
    format!("+{}:{:02}.{:03}", since.0 / 60_000, since.0 / 1000 % 60, since.0 % 1000)
}

const fn is_shown(event: &Event) -> bool {
    !matches!(event, Event::GateSampled { .. } | Event::Served { .. } | Event::Health { ok: true, .. })
}

/// The lines of a report that changed.
fn report_changes(before: &Report, after: &Report) -> Vec<String> {
    let describe = |report: &Report, model: &ModelName| {
        let model_report = report.models.get(model)?;
        Some(format!("{model}: {}: {}", model_report.state.as_str(), model_report.reason))
    };
    let models = after.models.keys().filter(|model| describe(before, model) != describe(after, model));
    let mut changes: Vec<String> = models.filter_map(|model| describe(after, model)).collect();
    for (id, reason) in &after.accelerators {
        if before.accelerators.get(id) != Some(reason) {
            changes.push(format!("{id}: {reason}"));
        }
    }
    changes
}

/// Replaces times of day inside a reason by times since the start.
fn relativize_times(text: &str, start: Tick) -> String {
    let words = text.split(' ').map(|word| {
        let bare = word.trim_end_matches([',', ';', ':']);
        let tail = word.strip_prefix(bare).unwrap_or_default();
        parse_time_of_day(bare).map_or_else(
            || word.to_owned(),
            |at| {
                let day = 86_400_000;
                let since = (at + day - start.0 % day) % day;
                format!("{}{tail}", format_offset(Millis(since)))
            },
        )
    });
    words.collect::<Vec<_>>().join(" ")
}

/// Milliseconds since midnight, of `12:34:56.789`.
fn parse_time_of_day(word: &str) -> Option<u64> {
    let (clock, millis) = word.split_once('.')?;
    let parts: Vec<&str> = clock.split(':').collect();
    let [h, m, s] = parts.as_slice() else { return None };
    let number = |text: &str| text.parse::<u64>().ok();
    Some(((number(h)? * 60 + number(m)?) * 60 + number(s)?) * 1000 + number(millis)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_day_become_times_since_the_start() {
        let start = Tick(1_000_000_000);
        let text = format!("drain deadline at {}, then sleeps", start + Millis(61_500));
        assert_eq!(relativize_times(&text, start), "drain deadline at +1:01.500, then sleeps");
        assert_eq!(relativize_times("30.5Gi at 1.2", start), "30.5Gi at 1.2");
    }
}
