//! Runs a program for a moment to read what it prints.

use std::{path::Path, pin::pin, process::Stdio, time::Duration};

use tokio::{
    io::{AsyncRead, AsyncReadExt as _},
    process::Command,
    time,
};

use crate::cli::progress::{ProgressLine, in_tenths};

/// The longest that one program may take.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes of output that are read. The help of llama-server has about 60 KiB.
const MAX_OUTPUT_BYTES: u64 = 1 << 20;
/// Interval between two changes of the line that shows progress.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

/// Returns what a program prints on both outputs; `None` if it cannot run or does not end in time.
pub(in crate::cli) async fn output_of(program: &Path, arguments: &[&str]) -> Option<String> {
    output_within(PROBE_TIMEOUT, program, arguments).await
}

async fn output_within(limit: Duration, program: &Path, arguments: &[&str]) -> Option<String> {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .ok()?;
    let (out, err) = (child.stdout.take()?, child.stderr.take()?);
    let read = async {
        let (out, err) = tokio::join!(read_some(out), read_some(err));
        // Help may come with any exit status.
        child.wait().await.ok()?;
        Some(out + &err)
    };
    time::timeout(limit, read).await.ok()?
}

async fn read_some(stream: impl AsyncRead + Unpin) -> String {
    let mut bytes = Vec::new();
    // What was read before an error is still of use.
    drop(stream.take(MAX_OUTPUT_BYTES).read_to_end(&mut bytes).await);
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Awaits `work`, and shows on a terminal what takes longer than a second.
pub(in crate::cli) async fn with_progress<T>(what: &str, work: impl Future<Output = T>) -> T {
    let mut progress = ProgressLine::new();
    let mut work = pin!(work);
    loop {
        if let Ok(done) = time::timeout(PROGRESS_INTERVAL, work.as_mut()).await {
            return done;
        }
        let text = format!("{what}: {}", in_tenths(progress.elapsed()));
        progress.show(&text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn both_outputs_are_read_whatever_the_exit_status() {
        let output = output_of(Path::new("/bin/sh"), &["-c", "echo a; echo b >&2; exit 3"]).await;
        assert_eq!(output.as_deref(), Some("a\nb\n"));
        assert_eq!(output_of(Path::new("/no/such/program"), &[]).await, None);
    }

    #[tokio::test]
    async fn a_program_that_does_not_end_is_left_after_the_limit() {
        let limit = Duration::from_millis(50);
        assert_eq!(output_within(limit, Path::new("/bin/sh"), &["-c", "exec sleep 600"]).await, None);
    }

    #[tokio::test]
    async fn more_output_than_the_limit_is_cut() {
        let script = "head -c 3000000 /dev/zero | tr '\\0' x";
        let output = output_of(Path::new("/bin/sh"), &["-c", script]).await.unwrap();
        assert_eq!(output.len() as u64, MAX_OUTPUT_BYTES);
    }
}
