//! The response's body as the client's connection reads it, and everything that must last exactly as long.
//!
//! A body is one of three: text of ours, an engine's answer passing through, or a stream whose head went out while its
//! request still waits. The last keeps the connection alive with what its API's clients take for no word of the model, and
//! becomes the second when the engine answers. Once a head is out, a failure can only be told as an error event; no
//! `[DONE]` follows and the connection is cut, so that nobody takes half an answer for a whole one.
//!
//! A client that takes nothing pins an engine. hyper asks for the next frame only when it could write the last one, so
//! the time since a frame was handed over and no other was asked for is the time the client has stalled; on HTTP/2, unless some of
//! it went out meanwhile ([`outgoing`]).

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
use rouse::{
    client,
    fault::{Fault, Phase},
    lease::Gate,
    openai::{self, Form, heartbeat::heartbeat},
    relay::{Piece, RelayBody, headers::is_readable_stream},
};
use tokio::time::{Instant, Sleep};

use super::{exchange::Watcher, track::Track};
use crate::{
    config::{self, OnDisconnect},
    serve::socket::{Flushed, InExchange, Socket},
};

mod outgoing;

use outgoing::Outgoing;

/// Of an engine's own refusal, at most so much is repeated in an event.
const REFUSAL: usize = 64 * 1024;
/// How long an answer is read on behalf of a client that left, for engines that must not be interrupted.
const DRAIN: Duration = Duration::from_secs(300);

/// An engine's answer as it passes.
pub(crate) type Upstream = RelayBody<Watcher>;

/// A future for the answer of a request that may still be waiting.
pub(crate) type Job = Pin<Box<dyn Future<Output = Result<Box<Answer>, Fault>>>>;

/// An engine's answer and what its body is tied to.
pub(crate) struct Answer {
    pub(crate) response: Response<Upstream>,
    pub(crate) gate: Arc<Gate>,
}

pub(crate) struct Reply {
    content: Content,
    track: Rc<Track>,
    exchange: InExchange,
}

enum Content {
    Text(Option<Bytes>),
    Live(Rc<Live>),
}

/// A body that lasts; shared with the connection, which cuts it when its client stalls.
pub(crate) struct Live {
    state: RefCell<State>,
    handed: Cell<Option<Instant>>,
    /// When the last of it was handed over, where it was known to be the last.
    ended: Cell<Option<Instant>>,
    gate: RefCell<Option<Arc<Gate>>>,
    socket: Rc<Socket>,
    track: Rc<Track>,
    on_disconnect: OnDisconnect,
    form: Form,
    patience: Duration,
}

#[expect(
    clippy::large_enum_variant,
    reason = "a stream is relayed for nearly all of its life, and a box is an allocation a request"
)]
enum State {
    Waiting(Waiting),
    Relayed(Upstream),
    Refused(Box<Refused>),
    /// The last event is handed over. An error ends the connection at once, with whatever hyper still holds: the event
    /// must be out first.
    Failing {
        rest: Option<Bytes>,
        flushed: Rc<Flushed>,
        /// It waits no longer than this.
        until: Pin<Box<Sleep>>,
    },
    Broken,
    Over,
}

/// An engine's refusal, gathered to be told as an event.
struct Refused {
    status: StatusCode,
    body: Upstream,
    gathered: Vec<u8>,
}

struct Waiting {
    job: Job,
    /// None for a client that wants none.
    beats: Option<Beats>,
}

/// What is written while the stream waits, and when.
struct Beats {
    next: Pin<Box<Sleep>>,
    every: Duration,
    heartbeat: &'static [u8],
}

/// Ends a body uncleanly: the client must not take what it has for the whole.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the response was broken off")]
pub(crate) struct Broken;

impl Reply {
    pub(crate) fn text(text: Bytes, track: Rc<Track>, exchange: InExchange) -> Self {
        exchange.handed();
        Self { content: Content::Text(Some(text)), track, exchange }
    }

    /// The same without its text, for an answer to HEAD.
    pub(crate) fn without_text(mut self) -> Self {
        if let Content::Text(text) = &mut self.content {
            *text = None;
        }
        self
    }

    /// It lasts, and is not a text of ours.
    pub(crate) const fn is_live(&self) -> bool {
        matches!(self.content, Content::Live(_))
    }

    pub(crate) fn live(live: Rc<Live>, exchange: InExchange) -> Self {
        exchange.handed();
        Self { track: Rc::clone(&live.track), content: Content::Live(live), exchange }
    }

    /// The next frame. `memory`: lent by somebody who writes at once what comes, and does not ask again before; what can be
    /// is left there.
    fn poll_next(&mut self, memory: Option<&mut [u8]>, cx: &mut Context<'_>) -> Next {
        self.exchange.asked();
        let next = match &mut self.content {
            Content::Text(text) => {
                let text = text.take();
                self.track.over();
                self.track.sent(text.as_ref().map_or(0, Bytes::len));
                Poll::Ready(text.map(|text| Ok(Piece::Own(text))))
            }
            Content::Live(live) => live.poll(memory, cx),
        };
        if matches!(next, Poll::Ready(Some(Ok(_)))) {
            self.exchange.handed();
        }
        next
    }

    /// On HTTP/1.1 a client that takes nothing blocks the socket.
    fn outgoing(&self, piece: Piece) -> Outgoing {
        // Only what lies in memory that was lent would have to be copied out of it.
        let bytes = piece.into_bytes(&[]);
        match &self.content {
            Content::Live(live) if live.socket.is_multiplexed() => Outgoing::of(live, bytes),
            Content::Live(_) | Content::Text(_) => Outgoing::alone(bytes),
        }
    }
}

/// The next of an answer, as it was asked for.
type Next = Poll<Option<Result<Piece, Broken>>>;

impl Live {
    /// `now`: its head goes out.
    pub(crate) fn relayed(answer: Box<Answer>, parts: LiveParts, now: Instant) -> Rc<Self> {
        parts.track.phase(Phase::Streaming);
        Self::new(State::Relayed(answer.response.into_body()), Some(answer.gate), parts, now)
    }

    /// The first heartbeat comes at once. Without a `stream` there are none, and the client hears nothing before the engine's
    /// first byte.
    pub(crate) fn waiting(job: Job, stream: Option<&config::Stream>, parts: LiveParts) -> Rc<Self> {
        let beats = stream.map(|stream| Beats {
            next: Box::pin(tokio::time::sleep(Duration::ZERO)),
            every: stream.heartbeat.duration(),
            heartbeat: heartbeat(parts.form, stream.responses_events),
        });
        let waiting = Waiting { job, beats };
        Self::new(State::Waiting(waiting), None, parts, Instant::now())
    }

    fn new(state: State, gate: Option<Arc<Gate>>, parts: LiveParts, now: Instant) -> Rc<Self> {
        let live = Rc::new(Self {
            state: RefCell::new(state),
            // The head is: nobody may ever ask for what follows it.
            handed: Cell::new(Some(now)),
            ended: Cell::new(None),
            gate: RefCell::new(gate),
            socket: parts.socket,
            track: parts.track,
            on_disconnect: parts.on_disconnect,
            form: parts.form,
            patience: parts.patience,
        });
        live.socket.watch(&live);
        live
    }

    /// Some of what was handed over went out.
    fn taken(&self) {
        if self.handed.get().is_some() {
            let now = Instant::now();
            self.handed.set(Some(now));
            self.socket.note_moved(now);
        }
    }

    /// Since when the client has taken nothing although there was more to give.
    pub(crate) fn stalled_since(&self) -> Option<Instant> {
        self.handed.get()
    }

    /// The engine drains for others, which shortens a stalled client's time.
    pub(crate) fn drains(&self) -> bool {
        self.gate.borrow().as_ref().is_some_and(|gate| !gate.is_open())
    }

    /// Its connection is cut because the client takes nothing.
    pub(crate) fn note_stalled(&self) {
        self.track.stalled();
    }

    /// Ends the exchange with the engine, since the client takes nothing; what it has got stays.
    pub(crate) fn cut(&self) {
        self.track.stalled();
        let state = self.state.replace(State::Broken);
        self.leave(state);
        self.handed.set(None);
        // The others get their time from here.
        self.socket.note_moved(Instant::now());
    }

    /// `memory`: lent by somebody who writes what comes at once, and asks again when it is written.
    fn poll(&self, mut memory: Option<&mut [u8]>, cx: &mut Context<'_>) -> Next {
        self.handed.set(None);
        let mut state = self.state.borrow_mut();
        loop {
            match &mut *state {
                State::Relayed(body) => {
                    match ready!(client::Answer::poll_piece(body, memory.as_deref_mut(), cx)) {
                        // That is its last word. When it is out is known here, and not to the relay.
                        Some(Ok(Piece::Own(event))) if body.is_broken() => {
                            return self.last(&mut state, event);
                        }
                        Some(Ok(piece)) => {
                            let now = body.passed().unwrap_or_else(Instant::now);
                            self.ended.set(body.is_end_stream().then_some(now));
                            return self.hand(piece, now);
                        }
                        Some(Err(_)) => *state = State::Broken,
                        None => *state = State::Over,
                    }
                }
                State::Waiting(waiting) => {
                    let result = match waiting.job.as_mut().poll(cx) {
                        Poll::Ready(result) => result,
                        Poll::Pending => {
                            let Some(beats) = &mut waiting.beats else { return Poll::Pending };
                            ready!(beats.next.as_mut().poll(cx));
                            let now = Instant::now();
                            beats.next.as_mut().reset(now + beats.every);
                            return self.hand(Piece::Own(Bytes::from_static(beats.heartbeat)), now);
                        }
                    };
                    match result {
                        Ok(answer) => {
                            *self.gate.borrow_mut() = Some(answer.gate);
                            let (head, body) = answer.response.into_parts();
                            self.track.phase(Phase::Streaming);
                            // Our head promised events, in the clear: nothing else can stand behind it.
                            *state = if !head.status.is_success() {
                                let (status, gathered) = (head.status, Vec::new());
                                State::Refused(Box::new(Refused { status, body, gathered }))
                            } else if is_readable_stream(&head.headers) {
                                State::Relayed(body)
                            } else {
                                self.leave(State::Relayed(body));
                                return self.refused(&mut state, head.status, &[]);
                            };
                        }
                        Err(fault) => {
                            self.track.fault(&fault);
                            return self.last(&mut state, openai::error::event(&fault, self.form));
                        }
                    }
                }
                State::Refused(refused) => {
                    let Refused { status, body, gathered } = &mut **refused;
                    match ready!(Pin::new(body).poll_frame(cx)) {
                        Some(Ok(frame)) => {
                            if let Ok(data) = frame.into_data() {
                                let room = REFUSAL.saturating_sub(gathered.len()).min(data.len());
                                gathered.extend_from_slice(data.get(..room).unwrap_or_default());
                            }
                        }
                        None | Some(Err(_)) => {
                            let (status, gathered) = (*status, std::mem::take(gathered));
                            return self.refused(&mut state, status, &gathered);
                        }
                    }
                }
                State::Failing { rest, flushed, until } => {
                    if let Some(rest) = rest.take() {
                        return self.hand(Piece::Own(rest), Instant::now());
                    }
                    if !flushed.poll(&self.socket, cx) {
                        ready!(until.as_mut().poll(cx));
                    }
                    *state = State::Broken;
                }
                State::Broken => {
                    *state = State::Over;
                    self.track.over();
                    return Poll::Ready(Some(Err(Broken)));
                }
                State::Over => {
                    self.track.over();
                    return Poll::Ready(None);
                }
            }
        }
    }

    /// Hands over the last event. On HTTP/2 its last byte comes after it: hyper takes one frame beyond what the stream's
    /// window has room for, and asks again once that frame has some; so when it asks for what follows that byte, all may be
    /// written.
    fn last(&self, state: &mut State, mut event: Bytes) -> Next {
        let split = self.socket.is_multiplexed() && event.len() > 1;
        let rest = split.then(|| event.split_off(event.len() - 1));
        let until = Box::pin(tokio::time::sleep(self.patience));
        *state = State::Failing { rest, flushed: Rc::default(), until };
        self.hand(Piece::Own(event), Instant::now())
    }

    /// Nobody reads on. An engine that must not be interrupted is read to its end all the same.
    fn leave(&self, state: State) {
        if self.on_disconnect != OnDisconnect::Drain {
            return;
        }
        let body = match state {
            State::Relayed(body) => body,
            State::Refused(refused) => refused.body,
            _ => return,
        };
        if !body.is_end_stream() {
            drain(body);
        }
    }

    fn hand(&self, piece: Piece, now: Instant) -> Next {
        self.handed.set(Some(now));
        self.track.sent(piece.len());
        Poll::Ready(Some(Ok(piece)))
    }

    /// An engine's answer that cannot stand in the stream, as its last event.
    fn refused(&self, state: &mut State, status: StatusCode, body: &[u8]) -> Next {
        self.track.code(openai::error::ENGINE_REFUSED);
        self.last(state, openai::error::event_of_engine(status, body, self.form))
    }
}

/// What a [`Live`] body belongs to.
pub(crate) struct LiveParts {
    pub(crate) socket: Rc<Socket>,
    pub(crate) track: Rc<Track>,
    pub(crate) on_disconnect: OnDisconnect,
    /// In whose words heartbeats and errors are written.
    pub(crate) form: Form,
    /// How long a client may take for the last event.
    pub(crate) patience: Duration,
}

impl Drop for Live {
    fn drop(&mut self) {
        let state = self.state.replace(State::Over);
        self.leave(state);
    }
}

/// Reads an answer to its end for nobody. Some engines do not survive an interrupted request.
pub(crate) fn drain(mut body: Upstream) {
    tokio::task::spawn_local(async move {
        let end = poll_fn(|cx| {
            while let Some(Ok(_)) = ready!(Pin::new(&mut body).poll_frame(cx)) {}
            Poll::Ready(())
        });
        if tokio::time::timeout(DRAIN, end).await.is_err() {
            tracing::debug!("gave up draining the answer of a client that left");
        }
    });
}

impl Body for Reply {
    type Data = Outgoing;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Outgoing>, Broken>>> {
        let next = ready!(self.poll_next(None, cx));
        Poll::Ready(next.map(|piece| piece.map(|piece| Frame::data(self.outgoing(piece)))))
    }

    fn is_end_stream(&self) -> bool {
        match &self.content {
            Content::Text(text) => text.as_ref().is_none_or(Bytes::is_empty),
            Content::Live(live) => match &*live.state.borrow() {
                State::Over => true,
                State::Relayed(body) => body.is_end_stream(),
                _ => false,
            },
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Text(text) => SizeHint::with_exact(text.as_ref().map_or(0, |text| text.len() as u64)),
            Content::Live(live) => match &*live.state.borrow() {
                State::Relayed(body) => body.size_hint(),
                State::Over => SizeHint::with_exact(0),
                _ => SizeHint::default(),
            },
        }
    }
}

impl client::Answer for Reply {
    fn is_relayed(&self) -> bool {
        matches!(&self.content, Content::Live(live) if matches!(*live.state.borrow(), State::Relayed(_)))
    }

    fn poll_piece(&mut self, memory: Option<&mut [u8]>, cx: &mut Context<'_>) -> Next {
        self.poll_next(memory, cx)
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        let ended = match &self.content {
            Content::Text(_) => None,
            // hyper asks no more once a body says that it is at its end, and never for the body of an answer to HEAD.
            Content::Live(live) if self.is_end_stream() => live.ended.get(),
            Content::Live(_) => return,
        };
        // One look at the clock for both, or none.
        let now = ended.unwrap_or_else(Instant::now);
        self.track.over_at(now);
        self.exchange.ends(now);
    }
}

#[cfg(test)]
mod tests;
