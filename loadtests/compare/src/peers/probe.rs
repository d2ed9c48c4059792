//! Probes whether a process has started. The probes are frequent and short; the engine's core is otherwise idle
//! meanwhile.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context as _, bail};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::{Instant, MissedTickBehavior, interval, timeout},
};

use super::process::BenchProcess;

/// Probe intervals, which are the resolution of the reported start times.
const LISTEN_POLL_INTERVAL: Duration = Duration::from_millis(1);
const SERVE_POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Timeout of one request; the engine itself responds at once.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);

/// Waits until `address` accepts connections.
pub(crate) async fn wait_until_listening(
    process: &mut BenchProcess,
    address: SocketAddr,
    within: Duration,
) -> anyhow::Result<()> {
    let (mut every, until) = (delayed_interval(LISTEN_POLL_INTERVAL), Instant::now() + within);
    loop {
        every.tick().await;
        if TcpStream::connect(address).await.is_ok() {
            return Ok(());
        }
        process.check()?;
        if Instant::now() > until {
            bail!("does not listen: {}", process.log_tail());
        }
    }
}

/// Waits until a request succeeds with 200.
pub(crate) async fn wait_until_serving(
    process: &mut BenchProcess,
    address: SocketAddr,
    model: &str,
    key: &str,
    within: Duration,
) -> anyhow::Result<()> {
    let (mut every, until) = (delayed_interval(SERVE_POLL_INTERVAL), Instant::now() + within);
    loop {
        every.tick().await;
        let answer = timeout(RESPONSE_TIMEOUT, send_request(address, model, key)).await;
        if matches!(answer, Ok(Ok(200))) {
            return Ok(());
        }
        process.check()?;
        if Instant::now() > until {
            bail!("does not serve ({answer:?}): {}", process.log_tail());
        }
    }
}

fn delayed_interval(period: Duration) -> tokio::time::Interval {
    let mut every = interval(period);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    every
}

/// Sends one request and returns the status.
async fn send_request(address: SocketAddr, model: &str, key: &str) -> anyhow::Result<u16> {
    let body = format!(r#"{{"model":"{model}","messages":[{{"role":"user","content":"are you there?"}}]}}"#);
    let mut io = TcpStream::connect(address).await?;
    io.write_all(head(address, key, body.len() as u64).as_bytes()).await?;
    io.write_all(body.as_bytes()).await?;
    let mut answer = Vec::new();
    io.read_to_end(&mut answer).await?;
    status(&answer)
}

/// The head of a chat request with `connection: close`.
pub(crate) fn head(address: SocketAddr, key: &str, length: u64) -> String {
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\nauthorization: \
         Bearer {key}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n"
    )
}

/// Parses the status of a complete response.
pub(crate) fn status(answer: &[u8]) -> anyhow::Result<u16> {
    let text = answer.get(9..12).context("the answer is too short")?;
    std::str::from_utf8(text)?.parse().context("the answer has no status")
}
