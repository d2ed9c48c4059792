//! The simulated accelerators of a machine: one JSON file that every engine (and a test's memory meter) shares.
//!
//! It enforces capacity, which is the point of it: a gateway that grants too much must see an engine die, not a number in a
//! log. Three things follow from engines being killed at any moment:
//! * a change is written beside the file and renamed over it, under a lock on a third file: no reader meets half a state;
//! * every entry names its process by pid and start time, and whoever reads drops the entries of processes that are gone;
//! * memory that comes back late is an entry with a deadline in wall-clock time, since its owner may be gone by then.

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

/// What one accelerator holds; all in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SimAcceleratorUsage {
    pub capacity: u64,
    /// All that is in use, memory of processes that are gone but whose memory comes back late included.
    pub used_total: u64,
    /// By living process.
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
    /// Makes the file with accelerators of the given capacities in bytes, replacing one that is there.
    pub fn create(path: impl AsRef<Path>, accelerators: &[(impl AsRef<str>, u64)]) -> Result<Self, Error> {
        let book = Self { path: path.as_ref().to_owned() };
        let accelerators = accelerators
            .iter()
            .map(|(id, capacity)| {
                (id.as_ref().to_owned(), SimAcceleratorState { capacity: *capacity, used: BTreeMap::new() })
            })
            .collect();
        let _lock = book.lock_file()?;
        book.write(&AcceleratorFileState { accelerators, ..AcceleratorFileState::default() })?;
        Ok(book)
    }

    /// Opens a file that [`AcceleratorFile::create`] made.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let book = Self { path: path.as_ref().to_owned() };
        book.read()?;
        Ok(book)
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What is in use now, by accelerator id.
    pub fn usage(&self) -> Result<BTreeMap<String, SimAcceleratorUsage>, Error> {
        self.transact(|state, _| {
            Ok(state.accelerators.keys().map(|id| (id.clone(), state.usage(id))).collect())
        })
    }

    /// Host memory that sleepers hold, by living process, in bytes.
    pub fn host_usage(&self) -> Result<BTreeMap<u32, u64>, Error> {
        self.transact(|state, _| Ok(state.host.used.iter().map(|(pid, entry)| (*pid, entry.bytes)).collect()))
    }

    /// What did not fit, in words, the last of it: an engine that dies of that is gone, and its log may go with it.
    pub fn refusals(&self) -> Result<Vec<String>, Error> {
        Ok(self.read()?.refused)
    }

    /// An account for the calling process on `ids`; a number that is no id is an index, as in `CUDA_VISIBLE_DEVICES`.
    /// No ids is the first accelerator. Memory that it frees stays counted for `late`.
    pub fn holder(
        &self,
        ids: &[String],
        label: &str,
        late: Option<Duration>,
    ) -> Result<MemoryAccount, Error> {
        let known: Vec<String> = self.usage()?.into_keys().collect();
        let find = |id: &String| {
            let by_index = || id.parse().ok().and_then(|index: usize| known.get(index));
            known.iter().find(|k| *k == id).or_else(by_index).cloned()
        };
        let mut ids = ids
            .iter()
            .filter(|id| !id.is_empty())
            .map(|id| find(id).ok_or_else(|| Error::UnknownAccelerator(id.clone())))
            .collect::<Result<Vec<_>, _>>()?;
        if ids.is_empty() {
            ids = known.into_iter().take(1).collect();
        }
        let pid = std::process::id();
        let start = process::start_ticks(pid).unwrap_or_default();
        Ok(MemoryAccount { file: self.clone(), ids, pid, start, label: label.to_owned(), free_delay: late })
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
        // A transaction is a read and a rename: waiting for it does not hold up the streams noticeably.
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
