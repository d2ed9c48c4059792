//! Label values. All except configured names come from closed sets.

use rouse::fault::DisconnectPhase;

use crate::driver::ColdStart;

/// The route of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteLabel {
    Chat,
    Completions,
    Embeddings,
    Responses,
    Rerank,
    Score,
    Moderations,
    Images,
    Speech,
    Transcriptions,
    Translations,
    Messages,
    CountTokens,
    Tokenize,
    Detokenize,
    /// The passthrough to an engine's own routes.
    Engines,
    Models,
    Other,
}

/// How a request ended for its client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatusClass {
    Success,
    Redirect,
    ClientError,
    ServerError,
    /// The client disconnected first.
    ClientLeft,
}

/// Why an engine was launched, woken, put to sleep or stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransitionCause {
    /// A request waits for the engine.
    Demand,
    /// No request used the engine.
    Idle,
    /// Another model needs the engine's memory.
    Swap,
    /// The model's target is lower.
    Scale,
    /// The engine sleeps and wakes once without need.
    Rehearsal,
    /// The engine failed or was judged hung.
    Fault,
    Operator,
    /// The configuration changed.
    Reload,
    Shutdown,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransitionKind {
    Launch,
    Wake,
    Sleep,
    Stop,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutcomeLabel {
    Done,
    Failed,
}

pub(super) const ROUTE_COUNT: usize = RouteLabel::ALL.len();
pub(super) const STATUS_COUNT: usize = 5;
pub(super) const START_COUNT: usize = 3;
pub(super) const PHASES: [DisconnectPhase; 4] = [
    DisconnectPhase::Parked,
    DisconnectPhase::Connecting,
    DisconnectPhase::Headers,
    DisconnectPhase::Streaming,
];

impl RouteLabel {
    pub(super) const ALL: [Self; 18] = [
        Self::Chat,
        Self::Completions,
        Self::Embeddings,
        Self::Responses,
        Self::Rerank,
        Self::Score,
        Self::Moderations,
        Self::Images,
        Self::Speech,
        Self::Transcriptions,
        Self::Translations,
        Self::Messages,
        Self::CountTokens,
        Self::Tokenize,
        Self::Detokenize,
        Self::Engines,
        Self::Models,
        Self::Other,
    ];

    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completions => "completions",
            Self::Embeddings => "embeddings",
            Self::Responses => "responses",
            Self::Rerank => "rerank",
            Self::Score => "score",
            Self::Moderations => "moderations",
            Self::Images => "images",
            Self::Speech => "speech",
            Self::Transcriptions => "transcriptions",
            Self::Translations => "translations",
            Self::Messages => "messages",
            Self::CountTokens => "count_tokens",
            Self::Tokenize => "tokenize",
            Self::Detokenize => "detokenize",
            Self::Engines => "engines",
            Self::Models => "models",
            Self::Other => "other",
        }
    }

    /// Returns the route with this label, or `Other`.
    #[must_use]
    pub fn from_label(label: &str) -> Self {
        Self::ALL.into_iter().find(|route| route.as_str() == label).unwrap_or(Self::Other)
    }
}

impl StatusClass {
    /// Classifies an HTTP status; 499 is never sent.
    #[must_use]
    pub const fn from_code(code: u16) -> Self {
        match code {
            499 => Self::ClientLeft,
            500.. => Self::ServerError,
            400.. => Self::ClientError,
            300.. => Self::Redirect,
            _ => Self::Success,
        }
    }

    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Success => "2xx",
            Self::Redirect => "3xx",
            Self::ClientError => "4xx",
            Self::ServerError => "5xx",
            Self::ClientLeft => "499",
        }
    }
}

impl TransitionCause {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Demand => "demand",
            Self::Idle => "idle",
            Self::Swap => "swap",
            Self::Scale => "scale",
            Self::Rehearsal => "rehearsal",
            Self::Fault => "fault",
            Self::Operator => "operator",
            Self::Reload => "reload",
            Self::Shutdown => "shutdown",
        }
    }
}

impl TransitionKind {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Launch => "launch",
            Self::Wake => "wake",
            Self::Sleep => "sleep",
            Self::Stop => "stop",
        }
    }
}

impl OutcomeLabel {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Failed => "failed",
        }
    }
}

pub(crate) const fn cold_start_label(start: Option<ColdStart>) -> (usize, &'static str) {
    match start {
        None => (0, "none"),
        Some(ColdStart::Hot) => (1, "hot"),
        Some(ColdStart::Cold) => (2, "cold"),
    }
}

pub(super) const fn phase_index(phase: DisconnectPhase) -> usize {
    match phase {
        DisconnectPhase::Parked => 0,
        DisconnectPhase::Connecting => 1,
        DisconnectPhase::Headers => 2,
        DisconnectPhase::Streaming => 3,
    }
}

/// Returns the phase as one word: [`DisconnectPhase::as_str`] is for sentences.
pub(crate) const fn phase_label(phase: DisconnectPhase) -> &'static str {
    match phase {
        DisconnectPhase::Parked => "parked",
        DisconnectPhase::Connecting => "connecting",
        DisconnectPhase::Headers => "headers",
        DisconnectPhase::Streaming => "streaming",
    }
}
