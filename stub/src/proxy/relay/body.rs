//! The request body: buffered if small, else streamed.
//!
//! The relay does not read the content, so it need not hold a body. It holds a small body while sending it, because
//! only then can it resend a request whose pooled connection turns out to be closed.

use std::{
    future::poll_fn,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame};
use http_body_util::BodyExt as _;
use rouse::{fault::Fault, units};
use rouse_net::{
    relay::RequestBodyStream,
    server::{
        Http1RequestBody, RequestBodyError,
        body_rate::{MinRateTimer, RATE_WINDOW},
    },
};
use tokio::time::{Instant, Sleep, sleep};

use super::{RelayThreadContext, socket::RelaySocket};
use crate::proxy::metrics::ByteDirection;

/// Longest wait for the beginning of a body during shutdown, and longest pause in the rest.
const CLOSING_BODY_TIMEOUT: Duration = Duration::from_secs(2);
/// Largest buffered body, in bytes.
const MAX_BUFFERED_BYTES: u64 = 64 << 10;

/// The body of a client's request.
pub(super) type RelayRequestBody = Http1RequestBody<RelaySocket>;

/// Buffers a small body, or the beginning of a larger one.
pub(super) async fn buffer_body(
    mut body: RelayRequestBody,
    context: &Rc<RelayThreadContext>,
    socket: &Rc<RelaySocket>,
) -> Result<(Bytes, Option<RequestBodyStream>), Fault> {
    let settings = &context.proxy.settings;
    let (most, within) = (settings.max_body, settings.body_timeout);
    let declared = body.size_hint().exact();
    if declared.is_some_and(|length| length > most) {
        return Err(too_large(most));
    }
    let (gathered, whole) = tokio::select! {
        // Most bodies arrive with their head, and then need no timer.
        biased;
        begun = read_prefix(&mut body, declared) => begun?,
        () = body_timeout(socket, within) => {
            let what = "the body, or its first 64 KiB".to_owned();
            return Err(Fault::RequestTimeout { what });
        }
    };
    if whole {
        return Ok((gathered, None));
    }
    let so_far = gathered.len() as u64;
    if so_far > most {
        return Err(too_large(most));
    }
    let remaining = declared.map(|length| length - so_far);
    socket.set_upload_open(true);
    let rest = RemainingBody {
        body,
        context: Rc::clone(context),
        socket: Rc::clone(socket),
        received_bytes: so_far,
        max_bytes: most,
        idle_timeout: within,
        idle_timer: Box::pin(sleep(within)),
        is_waiting: false,
        min_rate: settings.body_rate,
        rate: MinRateTimer::new(settings.body_rate, RATE_WINDOW.min(within)),
    };
    Ok((gathered, Some(RequestBodyStream { remaining, body: Box::pin(rest) })))
}

/// Completes when the beginning of a body times out, earlier if the connection is closing.
async fn body_timeout(socket: &RelaySocket, within: Duration) {
    // The connection's task polls this again when the connection is closing.
    let closes = poll_fn(|_| if socket.is_closing() { Poll::Ready(()) } else { Poll::Pending });
    tokio::select! {
        () = sleep(within) => {}
        () = async { closes.await; sleep(CLOSING_BODY_TIMEOUT).await } => {}
    }
}

/// Returns a small body whole, or the beginning of a larger one. The flag: whether it is complete.
async fn read_prefix(body: &mut RelayRequestBody, declared: Option<u64>) -> Result<(Bytes, bool), Fault> {
    let mut gathered = BytesMut::new();
    let mut first = Bytes::new();
    while declared.is_none_or(|length| length <= MAX_BUFFERED_BYTES)
        && (gathered.len() + first.len()) as u64 <= MAX_BUFFERED_BYTES
    {
        let Some(frame) = body.frame().await else {
            return Ok((if gathered.is_empty() { first } else { gathered.freeze() }, true));
        };
        let Ok(data) = frame.map_err(|error| aborted_body(&error))?.into_data() else {
            continue;
        };
        if first.is_empty() && gathered.is_empty() {
            first = data;
        } else {
            gathered.extend_from_slice(&std::mem::take(&mut first));
            gathered.extend_from_slice(&data);
        }
    }
    Ok((if gathered.is_empty() { first } else { gathered.freeze() }, false))
}

/// Streams the rest of a body, within the limit.
struct RemainingBody {
    body: RelayRequestBody,
    context: Rc<RelayThreadContext>,
    socket: Rc<RelaySocket>,
    received_bytes: u64,
    max_bytes: u64,
    /// Longest pause between two frames.
    idle_timeout: Duration,
    /// Fires when the next frame is overdue.
    idle_timer: Pin<Box<Sleep>>,
    /// The engine has taken all that has arrived, so the client is the one to wait for.
    is_waiting: bool,
    /// In bytes a second.
    min_rate: units::Bytes,
    rate: MinRateTimer,
}

impl RemainingBody {
    /// Longest pause from now on: shorter once the connection is closing.
    fn max_pause(&self) -> Duration {
        if self.socket.is_closing() { self.idle_timeout.min(CLOSING_BODY_TIMEOUT) } else { self.idle_timeout }
    }

    /// Waits for the client. Ready with the fault when the client is too slow.
    fn poll_wait(&mut self, cx: &mut Context<'_>) -> Poll<Fault> {
        // The relay passes frames on as they arrive, and holds none of them.
        if self.rate.poll_wait(self.received_bytes, 0, cx).is_ready() {
            let what = format!("the body arrived slower than --body-rate ({}/s)", self.min_rate);
            return Poll::Ready(Fault::RequestTimeout { what });
        }
        let latest = Instant::now() + self.max_pause();
        if !std::mem::replace(&mut self.is_waiting, true) || latest < self.idle_timer.deadline() {
            self.idle_timer.as_mut().reset(latest);
        }
        ready!(self.idle_timer.as_mut().poll(cx));
        let what = format!("no byte of its body arrived for {:?}", self.max_pause());
        Poll::Ready(Fault::RequestTimeout { what })
    }
}

impl Body for RemainingBody {
    type Data = Bytes;
    type Error = Fault;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Fault>>> {
        let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) else {
            return self.poll_wait(cx).map(|fault| Some(Err(fault)));
        };
        self.is_waiting = false;
        self.rate.pause();
        let frame = frame.map(|frame| frame.map_err(|error| aborted_body(&error)));
        if let Some(Ok(frame)) = &frame {
            let bytes = frame.data_ref().map_or(0, Bytes::len);
            self.received_bytes += bytes as u64;
            if self.received_bytes > self.max_bytes {
                return Poll::Ready(Some(Err(too_large(self.max_bytes))));
            }
            self.context.traffic.add(ByteDirection::ToEngine, bytes);
        }
        if frame.is_none() || self.body.is_end_stream() {
            self.socket.set_upload_open(false);
        }
        Poll::Ready(frame)
    }
}

fn too_large(max_body: u64) -> Fault {
    Fault::BodyTooLarge { setting: "--max-body".into(), limit: units::Bytes(max_body) }
}

fn aborted_body(error: &RequestBodyError) -> Fault {
    Fault::InvalidRequest { message: format!("the request body ended early: {error}"), param: None }
}
