//! Prints the admin API's responses for people.

use std::{
    collections::BTreeMap,
    io::{IsTerminal as _, Write},
    iter,
};

use rouse::{
    fault::WaitDetails,
    fleet::report::{FleetView, ModelState, VariantReport},
    journal::{self, JournalLine},
    model::{AcceleratorId, ModelName, VariantName},
    units::{Bytes, Tick, pluralize},
};
use serde::Deserialize;

use super::client::{AdminClient, encode_path_segment};

/// Response of `GET /admin/v1/models/{m}/explain`.
#[derive(Debug, Deserialize)]
struct Explanation {
    model: ModelName,
    state: ModelState,
    waiting: u32,
    leases: u32,
    reason: String,
    #[serde(default)]
    variants: BTreeMap<VariantName, VariantReport>,
    #[serde(default)]
    wait: WaitDetails,
    at: Tick,
}

pub(super) async fn ps(client: &AdminClient, json: bool) -> anyhow::Result<()> {
    let body = client.get("/admin/v1/fleet").await?;
    let mut out = std::io::stdout().lock();
    if json {
        return Ok(writeln!(out, "{}", String::from_utf8_lossy(&body))?);
    }
    let view: FleetView = serde_json::from_slice(&body).map_err(|error| client.unexpected_response(error))?;
    Ok(write!(out, "{}", render_fleet(&view, use_color()))?)
}

/// Whether to use colour: on a terminal, unless the user set `NO_COLOR` (<https://no-color.org>).
pub(super) fn use_color() -> bool {
    std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

pub(super) async fn explain(client: &AdminClient, model: &str, json: bool) -> anyhow::Result<()> {
    let body = client.get(&format!("/admin/v1/models/{}/explain", encode_path_segment(model))).await?;
    let mut out = std::io::stdout().lock();
    if json {
        return Ok(writeln!(out, "{}", String::from_utf8_lossy(&body))?);
    }
    let explanation: Explanation =
        serde_json::from_slice(&body).map_err(|error| client.unexpected_response(error))?;
    Ok(write!(out, "{}", render_explanation(&explanation, use_color()))?)
}

/// Prints events until the gateway ends the stream.
pub(super) async fn events(client: &AdminClient, json: bool) -> anyhow::Result<()> {
    let mut body = client.stream("/admin/v1/events").await?;
    let mut sse = EventStreamReader::default();
    while let Some(data) = body.chunk().await.map_err(|_| client.stream_ended())? {
        let mut out = std::io::stdout().lock();
        for item in sse.feed(&data) {
            match item {
                StreamItem::Event(line) if json => writeln!(out, "{line}")?,
                StreamItem::Event(line) => write!(out, "{}", render_event(&line))?,
                StreamItem::Missed(number) => {
                    eprintln!(
                        "rouse-gateway: this client read too slowly and missed {}",
                        pluralize(number, "event")
                    );
                }
            }
        }
        out.flush()?;
    }
    Ok(())
}

pub(super) async fn logs(
    client: &AdminClient,
    model: &str,
    replica: u32,
    follow: bool,
) -> anyhow::Result<()> {
    let path =
        format!("/admin/v1/models/{}/logs?replica={replica}&follow={follow}", encode_path_segment(model));
    let mut body = client.stream(&path).await?;
    while let Some(data) = body.chunk().await.map_err(|_| client.stream_ended())? {
        let mut out = std::io::stdout().lock();
        out.write_all(&data)?;
        out.flush()?;
    }
    Ok(())
}

/// Parses the subset of server-sent events that the gateway writes: one `data:` line per event.
#[derive(Default)]
struct EventStreamReader {
    pending: Vec<u8>,
    missed: bool,
}

enum StreamItem {
    Event(String),
    /// Number of events that this reader missed.
    Missed(String),
}

impl EventStreamReader {
    fn feed(&mut self, data: &[u8]) -> Vec<StreamItem> {
        self.pending.extend_from_slice(data);
        let mut items = Vec::new();
        while let Some(end) = self.pending.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.pending.drain(..=end).collect();
            items.extend(self.parse_line(String::from_utf8_lossy(&line).trim_end()));
        }
        items
    }

    fn parse_line(&mut self, line: &str) -> Option<StreamItem> {
        if line.is_empty() {
            self.missed = false;
        }
        if let Some(name) = line.strip_prefix("event:") {
            self.missed = name.trim() == "missed";
        }
        let data = line.strip_prefix("data:")?.trim_start().to_owned();
        Some(if self.missed { StreamItem::Missed(data) } else { StreamItem::Event(data) })
    }
}

pub(super) fn render_fleet(view: &FleetView, colours: bool) -> String {
    let slots = slots_by_accelerator(view);
    [model_rows(view), engine_rows(view, &slots), memory_rows(view, &slots)]
        .iter()
        .filter(|rows| rows.len() > 1)
        .map(|rows| table(rows, colours))
        .collect::<Vec<_>>()
        .join("\n")
}

/// Returns the taken slots and all slots of each accelerator that has slots.
fn slots_by_accelerator(view: &FleetView) -> BTreeMap<&AcceleratorId, String> {
    let with_slots = view.accelerators.iter().filter(|accelerator| accelerator.pool.is_some());
    let slots = with_slots.filter_map(|accelerator| {
        let (all, taken) = (accelerator.units?, accelerator.units_taken.unwrap_or_default());
        Some((&accelerator.id, format!("{taken}/{all}")))
    });
    slots.collect()
}

fn model_rows(view: &FleetView) -> Vec<Vec<String>> {
    let mut rows = vec![row(["MODEL", "STATE", "WAITING", "EXPECTED WAIT", "LEASES", "MEMORY", "REASON"])];
    rows.extend(view.models.iter().map(|model| {
        let state = if model.pinned {
            format!("{}, pinned", model.state.as_str())
        } else {
            model.state.as_str().to_owned()
        };
        row([
            model.name.as_str(),
            &state,
            &model.waiting.to_string(),
            &model.expected_wait.map_or_else(|| "-".to_owned(), |wait| wait.to_string()),
            &model.leases.to_string(),
            &model.declared.to_string(),
            &truncate_to_seconds(&model.reason),
        ])
    }));
    rows
}

/// Returns the rows of engines, with a column of slots if an accelerator has some.
fn engine_rows(view: &FleetView, slots: &BTreeMap<&AcceleratorId, String>) -> Vec<Vec<String>> {
    let mut rows = vec![row(["ENGINE", "STATE", "SINCE", "LEASES", "ON", "RESERVED", "HOST"])];
    rows.extend(view.engines.iter().map(|engine| {
        let on: Vec<_> = engine.accelerators.iter().map(ToString::to_string).collect();
        row([
            &engine.engine.to_string(),
            &engine.state,
            &truncate_to_seconds(&engine.since.to_string()),
            &engine.leases.to_string(),
            &on.join(","),
            &engine.reserved.to_string(),
            &engine.host.to_string(),
        ])
    }));
    if !slots.is_empty() {
        let of_engine = view.engines.iter().map(|engine| {
            let of_each = engine.accelerators.iter().filter_map(|id| slots.get(id).map(String::as_str));
            of_each.collect::<Vec<_>>().join(",")
        });
        insert_column(&mut rows, 5, "SLOTS", of_engine);
    }
    rows
}

/// Returns the rows of memory, with columns of slots and nodes if an accelerator has slots.
fn memory_rows(view: &FleetView, slots: &BTreeMap<&AcceleratorId, String>) -> Vec<Vec<String>> {
    let mut rows = vec![row(["ACCELERATOR", "CAPACITY", "RESERVED", "OBSERVED", ""])];
    rows.extend(view.accelerators.iter().map(|accelerator| {
        let observed = accelerator.observed.map_or_else(|| "-".to_owned(), |bytes| bytes.to_string());
        row([
            accelerator.id.as_str(),
            &accelerator.capacity.to_string(),
            &accelerator.reserved.to_string(),
            &observed,
            if accelerator.healthy { "" } else { "unhealthy: no new reservations" },
        ])
    }));
    let host = &view.host;
    if host.capacity > Bytes::ZERO {
        rows.push(row(["host RAM", &host.capacity.to_string(), &host.reserved.to_string(), "-", ""]));
    }
    if !slots.is_empty() {
        let of_each = view.accelerators.iter().map(|accelerator| slots.get(&accelerator.id).cloned());
        insert_column(&mut rows, 4, "SLOTS", of_each.map(Option::unwrap_or_default));
        let nodes = view.accelerators.iter().map(|accelerator| accelerator.node.clone());
        insert_column(&mut rows, 5, "NODE", nodes.map(Option::unwrap_or_default));
    }
    rows
}

/// Inserts a column into a table. Rows without a cell get `-`.
fn insert_column(rows: &mut [Vec<String>], at: usize, head: &str, cells: impl Iterator<Item = String>) {
    let cells = cells.map(|cell| if cell.is_empty() { "-".to_owned() } else { cell });
    let column = iter::once(head.to_owned()).chain(cells).chain(iter::repeat("-".to_owned()));
    for (row, cell) in rows.iter_mut().zip(column) {
        row.insert(at.min(row.len()), cell);
    }
}

/// Cuts the milliseconds from times of day.
///
/// They mean nothing to a person who waits for seconds or minutes.
pub(super) fn truncate_to_seconds(text: &str) -> String {
    let is_clock = |text: &str| {
        let is_due = |(at, byte): (usize, u8)| if at % 3 == 2 { byte == b':' } else { byte.is_ascii_digit() };
        text.bytes().enumerate().all(is_due)
    };
    let word = |word: &str| match word.split_at_checked("00:00:00".len()) {
        Some((clock, rest)) if is_clock(clock) && rest.starts_with('.') => {
            format!("{clock}{}", rest.trim_start_matches(|c: char| c == '.' || c.is_ascii_digit()))
        }
        _ => word.to_owned(),
    };
    text.split(' ').map(word).collect::<Vec<_>>().join(" ")
}

/// Returns the terminal colour of a model's, engine's or Warmup's state; `None` for inconspicuous states.
fn state_color(state: &str) -> Option<&'static str> {
    match state.split([',', '(']).next()? {
        "awake" | "Awake" | "Completed" => Some("\x1b[32m"),
        "failed" | "unplaceable" | "Failing" | "Backoff" | "Failed" => Some("\x1b[31m"),
        "launching" | "Launching" | "Loading" | "Waking" | "Draining" | "FallingAsleep" | "InProgress"
        | "Pulling" => Some("\x1b[33m"),
        _ => None,
    }
}

/// Adds the state's colour, if colours are on.
fn colorize_state(state: &str, colours: bool) -> String {
    match state_color(state.trim_end()).filter(|_| colours) {
        Some(colour) => format!("{colour}{state}\x1b[0m"),
        None => state.to_owned(),
    }
}

fn render_explanation(explanation: &Explanation, colours: bool) -> String {
    let Explanation { model, state, waiting, leases, reason, variants, wait, at } = explanation;
    let (leases, reason) = (pluralize(leases, "lease"), truncate_to_seconds(reason));
    let state = colorize_state(state.as_str(), colours);
    let mut text = format!("{model}: {state}, {waiting} waiting, {leases}\n  {reason}\n");
    for (variant, report) in variants {
        // The only variant of a model that lists none.
        let name = if variant.is_default() { String::new() } else { format!(" of {variant}") };
        text.push_str(&format!("  engines{name}: {}\n", truncate_to_seconds(&report.to_string())));
    }
    for holder in &wait.holders {
        text.push_str(&format!(
            "  {} holds {}: {}, idle for {}{}\n",
            holder.model,
            holder.memory,
            pluralize(holder.leases, "lease"),
            holder.idle_for,
            if holder.pinned { ", pinned" } else { "" },
        ));
    }
    if wait.unlisted_holders > 0 {
        text.push_str(&format!("  and {} with less\n", pluralize(wait.unlisted_holders, "other engine")));
    }
    if let Some(expected) = &wait.expected_wait {
        text.push_str(&format!("  expected wait: {expected}\n"));
    }
    if let Some(after) = wait.retry_after {
        text.push_str(&format!("  earliest possible change in {after}\n"));
    }
    text.push_str(&format!("  as of {} UTC\n", truncate_to_seconds(&at.to_string())));
    text
}

/// Renders a journal line like `replay`, one event per line. A turn without events yields no text.
fn render_event(line: &str) -> String {
    let Ok(JournalLine::Turn { at, events }) = journal::read_line(line) else {
        return format!("{}\n", replace_control_chars(line));
    };
    events.iter().map(|event| format!("{at} {}\n", replace_control_chars(&event.to_string()))).collect()
}

/// Replaces control characters: some text comes from engines, and must not control the terminal.
pub(super) fn replace_control_chars(text: &str) -> String {
    text.replace(char::is_control, "\u{fffd}")
}

pub(super) fn row<const N: usize>(cells: [&str; N]) -> Vec<String> {
    cells.map(str::to_owned).to_vec()
}

/// Aligns columns to their widest cell, except the last. The second column has a state, which is coloured.
pub(super) fn table(rows: &[Vec<String>], colours: bool) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or_default();
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or_default()
    };
    let widths: Vec<_> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let cell = format!("{cell:<width$}");
            line.push_str(&colorize_state(&cell, colours && column == 1));
            line.push_str("  ");
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests;
