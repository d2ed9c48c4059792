//! Text in the many forms that requests use.

use serde::Deserialize;

#[derive(Debug, Deserialize)]
pub(super) struct SimMessage {
    role: Option<String>,
    #[serde(rename = "type")]
    kind: Option<String>,
    content: Option<TextContent>,
}

/// Text as one string or as parts. Parts that are not text count as empty.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum TextContent {
    Whole(String),
    Parts(Vec<TextContentPart>),
}

#[derive(Debug, Deserialize)]
pub(super) struct TextContentPart {
    #[serde(default)]
    text: String,
    #[serde(rename = "type")]
    kind: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum PromptInput {
    Whole(String),
    Tokens(Vec<u32>),
    Many(Vec<String>),
    ManyTokens(Vec<Vec<u32>>),
    Documents(Vec<RerankDocument>),
    Items(Vec<SimMessage>),
}

#[derive(Debug, Deserialize)]
pub(super) struct RerankDocument {
    text: String,
}

impl SimMessage {
    pub(super) fn text(&self) -> String {
        self.content.as_ref().map(TextContent::joined).unwrap_or_default()
    }

    /// Whether it is a tool result, in any of the three APIs' forms.
    pub(super) fn is_tool_result(&self) -> bool {
        let has = |kind: &Option<String>, name| kind.as_deref() == Some(name);
        let parts = match &self.content {
            Some(TextContent::Parts(parts)) => parts.as_slice(),
            _ => &[],
        };
        has(&self.role, "tool")
            || has(&self.kind, "function_call_output")
            || parts.iter().any(|part| has(&part.kind, "tool_result"))
    }
}

impl TextContent {
    pub(super) fn joined(&self) -> String {
        match self {
            Self::Whole(text) => text.clone(),
            Self::Parts(parts) => parts.iter().map(|part| part.text.as_str()).collect(),
        }
    }
}

impl PromptInput {
    /// Each text separately.
    pub(super) fn texts(&self) -> Vec<String> {
        match self {
            Self::Whole(text) => vec![text.clone()],
            Self::Tokens(ids) => vec![join(ids)],
            Self::Many(texts) => texts.clone(),
            Self::ManyTokens(many) => many.iter().map(|ids| join(ids)).collect(),
            Self::Documents(documents) => documents.iter().map(|document| document.text.clone()).collect(),
            Self::Items(items) => items.iter().map(SimMessage::text).collect(),
        }
    }

    /// Treats items as a conversation, whose last message is answered.
    pub(super) fn last(&self) -> Option<Vec<String>> {
        match self {
            Self::Items(items) => items.last().map(|item| vec![item.text()]),
            other => Some(other.texts()),
        }
    }

    pub(super) fn ends_with_result(&self) -> bool {
        matches!(self, Self::Items(items) if items.last().is_some_and(SimMessage::is_tool_result))
    }
}

fn join(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")
}
