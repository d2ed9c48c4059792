//! The simulated accelerators of a machine: one JSON file that every engine and a test's memory meter share.
//!
//! The file enforces capacity: if a gateway grants too much memory, an engine must die, so that the error is more than
//! a number in a log. Engines can be killed at any moment, which has three consequences:
//! * a change is written to a second file and renamed over the first, under a lock on a third file, so no reader sees
//!   partial state;
//! * every entry names its process by pid and start time, and each reader drops the entries of dead processes;
//! * memory that is freed late is an entry with a wall-clock deadline, because its owner may be dead by then.

mod holder;
mod process;
mod state;

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use nix::fcntl::{Flock, FlockArg};
use thiserror::Error;

use crate::clock;

pub use holder::{AccountTransaction, MemoryAccount};

use state::{AcceleratorFileState, SimAcceleratorState};

#[derive(Debug, Error)]
pub enum Error {
    #[error("accelerator file {path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error("accelerator file {path} is not valid: {source}")]
    Format { path: PathBuf, source: serde_json::Error },
    #[error("accelerator `{0}` is not in the file")]
    UnknownAccelerator(String),
    #[error("{asked} bytes do not fit on `{accelerator}`: {free} of {capacity} are free")]
    OutOfMemory { accelerator: String, asked: u64, capacity: u64, free: u64 },
}

/// Memory use of one accelerator, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SimAcceleratorUsage {
    pub capacity: u64,
    /// All memory in use, including late memory of dead processes.
    pub used_total: u64,
    /// By live process.
    pub by_pid: BTreeMap<u32, u64>,
}

impl SimAcceleratorUsage {
    #[must_use]
    pub fn free(&self) -> u64 {
        self.capacity.saturating_sub(self.used_total)
    }
}

/// The shared file.
#[derive(Clone, Debug)]
pub struct AcceleratorFile {
    path: PathBuf,
}

impl AcceleratorFile {
    /// Creates or replaces the file with accelerators of these capacities in bytes.
    pub fn create(path: impl AsRef<Path>, accelerators: &[(impl AsRef<str>, u64)]) -> Result<Self, Error> {
        let file = Self { path: path.as_ref().to_owned() };
        let accelerators = accelerators
            .iter()
            .map(|(id, capacity)| {
                (id.as_ref().to_owned(), SimAcceleratorState { capacity: *capacity, used: BTreeMap::new() })
            })
            .collect();
        let _lock = file.lock_file()?;
        file.write(&AcceleratorFileState { accelerators, ..AcceleratorFileState::default() })?;
        Ok(file)
    }

    /// Opens a file that [`AcceleratorFile::create`] made.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let file = Self { path: path.as_ref().to_owned() };
        file.read()?;
        Ok(file)
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Current usage by accelerator id.
    pub fn usage(&self) -> Result<BTreeMap<String, SimAcceleratorUsage>, Error> {
        self.transact(|state, _| {
            Ok(state.accelerators.keys().map(|id| (id.clone(), state.usage(id))).collect())
        })
    }

    /// Host memory that sleeping engines hold, in bytes by live process.
    pub fn host_usage(&self) -> Result<BTreeMap<u32, u64>, Error> {
        self.transact(|state, _| Ok(state.host.used.iter().map(|(pid, entry)| (*pid, entry.bytes)).collect()))
    }

    /// The most recent refused allocations as text. A refused engine dies, and its log may be deleted with it.
    pub fn refusals(&self) -> Result<Vec<String>, Error> {
        Ok(self.read()?.refused)
    }

    /// Opens an account for the calling process on `ids`; a number that is not an id is an index, as in
    /// `CUDA_VISIBLE_DEVICES`. Without ids it uses the first accelerator. Freed memory stays counted for `free_delay`.
    pub fn holder(
        &self,
        ids: &[String],
        label: &str,
        free_delay: Option<Duration>,
    ) -> Result<MemoryAccount, Error> {
        let known_ids: Vec<String> = self.usage()?.into_keys().collect();
        let find = |id: &String| {
            let by_index = || id.parse().ok().and_then(|index: usize| known_ids.get(index));
            known_ids.iter().find(|k| *k == id).or_else(by_index).cloned()
        };
        let mut ids = ids
            .iter()
            .filter(|id| !id.is_empty())
            .map(|id| find(id).ok_or_else(|| Error::UnknownAccelerator(id.clone())))
            .collect::<Result<Vec<_>, _>>()?;
        if ids.is_empty() {
            ids = known_ids.into_iter().take(1).collect();
        }
        let pid = std::process::id();
        let start = process::start_ticks(pid).unwrap_or_default();
        Ok(MemoryAccount { file: self.clone(), ids, pid, start, label: label.to_owned(), free_delay })
    }

    fn transact<T>(
        &self,
        change: impl FnOnce(&mut AcceleratorFileState, u64) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let _lock = self.lock_file()?;
        let mut state = self.read()?;
        let before = state.clone();
        let now_ms = clock::wall_us() / 1000;
        state.drop_dead_processes(now_ms);
        let unchanged = state.clone();
        let result = change(&mut state, now_ms);
        match &result {
            Ok(_) => {}
            Err(error @ Error::OutOfMemory { .. }) => state = unchanged.with_refusal(error.to_string()),
            Err(_) => return result,
        }
        if state != before {
            self.write(&state)?;
        }
        result
    }

    fn lock_file(&self) -> Result<Flock<File>, Error> {
        let path = self.sibling_path("lock");
        let file = File::options().create(true).truncate(false).write(true).open(&path);
        let file = file.map_err(|source| Error::Io { path: path.clone(), source })?;
        // A transaction is a read and a rename, so waiting for the lock does not noticeably delay streams.
        Flock::lock(file, FlockArg::LockExclusive)
            .map_err(|(_, errno)| Error::Io { path, source: errno.into() })
    }

    fn read(&self) -> Result<AcceleratorFileState, Error> {
        let text = fs::read(&self.path).map_err(|source| Error::Io { path: self.path.clone(), source })?;
        serde_json::from_slice(&text).map_err(|source| Error::Format { path: self.path.clone(), source })
    }

    fn write(&self, state: &AcceleratorFileState) -> Result<(), Error> {
        let format = |source| Error::Format { path: self.path.clone(), source };
        let text = serde_json::to_vec_pretty(state).map_err(format)?;
        let new = self.sibling_path("new");
        fs::write(&new, text)
            .and_then(|()| fs::rename(&new, &self.path))
            .map_err(|source| Error::Io { path: new, source })
    }

    fn sibling_path(&self, extension: &str) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(".");
        name.push(extension);
        PathBuf::from(name)
    }
}

#[cfg(test)]
mod tests;
