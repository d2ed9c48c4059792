//! From the request to the engine's head.

use std::{
    future::poll_fn,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use http::{Method, Response};
use tokio::time::{Instant, timeout};

use super::{
    Exchange, Failed, Look, Observer, Outcome, Outgoing, Pool, RelayBody, Target, Timeouts, Upload,
    body::{Flow, Wanted},
    connection::Connection,
    head::{self, Head},
    headers::{self, Ours},
    payload::Unsent,
    pool::Key,
    record::Record,
    watch::{Deadline, Watch},
};
use crate::{
    fault::{Fault, Phase, Timer},
    lease::Lease,
    origin::Origin,
};

/// An engine that closes an idle connection in the instant in which it is used does so this soon, also one whose loop is
/// busy. What it could have begun in this time is little.
const AT_ONCE: Duration = Duration::from_millis(250);

/// Sends the request and waits for the engine's head. Dropping the future closes the connection at once.
///
/// # Errors
/// There is no answer: the engine could not be reached, closed, was too slow, or the lease was revoked.
pub async fn exchange<O: Observer + Unpin>(
    pool: &Pool,
    exchange: Exchange<'_, O>,
) -> Result<Response<RelayBody<O>>, Failed> {
    let Exchange { now, target, outgoing, upload, lease, timeouts, observer } = exchange;
    let wanted = Wanted { stream: outgoing.stream, look: outgoing.look, form: outgoing.form };
    let mut record = Record::new(lease, observer);
    match run(pool, &target, outgoing, upload, (&timeouts, now), &mut record).await {
        Ok((head, flow)) => {
            record.phase = Phase::Streaming;
            Ok(RelayBody::respond(head, flow, record, target.engine.model, &timeouts, wanted))
        }
        Err(fault) => {
            let (elsewhere, begun) = (!record.sent, record.begun);
            record.end(Outcome::Failed(fault.clone()));
            Err(Failed { fault, elsewhere, begun })
        }
    }
}

/// Why a connection gave no head.
enum Silence {
    /// It closed, or never opened, without a byte of an answer.
    Empty,
    /// What came is no answer, or only a part of one.
    Broken,
    Ended(Fault),
}

async fn run<O: Observer>(
    pool: &Pool,
    target: &Target,
    outgoing: Outgoing<'_>,
    mut upload: Option<Upload>,
    (timeouts, now): (&Timeouts, Instant),
    record: &mut Record<O>,
) -> Result<(Head, Pin<Box<Flow>>), Fault> {
    let origin = target.origin.as_deref().map_or(0, Origin::id);
    let key = Key { address: target.address, generation: target.generation, origin };
    let deadline = if outgoing.stream {
        Deadline::after(Timer::FirstByte, timeouts.first_byte, now)
    } else {
        Deadline::after(Timer::NonStream, timeouts.non_stream, now)
    };
    let Some(open) = record.open() else {
        return Err(Fault::Internal);
    };
    let mut flow = Flow::new(Watch::new(&open.lease, deadline), pool.clone());
    // A kept one may be closed this moment, and what has come of an upload is not kept.
    let mut pooled = if upload.is_none() { pool.take(&key, now) } else { None };
    loop {
        record.phase = Phase::Connecting;
        let Some(open) = record.open() else {
            return Err(Fault::Internal);
        };
        if let Some(fault) = open.lease.revoked() {
            return Err(fault.clone());
        }
        let mut connection = match pooled.take() {
            Some(connection) => connection,
            None => {
                connect(target, timeouts, &open.lease, flow.as_mut().watch()).await.map_err(|fault| {
                    match fault {
                        // That nobody is there any more follows from what happened: it took the request and closed.
                        Fault::EngineUnreachable { model } if record.sent => {
                            Fault::EngineClosed { model, begun: record.begun }
                        }
                        fault => fault,
                    }
                })?
            }
        };
        record.phase = Phase::Headers;
        let Some(open) = record.open() else {
            return Err(Fault::Internal);
        };
        open.observer.connected();
        let mut unsent =
            poll_fn(|cx| Poll::Ready(begin(pool, &mut connection, (&outgoing, upload.as_ref()), target, cx)))
                .await;
        if let Some(upload) = upload.take() {
            unsent.append(upload);
        }
        let answer = poll_fn(|cx| {
            let answer = poll_answer(pool, &mut connection, &mut unsent, outgoing.method, cx);
            match answer {
                Poll::Ready(answer) => Poll::Ready(answer),
                Poll::Pending => {
                    let watch = flow.as_mut().watch();
                    watch.poll(&open.lease, &target.engine.model, cx).map(|fault| Err(Silence::Ended(fault)))
                }
            }
        })
        .await;
        let silence = match answer {
            Ok(head) => {
                open.observer.head(head.status);
                let home = head.keep.then_some(key);
                flow.as_mut().carry(connection, unsent, home);
                return Ok((head, flow));
            }
            Err(silence) => silence,
        };
        let whole = unsent.is_empty() && !connection.spent;
        let begun = matches!(silence, Silence::Broken) || (whole && now.elapsed() > AT_ONCE);
        let replays = connection.reused && matches!(silence, Silence::Empty) && !begun;
        if replays {
            open.observer.replayed();
        }
        // An end without a byte does not say that nothing was read, and a request may be what ended it. The same engine
        // is asked again if it is still there; no other one is.
        record.sent |= unsent.is_begun();
        record.begun |= begun;
        match silence {
            Silence::Ended(fault) => return Err(fault),
            Silence::Empty if replays => {}
            Silence::Empty | Silence::Broken => {
                return Err(Fault::EngineClosed { model: target.engine.model.clone(), begun });
            }
        }
    }
}

/// Sends what the socket takes at once, which is nearly always all.
fn begin(
    pool: &Pool,
    connection: &mut Connection,
    (outgoing, upload): (&Outgoing<'_>, Option<&Upload>),
    target: &Target,
    cx: &mut Context<'_>,
) -> Unsent {
    let Outgoing { method, path, headers, request_id, body, stream, look, .. } = outgoing;
    // What has come of a body without a length is its first chunk.
    let chunk = upload.is_some_and(|upload| upload.left.is_none()).then(|| body.as_chunk());
    let length = upload.map_or(Some(0), |upload| upload.left).map(|left| body.len() as u64 + left);
    let body = chunk.as_ref().unwrap_or(body);
    pool.with_draft(|draft| {
        head::line(draft, method, target.origin.as_ref().map_or("", |origin| &*origin.path), path);
        let ours = Ours {
            host: &connection.host,
            authorization: target.authorization.as_ref(),
            request_id: *request_id,
            length,
            identity: *stream || *look == Look::Documents,
        };
        headers::to_engine(draft, headers, ours);
        draft.extend_from_slice(b"\r\n");
        connection.begin(draft, body, cx)
    })
}

async fn connect(
    target: &Target,
    timeouts: &Timeouts,
    lease: &Lease,
    mut watch: Pin<&mut Watch>,
) -> Result<Connection, Fault> {
    let ended = poll_fn(|cx| watch.as_mut().poll(lease, &target.engine.model, cx));
    tokio::select! {
        biased;
        connected = timeout(timeouts.connect.duration(), Connection::connect(target)) => {
            let model = || target.engine.model.clone();
            match connected {
                Ok(connected) => connected.map_err(|_| Fault::EngineUnreachable { model: model() }),
                Err(_) => {
                    let (which, limit) = (Timer::Connect, timeouts.connect);
                    Err(Fault::EngineTimeout { model: model(), which, limit })
                }
            }
        }
        fault = ended => Err(fault),
    }
}

/// Sends and listens at once: an engine may answer before it has read the body, and may then never read it.
fn poll_answer(
    pool: &Pool,
    connection: &mut Connection,
    unsent: &mut Unsent,
    method: &Method,
    cx: &mut Context<'_>,
) -> Poll<Result<Head, Silence>> {
    if let Poll::Ready(Err(_)) = connection.poll_send(unsent, cx) {
        // It reads no more. It may have said why, so what it said is read first.
        unsent.abandon();
        connection.spent = true;
        if let Some(fault) = unsent.take_fault() {
            return Poll::Ready(Err(Silence::Ended(fault)));
        }
    }
    loop {
        let Poll::Ready(read) = connection.poll_hold(pool, cx) else {
            return Poll::Pending;
        };
        let closed = !matches!(read, Ok(1..));
        match head::parse(&mut connection.held, method) {
            // Nobody was told of the head yet.
            Ok(Some(head)) if head.decoder.refuses(&connection.held) => {
                return Poll::Ready(Err(Silence::Broken));
            }
            Ok(Some(head)) => return Poll::Ready(Ok(head)),
            Ok(None) if !closed => connection.answered = true,
            Ok(None) if !connection.answered => return Poll::Ready(Err(Silence::Empty)),
            Ok(None) | Err(_) => return Poll::Ready(Err(Silence::Broken)),
        }
    }
}
