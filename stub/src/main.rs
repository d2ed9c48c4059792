//! `rouse-stub`: the gateway's hand inside Pods and on nodes. Today it only says what it will be; the roles
//! arrive with the Kubernetes work (see `docs/architecture.md`).

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "rouse-stub", version, about = "Rouse's small second binary, for Pods and nodes")]
struct Args {
    #[command(subcommand)]
    role: Role,
}

/// The three roles of the stub. None of them runs yet, and each says so with a failing exit code, so that a Pod
/// that is started with this build cannot be mistaken for a working one.
#[derive(Subcommand)]
enum Role {
    /// Relay, probes and gate beside a requester Pod's accelerators
    Proxy,
    /// Starts and stops engines inside a provider Pod
    Launcher,
    /// Device plugin and node agent
    Node,
}

fn main() -> ExitCode {
    let role = match Args::parse().role {
        Role::Proxy => "proxy",
        Role::Launcher => "launcher",
        Role::Node => "node",
    };
    eprintln!(
        "rouse-stub {role}: not built yet in version {}; on one machine use rouse-gateway alone",
        env!("CARGO_PKG_VERSION")
    );
    ExitCode::from(69)
}
