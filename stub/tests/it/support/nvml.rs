//! A fake NVML library with accelerators from a file. Each line has a UUID, the UUID of the accelerator it is a
//! partition of (or `-`), and the MiB in use, or `lost` or `hang` instead of them.

use std::{
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use tempfile::TempDir;

const SOURCE: &str = include_str!("nvml.c");

/// A library in its own folder, deleted on drop.
pub(crate) struct FakeNvmlLibrary {
    dir: TempDir,
}

impl FakeNvmlLibrary {
    pub(crate) fn new(lines: &[&str]) -> Self {
        let fake = Self { dir: tempfile::tempdir().unwrap() };
        compile(&fake.dir.path().join("libnvidia-ml.so.1"));
        fake.set_accelerators(lines);
        fake
    }

    /// The environment that makes a process load this library.
    pub(crate) fn environment(&self) -> [(&'static str, PathBuf); 2] {
        [("LD_LIBRARY_PATH", self.dir.path().to_owned()), ("FAKE_NVML", self.file())]
    }

    fn file(&self) -> PathBuf {
        self.dir.path().join("accelerators")
    }

    /// Changes the accelerators. A hanging call returns once its line no longer says `hang`.
    pub(crate) fn set_accelerators(&self, lines: &[&str]) {
        let new = self.file().with_extension("new");
        std::fs::write(&new, lines.join("\n") + "\n").unwrap();
        std::fs::rename(new, self.file()).unwrap();
    }
}

pub(crate) fn compile(library: &Path) {
    let mut compiler = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-x", "c", "-", "-o"])
        .arg(library)
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    compiler.stdin.take().unwrap().write_all(SOURCE.as_bytes()).unwrap();
    let compiled = compiler.wait_with_output().unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
}
