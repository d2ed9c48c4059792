//! The response's body as the client's connection reads it, and everything that must last exactly as long.
//!
//! A body is one of three: text of ours, an engine's answer passing through, or a stream whose head went out while its
//! request still waits. The last keeps the connection alive with what its API's clients take for no word of the model, and
//! becomes the second when the engine answers. Once a head is out, a failure can only be told as an error event; no
//! `[DONE]` follows and the connection is cut, so that nobody takes half an answer for a whole one.
//!
//! A client that takes nothing pins an engine. hyper asks for the next frame only when it could write the last one, so
//! the time since a frame was handed over and no other was asked for is the time the client has stalled; on HTTP/2, unless some of
//! it went out meanwhile (`tracked_bytes`).

use std::{
    cell::{Cell, RefCell},
    future::poll_fn,
    pin::Pin,
    rc::Rc,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use rouse::fault::{DisconnectPhase, Fault};
use rouse_net::{
    downstream,
    lease::Gate,
    openai::{self, ApiSchema, heartbeat::heartbeat},
    relay::{RelayBody, ScratchFrame, headers::is_readable_stream},
};
use tokio::time::{Instant, Sleep};

use super::{engine_request::RequestExchangeObserver, request_context::RequestContext};
use crate::{
    config::{self, OnDisconnect},
    serve::socket::{ClientSocket, ConnectionExchangeGuard, FlushNotify},
};

mod tracked_bytes;

use tracked_bytes::TrackedBytes;

/// Of an engine's own refusal, at most so much is repeated in an event.
const MAX_REFUSAL_BYTES: usize = 64 * 1024;
/// How long an answer is read on behalf of a client that left, for engines that must not be interrupted.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(300);

/// An engine's answer as it passes.
pub(crate) type EngineResponseBody = RelayBody<RequestExchangeObserver>;

/// A future for the answer of a request that may still be waiting.
pub(crate) type EngineResponseFuture = Pin<Box<dyn Future<Output = Result<Box<EngineResponse>, Fault>>>>;

/// An engine's answer and what its body is tied to.
pub(crate) struct EngineResponse {
    pub(crate) response: Response<EngineResponseBody>,
    pub(crate) gate: Arc<Gate>,
}

pub(crate) struct ClientResponseBody {
    content: ResponseContent,
    context: Rc<RequestContext>,
    exchange: ConnectionExchangeGuard,
}

enum ResponseContent {
    Text(Option<Bytes>),
    Streaming(Rc<StreamingBody>),
}

/// A body that lasts; shared with the connection, which cuts it when its client stalls.
pub(crate) struct StreamingBody {
    state: RefCell<StreamingState>,
    handed_at: Cell<Option<Instant>>,
    /// When the last of it was handed over, where it was known to be the last.
    ended_at: Cell<Option<Instant>>,
    gate: RefCell<Option<Arc<Gate>>>,
    socket: Rc<ClientSocket>,
    context: Rc<RequestContext>,
    on_disconnect: OnDisconnect,
    form: ApiSchema,
    stall_timeout: Duration,
}

#[expect(
    clippy::large_enum_variant,
    reason = "a stream is relayed for nearly all of its life, and a box is an allocation a request"
)]
enum StreamingState {
    Waiting(WaitingStream),
    Relayed(EngineResponseBody),
    Refused(Box<EngineRefusalBody>),
    /// The last event is handed over. An error ends the connection at once, with whatever hyper still holds: the event
    /// must be out first.
    Failing {
        remainder: Option<Bytes>,
        flushed: Rc<FlushNotify>,
        /// It waits no longer than this.
        deadline: Pin<Box<Sleep>>,
    },
    Aborted,
    Ended,
}

/// An engine's refusal, gathered to be told as an event.
struct EngineRefusalBody {
    status: StatusCode,
    body: EngineResponseBody,
    collected: Vec<u8>,
}

struct WaitingStream {
    response: EngineResponseFuture,
    /// None for a client that wants none.
    heartbeat: Option<HeartbeatTimer>,
}

/// What is written while the stream waits, and when.
struct HeartbeatTimer {
    timer: Pin<Box<Sleep>>,
    interval: Duration,
    frame: &'static [u8],
}

/// Ends a body uncleanly: the client must not take what it has for the whole.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the response was broken off")]
pub(crate) struct ResponseAborted;

impl ClientResponseBody {
    pub(crate) fn text(text: Bytes, track: Rc<RequestContext>, exchange: ConnectionExchangeGuard) -> Self {
        exchange.note_handed();
        Self { content: ResponseContent::Text(Some(text)), context: track, exchange }
    }

    /// The same without its text, for an answer to HEAD.
    pub(crate) fn without_body(mut self) -> Self {
        if let ResponseContent::Text(text) = &mut self.content {
            *text = None;
        }
        self
    }

    /// It lasts, and is not a text of ours.
    pub(crate) const fn is_streaming(&self) -> bool {
        matches!(self.content, ResponseContent::Streaming(_))
    }

    pub(crate) fn streaming(live: Rc<StreamingBody>, exchange: ConnectionExchangeGuard) -> Self {
        exchange.note_handed();
        Self { context: Rc::clone(&live.context), content: ResponseContent::Streaming(live), exchange }
    }

    /// The next frame. `memory`: lent by somebody who writes at once what comes, and does not ask again before; what can be
    /// is left there.
    fn poll_next(&mut self, memory: Option<&mut [u8]>, cx: &mut Context<'_>) -> ResponseFramePoll {
        self.exchange.note_polled();
        let next = match &mut self.content {
            ResponseContent::Text(text) => {
                let text = text.take();
                self.context.set_complete();
                self.context.add_bytes_out(text.as_ref().map_or(0, Bytes::len));
                Poll::Ready(text.map(|text| Ok(ScratchFrame::Owned(text))))
            }
            ResponseContent::Streaming(live) => live.poll(memory, cx),
        };
        if matches!(next, Poll::Ready(Some(Ok(_)))) {
            self.exchange.note_handed();
        }
        next
    }

    /// On HTTP/1.1 a client that takes nothing blocks the socket.
    fn track_bytes(&self, piece: ScratchFrame) -> TrackedBytes {
        // Only what lies in memory that was lent would have to be copied out of it.
        let bytes = piece.into_bytes(&[]);
        match &self.content {
            ResponseContent::Streaming(live) if live.socket.is_multiplexed() => {
                TrackedBytes::tracked(live, bytes)
            }
            ResponseContent::Streaming(_) | ResponseContent::Text(_) => TrackedBytes::untracked(bytes),
        }
    }
}

/// The next of an answer, as it was asked for.
type ResponseFramePoll = Poll<Option<Result<ScratchFrame, ResponseAborted>>>;

impl StreamingBody {
    /// `now`: its head goes out.
    pub(crate) fn relayed(
        answer: Box<EngineResponse>,
        parts: StreamingBodyContext,
        now: Instant,
    ) -> Rc<Self> {
        parts.context.set_phase(DisconnectPhase::Streaming);
        Self::new(StreamingState::Relayed(answer.response.into_body()), Some(answer.gate), parts, now)
    }

    /// The first heartbeat comes at once. Without a `stream` there are none, and the client hears nothing before the engine's
    /// first byte.
    pub(crate) fn waiting(
        job: EngineResponseFuture,
        stream: Option<&config::StreamConfig>,
        parts: StreamingBodyContext,
    ) -> Rc<Self> {
        let beats = stream.map(|stream| HeartbeatTimer {
            timer: Box::pin(tokio::time::sleep(Duration::ZERO)),
            interval: stream.heartbeat.duration(),
            frame: heartbeat(parts.form, stream.responses_heartbeat_events),
        });
        let waiting = WaitingStream { response: job, heartbeat: beats };
        Self::new(StreamingState::Waiting(waiting), None, parts, Instant::now())
    }

    fn new(
        state: StreamingState,
        gate: Option<Arc<Gate>>,
        parts: StreamingBodyContext,
        now: Instant,
    ) -> Rc<Self> {
        let live = Rc::new(Self {
            state: RefCell::new(state),
            // The head is: nobody may ever ask for what follows it.
            handed_at: Cell::new(Some(now)),
            ended_at: Cell::new(None),
            gate: RefCell::new(gate),
            socket: parts.socket,
            context: parts.context,
            on_disconnect: parts.on_disconnect,
            form: parts.form,
            stall_timeout: parts.stall_timeout,
        });
        live.socket.watch_body(&live);
        live
    }

    /// Some of what was handed over went out.
    fn note_written(&self) {
        if self.handed_at.get().is_some() {
            let now = Instant::now();
            self.handed_at.set(Some(now));
            self.socket.note_progress(now);
        }
    }

    /// Since when the client has taken nothing although there was more to give.
    pub(crate) fn stalled_since(&self) -> Option<Instant> {
        self.handed_at.get()
    }

    /// The engine drains for others, which shortens a stalled client's time.
    pub(crate) fn is_engine_draining(&self) -> bool {
        self.gate.borrow().as_ref().is_some_and(|gate| !gate.is_open())
    }

    /// Its connection is cut because the client takes nothing.
    pub(crate) fn note_stalled(&self) {
        self.context.client_stalled();
    }

    /// Ends the exchange with the engine, since the client takes nothing; what it has got stays.
    pub(crate) fn abort_stalled(&self) {
        self.context.client_stalled();
        let state = self.state.replace(StreamingState::Aborted);
        self.drain_if_required(state);
        self.handed_at.set(None);
        // The others get their time from here.
        self.socket.note_progress(Instant::now());
    }

    /// `memory`: lent by somebody who writes what comes at once, and asks again when it is written.
    fn poll(&self, mut memory: Option<&mut [u8]>, cx: &mut Context<'_>) -> ResponseFramePoll {
        self.handed_at.set(None);
        let mut state = self.state.borrow_mut();
        loop {
            match &mut *state {
                StreamingState::Relayed(body) => {
                    match ready!(downstream::ScratchBody::poll_frame_into(body, memory.as_deref_mut(), cx)) {
                        // That is its last word. When it is out is known here, and not to the relay.
                        Some(Ok(ScratchFrame::Owned(event))) if body.is_broken() => {
                            return self.send_last_event(&mut state, event);
                        }
                        Some(Ok(piece)) => {
                            let now = body.last_frame_at().unwrap_or_else(Instant::now);
                            self.ended_at.set(body.is_end_stream().then_some(now));
                            return self.hand_over(piece, now);
                        }
                        Some(Err(_)) => *state = StreamingState::Aborted,
                        None => *state = StreamingState::Ended,
                    }
                }
                StreamingState::Waiting(waiting) => {
                    let result = match waiting.response.as_mut().poll(cx) {
                        Poll::Ready(result) => result,
                        Poll::Pending => {
                            let Some(beats) = &mut waiting.heartbeat else { return Poll::Pending };
                            ready!(beats.timer.as_mut().poll(cx));
                            let now = Instant::now();
                            beats.timer.as_mut().reset(now + beats.interval);
                            return self.hand_over(ScratchFrame::Owned(Bytes::from_static(beats.frame)), now);
                        }
                    };
                    match result {
                        Ok(answer) => {
                            *self.gate.borrow_mut() = Some(answer.gate);
                            let (head, body) = answer.response.into_parts();
                            self.context.set_phase(DisconnectPhase::Streaming);
                            // Our head promised events, in the clear: nothing else can stand behind it.
                            *state = if !head.status.is_success() {
                                let (status, gathered) = (head.status, Vec::new());
                                StreamingState::Refused(Box::new(EngineRefusalBody {
                                    status,
                                    body,
                                    collected: gathered,
                                }))
                            } else if is_readable_stream(&head.headers) {
                                StreamingState::Relayed(body)
                            } else {
                                self.drain_if_required(StreamingState::Relayed(body));
                                return self.end_with_refusal(&mut state, head.status, &[]);
                            };
                        }
                        Err(fault) => {
                            self.context.record_fault(&fault);
                            return self.send_last_event(&mut state, openai::error::event(&fault, self.form));
                        }
                    }
                }
                StreamingState::Refused(refused) => {
                    let EngineRefusalBody { status, body, collected: gathered } = &mut **refused;
                    match ready!(Pin::new(body).poll_frame(cx)) {
                        Some(Ok(frame)) => {
                            if let Ok(data) = frame.into_data() {
                                let room = MAX_REFUSAL_BYTES.saturating_sub(gathered.len()).min(data.len());
                                gathered.extend_from_slice(data.get(..room).unwrap_or_default());
                            }
                        }
                        None | Some(Err(_)) => {
                            let (status, gathered) = (*status, std::mem::take(gathered));
                            return self.end_with_refusal(&mut state, status, &gathered);
                        }
                    }
                }
                StreamingState::Failing { remainder: rest, flushed, deadline: until } => {
                    if let Some(rest) = rest.take() {
                        return self.hand_over(ScratchFrame::Owned(rest), Instant::now());
                    }
                    if !flushed.poll(&self.socket, cx) {
                        ready!(until.as_mut().poll(cx));
                    }
                    *state = StreamingState::Aborted;
                }
                StreamingState::Aborted => {
                    *state = StreamingState::Ended;
                    self.context.set_complete();
                    return Poll::Ready(Some(Err(ResponseAborted)));
                }
                StreamingState::Ended => {
                    self.context.set_complete();
                    return Poll::Ready(None);
                }
            }
        }
    }

    /// Hands over the last event. On HTTP/2 its last byte comes after it: hyper takes one frame beyond what the stream's
    /// window has room for, and asks again once that frame has some; so when it asks for what follows that byte, all may be
    /// written.
    fn send_last_event(&self, state: &mut StreamingState, mut event: Bytes) -> ResponseFramePoll {
        let split = self.socket.is_multiplexed() && event.len() > 1;
        let rest = split.then(|| event.split_off(event.len() - 1));
        let until = Box::pin(tokio::time::sleep(self.stall_timeout));
        *state = StreamingState::Failing { remainder: rest, flushed: Rc::default(), deadline: until };
        self.hand_over(ScratchFrame::Owned(event), Instant::now())
    }

    /// Nobody reads on. An engine that must not be interrupted is read to its end all the same.
    fn drain_if_required(&self, state: StreamingState) {
        if self.on_disconnect != OnDisconnect::Drain {
            return;
        }
        let body = match state {
            StreamingState::Relayed(body) => body,
            StreamingState::Refused(refused) => refused.body,
            _ => return,
        };
        if !body.is_end_stream() {
            drain_detached(body);
        }
    }

    fn hand_over(&self, piece: ScratchFrame, now: Instant) -> ResponseFramePoll {
        self.handed_at.set(Some(now));
        self.context.add_bytes_out(piece.len());
        Poll::Ready(Some(Ok(piece)))
    }

    /// An engine's answer that cannot stand in the stream, as its last event.
    fn end_with_refusal(
        &self,
        state: &mut StreamingState,
        status: StatusCode,
        body: &[u8],
    ) -> ResponseFramePoll {
        self.context.set_code(openai::error::ENGINE_REFUSED);
        self.send_last_event(state, openai::error::engine_error_event(status, body, self.form))
    }
}

/// What a [`StreamingBody`] belongs to.
pub(crate) struct StreamingBodyContext {
    pub(crate) socket: Rc<ClientSocket>,
    pub(crate) context: Rc<RequestContext>,
    pub(crate) on_disconnect: OnDisconnect,
    /// In whose words heartbeats and errors are written.
    pub(crate) form: ApiSchema,
    /// How long a client may take for the last event.
    pub(crate) stall_timeout: Duration,
}

impl Drop for StreamingBody {
    fn drop(&mut self) {
        let state = self.state.replace(StreamingState::Ended);
        self.drain_if_required(state);
    }
}

/// Reads an answer to its end for nobody. Some engines do not survive an interrupted request.
pub(crate) fn drain_detached(mut body: EngineResponseBody) {
    tokio::task::spawn_local(async move {
        let end = poll_fn(|cx| {
            while let Some(Ok(_)) = ready!(Pin::new(&mut body).poll_frame(cx)) {}
            Poll::Ready(())
        });
        if tokio::time::timeout(DRAIN_TIMEOUT, end).await.is_err() {
            tracing::debug!("gave up draining the answer of a client that left");
        }
    });
}

impl Body for ClientResponseBody {
    type Data = TrackedBytes;
    type Error = ResponseAborted;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<TrackedBytes>, ResponseAborted>>> {
        let next = ready!(self.poll_next(None, cx));
        Poll::Ready(next.map(|piece| piece.map(|piece| Frame::data(self.track_bytes(piece)))))
    }

    fn is_end_stream(&self) -> bool {
        match &self.content {
            ResponseContent::Text(text) => text.as_ref().is_none_or(Bytes::is_empty),
            ResponseContent::Streaming(live) => match &*live.state.borrow() {
                StreamingState::Ended => true,
                StreamingState::Relayed(body) => body.is_end_stream(),
                _ => false,
            },
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            ResponseContent::Text(text) => {
                SizeHint::with_exact(text.as_ref().map_or(0, |text| text.len() as u64))
            }
            ResponseContent::Streaming(live) => match &*live.state.borrow() {
                StreamingState::Relayed(body) => body.size_hint(),
                StreamingState::Ended => SizeHint::with_exact(0),
                _ => SizeHint::default(),
            },
        }
    }
}

impl downstream::ScratchBody for ClientResponseBody {
    fn uses_scratch(&self) -> bool {
        matches!(&self.content, ResponseContent::Streaming(live) if matches!(*live.state.borrow(), StreamingState::Relayed(_)))
    }

    fn poll_frame_into(&mut self, memory: Option<&mut [u8]>, cx: &mut Context<'_>) -> ResponseFramePoll {
        self.poll_next(memory, cx)
    }
}

impl Drop for ClientResponseBody {
    fn drop(&mut self) {
        let ended = match &self.content {
            ResponseContent::Text(_) => None,
            // hyper asks no more once a body says that it is at its end, and never for the body of an answer to HEAD.
            ResponseContent::Streaming(live) if self.is_end_stream() => live.ended_at.get(),
            ResponseContent::Streaming(_) => return,
        };
        // One look at the clock for both, or none.
        let now = ended.unwrap_or_else(Instant::now);
        self.context.set_complete_at(now);
        self.exchange.set_ended_at(now);
    }
}

#[cfg(test)]
mod tests;
