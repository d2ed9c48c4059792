//! Every label value that is not a configured name is from a closed set.

use rouse::fault::Phase;

use crate::driver::ColdStart;

/// Which door a request came through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
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
    /// The passage to an engine's own routes.
    Engines,
    Models,
    Other,
}

/// How a request ended, as a client sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    Success,
    Redirect,
    Client,
    Server,
    /// The client left first.
    Left,
}

/// Why an engine was launched, woken, put to sleep or stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// A request waits for it.
    Demand,
    /// Nobody used it.
    Idle,
    /// Another model needs its memory.
    Swap,
    /// It failed or was judged hung.
    Fault,
    Operator,
    /// The configuration changed.
    Reload,
    Shutdown,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transition {
    Launch,
    Wake,
    Sleep,
    Stop,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Done,
    Failed,
}

pub(super) const ROUTES: usize = Route::ALL.len();
pub(super) const STATUSES: usize = 5;
pub(super) const STARTS: usize = 4;
pub(super) const PHASES: [Phase; 4] = [Phase::Parked, Phase::Connecting, Phase::Headers, Phase::Streaming];

impl Route {
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

    /// By its label; `Other` for what has none.
    #[must_use]
    pub fn named(label: &str) -> Self {
        Self::ALL.into_iter().find(|route| route.as_str() == label).unwrap_or(Self::Other)
    }
}

impl Status {
    /// Of an HTTP status; 499 is not one that was sent.
    #[must_use]
    pub const fn of(code: u16) -> Self {
        match code {
            499 => Self::Left,
            500.. => Self::Server,
            400.. => Self::Client,
            300.. => Self::Redirect,
            _ => Self::Success,
        }
    }

    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Success => "2xx",
            Self::Redirect => "3xx",
            Self::Client => "4xx",
            Self::Server => "5xx",
            Self::Left => "499",
        }
    }
}

impl Cause {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Demand => "demand",
            Self::Idle => "idle",
            Self::Swap => "swap",
            Self::Fault => "fault",
            Self::Operator => "operator",
            Self::Reload => "reload",
            Self::Shutdown => "shutdown",
        }
    }
}

impl Transition {
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

impl Outcome {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Failed => "failed",
        }
    }
}

pub(super) const fn start(start: Option<ColdStart>) -> (usize, &'static str) {
    match start {
        None => (0, "none"),
        Some(ColdStart::Hot) => (1, "hot"),
        Some(ColdStart::Warm) => (2, "warm"),
        Some(ColdStart::Cold) => (3, "cold"),
    }
}

pub(super) const fn phase_index(phase: Phase) -> usize {
    match phase {
        Phase::Parked => 0,
        Phase::Connecting => 1,
        Phase::Headers => 2,
        Phase::Streaming => 3,
    }
}

/// As one word: [`Phase::as_str`] is for sentences.
pub(super) const fn phase(phase: Phase) -> &'static str {
    match phase {
        Phase::Parked => "parked",
        Phase::Connecting => "connecting",
        Phase::Headers => "headers",
        Phase::Streaming => "streaming",
    }
}
