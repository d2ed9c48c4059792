//! The content of one choice of a response, in token-sized pieces: plain tokens, a document, or tool calls.

use std::{borrow::Cow, sync::Arc};

use crate::{
    content::{self, CORRUPT, TOKEN_BYTES},
    document,
    request::ToolDefinition,
};

pub(crate) struct SimChoice {
    content: ChoiceContent,
    /// The finish reason, in chat's terms.
    pub(crate) finish: &'static str,
    /// Length in tokens.
    pub(crate) tokens: u64,
}

enum ChoiceContent {
    Tokens(u64),
    Corrupt,
    Text(Vec<String>),
    Calls(Vec<SimToolCall>),
}

#[derive(Clone, Debug)]
pub(crate) struct SimToolCall {
    /// The suffix of the call's id in a response.
    pub(crate) id: Arc<str>,
    pub(crate) name: String,
    pieces: Vec<String>,
}

impl SimToolCall {
    /// The complete arguments.
    pub(crate) fn arguments(&self) -> String {
        self.pieces.concat()
    }
}

/// One token of content.
pub(crate) struct TokenPiece<'a> {
    pub(crate) text: Cow<'a, str>,
    /// The tool call that it belongs to, if any.
    pub(crate) call: Option<CallPosition<'a>>,
}

pub(crate) struct CallPosition<'a> {
    pub(crate) index: usize,
    pub(crate) call: &'a SimToolCall,
    pub(crate) is_first: bool,
    pub(crate) is_last: bool,
}

impl SimChoice {
    /// Plain tokens by [`content::token`]: `requested` of them, else `usual`.
    pub(crate) fn plain(key: u64, corrupt: bool, requested: Option<u64>, usual: u64) -> Self {
        let content = if corrupt { ChoiceContent::Corrupt } else { ChoiceContent::Tokens(key) };
        let finish = if requested.is_some() { "length" } else { "stop" };
        Self { content, finish, tokens: requested.unwrap_or(usual) }
    }

    /// A text, truncated to the requested number of tokens.
    pub(crate) fn text(text: &str, requested: Option<u64>) -> Self {
        let pieces = split_tokens(text);
        let length = pieces.len() as u64;
        Self { content: ChoiceContent::Text(pieces), finish: "stop", tokens: length }.truncated_to(requested)
    }

    /// Calls of `tools` in order, with arguments that fit their schemas.
    pub(crate) fn calls(tools: &[ToolDefinition], key: u64, requested: Option<u64>) -> Self {
        let call = |(index, tool): (u64, &ToolDefinition)| {
            let key = key.wrapping_add(index << 32);
            let pieces = split_tokens(&document::fit_schema(&tool.schema, key).to_string());
            SimToolCall { id: content::token(key, u64::MAX).trim().into(), name: tool.name.clone(), pieces }
        };
        let calls: Vec<SimToolCall> = (0..).zip(tools).map(call).collect();
        let length = calls.iter().map(|call| call.pieces.len() as u64).sum();
        Self { content: ChoiceContent::Calls(calls), finish: "tool_calls", tokens: length }
            .truncated_to(requested)
    }

    fn truncated_to(mut self, requested: Option<u64>) -> Self {
        if let Some(requested) = requested.filter(|requested| *requested < self.tokens) {
            self.tokens = requested;
            self.finish = "length";
        }
        self
    }

    pub(crate) fn is_tool_call(&self) -> bool {
        matches!(self.content, ChoiceContent::Calls(_))
    }

    /// Token `i` of the choice.
    pub(crate) fn piece(&self, i: u64) -> TokenPiece<'_> {
        let text = match &self.content {
            ChoiceContent::Tokens(key) => content::token(*key, i).into(),
            ChoiceContent::Corrupt => CORRUPT.into(),
            ChoiceContent::Text(pieces) => pieces.get(i as usize).map_or("", String::as_str).into(),
            ChoiceContent::Calls(calls) => return call_piece(calls, i as usize),
        };
        TokenPiece { text, call: None }
    }

    /// The text of its first `token_count` tokens. Tool calls add no text.
    pub(crate) fn text_so_far(&self, token_count: u64) -> String {
        let token_count = token_count.min(self.tokens);
        if self.is_tool_call() {
            String::new()
        } else {
            (0..token_count).map(|i| self.piece(i).text).collect()
        }
    }

    /// The calls begun in its first `token_count` tokens, each with its arguments so far.
    pub(crate) fn calls_so_far(&self, token_count: u64) -> Vec<(&SimToolCall, String)> {
        let mut called: Vec<(&SimToolCall, String)> = Vec::new();
        for i in 0..token_count.min(self.tokens) {
            let piece = self.piece(i);
            let Some(position) = piece.call else { break };
            match called.last_mut().filter(|_| !position.is_first) {
                Some((_, arguments)) => arguments.push_str(&piece.text),
                None => called.push((position.call, piece.text.into_owned())),
            }
        }
        called
    }
}

fn call_piece(calls: &[SimToolCall], mut i: usize) -> TokenPiece<'_> {
    for (index, call) in calls.iter().enumerate() {
        if let Some(text) = call.pieces.get(i) {
            let is_last = i + 1 == call.pieces.len();
            return TokenPiece {
                text: text.as_str().into(),
                call: Some(CallPosition { index, call, is_first: i == 0, is_last }),
            };
        }
        i -= call.pieces.len();
    }
    TokenPiece { text: "".into(), call: None }
}

/// Splits a text into token-sized pieces, at any character.
fn split_tokens(text: &str) -> Vec<String> {
    let letters: Vec<char> = text.chars().collect();
    letters.chunks(TOKEN_BYTES).map(|piece| piece.iter().collect()).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn calls_come_in_pieces_and_one_after_the_other() {
        let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
        let tools = ["a", "b"].map(|name| ToolDefinition { name: name.to_owned(), schema: schema.clone() });
        let voice = SimChoice::calls(&tools, 1, None);
        let called = voice.calls_so_far(voice.tokens);
        assert_eq!((called.len(), voice.finish), (2, "tool_calls"));
        for (call, arguments) in &called {
            assert!(call.pieces.len() > 1);
            assert!(serde_json::from_str::<Value>(arguments).unwrap()["city"].is_string());
        }
        assert_ne!(called[0].1, called[1].1);
        assert_eq!(SimChoice::calls(&tools, 1, Some(2)).finish, "length");
    }

    #[test]
    fn a_text_is_cut_off_where_the_request_says() {
        assert_eq!(SimChoice::text("12345678", None).text_so_far(9), "12345678");
        let cut = SimChoice::text("12345678", Some(1));
        assert_eq!((cut.text_so_far(9).as_str(), cut.finish), ("1234567", "length"));
    }
}
