//! A world whose Pods are processes.

use std::{fs, os::unix::fs::PermissionsExt as _, path::PathBuf};

use rouse_cluster::{
    Cluster, PodRunner,
    podrunner::{Image, NodeSpec},
};
use serde_json::json;
use tempfile::TempDir;

use crate::{nvml, site::Site, support::cluster, world::World};

/// The image that gateways put beside engines.
const STUB: &str = "rouse/stub";
/// What this test program is, when it is started for a Pod.
pub(crate) const RUNS: &str = "ROUSE_TEST_STUB";

/// The gateway, which is the engine too, and the stub of a world.
pub(crate) struct Programs {
    gateway: PathBuf,
    /// None: this test program is the stub.
    stub: Option<PathBuf>,
}

impl Programs {
    /// The programs as cargo builds them for tests.
    pub(crate) fn ours() -> Self {
        Self { gateway: env!("CARGO_BIN_EXE_rouse-gateway").into(), stub: None }
    }

    /// The optimised programs of the folder that `ROUSE_OPTIMISED` names: tests hold them to figures that are promised of releases.
    /// Without that variable, the same as [`Self::ours`].
    pub(crate) fn optimised() -> Self {
        let Some(folder) = std::env::var_os("ROUSE_OPTIMISED").map(PathBuf::from) else {
            return Self::ours();
        };
        Self { gateway: folder.join("rouse-gateway"), stub: Some(folder.join("rouse-stub")) }
    }

    pub(crate) const fn are_optimised(&self) -> bool {
        self.stub.is_some()
    }
}

/// Not a test: the stub of a Pod.
#[test]
fn stub() {
    let Ok(arguments) = std::env::var(RUNS) else { return };
    let arguments = std::iter::once("rouse-stub").chain(arguments.lines()).map(std::ffi::OsString::from);
    let ended = rouse_stub::cli::run_as(arguments);
    eprintln!("the stub has ended: {ended:?}");
}

impl World<'static> {
    /// With one node of so many accelerators, and so much memory in the pool; in the cluster that all tests share.
    pub(crate) async fn new(name: &str, gpus: u32, memory: &str) -> Self {
        Self::on(cluster().await, name, gpus, memory).await
    }
}

impl<'a> World<'a> {
    /// The same in a cluster that knows our kinds.
    pub(crate) async fn on(cluster: &'a Cluster, name: &str, gpus: u32, memory: &str) -> Self {
        let site = Site::new(cluster, name).await;
        Self::at(site, memory, |own| plain_node(own, gpus)).await
    }

    /// On this ground, with the node that is made for the namespace's name.
    pub(crate) async fn at(site: Site<'a>, memory: &str, node: impl FnOnce(&str) -> NodeSpec) -> Self {
        Self::of(Programs::ours(), site, memory, node).await
    }

    /// On this ground, with a node that is made for the namespace's name, and with these programs.
    pub(crate) async fn of(
        programs: Programs,
        site: Site<'a>,
        memory: &str,
        node: impl FnOnce(&str) -> NodeSpec,
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let own = site.namespace.name().to_owned();
        let runner = PodRunner::of(&site.namespace)
            .node(node(&own))
            .image(STUB, Image::new(programs.stub.unwrap_or_else(|| stub_program(&dir))))
            .image("rouse/engine", Image::new(&programs.gateway))
            .start()
            .await
            .unwrap();
        let (program, stub_image) = (programs.gateway, STUB.to_owned());
        let world = Self { site, runner, dir, program, stub_image, watched: own.clone() };
        world.pool(&own, json!({"nodeSelector": {"inference-pool": own}, "memory": memory})).await;
        world
    }

    /// What the stubs of this model's engines see from now on: accelerators, and the MiB in use of each. As in a container
    /// into which only these were put.
    pub(crate) fn accelerators(&self, model: &str, all: &[(&str, u64)]) {
        let driver = self.dir.path().join("driver");
        if !driver.exists() {
            fs::create_dir(&driver).unwrap();
            nvml::compile(&driver.join("libnvidia-ml.so.1"));
        }
        let lines: String = all.iter().map(|(id, mib)| format!("{id} - {mib}\n")).collect();
        let new = driver.join(format!("{model}.new"));
        fs::write(&new, lines).unwrap();
        fs::rename(new, driver.join(model)).unwrap();
    }
}

/// In the pool of the namespace's name.
pub(crate) fn plain_node(own: &str, gpus: u32) -> NodeSpec {
    NodeSpec::new(&format!("{own}-a")).gpus(gpus).label("inference-pool", own)
}

/// A script that starts this very program as the stub, with the container's arguments. Where a file is named after the model,
/// the stub finds a driver that tells of the accelerators in it ([`World::accelerators`]).
fn stub_program(dir: &TempDir) -> PathBuf {
    let path = dir.path().join("rouse-stub");
    let (own, driver) = (std::env::current_exe().unwrap(), dir.path().join("driver"));
    let script = format!(
        "#!/bin/sh\n\
         for word in \"$@\"; do case $word in --model=*) FAKE_NVML={driver}/${{word#--model=}};; esac; done\n\
         if [ -e \"$FAKE_NVML\" ]; then export FAKE_NVML LD_LIBRARY_PATH={driver}; fi\n\
         {RUNS}=$(printf '%s\\n' \"$@\") exec {own} runner::stub --exact --nocapture\n",
        driver = driver.display(),
        own = own.display()
    );
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}
