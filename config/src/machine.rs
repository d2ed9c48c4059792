//! Inputs of the defaults: RAM and environment.

use std::path::{Path, PathBuf};

use rouse::units::Bytes;

use super::{
    PlatformKind,
    host::{HostMemory, SystemFiles},
    reader::EnvLookup,
};

/// Inputs of the defaults, and the command line's override. A test supplies its own.
pub struct MachineDefaults {
    /// Overrides the file's `platform`.
    pub platform: Option<PlatformKind>,
    /// RAM that this process and its engines may use.
    pub memory: Bytes,
    pub environment: EnvLookup,
}

impl MachineDefaults {
    pub fn detect() -> Self {
        Self { platform: None, memory: memory(), environment: |name| std::env::var(name).ok() }
    }
}

/// Returns the default state directory.
///
/// `$STATE_DIRECTORY` (systemd), else `$XDG_STATE_HOME/rouse`, else `~/.local/state/rouse`, else `/var/lib/rouse` (a
/// service without a home).
pub fn default_state_dir(environment: EnvLookup) -> PathBuf {
    let set = |name| environment(name).filter(|value| !value.is_empty());
    if let Some(dir) = set("STATE_DIRECTORY") {
        return dir.into();
    }
    if let Some(base) = set("XDG_STATE_HOME") {
        return Path::new(&base).join("rouse");
    }
    set("HOME").map_or_else(|| "/var/lib/rouse".into(), |home| Path::new(&home).join(".local/state/rouse"))
}

/// Returns the RAM that this process may use, or 16 GiB if the kernel does not report it.
fn memory() -> Bytes {
    HostMemory::read(&SystemFiles::default()).map_or(Bytes::gib(16), |memory| memory.usable())
}
