//! A relayed or waiting body: its states, its heartbeats, its last event, and how long its client has read nothing.
//!
//! Apart from the response's body, because the connection shares it and cuts it when the client stalls.

use std::{
    cell::{Cell, OnceCell, RefCell},
    future::poll_fn,
    pin::Pin,
    rc::Rc,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::StatusCode;
use http_body::Body as _;
use rouse::{fault::DisconnectPhase, fleet::quote::WaitRange, units::Millis};
use rouse_config::OnDisconnect;
use rouse_net::{
    lease::Gate,
    openai::{self, ApiSchema, heartbeat::heartbeat},
    relay::{ScratchFrame, headers::is_readable_stream},
    server::ScratchBody,
};
use tokio::time::{Instant, Sleep};

use super::{EngineResponse, EngineResponseBody, EngineResponseFuture, ResponseAborted, ResponseFramePoll};
use crate::{
    http::request_context::RequestContext,
    serve::socket::{ClientSocket, FlushNotify},
};

/// How much of an engine's own refusal an error event repeats, in bytes.
const MAX_REFUSAL_BYTES: usize = 64 * 1024;
/// How long a response is read after its client disconnected, for engines that must not be interrupted.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(300);

/// A relayed or waiting body. The connection shares it and cuts it when the client stalls.
pub(crate) struct StreamingBody {
    pub(super) state: RefCell<StreamingState>,
    handed_at: Cell<Option<Instant>>,
    /// When the last frame was handed over, if that frame was known to be the last.
    pub(super) ended_at: Cell<Option<Instant>>,
    /// The gate of the engine that answers, once one does.
    gate: OnceCell<Arc<Gate>>,
    pub(super) socket: Rc<ClientSocket>,
    pub(super) context: Rc<RequestContext>,
    on_disconnect: OnDisconnect,
    form: ApiSchema,
    stall_timeout: Millis,
}

#[expect(
    clippy::large_enum_variant,
    reason = "a stream is relayed for nearly all of its life, and a box is an allocation a request"
)]
pub(super) enum StreamingState {
    Waiting(WaitingStream),
    Relayed(EngineResponseBody),
    Refused(Box<EngineRefusalBody>),
    /// The last event is handed over. An error ends the connection at once and discards what it still holds, so the
    /// event must be written first.
    Failing {
        remainder: Option<Bytes>,
        flushed: Rc<FlushNotify>,
        /// The latest time to wait for the flush.
        deadline: Pin<Box<Sleep>>,
    },
    Aborted,
    Ended,
}

/// An engine's refusal, collected for an error event.
pub(super) struct EngineRefusalBody {
    status: StatusCode,
    body: EngineResponseBody,
    collected: Vec<u8>,
}

pub(super) struct WaitingStream {
    response: EngineResponseFuture,
    /// `None`: the client wants no heartbeats.
    heartbeat: Option<HeartbeatTimer>,
}

/// The heartbeat of a waiting stream: its timer, and what its frames are made from.
struct HeartbeatTimer {
    timer: Pin<Box<Sleep>>,
    interval: Duration,
    /// Whether a frame is an event on the responses API.
    sends_events: bool,
    remaining_wait: RemainingWait,
}

/// Returns the model that a request waits for, and the rest of the expected wait, if that is known.
pub(crate) type RemainingWait = Box<dyn Fn() -> Option<(String, WaitRange)>>;

impl StreamingBody {
    /// A relayed engine response. `now`: when its head goes out.
    pub(crate) fn relayed(
        response: Box<EngineResponse>,
        body_context: StreamingBodyContext,
        now: Instant,
    ) -> Rc<Self> {
        body_context.context.set_phase(DisconnectPhase::Streaming);
        Self::new(
            StreamingState::Relayed(response.response.into_body()),
            Some(response.gate),
            body_context,
            now,
        )
    }

    /// A stream whose request still waits. The first heartbeat comes at once. Without `beats` there are no heartbeats,
    /// and the client gets nothing before the engine's first byte.
    pub(crate) fn waiting(
        response: EngineResponseFuture,
        beats: Option<(&rouse_config::StreamConfig, RemainingWait)>,
        body_context: StreamingBodyContext,
    ) -> Rc<Self> {
        let beats = beats.map(|(stream, remaining_wait)| HeartbeatTimer {
            timer: Box::pin(tokio::time::sleep(Duration::ZERO)),
            interval: stream.heartbeat.duration(),
            sends_events: stream.responses_heartbeat_events,
            remaining_wait,
        });
        let waiting = WaitingStream { response, heartbeat: beats };
        Self::new(StreamingState::Waiting(waiting), None, body_context, Instant::now())
    }

    fn new(
        state: StreamingState,
        gate: Option<Arc<Gate>>,
        body_context: StreamingBodyContext,
        now: Instant,
    ) -> Rc<Self> {
        let streaming_body = Rc::new(Self {
            state: RefCell::new(state),
            // The head counts as handed over: the connection may never poll for a frame after it.
            handed_at: Cell::new(Some(now)),
            ended_at: Cell::new(None),
            gate: gate.map_or_else(OnceCell::new, OnceCell::from),
            socket: body_context.socket,
            context: body_context.context,
            on_disconnect: body_context.on_disconnect,
            form: body_context.form,
            stall_timeout: body_context.stall_timeout.into(),
        });
        streaming_body.socket.watch_body(&streaming_body);
        streaming_body
    }

    /// Records that the client's connection wrote a part of the last frame.
    pub(super) fn note_written(&self) {
        if self.handed_at.get().is_some() {
            let now = Instant::now();
            self.handed_at.set(Some(now));
            self.socket.note_progress(now);
        }
    }

    /// Since when the client has read nothing although the body had more.
    pub(crate) fn stalled_since(&self) -> Option<Instant> {
        self.handed_at.get()
    }

    /// Whether the engine drains (its gate is closed), which shortens a stalled client's time.
    pub(crate) fn is_engine_draining(&self) -> bool {
        self.gate.get().is_some_and(|gate| !gate.is_open())
    }

    /// Records that the connection is cut because the client reads nothing.
    pub(crate) fn note_stalled(&self) {
        self.context.client_stalled();
    }

    /// Ends the exchange with the engine because the client reads nothing; delivered bytes stay delivered.
    pub(crate) fn abort_stalled(&self) {
        self.context.client_stalled();
        let state = self.state.replace(StreamingState::Aborted);
        self.drain_if_required(state);
        self.handed_at.set(None);
        // Other streams of the connection get their full time from here.
        self.socket.note_progress(Instant::now());
    }

    /// Polls the next frame. `memory`: scratch space of a caller that writes the frame before it polls again.
    pub(super) fn poll(&self, mut memory: Option<&mut [u8]>, cx: &mut Context<'_>) -> ResponseFramePoll {
        self.handed_at.set(None);
        let mut state = self.state.borrow_mut();
        loop {
            match &mut *state {
                StreamingState::Relayed(body) => {
                    match ready!(ScratchBody::poll_frame_into(body, memory.as_deref_mut(), cx)) {
                        // This event is the relay's last. Only this body knows when the event is written.
                        Some(Ok(ScratchFrame::Owned(event))) if body.is_broken() => {
                            return self.send_last_event(&mut state, event);
                        }
                        Some(Ok(frame)) => {
                            let now = body.last_frame_at().unwrap_or_else(Instant::now);
                            self.ended_at.set(body.is_end_stream().then_some(now));
                            return self.hand_over(frame, now);
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
                            let frame = heartbeat(self.form, beats.sends_events, &beats.remaining_wait);
                            return self.hand_over(ScratchFrame::Owned(frame), now);
                        }
                    };
                    match result {
                        Ok(answer) => {
                            self.gate.set(answer.gate).unwrap_or_default();
                            let (head, body) = answer.response.into_parts();
                            self.context.set_phase(DisconnectPhase::Streaming);
                            // The head that went out promised uncompressed events, so no other body may follow it.
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
                StreamingState::Failing { remainder: rest, flushed, deadline } => {
                    if let Some(rest) = rest.take() {
                        return self.hand_over(ScratchFrame::Owned(rest), Instant::now());
                    }
                    if !flushed.poll(&self.socket, cx) {
                        ready!(deadline.as_mut().poll(cx));
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

    /// Hands over the last event. On HTTP/2 its last byte follows as a frame of its own: hyper takes one frame beyond
    /// the stream's window, and polls again once that frame has some room. So the poll after the last byte shows that
    /// the whole event may be written.
    fn send_last_event(&self, state: &mut StreamingState, mut event: Bytes) -> ResponseFramePoll {
        let split = self.socket.is_multiplexed() && event.len() > 1;
        let rest = split.then(|| event.split_off(event.len() - 1));
        let deadline = Box::pin(tokio::time::sleep(self.stall_timeout.duration()));
        *state = StreamingState::Failing { remainder: rest, flushed: Rc::default(), deadline };
        self.hand_over(ScratchFrame::Owned(event), Instant::now())
    }

    /// Drains the engine's response if the engine must not be interrupted. No client reads it any more.
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

    fn hand_over(&self, frame: ScratchFrame, now: Instant) -> ResponseFramePoll {
        self.handed_at.set(Some(now));
        self.context.add_bytes_out(frame.len());
        Poll::Ready(Some(Ok(frame)))
    }

    /// Ends the stream with an engine's response that cannot be relayed, as an error event.
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

/// The context of a [`StreamingBody`].
pub(crate) struct StreamingBodyContext {
    pub(crate) socket: Rc<ClientSocket>,
    pub(crate) context: Rc<RequestContext>,
    pub(crate) on_disconnect: OnDisconnect,
    /// The API schema of heartbeats and errors.
    pub(crate) form: ApiSchema,
    /// How long a client may take to read the last event.
    pub(crate) stall_timeout: Duration,
}

impl Drop for StreamingBody {
    fn drop(&mut self) {
        self.socket.unwatch_body(self);
        let state = self.state.replace(StreamingState::Ended);
        self.drain_if_required(state);
    }
}

/// Reads a response to its end and discards it. Some engines do not survive an interrupted request.
pub(crate) fn drain_detached(mut body: EngineResponseBody) {
    tokio::task::spawn_local(async move {
        let end = poll_fn(|cx| {
            while let Some(Ok(_)) = ready!(Pin::new(&mut body).poll_frame(cx)) {}
            Poll::Ready(())
        });
        if tokio::time::timeout(DRAIN_TIMEOUT, end).await.is_err() {
            tracing::debug!("draining the response of a disconnected client timed out");
        }
    });
}
