//! A library that answers as NVIDIA's does, about accelerators that a file describes, one a line: its UUID, that of
//! the accelerator it is a part of (or `-`), and the MiB in use; or instead of these `lost`, or `hang`.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use super::Setting;

const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/support/nvml.c");

/// Lies in the stub's own folder.
pub(crate) struct Fake {
    file: PathBuf,
}

impl Fake {
    /// Has the stub find this library instead of any other.
    pub(crate) fn for_stub(setting: Setting, lines: &[&str]) -> (Setting, Self) {
        let library = setting.dir().join("libnvidia-ml.so.1");
        compile(&library);
        let fake = Self { file: setting.dir().join("accelerators") };
        fake.set(lines);
        let dir = setting.dir().to_owned();
        (setting.env("LD_LIBRARY_PATH", dir).env("FAKE_NVML", &fake.file), fake)
    }

    /// Whoever hangs goes on, when it is not told to any more.
    pub(crate) fn set(&self, lines: &[&str]) {
        let new = self.file.with_extension("new");
        std::fs::write(&new, lines.join("\n") + "\n").unwrap();
        std::fs::rename(new, &self.file).unwrap();
    }
}

fn compile(library: &Path) {
    let compiled =
        Command::new("cc").args(["-shared", "-fPIC", "-O1", "-o"]).arg(library).arg(SOURCE).output().unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
}
