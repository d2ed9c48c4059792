//! The routes whose body names a model, and what each of them is.

/// A route whose body names a model and is passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Inference {
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
}

/// In which format a body names its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Carries {
    Json,
    Multipart,
}

/// Every path, with the names that engines gave the same route over time.
const PATHS: [(&str, Inference); 18] = [
    ("/v1/chat/completions", Inference::Chat),
    ("/v1/completions", Inference::Completions),
    ("/v1/embeddings", Inference::Embeddings),
    ("/v1/responses", Inference::Responses),
    ("/v1/rerank", Inference::Rerank),
    ("/rerank", Inference::Rerank),
    ("/v2/rerank", Inference::Rerank),
    ("/v1/score", Inference::Score),
    ("/score", Inference::Score),
    ("/v1/moderations", Inference::Moderations),
    ("/v1/images/generations", Inference::Images),
    ("/v1/audio/speech", Inference::Speech),
    ("/v1/audio/transcriptions", Inference::Transcriptions),
    ("/v1/audio/translations", Inference::Translations),
    ("/v1/messages", Inference::Messages),
    ("/v1/messages/count_tokens", Inference::CountTokens),
    ("/tokenize", Inference::Tokenize),
    ("/detokenize", Inference::Detokenize),
];

impl Inference {
    /// The route at exactly this path.
    pub(crate) fn at(path: &str) -> Option<Self> {
        PATHS.iter().find(|(known, _)| *known == path).map(|(_, inference)| *inference)
    }

    /// `stream: true` means server-sent events here.
    pub(crate) const fn streams(self) -> bool {
        matches!(
            self,
            Self::Chat
                | Self::Completions
                | Self::Responses
                | Self::Images
                | Self::Transcriptions
                | Self::Translations
                | Self::Messages
        )
    }

    /// The model itself is at work, and not only its tokenizer.
    pub(crate) const fn computes(self) -> bool {
        !matches!(self, Self::CountTokens | Self::Tokenize | Self::Detokenize)
    }

    pub(crate) const fn carries(self) -> Carries {
        match self {
            Self::Transcriptions | Self::Translations => Carries::Multipart,
            _ => Carries::Json,
        }
    }

    /// The metric label.
    pub(crate) const fn label(self) -> &'static str {
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
        }
    }
}
