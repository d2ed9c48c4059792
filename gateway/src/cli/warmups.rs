//! Prints Warmups and their progress.
//!
//! On a terminal, `--watch` shows one progress bar for each Warmup. Elsewhere it prints a line for each change, which
//! suits logs and scripts.

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Write,
    process::ExitCode,
    time::Duration,
};

use clap::Args;
use rouse_controllers::{crd::warmup::WarmupStatusPhase, warmup_list::WarmupSummary};
use serde::{Deserialize, Serialize};

use super::{
    AdminArgs,
    client::AdminClient,
    screen::{LiveScreen, can_repaint, interrupted},
    show::{replace_control_chars, row, table, use_color},
};

/// Interval between two reads of a watch. Each read lists the Warmups anew.
const REFRESH_INTERVAL: Duration = Duration::from_secs(2);
/// Length of a progress bar.
const BAR_CELLS: u32 = 24;

/// Selects the Warmups to show.
#[derive(Args, Debug)]
pub(super) struct WarmupsArgs {
    /// Show this Warmup alone, with its nodes that are not done.
    #[arg(value_name = "[NAMESPACE/]NAME")]
    warmup: Option<String>,
    /// Show the Warmups of this namespace.
    #[arg(long, short)]
    namespace: Option<String>,
    #[command(flatten)]
    gateway: AdminArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Refresh until interrupted; with a NAME, until the Warmup has finished. The exit code is 1 if it has failed.
    #[arg(long, short, conflicts_with = "json")]
    watch: bool,
}

/// Response of `GET /admin/v1/warmups`.
#[derive(Debug, Serialize, Deserialize)]
struct WarmupsResponse {
    warmups: Vec<WarmupSummary>,
}

/// Which Warmups to show.
#[derive(Debug)]
struct WarmupFilter {
    namespace: Option<String>,
    name: Option<String>,
}

pub(super) async fn run(args: &WarmupsArgs) -> anyhow::Result<ExitCode> {
    let (client, filter) = (args.gateway.client(), WarmupFilter::of(args)?);
    if args.watch {
        return watch(&client, &filter).await;
    }
    let warmups = filter.select(read(&client).await?)?;
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&WarmupsResponse { warmups })?)?;
    } else {
        write!(out, "{}", render_table(&warmups, filter.name.is_some(), use_color()))?;
    }
    Ok(ExitCode::SUCCESS)
}

async fn read(client: &AdminClient) -> anyhow::Result<Vec<WarmupSummary>> {
    let body = client.get("/admin/v1/warmups").await?;
    let response: WarmupsResponse =
        serde_json::from_slice(&body).map_err(|error| client.unexpected_response(error))?;
    Ok(response.warmups)
}

async fn watch(client: &AdminClient, filter: &WarmupFilter) -> anyhow::Result<ExitCode> {
    let mut screen = (can_repaint() && use_color()).then(LiveScreen::open).transpose()?;
    let ended = tokio::select! {
        ended = follow(client, filter, screen.as_mut()) => ended?,
        () = interrupted() => return Ok(ExitCode::SUCCESS),
    };
    if let Some(screen) = screen {
        screen.leave()?;
    }
    Ok(ended)
}

/// Prints until the named Warmup has finished; without a name, forever.
async fn follow(
    client: &AdminClient,
    filter: &WarmupFilter,
    mut screen: Option<&mut LiveScreen>,
) -> anyhow::Result<ExitCode> {
    let mut printed = BTreeMap::new();
    loop {
        let warmups = filter.select(read(client).await?)?;
        if let Some(screen) = &mut screen {
            screen.show(&render_bars(&warmups, filter.name.is_some()))?;
        } else {
            let mut out = std::io::stdout().lock();
            for line in changed_lines(&mut printed, &warmups) {
                writeln!(out, "{line}")?;
            }
            out.flush()?;
        }
        if filter.name.is_some() && warmups.iter().all(WarmupSummary::is_finished) {
            let failed = warmups.iter().any(|warmup| warmup.phase == Some(WarmupStatusPhase::Failed));
            return Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS });
        }
        tokio::time::sleep(REFRESH_INTERVAL).await;
    }
}

impl WarmupFilter {
    fn of(args: &WarmupsArgs) -> anyhow::Result<Self> {
        let named = args.warmup.as_deref().map(|named| named.split_once('/').ok_or(named));
        let (namespace, name) = match named {
            Some(Ok((namespace, name))) => (Some(namespace.to_owned()), Some(name.to_owned())),
            Some(Err(name)) => (None, Some(name.to_owned())),
            None => (None, None),
        };
        anyhow::ensure!(
            namespace.is_none() || args.namespace.is_none(),
            "the namespace is given twice: write NAMESPACE/NAME, or NAME with --namespace"
        );
        Ok(Self { namespace: namespace.or_else(|| args.namespace.clone()), name })
    }

    /// Returns the Warmups to show. A named one must exist.
    fn select(&self, mut warmups: Vec<WarmupSummary>) -> anyhow::Result<Vec<WarmupSummary>> {
        let is_wanted = |wanted: Option<&String>, found: &String| wanted.is_none_or(|wanted| wanted == found);
        warmups.retain(|warmup| {
            is_wanted(self.namespace.as_ref(), &warmup.namespace)
                && is_wanted(self.name.as_ref(), &warmup.name)
        });
        if let Some(name) = self.name.as_ref().filter(|_| warmups.is_empty()) {
            let namespace =
                self.namespace.as_ref().map_or_else(String::new, |namespace| format!("{namespace}/"));
            anyhow::bail!("there is no Warmup {namespace}{name}");
        }
        Ok(warmups)
    }
}

/// Renders one row for each Warmup, and with `nodes` also its nodes that are not done.
fn render_table(warmups: &[WarmupSummary], nodes: bool, colours: bool) -> String {
    if warmups.is_empty() {
        return "There are no Warmups.\n".to_owned();
    }
    let mut rows = vec![row(["WARMUP", "PHASE", "WARM", "ACTIVE", "FAILED", "TARGET", "REASON"])];
    rows.extend(warmups.iter().map(|warmup| {
        let message = replace_control_chars(warmup.message.as_deref().unwrap_or_default());
        row([
            &full_name(warmup),
            phase(warmup),
            &format!("{}/{}", warmup.succeeded, warmup.desired),
            &warmup.active.to_string(),
            &warmup.failed.to_string(),
            &replace_control_chars(&warmup.target),
            &message,
        ])
    }));
    let mut text = table(&rows, colours);
    if nodes {
        warmups.iter().for_each(|warmup| text.push_str(&render_nodes(warmup, colours)));
    }
    text
}

/// Renders the nodes of a Warmup that are not done; empty if there are none.
fn render_nodes(warmup: &WarmupSummary, colours: bool) -> String {
    if warmup.nodes.is_empty() {
        return String::new();
    }
    let mut rows = vec![row(["NODE", "STATE", "ITEM", "FAILURES", "REASON"])];
    rows.extend(warmup.nodes.iter().map(|node| {
        let reason = node.message.as_ref().or(node.cause.as_ref()).map_or("", String::as_str);
        row([
            &node.node,
            &format!("{:?}", node.state),
            &replace_control_chars(node.item.as_deref().unwrap_or("-")),
            &node.attempts.to_string(),
            &replace_control_chars(reason),
        ])
    }));
    let mut text = format!("\n{}", table(&rows, colours));
    if warmup.more_nodes > 0 {
        text.push_str(&format!("and {} more\n", warmup.more_nodes));
    }
    text
}

/// Renders one progress bar for each Warmup.
fn render_bars(warmups: &[WarmupSummary], nodes: bool) -> String {
    if warmups.is_empty() {
        return "There are no Warmups.\n".to_owned();
    }
    let width = warmups.iter().map(|warmup| full_name(warmup).chars().count()).max().unwrap_or_default();
    let mut text = String::new();
    for warmup in warmups {
        text.push_str(&format!("{:<width$}  {}  {}\n", full_name(warmup), bar(warmup), progress(warmup)));
        if nodes {
            text.push_str(&render_nodes(warmup, true));
        }
    }
    text
}

/// Renders the nodes as a bar: `#` warm, `-` active, `.` waiting, `!` failed. It is full only once all nodes are warm.
fn bar(warmup: &WarmupSummary) -> String {
    let desired = u64::from(warmup.desired.max(1));
    let mut left = BAR_CELLS;
    let mut take = |cells: u64| {
        let taken = u32::try_from(cells).unwrap_or(u32::MAX).min(left);
        left -= taken;
        usize::try_from(taken).unwrap_or_default()
    };
    let scaled = |nodes: u32| u64::from(nodes) * u64::from(BAR_CELLS);
    let warm = take(scaled(warmup.succeeded) / desired);
    let failed = take(scaled(warmup.failed).div_ceil(desired));
    let active = take(scaled(warmup.active).div_ceil(desired));
    let waiting = take(u64::MAX);
    let parts = ["#".repeat(warm), "-".repeat(active), ".".repeat(waiting), "!".repeat(failed)];
    format!("[{}]", parts.concat())
}

/// Describes the progress of a Warmup in a few words.
fn progress(warmup: &WarmupSummary) -> String {
    let mut text = format!("{} {}/{} nodes warm", phase(warmup), warmup.succeeded, warmup.desired);
    for (number, state) in [(warmup.active, "active"), (warmup.failed, "failed")] {
        if number > 0 {
            text.push_str(&format!(", {number} {state}"));
        }
    }
    if let Some(message) =
        warmup.message.as_ref().filter(|_| warmup.phase != Some(WarmupStatusPhase::Completed))
    {
        text.push_str(&format!(": {}", replace_control_chars(message)));
    }
    text
}

/// Returns a line for each Warmup that is new, has changed or is gone since the last call.
fn changed_lines(printed: &mut BTreeMap<String, String>, warmups: &[WarmupSummary]) -> Vec<String> {
    let names: BTreeSet<String> = warmups.iter().map(full_name).collect();
    let gone: Vec<String> = printed.keys().filter(|name| !names.contains(*name)).cloned().collect();
    let mut lines = Vec::new();
    for name in gone {
        printed.remove(&name);
        lines.push(format!("{name}: deleted"));
    }
    for warmup in warmups {
        let line = format!("{}: {}", full_name(warmup), progress(warmup));
        if printed.insert(full_name(warmup), line.clone()).as_ref() != Some(&line) {
            lines.push(line);
        }
    }
    lines
}

fn full_name(warmup: &WarmupSummary) -> String {
    format!("{}/{}", warmup.namespace, warmup.name)
}

const fn phase(warmup: &WarmupSummary) -> &'static str {
    match warmup.phase {
        None => "New",
        Some(WarmupStatusPhase::InProgress) => "InProgress",
        Some(WarmupStatusPhase::Paused) => "Paused",
        Some(WarmupStatusPhase::Completed) => "Completed",
        Some(WarmupStatusPhase::Failed) => "Failed",
    }
}
