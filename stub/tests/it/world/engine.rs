//! Engines: engine-sim in a process of its own, which is this test binary started with a filter that runs nothing but
//! [`engine`], and one that does on its socket what a test says.

use std::{
    io::{BufRead as _, BufReader, Read as _},
    net::{SocketAddr, TcpListener, TcpStream},
    process::{Child, Command, ExitCode, Stdio},
};

use clap::Parser;

use super::Client;

const FLAGS: &str = "ROUSE_TEST_ENGINE";

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: engine_sim::Args,
}

/// No test: the engine's own process.
#[test]
#[ignore = "started by other tests"]
fn engine() {
    let Ok(flags) = std::env::var(FLAGS) else { return };
    let args = Cli::parse_from(std::iter::once("engine").chain(flags.split_whitespace())).args;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    assert_eq!(runtime.block_on(engine_sim::run(args)).unwrap(), ExitCode::SUCCESS);
}

/// A running engine-sim; killed by its own pid when dropped.
pub(crate) struct Sim {
    child: Child,
    pub(crate) address: SocketAddr,
}

pub(crate) fn sim(flags: &str) -> Sim {
    let usual = "--port 0 --model m --start-time 10ms --profile-time 0 --enable-sleep-mode --keep-alive 0";
    let flags =
        if flags.contains("--fast") { format!("--port 0 {flags}") } else { format!("{usual} {flags}") };
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["world::engine::engine", "--exact", "--ignored", "--nocapture"])
        .env(FLAGS, flags)
        .env("VLLM_SERVER_DEV_MODE", "1")
        .env_remove("CUDA_VISIBLE_DEVICES")
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let address = lines.find_map(|line| line.split("listening on ").nth(1)?.trim().parse().ok());
    std::thread::spawn(move || lines.for_each(drop));
    Sim { child, address: address.expect("the engine listens") }
}

impl Sim {
    pub(crate) fn client(&self) -> Client {
        Client::new(self.address)
    }

    pub(crate) fn counter(&self, name: &str) -> u64 {
        self.client().get("/sim/counters").json()[name].as_u64().unwrap()
    }
}

impl Drop for Sim {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// An engine that does this with each connection: it is given what came, up to the end of a head.
pub(crate) fn scripted(script: impl Fn(TcpStream, String) + Send + Sync + Clone + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            let script = script.clone();
            std::thread::spawn(move || {
                let mut came = Vec::new();
                let mut buffer = [0; 16 << 10];
                while !came.windows(4).any(|window| window == b"\r\n\r\n") {
                    match stream.read(&mut buffer) {
                        Ok(read @ 1..) => came.extend_from_slice(buffer.get(..read).unwrap()),
                        _ => return,
                    }
                }
                script(stream, String::from_utf8_lossy(&came).into_owned());
            });
        }
    });
    address
}
