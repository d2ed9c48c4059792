//! How the admin API reaches the threads that serve requests.
//!
//! A request lives on one core, and nothing of it may leave that core's thread. So the admin API sends each core a
//! task: to list its requests, or to serve one more connection. That connection is a pair of sockets within this
//! process. So a request from the admin API takes the path of any other, needs neither a listener's address nor a
//! certificate, and ends when its socket is closed.

use std::{
    io,
    os::{fd::OwnedFd, unix::net::UnixStream as StdUnixStream},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    net::UnixStream,
    sync::{mpsc, oneshot},
};

use crate::http::ActiveRequestList;

/// Tasks that may wait for a core. Beyond them the admin API does without that core.
const MAX_WAITING_TASKS: usize = 16;
/// How long a core may take to list its requests. A page is better off without them than without an answer.
const LIST_TIMEOUT: Duration = Duration::from_millis(500);

/// The threads that serve requests, as the admin API reaches them.
#[derive(Default)]
pub struct ApiWorkers {
    senders: Mutex<Vec<mpsc::Sender<WorkerTask>>>,
    /// The core that gets the next connection.
    next: AtomicUsize,
}

/// A task for one core.
pub(super) enum WorkerTask {
    /// Lists the core's requests, at most so many.
    ListRequests(usize, oneshot::Sender<ActiveRequestList>),
    /// Serves a connection whose requests have the operators' key.
    Serve(std::net::TcpStream),
}

impl ApiWorkers {
    /// Adds a core. The core carries out what it receives, until it drops the receiver.
    pub(super) fn add(&self) -> mpsc::Receiver<WorkerTask> {
        let (tx, rx) = mpsc::channel(MAX_WAITING_TASKS);
        self.senders().push(tx);
        rx
    }

    /// Lists the requests of all cores, at most `max` of them. A core that does not answer in time is left out.
    pub(crate) async fn active_requests(&self, max: usize) -> ActiveRequestList {
        let replies: Vec<_> = self
            .senders()
            .iter()
            .filter_map(|core| {
                let (tx, rx) = oneshot::channel();
                core.try_send(WorkerTask::ListRequests(max, tx)).ok()?;
                Some(rx)
            })
            .collect();
        let deadline = tokio::time::Instant::now() + LIST_TIMEOUT;
        let mut lists = Vec::with_capacity(replies.len());
        for reply in replies {
            if let Ok(Ok(list)) = tokio::time::timeout_at(deadline, reply).await {
                lists.push(list);
            }
        }
        ActiveRequestList::join(lists, max)
    }

    /// Opens a connection to a core, for requests of operators.
    ///
    /// # Errors
    /// No core serves, or the process is out of descriptors.
    pub(crate) fn connect(&self) -> io::Result<UnixStream> {
        let (near, far) = StdUnixStream::pair()?;
        near.set_nonblocking(true)?;
        far.set_nonblocking(true)?;
        // The data path only reads, writes and shuts down its sockets, which a Unix socket does under TCP's type, too.
        let mut task = WorkerTask::Serve(OwnedFd::from(far).into());
        let senders = self.senders();
        let first = self.next.fetch_add(1, Ordering::Relaxed) % senders.len().max(1);
        let (before, from) = senders.split_at(first.min(senders.len()));
        for core in from.iter().chain(before) {
            match core.try_send(task) {
                Ok(()) => return UnixStream::from_std(near),
                Err(mpsc::error::TrySendError::Full(back) | mpsc::error::TrySendError::Closed(back)) => {
                    task = back;
                }
            }
        }
        Err(io::ErrorKind::ConnectionRefused.into())
    }

    fn senders(&self) -> MutexGuard<'_, Vec<mpsc::Sender<WorkerTask>>> {
        self.senders.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(total: usize) -> ActiveRequestList {
        ActiveRequestList { total, ..ActiveRequestList::default() }
    }

    #[tokio::test]
    async fn a_core_that_does_not_answer_is_left_out() {
        let workers = ApiWorkers::default();
        let (mut quick, stuck, ended) = (workers.add(), workers.add(), workers.add());
        drop(ended);
        tokio::spawn(async move {
            while let Some(WorkerTask::ListRequests(max, reply)) = quick.recv().await {
                assert_eq!(max, 5);
                reply.send(list(3)).unwrap();
            }
        });
        assert_eq!(workers.active_requests(5).await.total, 3);
        drop(stuck);
        assert_eq!(workers.active_requests(5).await.total, 3);
    }

    #[tokio::test]
    async fn connections_go_to_the_cores_in_turn_and_past_those_that_have_ended() {
        let workers = ApiWorkers::default();
        assert_eq!(workers.connect().unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        let (mut first, ended, mut third) = (workers.add(), workers.add(), workers.add());
        drop(ended);
        let _open: Vec<_> = (0..6).map(|_| workers.connect().unwrap()).collect();
        let count = |core: &mut mpsc::Receiver<WorkerTask>| {
            std::iter::from_fn(|| core.try_recv().ok())
                .filter(|task| matches!(task, WorkerTask::Serve(_)))
                .count()
        };
        let counts = [count(&mut first), count(&mut third)];
        assert_eq!(counts.iter().sum::<usize>(), 6);
        assert!(counts.iter().all(|connections| *connections >= 2), "{counts:?}");
    }
}
