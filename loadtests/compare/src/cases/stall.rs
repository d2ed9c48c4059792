//! One very long prompt, sent by a process of its own at the lowest priority: what reads the streams must not wait for what
//! sends the prompt.

use std::{
    env,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    path::Path,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use clap::Args;
use tokio::time::sleep;

use crate::{
    load::{Seen, Streams, streams},
    peers::{
        MODEL, Proxy, probe,
        process::{Command, Process},
    },
};

/// Of the body.
const BYTES: u64 = 200_000_000;
/// Streams run for so long before it comes.
const BEFORE: Duration = Duration::from_millis(700);

/// Sends one body and waits for its answer.
#[derive(Args, Clone, Debug)]
pub(crate) struct SendBody {
    #[arg(long)]
    to: SocketAddr,
    #[arg(long)]
    key: String,
    #[arg(long, default_value_t = BYTES)]
    bytes: u64,
}

/// Streams with the body in their middle. A body that was not answered as it should be is an error.
pub(crate) async fn run(load: &Streams, proxy: &Proxy, core: usize, folder: &Path) -> anyhow::Result<Seen> {
    let command = Command::new("nice").args(["-n", "19"]).args([env::current_exe()?.as_os_str()]).args([
        "send-body",
        "--to",
        &proxy.address.to_string(),
        "--key",
        &proxy.key,
    ]);
    let body = async {
        sleep(BEFORE).await;
        Process::spawn("body", command, &core.to_string(), folder)?.ends_well().await
    };
    let reading = streams(load);
    tokio::pin!(body, reading);
    tokio::select! {
        sent = &mut body => {
            let mut seen = reading.await?;
            if let Err(error) = sent {
                seen.errors += 1;
                seen.complaint.get_or_insert_with(|| format!("{error:#}"));
            }
            Ok(seen)
        }
        seen = &mut reading => {
            let mut seen = seen?;
            seen.errors += 1;
            seen.complaint.get_or_insert_with(|| "the streams ended before the body was answered".to_owned());
            Ok(seen)
        }
    }
}

impl SendBody {
    pub(crate) fn run(&self) -> anyhow::Result<()> {
        ensure!(self.to.ip().is_loopback(), "load goes to loopback addresses alone");
        let message = format!(r#"{{"role":"user","content":"{}\nand so on"}},"#, "long words ".repeat(100));
        let front = format!(r#"{{"model":"{MODEL}","messages":["#);
        let back = r#"{"role":"user","content":"end"}]}"#;
        let messages = self.bytes / message.len() as u64;
        let length = (front.len() + back.len()) as u64 + messages * message.len() as u64;
        let mut io = TcpStream::connect(self.to)?;
        io.set_read_timeout(Some(Duration::from_secs(60)))?;
        io.set_write_timeout(Some(Duration::from_secs(60)))?;
        io.write_all(probe::head(self.to, &self.key, length).as_bytes())?;
        io.write_all(front.as_bytes())?;
        let many = message.repeat(64);
        let mut left = messages as usize * message.len();
        while left > 0 {
            let piece = many.as_bytes().get(..left).unwrap_or(many.as_bytes());
            io.write_all(piece)?;
            left -= piece.len();
        }
        io.write_all(back.as_bytes())?;
        let mut answer = Vec::new();
        io.read_to_end(&mut answer)?;
        let status = answer.get(9..12).context("no answer to the body")?;
        ensure!(status == b"200", "the body was answered with {}", String::from_utf8_lossy(status));
        Ok(())
    }
}
