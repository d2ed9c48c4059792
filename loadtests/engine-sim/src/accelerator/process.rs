//! Detects whether a process is alive, even if its pid was reused.

use std::fs;

/// Start time of the process in clock ticks since boot; `None` if it is dead. A zombie counts as dead, because it holds
/// no memory.
pub(super) fn start_ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the command in parentheses and may contain anything, even parentheses and spaces.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    // Field 22 of proc(5); `state` was field 3.
    fields.nth(18)?.parse().ok()
}

pub(super) fn is_alive(pid: u32, start: u64) -> bool {
    start_ticks(pid) == Some(start)
}
