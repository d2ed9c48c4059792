//! Stores what must outlive the gateway: running engines, their last use, the last failures of engines that have not
//! served since, and learned measurements of the models.
//!
//! Files are written beside and renamed over, so that a reader never meets half a file. They are not forced to the
//! disk, because no engines are left to find after a crash of the machine. State that the next step requires on disk
//! (an engine that was started, a transition that begins) is saved at once. The supervisor saves idle clocks, failures
//! and learned measurements within a second or so. The folder is locked: two gateways on one folder would adopt each
//! other's engines.

mod failure;

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use nix::fcntl::{Flock, FlockArg};
use rouse::{
    fleet::{event::LearnedMeasurements, quote::LearnedTimes},
    model::{AcceleratorId, EngineId, ModelName, SleepLevel},
    units::{Generation, Tick},
};
use rouse_net::process::table;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::{sync::Notify, task};

pub(super) use failure::StoredFailure;
use failure::readable_failures;

const LOCK_FILE: &str = "lock";
const ENGINES_FILE: &str = "engines.json";
const LEARNED_FILE: &str = "learned.json";

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "another gateway uses this state directory: {0}; stop that gateway, or set state to another directory"
    )]
    Locked(PathBuf),
    #[error("cannot use the state directory {path}: {source}")]
    Io { path: PathBuf, source: io::Error },
}

/// One engine that was started and not seen gone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct StoredEngine {
    pub(super) generation: Generation,
    pub(super) pid: i32,
    /// Start time of the process, in clock ticks since boot: with the pid, its identity.
    #[serde(rename = "start")]
    pub(super) process_start_ticks: u64,
    pub(super) address: SocketAddr,
    pub(super) accelerators: Vec<AcceleratorId>,
    pub(super) fingerprint: u64,
    pub(super) phase: StoredPhase,
    pub(super) started: Tick,
    /// End of its last lease, or its start before there was one.
    #[serde(rename = "lastEnd")]
    pub(super) last_lease_end: Tick,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum StoredPhase {
    Starting,
    Awake,
    /// Falling asleep or waking: after a crash in this phase, only the engine knows its state.
    #[serde(rename = "moving")]
    Transitioning(SleepLevel),
    Asleep(SleepLevel),
}

/// The lock of the state directory: while it is held, no other gateway uses the directory.
///
/// It is not part of the store, which tasks still share while they are being ended.
#[derive(Debug)]
pub struct StateDirLock {
    folder: PathBuf,
    _file: Flock<File>,
}

#[derive(Debug)]
pub(super) struct StateStore {
    folder: PathBuf,
    boot: String,
    content: Mutex<StoreContent>,
    /// Held while a file is written, so that an older state never replaces a newer one.
    writing: Mutex<()>,
    dirty: Notify,
}

#[derive(Debug, Default)]
struct StoreContent {
    engines: BTreeMap<EngineId, StoredEngine>,
    failures: BTreeMap<EngineId, StoredFailure>,
    learned: BTreeMap<ModelName, LearnedMeasurements>,
}

#[derive(Default, Serialize, Deserialize)]
struct EnginesFile {
    boot: String,
    engines: BTreeMap<EngineId, StoredEngine>,
    /// By engine, running or not. Files of earlier builds lack it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "readable_failures")]
    failures: BTreeMap<EngineId, StoredFailure>,
}

/// Whether a running gateway holds the lock of this state directory.
#[must_use]
pub fn is_in_use(folder: &Path) -> bool {
    let lock = File::open(folder.join(LOCK_FILE));
    lock.is_ok_and(|lock| Flock::lock(lock, FlockArg::LockSharedNonblock).is_err())
}

/// Reads what the gateway of this state directory has recorded of an engine, also while that gateway runs.
///
/// `None`: no process of the engine was recorded since the machine started.
///
/// # Errors
/// The record cannot be read.
pub(super) fn read_recorded(folder: &Path, engine: &EngineId) -> io::Result<Option<StoredEngine>> {
    let content = match fs::read(folder.join(ENGINES_FILE)) {
        Ok(content) => content,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut file: EnginesFile = serde_json::from_slice(&content)?;
    let current = file.boot == table::boot_id();
    Ok(file.engines.remove(engine).filter(|_| current))
}

impl StateDirLock {
    /// Locks the folder, and creates it if needed. Files of an earlier gateway stay unchanged.
    ///
    /// # Errors
    /// Another gateway holds the lock, or the folder cannot be created or written.
    pub fn take(folder: &Path) -> Result<Self, Error> {
        let failed = |source| Error::Io { path: folder.to_owned(), source };
        fs::create_dir_all(folder).map_err(failed)?;
        let folder = folder.canonicalize().map_err(failed)?;
        let file = File::options().create(true).truncate(false).write(true).open(folder.join(LOCK_FILE));
        let file = Flock::lock(file.map_err(failed)?, FlockArg::LockExclusiveNonblock);
        let file = file.map_err(|_| Error::Locked(folder.clone()))?;
        Ok(Self { folder, _file: file })
    }
}

impl StateStore {
    /// Reads the files of an earlier gateway. Renames a damaged file out of the way.
    pub(super) fn open(lock: &StateDirLock) -> Result<Self, Error> {
        let folder = lock.folder.clone();
        fs::create_dir_all(folder.join("logs"))
            .map_err(|source| Error::Io { path: folder.clone(), source })?;
        let boot = table::boot_id();
        let mut saved: EnginesFile = read_or_default(&folder.join(ENGINES_FILE));
        if saved.boot != boot {
            saved.engines.clear();
        }
        let content = StoreContent {
            engines: saved.engines,
            // A failure says what a person must mend, so it outlives a restart of the machine.
            failures: saved.failures,
            learned: read_or_default(&folder.join(LEARNED_FILE)),
        };
        Ok(Self {
            folder,
            boot,
            content: Mutex::new(content),
            writing: Mutex::default(),
            dirty: Notify::new(),
        })
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(super) fn engines(&self) -> BTreeMap<EngineId, StoredEngine> {
        self.content().engines.clone()
    }

    pub(super) fn failures(&self) -> BTreeMap<EngineId, StoredFailure> {
        self.content().failures.clone()
    }

    pub(super) fn learned(&self) -> BTreeMap<ModelName, LearnedMeasurements> {
        self.content().learned.clone()
    }

    /// Records a started engine, and returns when the record is on disk.
    pub(super) async fn add(self: &Arc<Self>, engine: EngineId, entry: StoredEngine) {
        self.content().engines.insert(engine, entry);
        self.save().await;
    }

    pub(super) async fn remove(self: &Arc<Self>, engine: &EngineId, generation: Generation) {
        let removed = {
            let mut content = self.content();
            let current = content.engines.get(engine).is_some_and(|e| e.generation == generation);
            current && content.engines.remove(engine).is_some()
        };
        if removed {
            self.save().await;
        }
    }

    pub(super) async fn set_phase(
        self: &Arc<Self>,
        engine: &EngineId,
        generation: Generation,
        phase: StoredPhase,
    ) {
        let changed =
            self.change(engine, generation, |entry| std::mem::replace(&mut entry.phase, phase) != phase);
        if changed {
            self.save().await;
        }
    }

    pub(super) fn note_idle(&self, engine: &EngineId, generation: Generation, last_end: Tick) {
        let newer = |entry: &mut StoredEngine| {
            let newer = last_end > entry.last_lease_end;
            entry.last_lease_end = entry.last_lease_end.max(last_end);
            newer
        };
        if self.change(engine, generation, newer) {
            self.dirty.notify_one();
        }
    }

    /// Replaces the failures of those models' engines for which `concerns` is true.
    pub(super) fn set_failures(
        &self,
        concerns: impl Fn(&ModelName) -> bool,
        failures: BTreeMap<EngineId, StoredFailure>,
    ) {
        let mut content = self.content();
        if content.failures.iter().filter(|(engine, _)| concerns(&engine.model)).eq(&failures) {
            return;
        }
        content.failures.retain(|engine, _| !concerns(&engine.model));
        content.failures.extend(failures);
        drop(content);
        self.dirty.notify_one();
    }

    /// Merges new measurements into the stored ones. A missing value keeps the stored one: the gateway may just have
    /// started.
    pub(super) fn merge_learned(&self, learned: BTreeMap<ModelName, LearnedMeasurements>) {
        let mut changed = false;
        let mut content = self.content();
        for (model, now) in learned {
            let known = content.learned.entry(model).or_default();
            let both = LearnedMeasurements {
                peak: now.peak.or(known.peak),
                observed: now.observed.or(known.observed),
                residue: now.residue.or(known.residue),
                start: now.start.or(known.start),
                wake: now.wake.or(known.wake),
                sleep: now.sleep.or(known.sleep),
                times: LearnedTimes {
                    start: now.times.start.or(known.times.start),
                    wake_one: now.times.wake_one.or(known.times.wake_one),
                    wake_two: now.times.wake_two.or(known.times.wake_two),
                    sleep: now.times.sleep.or(known.times.sleep),
                    rehearsed_sleep: now.times.rehearsed_sleep.or(known.times.rehearsed_sleep),
                    stop: now.times.stop.or(known.times.stop),
                },
            };
            changed |= std::mem::replace(known, both) != both;
        }
        drop(content);
        if changed {
            self.dirty.notify_one();
        }
    }

    /// Completes when there is unsaved state.
    pub(super) async fn wait_until_dirty(&self) {
        self.dirty.notified().await;
    }

    /// Writes both files. An error is logged: the engines keep running, but a restarted gateway would not know them.
    pub(super) async fn save(self: &Arc<Self>) {
        let store = Arc::clone(self);
        let saved = task::spawn_blocking(move || store.write()).await;
        if let Ok(Err(error)) = saved {
            tracing::error!(folder = %self.folder.display(), %error, "cannot save the state");
        }
    }

    fn write(&self) -> io::Result<()> {
        let _one_at_a_time = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let (engines, learned) = {
            let content = self.content();
            let engines = EnginesFile {
                boot: self.boot.clone(),
                engines: content.engines.clone(),
                failures: content.failures.clone(),
            };
            (serde_json::to_vec_pretty(&engines)?, serde_json::to_vec_pretty(&content.learned)?)
        };
        write_atomically(&self.folder.join(ENGINES_FILE), &engines)?;
        write_atomically(&self.folder.join(LEARNED_FILE), &learned)
    }

    fn change(
        &self,
        engine: &EngineId,
        generation: Generation,
        with: impl FnOnce(&mut StoredEngine) -> bool,
    ) -> bool {
        let mut content = self.content();
        let entry = content.engines.get_mut(engine);
        entry.filter(|entry| entry.generation == generation).is_some_and(with)
    }

    fn content(&self) -> MutexGuard<'_, StoreContent> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads a file; a missing one counts as empty. A damaged one is renamed: its processes are found by their mark.
fn read_or_default<T: Default + DeserializeOwned>(path: &Path) -> T {
    let Ok(text) = fs::read(path) else {
        return T::default();
    };
    serde_json::from_slice(&text).unwrap_or_else(|error| {
        let aside = path.with_extension("json.damaged");
        tracing::error!(path = %path.display(), %error, "state file is damaged, renaming it to .json.damaged");
        if let Err(error) = fs::rename(path, aside) {
            tracing::error!(path = %path.display(), %error, "cannot rename the damaged state file");
        }
        T::default()
    })
}

fn write_atomically(path: &Path, text: &[u8]) -> io::Result<()> {
    let new = path.with_extension("json.new");
    fs::write(&new, text)?;
    fs::rename(new, path)
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use rouse::{engine::last_outcome::FailureStage, fault::FailureCause, units::Millis};

    use super::*;

    fn engine_id(replica: u32) -> EngineId {
        EngineId::new("m".into(), replica)
    }

    fn failed(at: Tick) -> StoredFailure {
        let (stage, cause) = (FailureStage::Starting, FailureCause::Exited(3));
        StoredFailure { at, stage, cause, count: 2, fingerprint: 6 }
    }

    #[test]
    fn a_state_directory_serves_one_gateway() {
        let dir = tempfile::tempdir().unwrap();
        let first = StateDirLock::take(dir.path()).unwrap();
        assert!(is_in_use(dir.path()));
        let second = StateDirLock::take(dir.path()).unwrap_err().to_string();
        assert!(second.starts_with("another gateway uses this state directory"), "{second}");
        drop(first);
        assert!(!is_in_use(dir.path()));
        StateDirLock::take(dir.path()).unwrap();
    }

    /// A gateway that is replaced by a newer build leaves its engines to that one.
    #[test]
    fn the_words_of_an_engines_file_stay() {
        let written = serde_json::json!({
            "generation": 3, "pid": 4, "start": 5, "address": "127.0.0.1:8000", "accelerators": ["gpu-0"],
            "fingerprint": 6, "phase": {"moving": "one"}, "started": 7, "lastEnd": 8,
        });
        let engine: StoredEngine = serde_json::from_value(written.clone()).unwrap();
        assert_eq!(engine.phase, StoredPhase::Transitioning(SleepLevel::One));
        assert_eq!((engine.process_start_ticks, engine.last_lease_end), (5, Tick(8)));
        assert_eq!(serde_json::to_value(engine).unwrap(), written);

        let failure = serde_json::json!({
            "at": 9, "stage": "starting", "cause": {"exited": 3}, "count": 2, "fingerprint": 6,
        });
        let written = serde_json::json!({
            "boot": "b", "engines": {"m#0": written}, "failures": {"m#1": failure},
        });
        let file: EnginesFile = serde_json::from_value(written.clone()).unwrap();
        assert_eq!(file.failures, BTreeMap::from([(engine_id(1), failed(Tick(9)))]));
        assert_eq!(serde_json::to_value(file).unwrap(), written);
        for (stage, word) in [
            (FailureStage::Starting, "starting"),
            (FailureStage::Waking, "waking"),
            (FailureStage::Serving, "serving"),
            (FailureStage::FallingAsleep, "fallingAsleep"),
            (FailureStage::Sleeping, "sleeping"),
        ] {
            assert_eq!(serde_json::to_value(stage).unwrap(), word);
        }
        for (cause, word) in [
            (FailureCause::OutOfMemory, "out_of_memory"),
            (FailureCause::PortTaken, "port_taken"),
            (FailureCause::CommandNotFound, "command_not_found"),
            (FailureCause::NotLaunched, "not_launched"),
            (FailureCause::PermissionDenied, "permission_denied"),
            (FailureCause::Timeout, "timeout"),
            (FailureCause::Unhealthy, "unhealthy"),
            (FailureCause::Hung, "hung"),
            (FailureCause::PublicListener, "public_listener"),
            (FailureCause::Refused, "refused"),
            (FailureCause::SleepDenied, "stays_awake"),
            (FailureCause::Unreachable, "unreachable"),
            (FailureCause::ConnectionBroken, "broke_off"),
            (FailureCause::AcceleratorLost, "accelerator_lost"),
        ] {
            assert_eq!(serde_json::to_value(cause).unwrap(), word);
        }
        for (cause, written) in [
            (FailureCause::Killed(9), serde_json::json!({"killed": 9})),
            (
                FailureCause::WrongModel { serves: "a".into(), configured: "b".into() },
                serde_json::json!({"wrong_model": {"serves": "a", "configured": "b"}}),
            ),
        ] {
            assert_eq!(serde_json::to_value(cause).unwrap(), written);
        }
    }

    #[test]
    fn a_failure_of_a_newer_build_costs_neither_the_engines_nor_the_other_failures() {
        let known = serde_json::json!({
            "at": 9, "stage": "starting", "cause": {"exited": 3}, "count": 2, "fingerprint": 6, "newer": true,
        });
        let mut unknown = known.clone();
        unknown["cause"] = "of_a_newer_build".into();
        let engine = serde_json::json!({
            "generation": 3, "pid": 4, "start": 5, "address": "127.0.0.1:8000", "accelerators": [],
            "fingerprint": 6, "phase": "awake", "started": 7, "lastEnd": 8,
        });
        let written = serde_json::json!({
            "boot": "b", "engines": {"m#0": engine}, "failures": {"m#0": unknown, "m#1": known}, "newer": true,
        });
        let file: EnginesFile = serde_json::from_value(written).unwrap();
        assert_eq!(file.engines.keys().collect::<Vec<_>>(), [&engine_id(0)]);
        assert_eq!(file.failures, BTreeMap::from([(engine_id(1), failed(Tick(9)))]));
        let older: EnginesFile = serde_json::from_str(r#"{"boot": "b", "engines": {}}"#).unwrap();
        assert_eq!(older.failures, BTreeMap::new());
    }

    #[tokio::test]
    async fn a_failure_is_found_again_and_is_written_only_when_it_changes() {
        let dir = tempfile::tempdir().unwrap();
        let lock = StateDirLock::take(dir.path()).unwrap();
        let store = Arc::new(StateStore::open(&lock).unwrap());
        let one = |at| BTreeMap::from([(engine_id(0), failed(at))]);
        store.set_failures(|_| true, one(Tick(9)));
        assert!(store.wait_until_dirty().now_or_never().is_some());
        store.set_failures(|_| true, one(Tick(9)));
        store.set_failures(|model| model.as_str() == "other", BTreeMap::new());
        assert!(store.wait_until_dirty().now_or_never().is_none());
        store.set_failures(|_| true, one(Tick(10)));
        assert!(store.wait_until_dirty().now_or_never().is_some());
        store.save().await;
        assert_eq!(StateStore::open(&lock).unwrap().failures(), one(Tick(10)));
        store.set_failures(|model| model.as_str() == "m", BTreeMap::new());
        assert!(store.wait_until_dirty().now_or_never().is_some());
        store.save().await;
        assert_eq!(StateStore::open(&lock).unwrap().failures(), BTreeMap::new());
    }

    #[tokio::test]
    async fn what_is_saved_is_found_again_and_a_damaged_file_is_put_aside() {
        let dir = tempfile::tempdir().unwrap();
        let known = LearnedMeasurements { wake: Some(Millis(50)), ..LearnedMeasurements::default() };
        let learned = BTreeMap::from([(ModelName::from("m"), known)]);
        let lock = StateDirLock::take(dir.path()).unwrap();
        let store = Arc::new(StateStore::open(&lock).unwrap());
        store.merge_learned(learned.clone());
        // As a gateway does that has just started and knows nothing yet.
        store.merge_learned(BTreeMap::from([(ModelName::from("m"), LearnedMeasurements::default())]));
        store.save().await;
        drop(lock);
        fs::write(dir.path().join(ENGINES_FILE), "{").unwrap();
        let lock = StateDirLock::take(dir.path()).unwrap();
        assert!(!dir.path().join("engines.json.damaged").exists(), "a lock changes nothing");
        let store = StateStore::open(&lock).unwrap();
        assert_eq!(store.learned(), learned);
        assert!(dir.path().join("engines.json.damaged").exists());
    }
}
