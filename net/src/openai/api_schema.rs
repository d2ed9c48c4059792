//! The API schemas that clients understand.

/// The schema in which errors, events and heartbeats are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ApiSchema {
    /// Chat, completions and the rest of OpenAI's APIs.
    #[default]
    OpenAi,
    /// OpenAI's `/v1/responses`: the same envelope before the head, typed events after it.
    Responses,
    /// Anthropic's `/v1/messages`.
    Anthropic,
}
