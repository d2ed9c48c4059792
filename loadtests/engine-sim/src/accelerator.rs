//! The simulated accelerators of a machine: one JSON file that every engine (and a test's memory meter) shares.
//!
//! It enforces capacity, which is the point of it: a gateway that grants too much must see an engine die, not a number in a
//! log. Three things follow from engines being killed at any moment:
//! * a change is written beside the file and renamed over it, under a lock on a third file: no reader meets half a state;
//! * every entry names its process by pid and start time, and whoever reads drops the entries of processes that are gone;
//! * memory that comes back late is an entry with a deadline in wall-clock time, since its owner may be gone by then.

mod process;

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::clock;

#[derive(Debug, Error)]
pub enum Error {
    #[error("accelerator file {path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error("accelerator file {path} is not valid: {source}")]
    Format {
        path: PathBuf,
        source: serde_json::Error,
    },
    #[error("accelerator `{0}` is not in the file")]
    UnknownAccelerator(String),
    #[error("{asked} bytes do not fit on `{accelerator}`: {free} of {capacity} are free")]
    OutOfMemory {
        accelerator: String,
        asked: u64,
        capacity: u64,
        free: u64,
    },
}

/// What one accelerator holds; all in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub capacity: u64,
    /// All that is in use, memory of processes that are gone but whose memory comes back late included.
    pub used_total: u64,
    /// By living process.
    pub by_pid: BTreeMap<u32, u64>,
}

impl Usage {
    #[must_use]
    pub fn free(&self) -> u64 {
        self.capacity.saturating_sub(self.used_total)
    }
}

/// The shared file.
#[derive(Clone, Debug)]
pub struct Book {
    path: PathBuf,
}

/// One process's account in a [`Book`], over the accelerators it was given.
#[derive(Clone, Debug)]
pub struct Holder {
    book: Book,
    ids: Vec<String>,
    pid: u32,
    start: u64,
    label: String,
    late: Option<Duration>,
}

/// The accounts while they are locked; changes are kept only when the closure that got it returns `Ok`.
pub struct Session<'a> {
    state: &'a mut State,
    holder: &'a Holder,
    now_ms: u64,
}

impl Book {
    /// Makes the file with accelerators of the given capacities in bytes, replacing one that is there.
    pub fn create(path: impl AsRef<Path>, accelerators: &[(&str, u64)]) -> Result<Self, Error> {
        let book = Self {
            path: path.as_ref().to_owned(),
        };
        let accelerators = accelerators
            .iter()
            .map(|(id, capacity)| {
                (
                    (*id).to_owned(),
                    Card {
                        capacity: *capacity,
                        used: BTreeMap::new(),
                    },
                )
            })
            .collect();
        let _lock = book.lock()?;
        book.write(&State {
            accelerators,
            ..State::default()
        })?;
        Ok(book)
    }

    /// Opens a file that [`Book::create`] made.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let book = Self {
            path: path.as_ref().to_owned(),
        };
        book.read()?;
        Ok(book)
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What is in use now, by accelerator id.
    pub fn usage(&self) -> Result<BTreeMap<String, Usage>, Error> {
        self.transact(|state, _| {
            Ok(state
                .accelerators
                .keys()
                .map(|id| (id.clone(), state.usage(id)))
                .collect())
        })
    }

    /// Host memory that sleepers hold, by living process, in bytes.
    pub fn host_usage(&self) -> Result<BTreeMap<u32, u64>, Error> {
        self.transact(|state, _| {
            Ok(state
                .host
                .used
                .iter()
                .map(|(pid, entry)| (*pid, entry.bytes))
                .collect())
        })
    }

    /// An account for the calling process on `ids`; a number that is no id is an index, as in `CUDA_VISIBLE_DEVICES`.
    /// No ids is the first accelerator. Memory that it frees stays counted for `late`.
    pub fn holder(&self, ids: &[String], label: &str, late: Option<Duration>) -> Result<Holder, Error> {
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
        Ok(Holder {
            book: self.clone(),
            ids,
            pid,
            start,
            label: label.to_owned(),
            late,
        })
    }

    fn transact<T>(&self, change: impl FnOnce(&mut State, u64) -> Result<T, Error>) -> Result<T, Error> {
        let _lock = self.lock()?;
        let mut state = self.read()?;
        let before = state.clone();
        let now_ms = clock::wall_us() / 1000;
        state.drop_gone(now_ms);
        let result = change(&mut state, now_ms);
        if result.is_ok() && state != before {
            self.write(&state)?;
        }
        result
    }

    fn lock(&self) -> Result<Flock<File>, Error> {
        let path = self.beside("lock");
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path);
        let file = file.map_err(|source| Error::Io {
            path: path.clone(),
            source,
        })?;
        // A transaction is a read and a rename: waiting for it does not hold up the streams noticeably.
        Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, errno)| Error::Io {
            path,
            source: errno.into(),
        })
    }

    fn read(&self) -> Result<State, Error> {
        let text = fs::read(&self.path).map_err(|source| Error::Io {
            path: self.path.clone(),
            source,
        })?;
        serde_json::from_slice(&text).map_err(|source| Error::Format {
            path: self.path.clone(),
            source,
        })
    }

    fn write(&self, state: &State) -> Result<(), Error> {
        let format = |source| Error::Format {
            path: self.path.clone(),
            source,
        };
        let text = serde_json::to_vec_pretty(state).map_err(format)?;
        let new = self.beside("new");
        fs::write(&new, text)
            .and_then(|()| fs::rename(&new, &self.path))
            .map_err(|source| Error::Io { path: new, source })
    }

    fn beside(&self, extension: &str) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(".");
        name.push(extension);
        PathBuf::from(name)
    }
}

impl Holder {
    /// The accelerators of this account.
    #[must_use]
    pub fn ids(&self) -> &[String] {
        &self.ids
    }

    /// Sets how long freed memory stays counted from now on.
    pub fn set_late(&mut self, late: Option<Duration>) {
        self.late = late;
    }

    /// Runs `change` with the file locked; all of it happens or, on an error, nothing.
    pub fn transact<T>(&self, change: impl FnOnce(&mut Session<'_>) -> Result<T, Error>) -> Result<T, Error> {
        self.book.transact(|state, now_ms| {
            change(&mut Session {
                state,
                holder: self,
                now_ms,
            })
        })
    }

    /// Makes this account hold `bytes` on each of its accelerators.
    pub fn resize(&self, bytes: u64) -> Result<(), Error> {
        self.transact(|session| self.ids.iter().try_for_each(|id| session.resize(id, bytes)))
    }

    /// Makes this account hold `bytes` of host memory.
    pub fn resize_host(&self, bytes: u64) -> Result<(), Error> {
        self.transact(|session| {
            session.resize_host(bytes);
            Ok(())
        })
    }
}

impl Session<'_> {
    /// Bytes free on accelerator `id`.
    #[must_use]
    pub fn usage(&self, id: &str) -> Usage {
        self.state.usage(id)
    }

    /// Makes the account hold `bytes` on `id`: more must fit, less is freed (late, if the account is so).
    pub fn resize(&mut self, id: &str, bytes: u64) -> Result<(), Error> {
        let Holder { pid, late, .. } = *self.holder;
        let usage = self.state.usage(id);
        let card = self.state.accelerators.get_mut(id);
        let card = card.ok_or_else(|| Error::UnknownAccelerator(id.to_owned()))?;
        let held = card.used.get(&pid).map_or(0, |entry| entry.bytes);
        if bytes > held && bytes - held > usage.free() {
            let Usage { capacity, .. } = usage;
            let asked = bytes - held;
            return Err(Error::OutOfMemory {
                accelerator: id.to_owned(),
                asked,
                capacity,
                free: usage.free(),
            });
        }
        self.holder.enter(&mut card.used, bytes);
        if let Some(late) = late.filter(|_| bytes < held) {
            let until_unix_ms = self.now_ms + late.as_millis() as u64;
            let start = self.holder.start;
            let entry = Late {
                accelerator: id.to_owned(),
                bytes: held - bytes,
                until_unix_ms,
                pid,
                start,
            };
            self.state.late.push(entry);
        }
        Ok(())
    }

    /// Makes the account hold `bytes` of host memory, which has no capacity here.
    pub fn resize_host(&mut self, bytes: u64) {
        self.holder.enter(&mut self.state.host.used, bytes);
    }
}

impl Holder {
    fn enter(&self, used: &mut BTreeMap<u32, Entry>, bytes: u64) {
        if bytes == 0 {
            used.remove(&self.pid);
            return;
        }
        let late_ms = self.late.map_or(0, |late| late.as_millis() as u64);
        used.insert(
            self.pid,
            Entry {
                start: self.start,
                bytes,
                label: self.label.clone(),
                late_ms,
            },
        );
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct State {
    accelerators: BTreeMap<String, Card>,
    #[serde(default)]
    late: Vec<Late>,
    #[serde(default)]
    host: Host,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Card {
    capacity: u64,
    #[serde(default)]
    used: BTreeMap<u32, Entry>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Host {
    #[serde(default)]
    used: BTreeMap<u32, Entry>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Entry {
    start: u64,
    bytes: u64,
    label: String,
    /// How long the memory stays counted once the process is gone, however it went.
    #[serde(default)]
    late_ms: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Late {
    accelerator: String,
    bytes: u64,
    until_unix_ms: u64,
    pid: u32,
    start: u64,
}

impl State {
    fn usage(&self, id: &str) -> Usage {
        let Some(card) = self.accelerators.get(id) else {
            return Usage::default();
        };
        let mut by_pid: BTreeMap<u32, u64> =
            card.used.iter().map(|(pid, entry)| (*pid, entry.bytes)).collect();
        let mut used_total: u64 = by_pid.values().sum();
        for late in self.late.iter().filter(|late| late.accelerator == id) {
            used_total += late.bytes;
            if process::lives(late.pid, late.start) {
                *by_pid.entry(late.pid).or_default() += late.bytes;
            }
        }
        Usage {
            capacity: card.capacity,
            used_total,
            by_pid,
        }
    }

    /// Drops what processes held that are gone, or moves it to the late memory.
    fn drop_gone(&mut self, now_ms: u64) {
        let gone = |pid: &u32, entry: &mut Entry| !process::lives(*pid, entry.start);
        for (id, card) in &mut self.accelerators {
            for (pid, entry) in card
                .used
                .extract_if(.., gone)
                .filter(|(_, entry)| entry.late_ms > 0)
            {
                let until_unix_ms = now_ms + entry.late_ms;
                let Entry { bytes, start, .. } = entry;
                self.late.push(Late {
                    accelerator: id.clone(),
                    bytes,
                    until_unix_ms,
                    pid,
                    start,
                });
            }
        }
        self.host
            .used
            .retain(|pid, entry| process::lives(*pid, entry.start));
        self.late.retain(|late| late.until_unix_ms > now_ms);
    }
}

#[cfg(test)]
mod tests;
