//! Sends the request and waits for the engine's response head.

use std::{
    future::poll_fn,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use http::{Method, Response};
use tokio::time::{Instant, timeout};

use super::{
    ConnectionPool, Exchange, ExchangeError, ExchangeOutcome, RelayBody, RelayObserver, RelayTarget,
    RelayTimeouts, RequestBodyStream, ResponseInspection, UpstreamRequest,
    abort_watch::{AbortWatch, ExchangeDeadline},
    body::{ResponseOptions, UpstreamStream},
    connection::UpstreamConnection,
    guard::RelayGuard,
    head::{self, UpstreamResponseHead},
    headers::{self, HeaderOverrides},
    payload::UnsentRequest,
    pool::ConnectionKey,
};
use crate::{backend_origin::BackendOrigin, lease::Lease};
use rouse::fault::{DisconnectPhase, ExchangeTimeout, Fault};

/// The longest delay of a close that raced with the request, even from an engine whose event loop is busy. In this time
/// an engine can have begun little of the request.
const STALE_CONNECTION_WINDOW: Duration = Duration::from_millis(250);

/// Sends the request and waits for the engine's response head. Dropping the future closes the connection at once.
///
/// # Errors
/// The engine could not be reached, closed the connection, timed out, or sent no valid response, or the lease was
/// revoked.
pub async fn exchange<O: RelayObserver + Unpin>(
    pool: &ConnectionPool,
    exchange: Exchange<'_, O>,
) -> Result<Response<RelayBody<O>>, ExchangeError> {
    let Exchange { now, target, request: outgoing, upload, lease, timeouts, observer } = exchange;
    let options =
        ResponseOptions { stream: outgoing.stream, inspection: outgoing.inspection, schema: outgoing.schema };
    let mut record = RelayGuard::new(lease, observer);
    match run(pool, &target, outgoing, upload, (&timeouts, now), &mut record).await {
        Ok((head, flow)) => {
            record.phase = DisconnectPhase::Streaming;
            Ok(RelayBody::respond(head, flow, record, target.engine.model, &timeouts, options))
        }
        Err(fault) => {
            let (reroutable, begun) = (!record.sent, record.begun);
            record.end(ExchangeOutcome::Failed(fault.clone()));
            Err(ExchangeError { fault, reroutable, begun })
        }
    }
}

/// Why a connection yielded no head.
enum NoHeadReason {
    /// The connection closed without a response byte.
    Empty,
    /// The bytes received are no response, or only a part of one.
    Broken,
    Fault(Fault),
}

async fn run<O: RelayObserver>(
    pool: &ConnectionPool,
    target: &RelayTarget,
    outgoing: UpstreamRequest<'_>,
    mut upload: Option<RequestBodyStream>,
    (timeouts, now): (&RelayTimeouts, Instant),
    record: &mut RelayGuard<O>,
) -> Result<(UpstreamResponseHead, Pin<Box<UpstreamStream>>), Fault> {
    let origin = target.origin.as_deref().map_or(0, BackendOrigin::id);
    let key = ConnectionKey { address: target.address, generation: target.generation, origin };
    let deadline = if outgoing.stream {
        ExchangeDeadline::after(ExchangeTimeout::FirstByte, timeouts.first_byte, now)
    } else {
        ExchangeDeadline::after(ExchangeTimeout::NonStream, timeouts.non_stream, now)
    };
    let Some(open) = record.live() else {
        return Err(Fault::Internal);
    };
    let mut flow = UpstreamStream::new(AbortWatch::new(&open.lease, deadline), pool.clone());
    // A kept connection may be closing at this moment, and the parts of an upload that were sent are not kept for a
    // replay.
    let mut pooled = if upload.is_none() { pool.take(&key, now) } else { None };
    loop {
        record.phase = DisconnectPhase::Connecting;
        let Some(open) = record.live() else {
            return Err(Fault::Internal);
        };
        if let Some(fault) = open.lease.revoked() {
            return Err(fault.clone());
        }
        let mut connection = match pooled.take() {
            Some(connection) => connection,
            None => {
                connect(target, timeouts, &open.lease, flow.as_mut().abort_watch()).await.map_err(
                    |fault| {
                        match fault {
                            // The engine accepted the request and closed: that it is unreachable now follows from that.
                            Fault::EngineUnreachable { model } if record.sent => {
                                Fault::EngineClosedConnection { model, may_have_started: record.begun }
                            }
                            fault => fault,
                        }
                    },
                )?
            }
        };
        record.phase = DisconnectPhase::Headers;
        let Some(open) = record.live() else {
            return Err(Fault::Internal);
        };
        open.observer.connected();
        let mut unsent = poll_fn(|cx| {
            Poll::Ready(start_request(pool, &mut connection, (&outgoing, upload.as_ref()), target, cx))
        })
        .await;
        if let Some(upload) = upload.take() {
            unsent.append(upload);
        }
        let answer = poll_fn(|cx| {
            let answer = poll_head(pool, &mut connection, &mut unsent, outgoing.method, cx);
            match answer {
                Poll::Ready(answer) => Poll::Ready(answer),
                Poll::Pending => {
                    let watch = flow.as_mut().abort_watch();
                    watch
                        .poll(&open.lease, &target.engine.model, cx)
                        .map(|fault| Err(NoHeadReason::Fault(fault)))
                }
            }
        })
        .await;
        let silence = match answer {
            Ok(head) => {
                open.observer.head(head.status);
                // A report that was not asked for may come from an engine that no stub stands for.
                if outgoing.wants_load_report
                    && let Some(load) = &head.load
                {
                    open.observer.load_report(load);
                }
                let home = head.keep_alive.then_some(key);
                flow.as_mut().attach_connection(connection, unsent, home);
                return Ok((head, flow));
            }
            Err(silence) => silence,
        };
        let whole = unsent.is_empty() && !connection.must_close;
        let may_have_started =
            matches!(silence, NoHeadReason::Broken) || (whole && now.elapsed() > STALE_CONNECTION_WINDOW);
        let replays = connection.reused && matches!(silence, NoHeadReason::Empty) && !may_have_started;
        if replays {
            open.observer.replayed();
        }
        // A close without a byte does not prove that the engine read nothing, and the request itself may have crashed
        // it. So only the same engine gets a replay, if it is still there; other engines do not.
        record.sent |= unsent.is_begun();
        record.begun |= may_have_started;
        match silence {
            NoHeadReason::Fault(fault) => return Err(fault),
            NoHeadReason::Empty if replays => {}
            NoHeadReason::Empty | NoHeadReason::Broken => {
                return Err(Fault::EngineClosedConnection {
                    model: target.engine.model.clone(),
                    may_have_started,
                });
            }
        }
    }
}

/// Sends as much as the socket accepts at once, which is nearly always the whole request.
fn start_request(
    pool: &ConnectionPool,
    connection: &mut UpstreamConnection,
    (outgoing, upload): (&UpstreamRequest<'_>, Option<&RequestBodyStream>),
    target: &RelayTarget,
    cx: &mut Context<'_>,
) -> UnsentRequest {
    let UpstreamRequest {
        method,
        path,
        headers,
        request_id,
        body,
        stream,
        inspection: look,
        wants_load_report,
        ..
    } = outgoing;
    // The part of a body that has already arrived is its first chunk when the length is unknown.
    let chunk = upload.is_some_and(|upload| upload.remaining.is_none()).then(|| body.as_chunk());
    let length =
        upload.map_or(Some(0), |upload| upload.remaining).map(|remaining| body.len() as u64 + remaining);
    let body = chunk.as_ref().unwrap_or(body);
    pool.with_write_buffer(|buffer| {
        head::write_request_line(
            buffer,
            method,
            target.origin.as_ref().map_or("", |origin| &*origin.path),
            path,
        );
        let overrides = HeaderOverrides {
            host: &connection.host,
            authorization: target.authorization.as_ref(),
            request_id: *request_id,
            length,
            identity_encoding: *stream || *look == ResponseInspection::EventsAndJson,
            load_report: *wants_load_report,
        };
        headers::to_engine(buffer, headers, overrides);
        buffer.extend_from_slice(b"\r\n");
        connection.start_send(buffer, body, cx)
    })
}

async fn connect(
    target: &RelayTarget,
    timeouts: &RelayTimeouts,
    lease: &Lease,
    mut watch: Pin<&mut AbortWatch>,
) -> Result<UpstreamConnection, Fault> {
    let ended = poll_fn(|cx| watch.as_mut().poll(lease, &target.engine.model, cx));
    tokio::select! {
        biased;
        connected = timeout(timeouts.connect.duration(), UpstreamConnection::connect(target)) => {
            let model = || target.engine.model.clone();
            match connected {
                Ok(connected) => connected.map_err(|_| Fault::EngineUnreachable { model: model() }),
                Err(_) => {
                    let (timeout, limit) = (ExchangeTimeout::Connect, timeouts.connect);
                    Err(Fault::EngineTimeout { model: model(), timeout, limit })
                }
            }
        }
        fault = ended => Err(fault),
    }
}

/// Sends and reads at once: an engine may answer before it has read the body, and may then never read it.
fn poll_head(
    pool: &ConnectionPool,
    connection: &mut UpstreamConnection,
    unsent: &mut UnsentRequest,
    method: &Method,
    cx: &mut Context<'_>,
) -> Poll<Result<UpstreamResponseHead, NoHeadReason>> {
    if let Poll::Ready(Err(_)) = connection.poll_send(unsent, cx) {
        // The engine stopped reading. It may have sent the reason, so read its response first.
        unsent.abandon();
        connection.must_close = true;
        if let Some(fault) = unsent.take_fault() {
            return Poll::Ready(Err(NoHeadReason::Fault(fault)));
        }
    }
    loop {
        let Poll::Ready(read) = connection.poll_fill(pool, cx) else {
            return Poll::Pending;
        };
        let closed = !matches!(read, Ok(1..));
        match head::parse(&mut connection.read_buffer, method) {
            // The head has not been reported to any caller yet, so the exchange can still fail.
            Ok(Some(head)) if head.decoder.refuses(&connection.read_buffer) => {
                return Poll::Ready(Err(NoHeadReason::Broken));
            }
            Ok(Some(head)) => return Poll::Ready(Ok(head)),
            Ok(None) if !closed => connection.answered = true,
            Ok(None) if !connection.answered => return Poll::Ready(Err(NoHeadReason::Empty)),
            Ok(None) | Err(_) => return Poll::Ready(Err(NoHeadReason::Broken)),
        }
    }
}
