//! A counter shared by several processes.

use std::{
    fs::File,
    io::{Read as _, Seek as _, Write as _},
    path::Path,
    sync::{Mutex, PoisonError},
};

use anyhow::{Context as _, Result};

/// A counter in a locked file: processes and threads that open the same file never get the same number.
pub(crate) struct SharedCounter(Mutex<File>);

impl SharedCounter {
    /// Opens the counter in this file. A missing file starts at 0.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let file = File::options().read(true).write(true).create(true).truncate(false).open(path);
        Ok(Self(Mutex::new(file.with_context(|| path.display().to_string())?)))
    }

    /// Returns a new number each time, until 2^32 are used.
    pub(crate) fn next(&self) -> Result<u32> {
        // A file lock belongs to the open file, which the threads of this process share, so the mutex excludes them.
        let mut file = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        file.lock()?;
        let next = advance(&mut file);
        file.unlock()?;
        next
    }
}

fn advance(file: &mut File) -> Result<u32> {
    let mut bytes = [0; 4];
    file.rewind()?;
    let next = match file.read_exact(&mut bytes) {
        Ok(()) => u32::from_le_bytes(bytes),
        Err(_) => 0,
    };
    file.rewind()?;
    file.write_all(&next.wrapping_add(1).to_le_bytes())?;
    Ok(next)
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, thread};

    use super::*;

    #[test]
    fn who_opens_the_same_file_gets_other_numbers() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("counter");
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let path = path.clone();
                thread::spawn(move || {
                    let counter = SharedCounter::open(&path).unwrap();
                    (0..100).map(|_| counter.next().unwrap()).collect::<Vec<_>>()
                })
            })
            .collect();
        let numbers: BTreeSet<u32> = threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
        assert_eq!(numbers, (0..400).collect());
    }
}
