//! An instance's log: a file that the engine itself appends to, so that nothing stands between it and its output.
//!
//! Clients read it by offset, so an offset must mean the same byte for as long as the instance lives. Where a log outgrows
//! its cap, the blocks at its head are therefore given back to the file system by a hole, and the file keeps its length.
//! On a file system without holes the whole file is emptied, and what it held is counted in; what the engine writes in
//! that very instant may be lost there.
//!
//! What is being sent may be given back meanwhile, since a slow client must not keep it: then there are zeros in its
//! place, or the bytes of another offset. So reading and trimming exclude each other, and a reader that comes too late is
//! told.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use nix::{
    errno::Errno,
    fcntl::{FallocateFlags, fallocate},
};

use super::range::LogRange;

/// What an answer holds at most when its end is not named.
pub(crate) const MAX_PART_BYTES: u64 = 1 << 20;
/// Holes are made of whole blocks, and a block is no larger than this anywhere.
const HOLE_BLOCK_BYTES: u64 = 64 << 10;

#[derive(Debug)]
pub(crate) struct InstanceLog {
    path: PathBuf,
    file: File,
    head: Mutex<TrimmedHead>,
    removed: AtomicBool,
}

/// What is no longer there.
#[derive(Clone, Copy, Debug, Default)]
struct TrimmedHead {
    /// Offset of the first byte that is kept.
    first_kept: u64,
    /// Offset of the file's first byte: more than 0 once the file was emptied.
    file_base: u64,
}

/// A part of a log, to be read for as long as it is kept.
#[derive(Debug)]
pub(crate) struct LogPart {
    pub(crate) start: u64,
    /// The last byte that is part of it.
    pub(crate) end: u64,
    /// Length of the whole log, with what is not kept any more.
    pub(crate) total: u64,
    log: Arc<InstanceLog>,
}

/// No byte of the range is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the log has {total} bytes, and those before {first} are not kept")]
pub(crate) struct LogOutOfRange {
    pub(crate) total: u64,
    pub(crate) first: u64,
}

/// Why nothing is read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    OutOfRange(#[from] LogOutOfRange),
    #[error("the log cannot be read: {0}")]
    Io(#[from] io::Error),
}

impl InstanceLog {
    /// An empty log in `folder`; removed with this value at the latest.
    pub(crate) fn create(folder: &Path, instance: &str) -> io::Result<Self> {
        let path = folder.join(file_name(instance));
        // What engines log may be what clients asked: it is for the launcher's user alone.
        let file =
            File::options().create(true).truncate(true).read(true).write(true).mode(0o600).open(&path)?;
        Ok(Self { path, file, head: Mutex::default(), removed: AtomicBool::new(false) })
    }

    /// For the engine's output: whoever writes there appends.
    pub(crate) fn writer(&self) -> io::Result<File> {
        File::options().append(true).open(&self.path)
    }

    /// The range, as far as it is there. Without one, from the first byte that is kept. Blocks while the log is trimmed.
    pub(crate) fn part(self: &Arc<Self>, range: Option<LogRange>) -> Result<LogPart, Error> {
        let head = self.head();
        let total = head.file_base + self.file.metadata()?.len();
        let gone = LogOutOfRange { total, first: head.first_kept };
        let start = range.map_or(0, |range| range.start).max(head.first_kept);
        let last = total.checked_sub(1).ok_or(gone)?;
        let asked =
            range.and_then(|range| range.end).unwrap_or_else(|| start.saturating_add(MAX_PART_BYTES - 1));
        let end = asked.min(last);
        if start > end {
            return Err(gone.into());
        }
        Ok(LogPart { start, end, total, log: Arc::clone(self) })
    }

    /// Gives back what is more than `cap`, or four times a block where that is more. Blocks for as long as the file
    /// system takes.
    pub(crate) fn trim(&self, cap: u64) -> io::Result<()> {
        let cap = cap.max(4 * HOLE_BLOCK_BYTES);
        let mut head = self.head();
        let length = self.file.metadata()?.len();
        if head.file_base + length <= head.first_kept + cap {
            return Ok(());
        }
        // More than is needed, or it would be done anew for every line.
        let keep = cap - cap / 4;
        let hole = (length - keep) / HOLE_BLOCK_BYTES * HOLE_BLOCK_BYTES;
        match self.punch_hole(hole) {
            Ok(()) => head.first_kept = head.file_base + hole,
            Err(Errno::EOPNOTSUPP | Errno::ENOSYS) => self.truncate(&mut head, length)?,
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    fn punch_hole(&self, length: u64) -> nix::Result<()> {
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let length = i64::try_from(length).map_err(|_| Errno::EFBIG)?;
        fallocate(&self.file, flags, 0, length)
    }

    /// For file systems that know no holes.
    fn truncate(&self, head: &mut TrimmedHead, length: u64) -> io::Result<()> {
        self.file.set_len(0)?;
        head.file_base += length;
        head.first_kept = head.file_base;
        Ok(())
    }

    fn head(&self) -> MutexGuard<'_, TrimmedHead> {
        self.head.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes the file, once: another instance may have the name then.
    pub(crate) fn remove(&self) {
        if self.removed.swap(true, Ordering::Relaxed) {
            return;
        }
        if let Err(error) = fs::remove_file(&self.path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(path = %self.path.display(), %error, "the log cannot be removed");
        }
    }
}

impl Drop for InstanceLog {
    fn drop(&mut self) {
        self.remove();
    }
}

impl LogPart {
    pub(crate) const fn len(&self) -> u64 {
        self.end - self.start + 1
    }

    /// Fills the buffer from `at`, an offset within the part, as far as the part goes; how much that was. Blocks while the
    /// log is trimmed.
    ///
    /// # Errors
    /// The file cannot be read, or what was at this offset is not kept any more.
    pub(crate) fn read(&self, at: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let head = self.log.head();
        if at < head.first_kept {
            let why = format!("the log was trimmed up to {} while it was read at {at}", head.first_kept);
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, why));
        }
        let left = usize::try_from((self.end + 1).saturating_sub(at)).unwrap_or(usize::MAX);
        let most = left.min(buffer.len());
        let buffer = buffer.get_mut(..most).unwrap_or_default();
        self.log.file.read_at(buffer, at - head.file_base)
    }
}

/// Ids may hold what names of files cannot: that is spelled `%XX`, so that no two share a file.
fn file_name(instance: &str) -> String {
    let mut name = format!("launcher-{}-vllm-", std::process::id());
    for byte in instance.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.') {
            name.push(char::from(byte));
        } else {
            name.push_str(&format!("%{byte:02X}"));
        }
    }
    name.push_str(".log");
    name
}

#[cfg(test)]
mod tests;
