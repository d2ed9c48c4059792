//! Shows on a terminal what a command waits for, once it takes longer than a second.

use std::{
    io::{self, IsTerminal as _, Write as _},
    time::Duration,
};

use rouse::units::Millis;
use tokio::time::Instant;

/// Commands that take no longer show nothing.
const QUIET_TIME: Duration = Duration::from_secs(1);
/// Longest line. A wrapped one could not be overwritten.
const MAX_COLUMNS: usize = 78;

/// One line on standard error that is replaced again and again. The drop removes it.
///
/// Without a terminal there it shows nothing.
#[derive(Debug)]
pub(super) struct ProgressLine {
    began: Instant,
    on_terminal: bool,
    shown: bool,
}

impl ProgressLine {
    pub(super) fn new() -> Self {
        let on_terminal =
            io::stderr().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb");
        Self { began: Instant::now(), on_terminal, shown: false }
    }

    /// Whether a call of [`Self::show`] would show something. Spares the work for a text that is not shown.
    pub(super) fn is_due(&self) -> bool {
        self.on_terminal && self.began.elapsed() >= QUIET_TIME
    }

    pub(super) fn elapsed(&self) -> Millis {
        self.began.elapsed().into()
    }

    pub(super) fn show(&mut self, text: &str) {
        if self.is_due() {
            self.shown = true;
            // Progress that cannot be shown is no reason to stop.
            write!(io::stderr(), "\r{}\x1b[K", truncated(text)).unwrap_or_default();
        }
    }

    /// Removes the line, for output that follows it.
    pub(super) fn clear(&mut self) {
        if std::mem::take(&mut self.shown) {
            write!(io::stderr(), "\r\x1b[K").unwrap_or_default();
        }
    }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Formats how long a step has taken, and how long it takes usually.
pub(super) fn elapsed_of(elapsed: Millis, expected: Option<Millis>) -> String {
    let elapsed = in_tenths(elapsed);
    expected.map_or_else(|| elapsed.clone(), |expected| format!("{elapsed} of about {}", in_tenths(expected)))
}

/// Formats a duration with tenths of a second.
pub(super) fn in_tenths(span: Millis) -> String {
    let tenths = span.0.saturating_add(50) / 100;
    if tenths < 600 {
        return format!("{}.{}s", tenths / 10, tenths % 10);
    }
    Millis::secs(tenths / 10).to_string()
}

fn truncated(text: &str) -> String {
    let text = text.replace(char::is_control, " ");
    match text.char_indices().nth(MAX_COLUMNS) {
        Some(_) => text.chars().take(MAX_COLUMNS - 1).chain(['…']).collect(),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_short_and_a_long_line_is_cut() {
        assert_eq!(in_tenths(Millis(0)), "0.0s");
        assert_eq!(in_tenths(Millis(12_349)), "12.3s");
        assert_eq!(in_tenths(Millis(59_949)), "59.9s");
        assert_eq!(in_tenths(Millis(59_951)), "1m");
        assert_eq!(in_tenths(Millis(61_500)), "1m1s");
        assert_eq!(elapsed_of(Millis(1500), Some(Millis::secs(40))), "1.5s of about 40.0s");
        assert_eq!(elapsed_of(Millis(1500), None), "1.5s");
        let long = truncated(&"ä".repeat(100));
        assert_eq!((long.chars().count(), long.ends_with('…')), (MAX_COLUMNS, true));
        assert_eq!(truncated("a\nb"), "a b");
    }
}
