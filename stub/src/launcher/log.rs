//! An instance's log: a file that the engine appends to directly.
//!
//! Clients read the log by offset, so an offset must mean the same byte for as long as the instance exists. When a log
//! exceeds its cap, the launcher therefore punches a hole at its head, which frees the blocks and keeps the file's
//! length. On a file system without holes the whole file is truncated, and its length is added to the base offset;
//! output that the engine writes at that very moment may be lost.
//!
//! A trim may free bytes that are being sent, since a slow client must not hold them. A read would then return zeros or
//! the bytes of another offset. So reads and trims exclude each other, and a read of trimmed bytes fails.

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

/// Longest response to a request that names no end, in bytes.
pub(crate) const MAX_PART_BYTES: u64 = 1 << 20;
/// Alignment of holes, which free only whole blocks. No file system has larger blocks.
const HOLE_BLOCK_BYTES: u64 = 64 << 10;

#[derive(Debug)]
pub(crate) struct InstanceLog {
    path: PathBuf,
    file: File,
    head: Mutex<TrimmedHead>,
    removed: AtomicBool,
}

/// How much of the log's head was trimmed.
#[derive(Clone, Copy, Debug, Default)]
struct TrimmedHead {
    /// Offset of the first kept byte.
    first_kept: u64,
    /// Offset of the file's first byte. Above 0 once the file was truncated.
    file_base: u64,
}

/// A readable part of a log. Trimming may remove it.
#[derive(Debug)]
pub(crate) struct LogPart {
    pub(crate) start: u64,
    /// Offset of the last byte, inclusive.
    pub(crate) end: u64,
    /// Length of the whole log, trimmed bytes included.
    pub(crate) total: u64,
    log: Arc<InstanceLog>,
}

/// The log has no byte of the range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the log has no byte of this range: it has {total} bytes, and those before byte {first} are no longer kept"
)]
pub(crate) struct LogOutOfRange {
    pub(crate) total: u64,
    pub(crate) first: u64,
}

/// Why a read fails.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    OutOfRange(#[from] LogOutOfRange),
    #[error("the log cannot be read: {0}")]
    Io(#[from] io::Error),
}

impl InstanceLog {
    /// Creates an empty log in `folder`. Dropping this value removes the file.
    pub(crate) fn create(folder: &Path, instance: &str) -> io::Result<Self> {
        let path = folder.join(file_name(instance));
        // Engines may log what clients send, so only the launcher's user may read it.
        let file =
            File::options().create(true).truncate(true).read(true).write(true).mode(0o600).open(&path)?;
        Ok(Self { path, file, head: Mutex::default(), removed: AtomicBool::new(false) })
    }

    /// Opens the file for the engine's output, in append mode.
    pub(crate) fn writer(&self) -> io::Result<File> {
        File::options().append(true).open(&self.path)
    }

    /// Returns the range, clipped to the kept bytes. Without a range, starts at the first kept byte. Blocks while the
    /// log is trimmed.
    pub(crate) fn part(self: &Arc<Self>, range: Option<LogRange>) -> Result<LogPart, Error> {
        let head = self.head();
        let total = head.file_base + self.file.metadata()?.len();
        let out_of_range = LogOutOfRange { total, first: head.first_kept };
        let start = range.map_or(0, |range| range.start).max(head.first_kept);
        let last = total.checked_sub(1).ok_or(out_of_range)?;
        let requested_end =
            range.and_then(|range| range.end).unwrap_or_else(|| start.saturating_add(MAX_PART_BYTES - 1));
        let end = requested_end.min(last);
        if start > end {
            return Err(out_of_range.into());
        }
        Ok(LogPart { start, end, total, log: Arc::clone(self) })
    }

    /// Frees what exceeds `cap`, which is at least four blocks. Blocks as long as the file system takes.
    pub(crate) fn trim(&self, cap: u64) -> io::Result<()> {
        let cap = cap.max(4 * HOLE_BLOCK_BYTES);
        let mut head = self.head();
        let length = self.file.metadata()?.len();
        if head.file_base + length <= head.first_kept + cap {
            return Ok(());
        }
        // Trim to three quarters of the cap, so that the next line does not trigger another trim.
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

    /// Truncates the file, on file systems without holes.
    fn truncate(&self, head: &mut TrimmedHead, length: u64) -> io::Result<()> {
        self.file.set_len(0)?;
        head.file_base += length;
        head.first_kept = head.file_base;
        Ok(())
    }

    fn head(&self) -> MutexGuard<'_, TrimmedHead> {
        self.head.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes the file, once: another instance may have the name afterwards.
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

    /// Fills the buffer from the offset `at`, up to the part's end. Returns the number of bytes read. Blocks while the
    /// log is trimmed.
    ///
    /// # Errors
    /// The file cannot be read, or the byte at this offset was trimmed.
    pub(crate) fn read(&self, at: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let head = self.log.head();
        if at < head.first_kept {
            let message =
                format!("the log was trimmed up to byte {} during a read at byte {at}", head.first_kept);
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, message));
        }
        let remaining = usize::try_from((self.end + 1).saturating_sub(at)).unwrap_or(usize::MAX);
        let max_length = remaining.min(buffer.len());
        let buffer = buffer.get_mut(..max_length).unwrap_or_default();
        self.log.file.read_at(buffer, at - head.file_base)
    }
}

/// Builds the file's name. Bytes of the id that are unsafe in a file name become `%XX`, so that no two ids share a
/// file.
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
