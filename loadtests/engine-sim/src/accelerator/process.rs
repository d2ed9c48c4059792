//! Whether a process still lives, told apart from a later one that got its pid.

use std::fs;

/// When the process started, in clock ticks since boot; `None` when it is gone. A zombie is gone: it holds no memory.
pub(super) fn start_ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the command in parentheses and may hold anything, parentheses and spaces too.
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
