//! Runs the scheduler as a process of this machine, like the control plane's other servers.

use std::sync::Arc;

use anyhow::{Context as _, Result};

use crate::{
    ClusterInner, binaries,
    control_plane::{SCHEDULER_PORT, flags},
    server::ServerProcess,
};

/// Starts the scheduler. Tests wait for its effects, not for its readiness.
pub(super) fn start(inner: &Arc<ClusterInner>) -> Result<ServerProcess> {
    let (ground, users) = (&inner.resources, &inner.users);
    let program = binaries::find("ring2")?
        .remove("kube-scheduler")
        .context("testing/cluster/build does not list kube-scheduler")?;
    let admin = users.kubeconfig(users.admin(), inner.api_server)?.display().to_string();
    let args = flags(&[
        ("kubeconfig", admin.clone()),
        ("authentication-kubeconfig", admin.clone()),
        ("authorization-kubeconfig", admin),
        ("bind-address", ground.server_address().to_string()),
        ("secure-port", SCHEDULER_PORT.to_string()),
        ("cert-dir", ground.state().join("kube-scheduler").display().to_string()),
        // There is only one, and waiting for a lease would slow the tests.
        ("leader-elect", "false".to_owned()),
        ("profiling", "false".to_owned()),
    ]);
    let mut server = ServerProcess::new(ground, "kube-scheduler", program, args);
    server.start()?;
    Ok(server)
}
