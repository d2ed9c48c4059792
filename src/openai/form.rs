//! Whose API a request speaks.

/// In whose words errors, events and heartbeats are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    #[default]
    OpenAi,
    Responses,
    Anthropic,
}
