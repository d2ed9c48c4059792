//! A registry of images as a process of this machine. The node reaches it through a link, which tests can disturb.

use std::{
    fs,
    net::{SocketAddr, TcpListener},
    path::Path,
    sync::Arc,
};

use anyhow::{Context as _, Result};
use serde_json::json;

use crate::{
    ClusterInner, Link,
    server::{self, ServerProcess},
};

/// The Debian package's program. It reads its configuration from a file.
const PROGRAM: &str = "docker-registry";
/// A folder of the node with the runtime's settings for each registry. It reads them with each pull.
pub(super) const HOSTS_FOLDER: &str = "certs.d";

/// A running registry. It ends with the cluster.
pub struct NodeRegistry {
    address: SocketAddr,
    link: Link,
    _server: ServerProcess,
}

impl NodeRegistry {
    /// Starts a registry with these users, the lines of an `htpasswd` file with bcrypt hashes. Without users, everybody
    /// may pull and push. `folder` is the node's.
    pub(super) async fn start(
        inner: &Arc<ClusterInner>,
        folder: &Path,
        name: &'static str,
        users: &str,
    ) -> Result<Self> {
        let resources = &inner.resources;
        let own = resources.state().join(name);
        fs::create_dir_all(&own)?;
        // The cluster's addresses belong to no other program, so the port stays free.
        let address = TcpListener::bind((resources.server_address(), 0))?.local_addr()?;
        let mut config = json!({
            "version": 0.1,
            "log": {"level": "warn"},
            "storage": {"filesystem": {"rootdirectory": own.join("images")}},
            "http": {"addr": address.to_string(), "secret": name},
        });
        if !users.is_empty() {
            let path = own.join("htpasswd");
            fs::write(&path, users)?;
            config["auth"] = json!({"htpasswd": {"realm": name, "path": path}});
        }
        // JSON is valid YAML.
        let path = own.join("config.yml");
        fs::write(&path, config.to_string())?;
        let args = vec!["serve".to_owned(), path.display().to_string()];
        let mut server = ServerProcess::new(resources, name, PROGRAM.into(), args);
        server.start().context("apt-get install docker-registry")?;
        server.wait_until_ready(|| server::is_listening(address)).await?;

        let link = Link::open_to(Arc::clone(inner), resources.uplink_address(), address).await?;
        let host = link.address().to_string();
        let hosts = folder.join(HOSTS_FOLDER).join(&host);
        fs::create_dir_all(&hosts)?;
        // Without this the runtime asks for TLS.
        let plain = format!("[host.\"http://{host}\"]\ncapabilities = [\"pull\", \"resolve\"]\n");
        fs::write(hosts.join("hosts.toml"), format!("server = \"http://{host}\"\n\n{plain}"))?;
        Ok(Self { address, link, _server: server })
    }

    /// Where this machine reaches it.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// The node's way to it.
    #[must_use]
    pub const fn link(&self) -> &Link {
        &self.link
    }

    /// The reference by which the node's Pods name an image of this registry.
    #[must_use]
    pub fn reference(&self, image: &str) -> String {
        format!("{}/{image}", self.link.address())
    }
}
