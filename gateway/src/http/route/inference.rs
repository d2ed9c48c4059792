//! The routes whose body names a model, and their properties.

/// A route whose body names a model and is forwarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InferenceRoute {
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

/// The format in which a body names its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyEncoding {
    Json,
    Multipart,
}

/// Every path, including the names that engines gave the same route over time.
const INFERENCE_PATHS: [(&str, InferenceRoute); 18] = [
    ("/v1/chat/completions", InferenceRoute::Chat),
    ("/v1/completions", InferenceRoute::Completions),
    ("/v1/embeddings", InferenceRoute::Embeddings),
    ("/v1/responses", InferenceRoute::Responses),
    ("/v1/rerank", InferenceRoute::Rerank),
    ("/rerank", InferenceRoute::Rerank),
    ("/v2/rerank", InferenceRoute::Rerank),
    ("/v1/score", InferenceRoute::Score),
    ("/score", InferenceRoute::Score),
    ("/v1/moderations", InferenceRoute::Moderations),
    ("/v1/images/generations", InferenceRoute::Images),
    ("/v1/audio/speech", InferenceRoute::Speech),
    ("/v1/audio/transcriptions", InferenceRoute::Transcriptions),
    ("/v1/audio/translations", InferenceRoute::Translations),
    ("/v1/messages", InferenceRoute::Messages),
    ("/v1/messages/count_tokens", InferenceRoute::CountTokens),
    ("/tokenize", InferenceRoute::Tokenize),
    ("/detokenize", InferenceRoute::Detokenize),
];

impl InferenceRoute {
    /// The route with exactly this path.
    pub(crate) fn from_path(path: &str) -> Option<Self> {
        Self::known(path).map(|(_, inference)| inference)
    }

    /// The path itself, if a route has exactly this one.
    pub(crate) fn known_path(path: &str) -> Option<&'static str> {
        Self::known(path).map(|(known, _)| known)
    }

    fn known(path: &str) -> Option<(&'static str, Self)> {
        INFERENCE_PATHS.into_iter().find(|(known, _)| *known == path)
    }

    /// Whether `stream: true` means server-sent events on this route.
    pub(crate) const fn may_stream(self) -> bool {
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

    /// Whether the model itself runs, and not only its tokenizer.
    pub(crate) const fn runs_model(self) -> bool {
        !matches!(self, Self::CountTokens | Self::Tokenize | Self::Detokenize)
    }

    pub(crate) const fn body_encoding(self) -> BodyEncoding {
        match self {
            Self::Transcriptions | Self::Translations => BodyEncoding::Multipart,
            _ => BodyEncoding::Json,
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
