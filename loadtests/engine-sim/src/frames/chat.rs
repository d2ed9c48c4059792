//! Chat and text completions.

use serde_json::{Value, json};

use crate::{
    api::SimApi,
    choice::{SimChoice, SimToolCall, TokenPiece},
};

use super::{AnswerWriter, FrameUsage, merge, quoted};

impl AnswerWriter {
    pub(super) fn chat_opening(&self, choices: u64) -> Vec<String> {
        (0..choices).map(|n| self.chunk(n, r#""delta":{"role":"assistant","content":""}"#, None)).collect()
    }

    pub(super) fn chat_token(&self, n: u64, piece: &TokenPiece<'_>, finish: Option<&str>) -> Vec<String> {
        let text = quoted(&piece.text);
        let Some(position) = &piece.call else {
            return vec![self.chunk(n, &format!(r#""delta":{{"content":{text}}}"#), finish)];
        };
        let delta =
            |call: &str| format!(r#""delta":{{"tool_calls":[{{"index":{},{call}}}]}}"#, position.index);
        let mut events = Vec::new();
        if position.is_first {
            let call = call(position.call, "");
            // Strip the braces, because vLLM puts the index first.
            let call = call.to_string();
            let inner = call.trim_start_matches('{').strip_suffix('}').unwrap_or_default();
            events.push(self.chunk(n, &delta(inner), None));
        }
        events.push(self.chunk(n, &delta(&format!(r#""function":{{"arguments":{text}}}"#)), finish));
        events
    }

    pub(super) fn completions_token(&self, n: u64, text: &str, finish: Option<&str>) -> String {
        self.chunk(n, &format!(r#""text":{}"#, quoted(text)), finish)
    }

    pub(super) fn chat_closing(&self, usage: Option<FrameUsage>) -> Vec<String> {
        let mut events = Vec::new();
        if let Some(usage) = usage {
            let head = self.chunk_head();
            events.push(format!("{head},\"choices\":[],\"usage\":{}}}\n\n", usage.json()));
        }
        events.push("data: [DONE]\n\n".to_owned());
        events
    }

    pub(super) fn chat_whole(
        &self,
        sim_choices: &[SimChoice],
        token_count: u64,
        finish: Option<&str>,
    ) -> Value {
        let choice = |(index, sim_choice): (usize, &SimChoice)| {
            let finish = finish.unwrap_or(sim_choice.finish);
            let common =
                json!({"index": index, "logprobs": null, "finish_reason": finish, "stop_reason": null});
            let text = sim_choice.text_so_far(token_count);
            merge(
                common,
                match self.api {
                    SimApi::Chat => {
                        let calls = sim_choice.calls_so_far(token_count);
                        let calls: Vec<Value> =
                            calls.iter().map(|(tool_call, arguments)| call(tool_call, arguments)).collect();
                        let content = if calls.is_empty() { Value::from(text) } else { Value::Null };
                        json!({"message": {"role": "assistant", "content": content, "tool_calls": calls}})
                    }
                    _ => json!({"text": text}),
                },
            )
        };
        let choices: Vec<Value> = sim_choices.iter().enumerate().map(choice).collect();
        json!({
            "id": self.identity.id, "object": self.object(false), "created": self.identity.created, "model": self.model,
            "choices": choices, "usage": self.usage(sim_choices, token_count).json(),
        })
    }

    fn chunk(&self, n: u64, content: &str, finish: Option<&str>) -> String {
        let head = self.chunk_head();
        let finish = finish.map_or_else(|| "null".to_owned(), |reason| format!("\"{reason}\""));
        format!(
            "{head},\"choices\":[{{\"index\":{n},{content},\"logprobs\":null,\"finish_reason\":{finish}}}]}}\n\n"
        )
    }

    fn chunk_head(&self) -> String {
        let (name, escaped, object) = (&self.identity, &self.escaped, self.object(true));
        let (id, created) = (&name.id, name.created);
        format!(r#"data: {{"id":"{id}","object":"{object}","created":{created},"model":{escaped}"#)
    }

    fn object(&self, stream: bool) -> &'static str {
        match (self.api, stream) {
            (SimApi::Chat, true) => "chat.completion.chunk",
            (SimApi::Chat, false) => "chat.completion",
            _ => "text_completion",
        }
    }
}

fn call(call: &SimToolCall, arguments: &str) -> Value {
    let function = json!({"name": call.name, "arguments": arguments});
    json!({"id": format!("call_{}", call.id), "type": "function", "function": function})
}
