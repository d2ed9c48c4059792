//! The access log: lines on their way to a file, in a thread of their own.
//!
//! A disk may stall for seconds, and a core that writes to it stalls with every stream it carries. So a core only puts
//! a record into a bounded queue; formatting and writing are the thread's. What does not fit is dropped and counted: an
//! access log that holds up answers is worse than one with a gap.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    path::PathBuf,
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
    time::Duration,
};

use rouse::lease::Clock;
use tokio::sync::oneshot;

use super::{Error, Record, line};
use crate::{config::AccessLog, metrics::Lost};

/// Records that may wait to be written: a second of a very busy gateway.
const QUEUE: usize = 8192;
/// Written at once, when more wait.
const BATCH: usize = 64 << 10;
const CLOSE: Duration = Duration::from_secs(2);

pub(super) struct Access {
    queue: SyncSender<Message>,
    lost: Lost,
}

enum Message {
    Request(Arc<Record>),
    Reopen,
    Close(oneshot::Sender<()>),
}

struct Writer {
    out: Box<dyn Write + Send>,
    /// Where it is a file.
    path: Option<PathBuf>,
    clock: Clock,
    lost: Lost,
    /// The last write failed; said once, until one succeeds.
    broken: bool,
}

impl Access {
    pub(super) fn start(log: &AccessLog, clock: Clock, lost: &Lost) -> Result<Option<Self>, Error> {
        let (out, path): (Box<dyn Write + Send>, _) = match log {
            AccessLog::Off => return Ok(None),
            AccessLog::Stdout => (Box::new(io::stdout()), None),
            AccessLog::Stderr => (Box::new(io::stderr()), None),
            AccessLog::File(path) => {
                let file = open(path).map_err(|source| Error::Access { path: path.clone(), source })?;
                (Box::new(file), Some(path.clone()))
            }
        };
        let (queue, messages) = sync_channel(QUEUE);
        let writer = Writer { out, path, clock, lost: lost.clone(), broken: false };
        thread::Builder::new()
            .name("access-log".into())
            .spawn(move || writer.run(&messages))
            .map_err(Error::Thread)?;
        Ok(Some(Self { queue, lost: lost.clone() }))
    }

    /// Never waits.
    pub(super) fn tell(&self, record: Arc<Record>) {
        if self.queue.try_send(Message::Request(record)).is_err() {
            self.lost.access_full.inc();
        }
    }

    pub(super) fn reopen(&self) {
        if self.queue.try_send(Message::Reopen).is_err() {
            tracing::warn!("the access log is too busy to be reopened; ask again");
        }
    }

    pub(super) async fn close(&self) {
        let (tell, told) = oneshot::channel();
        let queue = self.queue.clone();
        // Behind what waits; a full queue empties, unless its disk hangs.
        tokio::task::spawn_blocking(move || queue.send(Message::Close(tell)));
        if tokio::time::timeout(CLOSE, told).await.is_err() {
            tracing::warn!("the end of the access log could not be written in time");
        }
    }
}

impl Writer {
    fn run(mut self, messages: &Receiver<Message>) {
        let mut bytes = Vec::with_capacity(BATCH);
        while let Ok(message) = messages.recv() {
            let mut lines = 0;
            let mut next = Some(message);
            while let Some(message) = next {
                match message {
                    Message::Request(record) => {
                        line::write(&record, self.clock, &mut bytes);
                        lines += 1;
                    }
                    Message::Reopen => {
                        self.write(&mut bytes, std::mem::take(&mut lines));
                        self.reopen();
                    }
                    Message::Close(tell) => {
                        self.write(&mut bytes, lines);
                        // Whoever asked may have given up.
                        tell.send(()).unwrap_or_default();
                        return;
                    }
                }
                next = if bytes.len() < BATCH { messages.try_recv().ok() } else { None };
            }
            self.write(&mut bytes, lines);
        }
    }

    fn write(&mut self, bytes: &mut Vec<u8>, lines: u64) {
        let written = self.out.write_all(bytes).and_then(|()| self.out.flush());
        bytes.clear();
        match written {
            Ok(()) => self.broken = false,
            Err(error) => {
                self.lost.access_failed.inc_by(lines);
                if !std::mem::replace(&mut self.broken, true) {
                    tracing::error!(%error, "the access log cannot be written");
                }
            }
        }
    }

    fn reopen(&mut self) {
        let Some(path) = &self.path else { return };
        match open(path) {
            Ok(file) => self.out = Box::new(file),
            Err(error) => {
                tracing::error!(path = %path.display(), %error, "the access log cannot be reopened; the old file goes on");
            }
        }
    }
}

fn open(path: &std::path::Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}
