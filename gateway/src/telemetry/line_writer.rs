//! Writes lines to a descriptor in a separate thread.
//!
//! A disk may stall for seconds, and a pipe for as long as its reader does; a core that writes to either stalls
//! together with every stream that it carries. So senders only put items into a bounded queue, and the thread formats
//! and writes the lines. Items that do not fit are dropped and counted: a log that delays responses is worse than one
//! with a gap.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
    time::Duration,
};

use prometheus::IntCounter;

/// Size at which a batch is written even if more lines wait.
const MAX_BATCH_BYTES: usize = 64 << 10;

/// The target of lines, and the handling of those that are lost.
pub(crate) struct LineSink {
    /// The thread's name.
    pub(crate) name: &'static str,
    pub(crate) out: Box<dyn Write + Send>,
    /// Path of a file, which can be reopened.
    pub(crate) path: Option<PathBuf>,
    /// Capacity of the queue, in items.
    pub(crate) queue: usize,
    /// How long the thread sleeps after a batch: a wake per line would cost the sender more than the line.
    pub(crate) batch_interval: Duration,
    pub(crate) full: IntCounter,
    pub(crate) failed: IntCounter,
    /// Called at the first of consecutive write failures, and at each failed reopen.
    pub(crate) on_failure: fn(&SinkFailure<'_>),
}

pub(crate) enum SinkFailure<'a> {
    Write(&'a io::Error),
    Reopen(&'a Path, &'a io::Error),
}

/// Sending end of the queue.
pub(crate) struct LineSender<T> {
    queue: SyncSender<Option<T>>,
    requests: Arc<WriterRequests>,
    /// Ends the thread's sleep between two batches.
    flush: SyncSender<()>,
    full: IntCounter,
}

/// Requests to the thread besides lines. They bypass the queue, which would lose them when it is full.
#[derive(Default)]
struct WriterRequests {
    reopen: AtomicBool,
    close: OnceLock<SyncSender<()>>,
}

struct LineWriterThread<F> {
    sink: LineSink,
    line: F,
    requests: Arc<WriterRequests>,
    flush_requested: Receiver<()>,
    /// The last write failed.
    failing: bool,
    /// The last write ended in the middle of a line.
    is_mid_line: bool,
}

impl<T: Send + 'static> LineSender<T> {
    /// Starts the thread. `line` appends an item's line with its line end.
    pub(crate) fn start(
        sink: LineSink,
        line: impl FnMut(&T, &mut Vec<u8>) + Send + 'static,
    ) -> io::Result<Self> {
        let (queue, lines_rx) = sync_channel(sink.queue);
        let (flush_tx, flush_rx) = sync_channel(1);
        let requests = Arc::<WriterRequests>::default();
        let (full, name) = (sink.full.clone(), sink.name);
        let writer = LineWriterThread {
            sink,
            line,
            requests: Arc::clone(&requests),
            flush_requested: flush_rx,
            failing: false,
            is_mid_line: false,
        };
        thread::Builder::new().name(name.into()).spawn(move || writer.run(&lines_rx))?;
        Ok(Self { queue, requests, flush: flush_tx, full })
    }

    /// Enqueues without waiting. Returns false, and counts that, if the queue is full.
    pub(crate) fn enqueue(&self, item: T) -> bool {
        let fits = self.queue.try_send(Some(item)).is_ok();
        if !fits {
            self.full.inc();
        }
        fits
    }

    /// Reopens the file after it was moved: later lines go into a new file.
    pub(crate) fn reopen(&self) {
        self.requests.reopen.store(true, Ordering::Release);
        self.wake();
    }

    /// Waits up to `timeout` until all earlier lines are written; false on a timeout. Only the first call counts.
    pub(crate) fn close(&self, timeout: Duration) -> bool {
        let (written_tx, written_rx) = sync_channel(1);
        if self.requests.close.set(written_tx).is_err() {
            return true;
        }
        self.wake();
        written_rx.recv_timeout(timeout).is_ok()
    }

    fn wake(&self) {
        // A full channel means that the thread is awake, or will check the requests anyway.
        self.queue.try_send(None).unwrap_or_default();
        self.flush.try_send(()).unwrap_or_default();
    }
}

impl<F> LineWriterThread<F> {
    fn run<T>(mut self, lines: &Receiver<Option<T>>)
    where
        F: FnMut(&T, &mut Vec<u8>),
    {
        let (mut bytes, mut ends) = (Vec::with_capacity(MAX_BATCH_BYTES), Vec::new());
        let mut again = false;
        loop {
            let first = if again {
                None
            } else {
                let Ok(first) = lines.recv() else { return };
                first
            };
            if self.requests.reopen.swap(false, Ordering::Acquire) {
                self.reopen();
            }
            // Read before the queue is drained, so that all lines from before the request are among those that follow.
            let close = self.requests.close.get().cloned();
            let mut next = Some(first);
            while let Some(one) = next {
                if let Some(one) = one {
                    let before = bytes.len();
                    (self.line)(&one, &mut bytes);
                    if bytes.len() > before {
                        ends.push(bytes.len());
                    }
                }
                next = if bytes.len() < MAX_BATCH_BYTES { lines.try_recv().ok() } else { None };
            }
            let more = bytes.len() >= MAX_BATCH_BYTES;
            self.write(&mut bytes, &ends);
            ends.clear();
            // The message that wakes this thread may have been taken with these lines, before its request was handled.
            let closing = close.is_none() && self.requests.close.get().is_some();
            again = more || closing || self.requests.reopen.load(Ordering::Acquire);
            if again {
                continue;
            }
            if let Some(close) = close {
                // The requester may have timed out, or been answered before.
                close.try_send(()).unwrap_or_default();
            } else if !self.sink.batch_interval.is_zero() {
                // An early flush and a timeout are treated alike.
                self.flush_requested.recv_timeout(self.sink.batch_interval).unwrap_or_default();
            }
        }
    }

    /// Writes the batch. `ends` has the end of each line.
    fn write(&mut self, bytes: &mut Vec<u8>, ends: &[usize]) {
        if bytes.is_empty() {
            return;
        }
        let completed = usize::from(self.is_mid_line);
        if self.is_mid_line {
            bytes.insert(0, b'\n');
        }
        let (written_bytes, written) = write(&mut *self.sink.out, bytes);
        if let Some(last) = written_bytes.checked_sub(1).and_then(|last| bytes.get(last)) {
            self.is_mid_line = *last != b'\n';
        }
        bytes.clear();
        match written {
            Ok(()) => self.failing = false,
            Err(error) => {
                let lost = ends.iter().filter(|end| completed + **end > written_bytes).count();
                self.sink.failed.inc_by(lost as u64);
                if !std::mem::replace(&mut self.failing, true) {
                    (self.sink.on_failure)(&SinkFailure::Write(&error));
                }
            }
        }
    }

    fn reopen(&mut self) {
        let Some(path) = &self.sink.path else { return };
        match open_append(path) {
            Ok(file) => (self.sink.out, self.is_mid_line) = (Box::new(file), false),
            Err(error) => (self.sink.on_failure)(&SinkFailure::Reopen(path, &error)),
        }
    }
}

pub(crate) fn open_append(path: &Path) -> io::Result<File> {
    // A new file is for the gateway's user alone, like the engines' logs. An existing file keeps its mode.
    OpenOptions::new().create(true).append(true).mode(0o600).open(path)
}

/// Writes all bytes; returns how many were accepted, even on an error.
fn write(out: &mut dyn Write, bytes: &[u8]) -> (usize, io::Result<()>) {
    let mut written_bytes = 0;
    while let Some(rest) = bytes.get(written_bytes..).filter(|rest| !rest.is_empty()) {
        match out.write(rest) {
            Ok(0) => return (written_bytes, Err(io::ErrorKind::WriteZero.into())),
            Ok(n) => written_bytes += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return (written_bytes, Err(error)),
        }
    }
    (written_bytes, out.flush())
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, mpsc};

    use super::*;

    const SOON: Duration = Duration::from_secs(5);

    /// Accepts `room` bytes, then fails once, then accepts everything.
    struct ShortWriter {
        room: Option<usize>,
        seen: Arc<Mutex<Vec<u8>>>,
    }

    impl Write for ShortWriter {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let n = match &mut self.room {
                Some(0) => {
                    self.room = None;
                    return Err(io::ErrorKind::StorageFull.into());
                }
                Some(room) => {
                    let n = bytes.len().min(*room);
                    *room -= n;
                    n
                }
                None => bytes.len(),
            };
            self.seen.lock().unwrap().extend_from_slice(&bytes[..n]);
            Ok(n)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Blocks until it is released.
    struct StalledWriter(mpsc::Receiver<()>, File);

    impl Write for StalledWriter {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            // The sender is dropped when writing may proceed.
            self.0.recv().unwrap_or_default();
            self.1.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn sink(out: Box<dyn Write + Send>) -> LineSink {
        let counter = || IntCounter::new("c", "c").unwrap();
        LineSink {
            name: "lines",
            out,
            path: None,
            queue: 2,
            batch_interval: Duration::ZERO,
            full: counter(),
            failed: counter(),
            on_failure: |_| {},
        }
    }

    fn start(sink: LineSink) -> LineSender<&'static str> {
        LineSender::start(sink, |line: &&str, out| out.extend_from_slice(line.as_bytes())).unwrap()
    }

    #[test]
    fn half_a_line_is_not_continued_by_the_next_one() {
        let seen = Arc::<Mutex<Vec<u8>>>::default();
        let sink = sink(Box::new(ShortWriter { room: Some(3), seen: Arc::clone(&seen) }));
        let failed = sink.failed.clone();
        let lines = start(sink);
        lines.enqueue("lost\n");
        while failed.get() == 0 {
            thread::yield_now();
        }
        lines.enqueue("kept\n");
        assert!(lines.close(SOON));
        assert_eq!(*seen.lock().unwrap(), b"los\nkept\n");
    }

    #[test]
    fn a_stalled_file_costs_lines_and_neither_time_nor_a_reopen() {
        let dir = tempfile::tempdir().unwrap();
        let (old, new) = (dir.path().join("old"), dir.path().join("new"));
        #[expect(clippy::disallowed_methods, reason = "a test's channel")]
        let (release, released) = mpsc::channel();
        let mut sink = sink(Box::new(StalledWriter(released, open_append(&old).unwrap())));
        sink.path = Some(new.clone());
        let full = sink.full.clone();
        let lines = start(sink);
        for _ in 0..10 {
            lines.enqueue("before\n");
        }
        assert!(full.get() > 0);
        lines.reopen();
        drop(release);
        while !new.exists() {
            thread::yield_now();
        }
        lines.enqueue("after\n");
        assert!(lines.close(SOON));
        assert!(std::fs::read_to_string(&new).unwrap().ends_with("after\n"));
    }

    #[test]
    fn a_new_file_is_for_its_user_alone_and_one_that_is_there_keeps_its_mode() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("access.log");
        let mode = |file: File| file.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(open_append(&path).unwrap()), 0o600);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        assert_eq!(mode(open_append(&path).unwrap()), 0o640);
    }

    #[test]
    fn the_end_is_not_waited_for_longer_than_said() {
        #[expect(clippy::disallowed_methods, reason = "a test's channel")]
        let (_release, released) = mpsc::channel();
        let dir = tempfile::tempdir().unwrap();
        let lines =
            start(sink(Box::new(StalledWriter(released, open_append(&dir.path().join("f")).unwrap()))));
        lines.enqueue("never\n");
        assert!(!lines.close(Duration::from_millis(20)));
    }
}
