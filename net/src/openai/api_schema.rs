//! Which API's words a client understands.

/// In whose words errors, events and heartbeats are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ApiSchema {
    /// Chat, completions and everything else of OpenAI's.
    #[default]
    OpenAi,
    /// OpenAI's `/v1/responses`: the same envelope before the head, typed events after it.
    Responses,
    /// Anthropic's `/v1/messages`.
    Anthropic,
}
