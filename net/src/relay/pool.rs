//! Idle connections to engines, per core.
//!
//! Last in, first out: the connection used most recently is the one least likely to have been closed meanwhile, its
//! buffers are warm, and those that load no longer needs grow old and go.
//!
//! A connection is kept for the engine's *life*, address and generation, since another engine may listen on the same
//! port tomorrow. It is kept for less time than engines keep theirs (uvicorn: 5 s), so that it is this side which
//! closes: a connection closed by the engine in the instant it is picked costs a replay, or a failed request.
//!
//! Not shared between cores, hence no lock: a clone is the same pool.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    fmt,
    net::SocketAddr,
    rc::Rc,
    time::Duration,
};

use tokio::{
    sync::Notify,
    time::{Instant, sleep_until},
};

use super::connection::UpstreamConnection;
use rouse::units::{Generation, Millis};

/// Shorter than uvicorn's 5 s.
pub const DEFAULT_IDLE_TIMEOUT: Millis = Millis::secs(4);
/// Idle connections kept for one engine. More than an engine runs requests at a time.
pub const DEFAULT_MAX_IDLE_PER_ENGINE: usize = 256;
/// What a core reads into, in bytes.
pub const SCRATCH_BYTES: usize = 64 << 10;

#[derive(Clone)]
pub struct ConnectionPool(Rc<ConnectionPoolInner>);

struct ConnectionPoolInner {
    idle: RefCell<BTreeMap<ConnectionKey, Vec<IdleConnection>>>,
    age: Duration,
    per_engine: usize,
    /// The pool was empty and is no longer.
    filled: Notify,
    /// Empty while it is lent, and before it is asked for.
    scratch: Cell<Vec<u8>>,
    /// The same for what is written.
    write_buffer: Cell<Vec<u8>>,
}

/// One engine's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ConnectionKey {
    pub(super) address: SocketAddr,
    pub(super) generation: Generation,
    /// Of a backend: several may have one address. 0 of an engine.
    pub(super) origin: u64,
}

#[derive(Debug)]
struct IdleConnection {
    connection: UpstreamConnection,
    since: Instant,
}

impl ConnectionPool {
    /// `age`: how long a connection may be idle. `per_engine`: how many are kept for one engine.
    #[must_use]
    pub fn new(age: Millis, per_engine: usize) -> Self {
        Self(Rc::new(ConnectionPoolInner {
            idle: RefCell::default(),
            age: age.duration(),
            per_engine,
            filled: Notify::new(),
            scratch: Cell::default(),
            write_buffer: Cell::default(),
        }))
    }

    /// Lends the core's memory for reads, [`SCRATCH_BYTES`] bytes of anything, for the length of one call. What shall outlive the
    /// call is copied out: then an idle stream holds no memory to read into, however many there are. Asked for inside of
    /// `with`, there is another one for that time.
    pub fn with_scratch<T>(&self, with: impl FnOnce(&mut [u8]) -> T) -> T {
        let mut scratch = self.0.scratch.take();
        if scratch.is_empty() {
            scratch = vec![0; SCRATCH_BYTES];
        }
        let result = with(&mut scratch);
        self.0.scratch.set(scratch);
        result
    }

    /// Lends memory to put a request together in.
    pub(super) fn with_write_buffer<T>(&self, with: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        let mut draft = self.0.write_buffer.take();
        draft.clear();
        let result = with(&mut draft);
        self.0.write_buffer.set(draft);
        result
    }

    /// Connections now idle.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.idle.borrow().values().map(Vec::len).sum()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.idle.borrow().values().all(Vec::is_empty)
    }

    /// Closes connections as they grow too old; never returns. To be run once per pool, beside the core's listeners:
    /// without it the last connections to an engine that nobody asks any more stay open.
    pub async fn expire(&self) {
        loop {
            match self.sweep(Instant::now()) {
                Some(next) => sleep_until(next).await,
                None => self.0.filled.notified().await,
            }
        }
    }

    /// The most recently used connection that is still good.
    pub(super) fn take(&self, key: &ConnectionKey, now: Instant) -> Option<UpstreamConnection> {
        let mut idle = self.0.idle.borrow_mut();
        let stack = idle.get_mut(key)?;
        // An empty stack stays until the next sweep: its memory is wanted again as soon as this exchange ends.
        while let Some(mut top) = stack.pop() {
            if now < top.since + self.0.age && top.connection.is_reusable() {
                return Some(top.connection);
            }
        }
        None
    }

    pub(super) fn put(&self, key: ConnectionKey, mut connection: UpstreamConnection, now: Instant) {
        connection.reset_for_reuse();
        let mut idle = self.0.idle.borrow_mut();
        if idle.is_empty() {
            self.0.filled.notify_one();
        }
        let stack = idle.entry(key).or_default();
        if stack.len() >= self.0.per_engine {
            // The oldest lies at the bottom.
            drop(stack.remove(0));
        }
        stack.push(IdleConnection { connection, since: now });
    }

    /// Closes what is too old at `now`; tells when the next one will be.
    fn sweep(&self, now: Instant) -> Option<Instant> {
        let age = self.0.age;
        let mut idle = self.0.idle.borrow_mut();
        idle.retain(|_, stack| {
            stack.retain(|one| now < one.since + age);
            !stack.is_empty()
        });
        idle.values().filter_map(|stack| stack.first()).map(|oldest| oldest.since + age).min()
    }
}

impl fmt::Debug for ConnectionPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("idle", &self.0.idle).finish_non_exhaustive()
    }
}

impl Default for ConnectionPool {
    fn default() -> Self {
        Self::new(DEFAULT_IDLE_TIMEOUT, DEFAULT_MAX_IDLE_PER_ENGINE)
    }
}
