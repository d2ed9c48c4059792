//! The inference routes and their kinds of responses.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SimApi {
    Chat,
    Completions,
    Responses,
    Messages,
    CountTokens,
    Embeddings,
    Rerank,
    Score,
    Moderations,
    Images,
    Speech,
    Transcriptions,
    Translations,
}

impl SimApi {
    pub(crate) fn from_path(path: &str) -> Option<Self> {
        Some(match path {
            "/v1/chat/completions" => Self::Chat,
            "/v1/completions" => Self::Completions,
            "/v1/responses" => Self::Responses,
            "/v1/messages" => Self::Messages,
            "/v1/messages/count_tokens" => Self::CountTokens,
            "/v1/embeddings" => Self::Embeddings,
            "/v1/rerank" | "/v2/rerank" | "/rerank" => Self::Rerank,
            "/v1/score" | "/score" => Self::Score,
            "/v1/moderations" => Self::Moderations,
            "/v1/images/generations" => Self::Images,
            "/v1/audio/speech" => Self::Speech,
            "/v1/audio/transcriptions" => Self::Transcriptions,
            "/v1/audio/translations" => Self::Translations,
            _ => return None,
        })
    }

    /// Whether it generates token by token and can stream. The other APIs respond at once.
    pub(crate) fn generates(self) -> bool {
        matches!(self, Self::Chat | Self::Completions | Self::Responses | Self::Messages)
            || self.takes_audio()
    }

    /// Whether its body is a form with a file.
    pub(crate) fn takes_audio(self) -> bool {
        matches!(self, Self::Transcriptions | Self::Translations)
    }

    /// Whether its errors and events are in Anthropic's form.
    pub(crate) fn is_anthropic(self) -> bool {
        matches!(self, Self::Messages | Self::CountTokens)
    }

    /// The prefix of its responses' ids.
    pub(crate) fn id_prefix(self) -> &'static str {
        match self {
            Self::Chat => "chatcmpl",
            Self::Completions => "cmpl",
            Self::Responses => "resp",
            Self::Messages | Self::CountTokens => "msg",
            Self::Embeddings => "embd",
            Self::Rerank => "rerank",
            Self::Score => "score",
            Self::Moderations => "modr",
            Self::Images => "img",
            Self::Speech | Self::Transcriptions | Self::Translations => "audio",
        }
    }
}
