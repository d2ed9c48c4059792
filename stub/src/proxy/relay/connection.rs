//! Serves one client connection until it ends. HTTP/1.1 only, which engines and the gateway speak.
//!
//! The task here polls the connection loop, and watches the deadlines beside it: a slow head, idleness, a client that
//! reads nothing, the end of a drain. The deadlines of a request's body belong to the exchange (`body.rs`). Every end of
//! the connection drops the loop, and with it the exchange with the engine. An exchange is cancelled in no other way.

use std::{future::poll_fn, pin::pin, rc::Rc, task::Poll, time::Duration};

use rouse::fault::Fault;
use rouse_net::server::{
    Http1Connection, Http1End, Http1Limits,
    deadlines::{DeadlineTimer, Deadlines, Http1IdleTracker, IdleEnd, IdleLimits, IdleState, NextCheck},
    last_response::{last_response_bytes, linger, send_last_response},
};
use tokio::time::{Instant, sleep};

use super::{RelayThreadContext, exchange, socket::RelaySocket};
use crate::proxy::state::ProxySettings;

/// The gateway's own heads are no larger than this.
const MAX_HEAD_BYTES: usize = 72 << 10;
/// The gateway accepts 100 fields from its clients and adds its own.
const MAX_HEADER_FIELDS: usize = 128;
/// How long a client may accept no bytes while its engine drains, and after its request was cut. With an open gate it
/// has `--stall-timeout`.
const DRAINING_WRITE_STALL_TIMEOUT: Duration = Duration::from_secs(5);
const CUT_WRITE_STALL_TIMEOUT: Duration = Duration::from_millis(500);
/// How long a kept connection stays open while the process shuts down, for a request that is on its way. Clients are
/// as near as the same cluster, and the process has a second to end after its hold.
const DRAIN_IDLE_TIMEOUT: Duration = Duration::from_millis(250);
/// How often a stalled client is checked.
const STALL_CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// Why a connection is over.
enum RelayConnectionEnd {
    /// The connection loop has ended it.
    Http(Http1End),
    /// A part of a head arrived, and the rest did not in time.
    SlowHead,
    /// No request arrived in time.
    Idle,
    /// The client stopped reading.
    Stalled,
}

pub(super) async fn serve(context: Rc<RelayThreadContext>, socket: Rc<RelaySocket>) {
    let end = {
        let limits = Http1Limits {
            max_head_bytes: MAX_HEAD_BYTES,
            max_headers: MAX_HEADER_FIELDS,
            ..Http1Limits::default()
        };
        let (pool, dates) = (context.pool.clone(), Rc::clone(&context.dates));
        let service = |request| exchange::serve(&context, &socket, request);
        let mut http1 = Http1Connection::new(Rc::clone(&socket), service, limits, pool, dates);
        let mut deadlines = RelayDeadlines::new(&context.proxy.settings, &socket);
        let mut checks = DeadlineTimer::new();
        let mut timer = pin!(sleep(context.proxy.settings.head_timeout));
        poll_fn(|cx| {
            if let Poll::Ready(end) = http1.poll(cx) {
                return Poll::Ready(RelayConnectionEnd::Http(end));
            }
            deadlines.idle.observe(http1.phase(), http1.requests());
            checks.note_same_task(socket.set_task(cx));
            if deadlines.note_closing() && !deadlines.is_idle() {
                http1.close();
            }
            checks.poll(&deadlines, timer.as_mut(), cx)
        })
        .await
    };
    // Boxed, so that an open stream carries no memory for it.
    Box::pin(close_connection(&context, &socket, end)).await;
}

/// The deadlines of one connection.
struct RelayDeadlines<'a> {
    settings: &'a ProxySettings,
    idle: Http1IdleTracker,
    draining_since: Option<Instant>,
    socket: &'a RelaySocket,
}

impl<'a> RelayDeadlines<'a> {
    fn new(settings: &'a ProxySettings, socket: &'a RelaySocket) -> Self {
        Self { settings, idle: Http1IdleTracker::new(), draining_since: None, socket }
    }

    /// Returns whether the process is shutting down. A connection without an exchange then waits a moment for a request
    /// that is on its way.
    fn note_closing(&mut self) -> bool {
        let closing = self.socket.is_closing();
        if closing {
            self.draining_since.get_or_insert_with(Instant::now);
        }
        closing
    }

    fn idle_deadline(&self, state: IdleState) -> (Instant, IdleEnd) {
        let limits = IdleLimits {
            head: self.settings.head_timeout,
            keep_alive: self.settings.idle_timeout,
            write_stall: self.settings.stall_timeout,
            drain: DRAIN_IDLE_TIMEOUT,
        };
        limits.deadline(state, self.socket.blocked_since(), self.draining_since)
    }

    /// How long the client may accept no bytes of its response.
    fn write_stall_timeout(&self) -> Duration {
        let most = match self.socket.gate_generation() {
            Some(generation) if generation.gate.revoked().is_some() => CUT_WRITE_STALL_TIMEOUT,
            Some(generation) if !generation.gate.is_open() => DRAINING_WRITE_STALL_TIMEOUT,
            _ => Duration::MAX,
        };
        most.min(self.settings.stall_timeout)
    }
}

impl Deadlines for RelayDeadlines<'_> {
    type End = RelayConnectionEnd;
    const GRANULARITY: Duration = STALL_CHECK_INTERVAL;

    fn is_idle(&self) -> bool {
        self.idle.state().is_some()
    }

    fn next_check(&self) -> NextCheck {
        match self.idle.state() {
            Some(state) => NextCheck { at: Some(self.idle_deadline(state).0), checks_soon: false },
            None => NextCheck { at: None, checks_soon: self.socket.blocked_since().is_some() },
        }
    }

    fn expired(&self, now: Instant) -> Option<RelayConnectionEnd> {
        let Some(state) = self.idle.state() else {
            let since = self.socket.blocked_since()?;
            return (since + self.write_stall_timeout() <= now).then_some(RelayConnectionEnd::Stalled);
        };
        let (at, end) = self.idle_deadline(state);
        (at <= now).then_some(match (end, state) {
            (IdleEnd::SlowHead, IdleState::ReadingHead { .. }) => RelayConnectionEnd::SlowHead,
            (IdleEnd::Stalled, _) => RelayConnectionEnd::Stalled,
            (IdleEnd::SlowHead | IdleEnd::NotStarted | IdleEnd::Idle, _) => RelayConnectionEnd::Idle,
        })
    }
}

/// Sends the client the final error, if any, and lets the client read it.
async fn close_connection(context: &RelayThreadContext, socket: &RelaySocket, end: RelayConnectionEnd) {
    let refusal = match end {
        RelayConnectionEnd::Http(Http1End::Closed { request_unread: true }) => {
            linger(socket).await;
            return;
        }
        RelayConnectionEnd::Http(Http1End::Refused(refusal)) => {
            let fault = Fault::InvalidRequest { message: refusal.to_string(), param: None };
            let mut response = exchange::head_rejection(&context.proxy, fault);
            *response.status_mut() = refusal.status();
            response
        }
        RelayConnectionEnd::SlowHead => {
            let what = "its head took longer than --head-timeout".to_owned();
            exchange::head_rejection(&context.proxy, Fault::RequestTimeout { what })
        }
        RelayConnectionEnd::Stalled => {
            tracing::debug!("closed a client connection: the client stopped reading");
            return;
        }
        RelayConnectionEnd::Idle | RelayConnectionEnd::Http(_) => return,
    };
    if send_last_response(socket, &last_response_bytes(&refusal)).await.is_ok() {
        linger(socket).await;
    }
}
