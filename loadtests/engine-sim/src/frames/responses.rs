//! The responses API: a response is a list of items, and every event is numbered.

use serde_json::{Value, json};

use crate::choice::{SimChoice, SimToolCall, TokenPiece};

use super::{AnswerWriter, finish_reason, has_tool_calls, merge, named_event, text_of};

impl AnswerWriter {
    pub(super) fn responses_opening(&mut self, choices: &[SimChoice]) -> Vec<String> {
        let created = self.response("in_progress", json!([]), Value::Null);
        let mut events = vec![
            self.event("response.created", json!({"response": created})),
            self.event("response.in_progress", json!({"response": created})),
        ];
        if !has_tool_calls(choices) {
            let (item, part) = (self.message("in_progress", &[]), text_part(""));
            events.push(self.event("response.output_item.added", json!({"output_index": 0, "item": item})));
            let item_position = self.text_place();
            events
                .push(self.event("response.content_part.added", merge(item_position, json!({"part": part}))));
        }
        events
    }

    pub(super) fn responses_token(&mut self, piece: &TokenPiece<'_>) -> Vec<String> {
        let Some(call_position) = &piece.call else {
            let delta = merge(self.text_place(), json!({"delta": piece.text, "logprobs": []}));
            return vec![self.event("response.output_text.delta", delta)];
        };
        let at = json!({"output_index": call_position.index});
        let named = merge(at.clone(), json!({"item_id": self.call_item_id(call_position.index)}));
        let mut events = Vec::new();
        if call_position.is_first {
            let item = self.call_item(call_position.index, call_position.call, "in_progress", "");
            events.push(self.event("response.output_item.added", merge(at.clone(), json!({"item": item}))));
        }
        let delta = merge(named.clone(), json!({"delta": piece.text}));
        events.push(self.event("response.function_call_arguments.delta", delta));
        if call_position.is_last {
            let arguments = call_position.call.arguments();
            let item = self.call_item(call_position.index, call_position.call, "completed", &arguments);
            let done = json!({"name": call_position.call.name, "arguments": arguments});
            events.push(self.event("response.function_call_arguments.done", merge(named, done)));
            events.push(self.event("response.output_item.done", merge(at, json!({"item": item}))));
        }
        events
    }

    pub(super) fn responses_closing(
        &mut self,
        choices: &[SimChoice],
        token_count: u64,
        finish: Option<&str>,
    ) -> Vec<String> {
        let mut events = Vec::new();
        if !has_tool_calls(choices) {
            let text = text_of(choices, token_count);
            let (part, item) = (text_part(&text), self.message("completed", &[text_part(&text)]));
            let item_position = self.text_place();
            let done = merge(item_position.clone(), json!({"text": text, "logprobs": []}));
            events.push(self.event("response.output_text.done", done));
            events
                .push(self.event("response.content_part.done", merge(item_position, json!({"part": part}))));
            events.push(self.event("response.output_item.done", json!({"output_index": 0, "item": item})));
        }
        let whole = self.responses_whole(choices, token_count, finish);
        let name = format!("response.{}", status(finish_reason(choices, finish)));
        events.push(self.event(&name, json!({"response": whole})));
        events
    }

    pub(super) fn responses_whole(
        &self,
        choices: &[SimChoice],
        token_count: u64,
        finish: Option<&str>,
    ) -> Value {
        let status = status(finish_reason(choices, finish));
        let output: Vec<Value> = if has_tool_calls(choices) {
            let called = choices.iter().flat_map(|choice| choice.calls_so_far(token_count)).enumerate();
            called.map(|(index, (call, said))| self.call_item(index, call, status, &said)).collect()
        } else {
            vec![self.message("completed", &[text_part(&text_of(choices, token_count))])]
        };
        let usage = self.usage(choices, token_count);
        let usage = json!({
            "input_tokens": usage.prompt, "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage.completion, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt + usage.completion,
        });
        self.response(status, output.into(), usage)
    }

    fn event(&mut self, name: &str, body: Value) -> String {
        let body = merge(json!({"type": name, "sequence_number": self.sequence}), body);
        self.sequence += 1;
        named_event(name, &body)
    }

    fn response(&self, status: &str, output: Value, usage: Value) -> Value {
        let details =
            if status == "incomplete" { json!({"reason": "max_output_tokens"}) } else { Value::Null };
        let response = json!({
            "id": self.identity.id, "object": "response", "created_at": self.identity.created, "status": status,
            "model": self.model, "output": output, "usage": usage, "error": null, "incomplete_details": details,
            "parallel_tool_calls": true, "temperature": 1.0, "top_p": 1.0,
        });
        merge(response, self.echoed_fields.clone())
    }

    fn message(&self, status: &str, parts: &[Value]) -> Value {
        json!({"id": self.id_of("msg"), "type": "message", "role": "assistant", "status": status, "content": parts})
    }

    fn text_place(&self) -> Value {
        json!({"item_id": self.id_of("msg"), "output_index": 0, "content_index": 0})
    }

    fn call_item(&self, index: usize, call: &SimToolCall, status: &str, arguments: &str) -> Value {
        json!({
            "id": self.call_item_id(index), "type": "function_call", "call_id": format!("call_{}", call.id),
            "name": call.name, "arguments": arguments, "status": status,
        })
    }

    fn call_item_id(&self, index: usize) -> String {
        format!("{}{index}", self.id_of("fc"))
    }
}

fn status(finish: &str) -> &'static str {
    if matches!(finish, "stop" | "tool_calls") { "completed" } else { "incomplete" }
}

fn text_part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}
