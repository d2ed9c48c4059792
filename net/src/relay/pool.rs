//! Idle connections to engines, per core.
//!
//! Last in, first out: the most recently used connection is the least likely to have been closed meanwhile, and its
//! buffers are warm. Connections beyond the present load age and expire.
//!
//! A connection is kept per engine *generation*: by address and generation, since another engine may listen on the same
//! port tomorrow. Connections expire sooner than engines close theirs (uvicorn: 5 s), so that this side closes first: a
//! connection that the engine closes in the instant it is picked costs a replay, or a failed request.
//!
//! Not shared between cores, hence no lock. A clone is the same pool.

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
/// Idle connections kept per engine. An engine runs fewer requests at a time.
pub const DEFAULT_MAX_IDLE_PER_ENGINE: usize = 256;
/// Size of a core's read memory, in bytes.
pub const SCRATCH_BYTES: usize = 64 << 10;

#[derive(Clone)]
pub struct ConnectionPool(Rc<ConnectionPoolInner>);

struct ConnectionPoolInner {
    idle: RefCell<BTreeMap<ConnectionKey, Vec<IdleConnection>>>,
    age: Duration,
    per_engine: usize,
    /// Notified when the empty pool gets a connection.
    filled: Notify,
    /// Empty while it is lent, and before its first use.
    scratch: Cell<Vec<u8>>,
    /// The buffer for writes; lent in the same way as `scratch`.
    write_buffer: Cell<Vec<u8>>,
}

/// The generation of an engine, or a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ConnectionKey {
    pub(super) address: SocketAddr,
    pub(super) generation: Generation,
    /// `BackendOrigin::id` of a backend, since several may share one address; 0 for an engine.
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

    /// Lends the core's read memory, [`SCRATCH_BYTES`] bytes of arbitrary content, for one call. Data that outlives the
    /// call is copied out, so that idle streams hold no read memory, however many there are. A nested call inside
    /// `with` gets temporary memory.
    pub fn with_scratch<T>(&self, with: impl FnOnce(&mut [u8]) -> T) -> T {
        let mut scratch = self.0.scratch.take();
        if scratch.is_empty() {
            scratch = vec![0; SCRATCH_BYTES];
        }
        let result = with(&mut scratch);
        self.0.scratch.set(scratch);
        result
    }

    /// Lends an empty buffer to assemble a request or a response in. A nested call gets a buffer of its own.
    pub(crate) fn with_write_buffer<T>(&self, with: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        let mut buffer = self.0.write_buffer.take();
        buffer.clear();
        let result = with(&mut buffer);
        self.0.write_buffer.set(buffer);
        result
    }

    /// Number of idle connections.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.idle.borrow().values().map(Vec::len).sum()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.idle.borrow().values().all(Vec::is_empty)
    }

    /// Closes connections that are too old; never returns. Run it once per pool, beside the core's listeners: without
    /// it, the last connections to an unused engine stay open.
    pub async fn expire(&self) {
        loop {
            match self.sweep(Instant::now()) {
                Some(next) => sleep_until(next).await,
                None => self.0.filled.notified().await,
            }
        }
    }

    /// Takes the most recently used connection that is still good.
    pub(super) fn take(&self, key: &ConnectionKey, now: Instant) -> Option<UpstreamConnection> {
        let mut idle = self.0.idle.borrow_mut();
        let stack = idle.get_mut(key)?;
        // An empty stack stays until the next sweep: this exchange needs its memory again as soon as it ends.
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
            // The oldest connection is at the bottom.
            drop(stack.remove(0));
        }
        stack.push(IdleConnection { connection, since: now });
    }

    /// Closes connections that are too old at `now`; returns when the next one will be.
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
        f.debug_struct("ConnectionPool").field("idle", &self.0.idle).finish_non_exhaustive()
    }
}

impl Default for ConnectionPool {
    fn default() -> Self {
        Self::new(DEFAULT_IDLE_TIMEOUT, DEFAULT_MAX_IDLE_PER_ENGINE)
    }
}
