//! Anthropic's messages: a response is a list of blocks.

use serde_json::{Value, json};

use crate::choice::{SimChoice, SimToolCall, TokenPiece};

use super::{AnswerWriter, finish_reason, has_tool_calls, named_event, text_of};

impl AnswerWriter {
    pub(super) fn messages_opening(&self, choices: &[SimChoice]) -> Vec<String> {
        let message = self.message_of(&json!([]), Value::Null, 0);
        let mut events = vec![event("message_start", json!({"message": message}))];
        if !has_tool_calls(choices) {
            events.push(block_start(0, json!({"type": "text", "text": ""})));
        }
        events
    }

    pub(super) fn messages_token(&self, piece: &TokenPiece<'_>) -> Vec<String> {
        let Some(position) = &piece.call else {
            return vec![delta(0, json!({"type": "text_delta", "text": piece.text}))];
        };
        let mut events = Vec::new();
        if position.is_first {
            events.push(block_start(position.index, tool_use(position.call, &json!({}))));
        }
        events.push(delta(position.index, json!({"type": "input_json_delta", "partial_json": piece.text})));
        if position.is_last {
            events.push(event("content_block_stop", json!({"index": position.index})));
        }
        events
    }

    pub(super) fn messages_closing(
        &self,
        choices: &[SimChoice],
        token_count: u64,
        finish: Option<&str>,
    ) -> Vec<String> {
        let mut events = Vec::new();
        if !has_tool_calls(choices) {
            events.push(event("content_block_stop", json!({"index": 0})));
        }
        let usage = self.usage(choices, token_count);
        let usage = json!({"input_tokens": usage.prompt, "output_tokens": usage.completion});
        let stop = json!({"stop_reason": stop_reason(finish_reason(choices, finish)), "stop_sequence": null});
        events.push(event("message_delta", json!({"delta": stop, "usage": usage})));
        events.push(event("message_stop", json!({})));
        events
    }

    pub(super) fn messages_whole(
        &self,
        choices: &[SimChoice],
        token_count: u64,
        finish: Option<&str>,
    ) -> Value {
        let blocks: Vec<Value> = if has_tool_calls(choices) {
            // A truncated call has no parseable arguments.
            let input = |arguments: &str| serde_json::from_str(arguments).unwrap_or_else(|_| json!({}));
            let called = choices.iter().flat_map(|choice| choice.calls_so_far(token_count));
            called.map(|(call, arguments)| tool_use(call, &input(&arguments))).collect()
        } else {
            vec![json!({"type": "text", "text": text_of(choices, token_count)})]
        };
        let stop = stop_reason(finish_reason(choices, finish)).into();
        self.message_of(&blocks.into(), stop, self.usage(choices, token_count).completion)
    }

    fn message_of(&self, blocks: &Value, stop_reason: Value, output_tokens: u64) -> Value {
        json!({
            "id": self.id_of("msg"), "type": "message", "role": "assistant", "model": self.model, "content": blocks,
            "stop_reason": stop_reason, "stop_sequence": null,
            "usage": {"input_tokens": self.prompt_tokens, "output_tokens": output_tokens},
        })
    }
}

fn stop_reason(finish: &str) -> &'static str {
    match finish {
        "length" => "max_tokens",
        "tool_calls" => "tool_use",
        _ => "end_turn",
    }
}

fn tool_use(call: &SimToolCall, input: &Value) -> Value {
    json!({"type": "tool_use", "id": format!("toolu_{}", call.id), "name": call.name, "input": input})
}

fn block_start(index: usize, block: Value) -> String {
    event("content_block_start", json!({"index": index, "content_block": block}))
}

fn delta(index: usize, delta: Value) -> String {
    event("content_block_delta", json!({"index": index, "delta": delta}))
}

fn event(name: &str, body: Value) -> String {
    named_event(name, &super::merge(json!({"type": name}), body))
}
