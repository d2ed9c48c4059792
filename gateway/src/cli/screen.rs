//! Shows a text that changes: in place on a terminal, and each new text after the last one elsewhere.

use std::io::{self, IsTerminal as _, Write as _};

use tokio::signal::unix::{SignalKind, signal};

/// Switches to the alternate screen, which keeps what the terminal showed, and hides the cursor.
const OPEN: &str = "\x1b[?1049h\x1b[?25l";
const CLOSE: &str = "\x1b[?25h\x1b[?1049l";
/// Moves to the top.
const TOP: &str = "\x1b[H";
/// Clears the rest of a line, and of the screen. Clearing less than everything at once avoids flicker.
const CLEAR_LINE: &str = "\x1b[K";
const CLEAR_BELOW: &str = "\x1b[J";

/// A text on standard output that is replaced again and again. The drop restores the terminal.
#[derive(Debug)]
pub(super) struct LiveScreen {
    in_place: bool,
    text: String,
    notice: String,
}

/// Whether standard output is a terminal that can move its cursor.
pub(super) fn can_repaint() -> bool {
    io::stdout().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Completes when a signal asks this program to end, so that its caller can restore the terminal first.
///
/// Signals count from the call on, not from the first poll.
pub(super) fn interrupted() -> impl Future<Output = ()> {
    let signals = (signal(SignalKind::interrupt()), signal(SignalKind::terminate()));
    async {
        match signals {
            (Ok(mut interrupt), Ok(mut terminate)) => {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                }
            }
            // The signal then ends the program at once.
            _ => std::future::pending().await,
        }
    }
}

impl LiveScreen {
    pub(super) fn open() -> io::Result<Self> {
        let in_place = can_repaint();
        if in_place {
            write_out(OPEN)?;
        }
        Ok(Self { in_place, text: String::new(), notice: String::new() })
    }

    /// Replaces the text, and removes the notice.
    pub(super) fn show(&mut self, text: &str) -> io::Result<()> {
        let unchanged = self.text == text && self.notice.is_empty();
        text.clone_into(&mut self.text);
        self.notice.clear();
        match (self.in_place, unchanged) {
            (true, _) => self.repaint(),
            (false, true) => Ok(()),
            (false, false) => write_out(&format!("{text}\n")),
        }
    }

    /// Shows a notice below the text, which may be out of date.
    pub(super) fn set_notice(&mut self, notice: &str) -> io::Result<()> {
        let unchanged = self.notice == notice;
        notice.clone_into(&mut self.notice);
        match (self.in_place, unchanged) {
            (true, _) => self.repaint(),
            (false, true) => Ok(()),
            (false, false) => writeln!(io::stderr(), "rouse-gateway: {notice}"),
        }
    }

    /// Restores the terminal, and leaves the last text on it.
    pub(super) fn leave(self) -> io::Result<()> {
        let text = self.in_place.then(|| self.text.clone());
        drop(self);
        text.map_or(Ok(()), |text| write_out(&text))
    }

    fn repaint(&self) -> io::Result<()> {
        write_out(&self.frame())
    }

    /// Returns the bytes that replace the last frame by this one.
    fn frame(&self) -> String {
        let mut frame = TOP.to_owned();
        let gap = if self.notice.is_empty() { None } else { Some("") };
        for line in self.text.lines().chain(gap).chain(self.notice.lines()) {
            frame.push_str(line);
            frame.push_str(CLEAR_LINE);
            frame.push('\n');
        }
        frame.push_str(CLEAR_BELOW);
        frame
    }
}

impl Drop for LiveScreen {
    fn drop(&mut self) {
        if self.in_place {
            // If the terminal is gone, nothing is left to restore.
            write_out(CLOSE).unwrap_or_default();
        }
    }
}

fn write_out(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_overwrites_each_line_and_clears_only_what_is_left_of_the_last_one() {
        let mut screen = LiveScreen { in_place: false, text: "a\nb\n".to_owned(), notice: String::new() };
        assert_eq!(screen.frame(), "\x1b[Ha\x1b[K\nb\x1b[K\n\x1b[J");
        screen.notice = "gone".to_owned();
        assert_eq!(screen.frame(), "\x1b[Ha\x1b[K\nb\x1b[K\n\x1b[K\ngone\x1b[K\n\x1b[J");
    }
}
