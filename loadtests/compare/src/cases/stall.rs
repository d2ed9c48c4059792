//! Measures one very long prompt beside streams. The question is how long the proxy delays an event, so nothing else
//! may delay it. On the load's core, the engine and the prompt's sender run only when the stream reader is idle
//! (`SCHED_IDLE`, which needs no privilege). The prompt's pace leaves room on that core, and its sender starts before
//! the first stream. An event carries its send time, so an engine that waits for its turn makes no event late.

use std::{
    env,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    path::Path,
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use clap::Args;

use crate::{
    load::{LoadResult, StreamLoad, streams},
    peers::{
        MODEL, RunningProxy, probe,
        process::{BenchCommand, BenchProcess},
    },
};

/// Size of the body.
const BODY_BYTES: u64 = 200_000_000;
/// Pace of the body: as fast as a network delivers it, with room left on the load's core.
const BYTES_PER_SECOND: f64 = 1e9;
/// Streams run this long before the body is sent.
const SEND_DELAY: Duration = Duration::from_millis(700);

/// Sends one body and waits for its answer.
#[derive(Args, Clone, Debug)]
pub(crate) struct SendBody {
    #[arg(long)]
    to: SocketAddr,
    #[arg(long)]
    key: String,
    #[arg(long, default_value_t = BODY_BYTES)]
    bytes: u64,
    /// Maximum number of bytes per second
    #[arg(long, default_value_t = BYTES_PER_SECOND)]
    pace: f64,
    /// Seconds to wait before sending
    #[arg(long, default_value_t = SEND_DELAY.as_secs_f64())]
    after: f64,
}

/// Runs streams with the body in the middle; `engines` serve both. An incorrect response to the body is an error.
pub(crate) async fn run(
    load: &StreamLoad,
    proxy: &RunningProxy,
    engines: &[u32],
    core: usize,
    folder: &Path,
) -> anyhow::Result<LoadResult> {
    for engine in engines {
        set_scheduling("--idle", *engine)?;
    }
    let result = send_beside_streams(load, proxy, core, folder).await;
    for engine in engines {
        set_scheduling("--other", *engine)?;
    }
    result
}

/// Sets the kernel's scheduling policy for `pid`.
fn set_scheduling(policy: &str, pid: u32) -> anyhow::Result<()> {
    let mut chrt = std::process::Command::new("chrt");
    chrt.args([policy, "--pid", "0", &pid.to_string()]).stdout(Stdio::null());
    let done = chrt.status().context("cannot run chrt, which util-linux brings")?;
    ensure!(done.success(), "chrt {policy} of an engine failed: {done}");
    Ok(())
}

async fn send_beside_streams(
    load: &StreamLoad,
    proxy: &RunningProxy,
    core: usize,
    folder: &Path,
) -> anyhow::Result<LoadResult> {
    let (program, to) = (env::current_exe()?, proxy.address.to_string());
    let sends = ["send-body", "--to", &to, "--key", &proxy.key];
    let command = BenchCommand::new("chrt").args(["--idle", "0"]).args([program.as_os_str()]).args(sends);
    let body = BenchProcess::spawn("body", command, &core.to_string(), folder)?.wait_success();
    let reading = streams(load);
    tokio::pin!(body, reading);
    tokio::select! {
        sent = &mut body => {
            let mut result = reading.await?;
            if let Err(error) = sent {
                result.errors += 1;
                result.first_error.get_or_insert_with(|| format!("{error:#}"));
            }
            Ok(result)
        }
        result = &mut reading => {
            let mut result = result?;
            result.errors += 1;
            result.first_error.get_or_insert_with(|| "the streams ended before the body was answered".to_owned());
            Ok(result)
        }
    }
}

impl SendBody {
    #[expect(clippy::disallowed_methods, reason = "a process that does nothing but send at a pace")]
    pub(crate) fn run(&self) -> anyhow::Result<()> {
        ensure!(self.to.ip().is_loopback(), "load may go only to loopback addresses");
        let message = format!(r#"{{"role":"user","content":"{}\nand so on"}},"#, "long words ".repeat(100));
        let front = format!(r#"{{"model":"{MODEL}","messages":["#);
        let back = r#"{"role":"user","content":"end"}]}"#;
        let messages = self.bytes / message.len() as u64;
        let length = (front.len() + back.len()) as u64 + messages * message.len() as u64;
        thread::sleep(Duration::try_from_secs_f64(self.after)?);
        let mut io = TcpStream::connect(self.to)?;
        io.set_read_timeout(Some(Duration::from_secs(60)))?;
        io.set_write_timeout(Some(Duration::from_secs(60)))?;
        io.write_all(probe::head(self.to, &self.key, length).as_bytes())?;
        io.write_all(front.as_bytes())?;
        let many = message.repeat(64);
        let mut remaining = messages as usize * message.len();
        let (all, began) = (remaining, Instant::now());
        while remaining > 0 {
            let piece = many.as_bytes().get(..remaining).unwrap_or(many.as_bytes());
            io.write_all(piece)?;
            remaining -= piece.len();
            let due = began + Duration::from_secs_f64((all - remaining) as f64 / self.pace);
            thread::sleep(due.saturating_duration_since(Instant::now()));
        }
        io.write_all(back.as_bytes())?;
        let mut answer = Vec::new();
        io.read_to_end(&mut answer)?;
        let status = probe::status(&answer).context("the answer to the body")?;
        ensure!(status == 200, "the body was answered with {status}");
        Ok(())
    }
}
