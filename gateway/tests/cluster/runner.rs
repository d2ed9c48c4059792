//! An installation whose Pods are processes.

use std::{fs, os::unix::fs::PermissionsExt as _, path::PathBuf};

use rouse_cluster::{
    PodRunner, TestCluster,
    podrunner::{NodeSpec, PodImage},
};
use serde_json::json;
use tempfile::TempDir;

use crate::{
    installation::Installation, nvml, site::GatewayNamespace, support::cluster, warmup::objects::WARMUP_LABEL,
};

/// The image of the stub that gateways add to engines' Pods.
const STUB_IMAGE: &str = "rouse/stub";
/// The variable with the stub's arguments: it makes this test program the stub of a Pod.
pub(crate) const STUB_ARGS_ENV: &str = "ROUSE_TEST_STUB";

/// The programs of an installation: the gateway, which is the engine as well, and the stub.
pub(crate) struct TestPrograms {
    pub(crate) gateway: PathBuf,
    /// Without a path this test program is the stub.
    stub: Option<PathBuf>,
}

impl TestPrograms {
    /// The programs that cargo builds for tests.
    pub(crate) fn from_cargo() -> Self {
        Self { gateway: env!("CARGO_BIN_EXE_rouse-gateway").into(), stub: None }
    }

    /// The optimised programs in the folder `ROUSE_OPTIMISED`: tests hold them to the figures promised for releases.
    /// Without that variable these are the programs of [`Self::from_cargo`].
    pub(crate) fn optimised() -> Self {
        let Some(folder) = std::env::var_os("ROUSE_OPTIMISED").map(PathBuf::from) else {
            return Self::from_cargo();
        };
        Self { gateway: folder.join("rouse-gateway"), stub: Some(folder.join("rouse-stub")) }
    }

    pub(crate) const fn are_optimised(&self) -> bool {
        self.stub.is_some()
    }
}

/// Runs the stub of a Pod. This is not a test.
#[test]
fn stub() {
    let Ok(arguments) = std::env::var(STUB_ARGS_ENV) else { return };
    let arguments = std::iter::once("rouse-stub").chain(arguments.lines()).map(std::ffi::OsString::from);
    let ended = rouse_stub::cli::run_from(arguments);
    eprintln!("the stub has ended: {ended:?}");
}

impl Installation<'static> {
    /// An installation with one node of this many accelerators, and a pool with this memory, in the cluster that all
    /// tests share.
    pub(crate) async fn new(name: &str, gpus: u32, memory: &str) -> Self {
        Self::new_in(cluster().await, name, gpus, memory).await
    }
}

impl<'a> Installation<'a> {
    /// An installation with one node in the given cluster, which serves our kinds.
    pub(crate) async fn new_in(cluster: &'a TestCluster, name: &str, gpus: u32, memory: &str) -> Self {
        let site = GatewayNamespace::new(cluster, name).await;
        Self::with_node(site, memory, |own| plain_node(own, gpus)).await
    }

    /// An installation in this namespace, with the node that `node` makes for the namespace's name.
    pub(crate) async fn with_node(
        site: GatewayNamespace<'a>,
        memory: &str,
        node: impl FnOnce(&str) -> NodeSpec,
    ) -> Self {
        Self::with_programs(TestPrograms::from_cargo(), site, memory, node).await
    }

    /// An installation in this namespace, with these programs and the node that `node` makes for the namespace's name.
    pub(crate) async fn with_programs(
        programs: TestPrograms,
        site: GatewayNamespace<'a>,
        memory: &str,
        node: impl FnOnce(&str) -> NodeSpec,
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let namespace = site.namespace.name().to_owned();
        let runner = PodRunner::builder(&site.namespace)
            .node(node(&namespace))
            .image(STUB_IMAGE, PodImage::new(programs.stub.unwrap_or_else(|| stub_program(&dir))))
            .image("rouse/engine", PodImage::new(&programs.gateway))
            .played(WARMUP_LABEL)
            .start()
            .await
            .unwrap();
        let (program, stub_image) = (programs.gateway, STUB_IMAGE.to_owned());
        let world = Self { site, runner, dir, program, stub_image, watched: namespace.clone() };
        world
            .pool(&namespace, json!({"nodeSelector": {"inference-pool": namespace}, "memory": memory}))
            .await;
        world
    }

    /// Sets what the stubs of this model's engines see from now on: accelerators, and the MiB in use of each. The stub
    /// sees them like a container into which only these were put.
    pub(crate) fn set_accelerators(&self, model: &str, all: &[(&str, u64)]) {
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

/// A node in the pool of the namespace's name.
pub(crate) fn plain_node(own: &str, gpus: u32) -> NodeSpec {
    NodeSpec::new(&format!("{own}-a")).gpus(gpus).label("inference-pool", own)
}

/// Writes a script that starts this program as the stub, with the container's arguments. If a file has the model's
/// name, the stub finds a driver that reports the file's accelerators ([`Installation::set_accelerators`]).
fn stub_program(dir: &TempDir) -> PathBuf {
    let path = dir.path().join("rouse-stub");
    let (own_exe, driver) = (std::env::current_exe().unwrap(), dir.path().join("driver"));
    let script = format!(
        "#!/bin/sh\n\
         for word in \"$@\"; do case $word in --model=*) FAKE_NVML={driver}/${{word#--model=}};; esac; done\n\
         if [ -e \"$FAKE_NVML\" ]; then export FAKE_NVML LD_LIBRARY_PATH={driver}; fi\n\
         {STUB_ARGS_ENV}=$(printf '%s\\n' \"$@\") exec {own_exe} runner::stub --exact --nocapture\n",
        driver = driver.display(),
        own_exe = own_exe.display()
    );
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}
