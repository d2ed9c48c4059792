//! The answers' text, as vLLM writes it: server-sent events one by one, and whole bodies.

use serde_json::{Value, json};

use crate::{
    ask::Api,
    clock,
    content::{self, CORRUPT},
};

/// What one choice says; corrupt when the weights are not what they should be.
#[derive(Clone, Copy)]
pub(crate) struct Voice {
    pub(crate) key: u64,
    pub(crate) corrupt: bool,
}

impl Voice {
    pub(crate) fn token(self, i: u64) -> String {
        if self.corrupt { CORRUPT.to_owned() } else { content::token(self.key, i) }
    }

    pub(crate) fn text(self, tokens: u64) -> String {
        (0..tokens).map(|i| self.token(i)).collect()
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Usage {
    pub(crate) prompt: u64,
    pub(crate) completion: u64,
}

impl Usage {
    fn json(self, api: Api) -> Value {
        let Self { prompt, completion } = self;
        let total = prompt + completion;
        if api == Api::Responses {
            return json!({"input_tokens": prompt, "output_tokens": completion, "total_tokens": total});
        }
        json!({"prompt_tokens": prompt, "total_tokens": total, "completion_tokens": completion})
    }
}

/// Writes one answer's events and bodies.
pub(crate) struct Frames {
    api: Api,
    id: String,
    created: u64,
    model: String,
    /// Ready for a JSON string.
    escaped: String,
    sequence: u64,
}

impl Frames {
    pub(crate) fn new(api: Api, model: &str, serial: u64) -> Self {
        let prefix = match api {
            Api::Chat => "chatcmpl",
            Api::Completions => "cmpl",
            Api::Responses => "resp",
            Api::Embeddings => "embd",
        };
        let (now, pid) = (clock::wall_us(), std::process::id());
        let id = format!("{prefix}-{:016x}{pid:08x}{serial:08x}", now);
        let escaped = Value::from(model).to_string();
        Self { api, id, created: now / 1_000_000, model: model.to_owned(), escaped, sequence: 0 }
    }

    /// What precedes the first token.
    pub(crate) fn opening(&mut self, choices: u64) -> Vec<String> {
        match self.api {
            Api::Chat => (0..choices)
                .map(|n| self.chunk(n, r#""delta":{"role":"assistant","content":""}"#, None))
                .collect(),
            Api::Responses => {
                let begun = self.response("in_progress", json!([]), None);
                let (item, part) = (self.item("in_progress", &[]), text_part(""));
                let place = json!({"item_id": self.item_id(), "output_index": 0, "content_index": 0});
                vec![
                    self.event("response.created", json!({"response": begun})),
                    self.event("response.in_progress", json!({"response": begun})),
                    self.event("response.output_item.added", json!({"output_index": 0, "item": item})),
                    self.event("response.content_part.added", merge(place, json!({"part": part}))),
                ]
            }
            _ => Vec::new(),
        }
    }

    /// One token of choice `n`; `last` is the finish reason when it is the last one.
    pub(crate) fn token(&mut self, n: u64, text: &str, last: Option<&str>) -> String {
        match self.api {
            Api::Chat => self.chunk(n, &format!(r#""delta":{{"content":"{text}"}}"#), last),
            Api::Responses => {
                let item = self.item_id();
                let delta = json!({"item_id": item, "output_index": 0, "content_index": 0, "delta": text, "logprobs": []});
                self.event("response.output_text.delta", delta)
            }
            _ => self.chunk(n, &format!(r#""text":"{text}""#), last),
        }
    }

    /// What follows the last token.
    pub(crate) fn closing(
        &mut self,
        usage: Usage,
        show_usage: bool,
        text: &str,
        finish: &str,
    ) -> Vec<String> {
        if self.api == Api::Responses {
            return self.response_closing(usage, text, finish);
        }
        let mut events = Vec::new();
        if show_usage {
            let usage = usage.json(self.api);
            let object = self.object(true);
            let Self { id, created, escaped, .. } = &*self;
            events.push(format!(
                "data: {{\"id\":\"{id}\",\"object\":\"{object}\",\"created\":{created},\"model\":{escaped},\"choices\":[],\"usage\":{usage}}}\n\n"
            ));
        }
        events.push("data: [DONE]\n\n".to_owned());
        events
    }

    /// The body of an answer that is no stream; one text for each choice.
    pub(crate) fn whole(&self, texts: &[String], usage: Usage, finish: &str) -> Value {
        if self.api == Api::Responses {
            let item = self.item("completed", &[text_part(&texts.concat())]);
            return self.response(status(finish), json!([item]), Some(usage));
        }
        let choice = |(index, text): (usize, &String)| {
            let common =
                json!({"index": index, "logprobs": null, "finish_reason": finish, "stop_reason": null});
            merge(
                common,
                match self.api {
                    Api::Chat => json!({"message": {"role": "assistant", "content": text, "tool_calls": []}}),
                    _ => json!({"text": text}),
                },
            )
        };
        let choices: Vec<Value> = texts.iter().enumerate().map(choice).collect();
        json!({
            "id": self.id, "object": self.object(false), "created": self.created, "model": self.model,
            "choices": choices, "usage": usage.json(self.api),
        })
    }

    fn response_closing(&mut self, usage: Usage, text: &str, finish: &str) -> Vec<String> {
        let place = json!({"item_id": self.item_id(), "output_index": 0, "content_index": 0});
        let (part, item) = (text_part(text), self.item("completed", &[text_part(text)]));
        let done = self.response(status(finish), json!([item]), Some(usage));
        let name = if finish == "stop" { "response.completed" } else { "response.incomplete" };
        vec![
            self.event(
                "response.output_text.done",
                merge(place.clone(), json!({"text": text, "logprobs": []})),
            ),
            self.event("response.content_part.done", merge(place, json!({"part": part}))),
            self.event("response.output_item.done", json!({"output_index": 0, "item": item})),
            self.event(name, json!({"response": done})),
        ]
    }

    fn chunk(&self, n: u64, what: &str, finish: Option<&str>) -> String {
        let Self { id, created, escaped, .. } = self;
        let object = self.object(true);
        let finish = finish.map_or_else(|| "null".to_owned(), |reason| format!("\"{reason}\""));
        format!(
            "data: {{\"id\":\"{id}\",\"object\":\"{object}\",\"created\":{created},\"model\":{escaped},\"choices\":[{{\"index\":{n},{what},\"logprobs\":null,\"finish_reason\":{finish}}}]}}\n\n"
        )
    }

    fn object(&self, stream: bool) -> &'static str {
        match (self.api, stream) {
            (Api::Chat, true) => "chat.completion.chunk",
            (Api::Chat, false) => "chat.completion",
            _ => "text_completion",
        }
    }

    fn event(&mut self, name: &str, body: Value) -> String {
        let body = merge(json!({"type": name, "sequence_number": self.sequence}), body);
        self.sequence += 1;
        format!("event: {name}\ndata: {body}\n\n")
    }

    fn item_id(&self) -> String {
        self.id.replacen("resp", "msg", 1)
    }

    fn item(&self, status: &str, parts: &[Value]) -> Value {
        json!({"id": self.item_id(), "type": "message", "role": "assistant", "status": status, "content": parts})
    }

    fn response(&self, status: &str, output: Value, usage: Option<Usage>) -> Value {
        json!({
            "id": self.id, "object": "response", "created_at": self.created, "status": status, "model": self.model,
            "output": output, "usage": usage.map(|usage| usage.json(self.api)), "error": null,
            "incomplete_details": if status == "incomplete" { json!({"reason": "max_output_tokens"}) } else { Value::Null },
            "instructions": null, "metadata": null, "parallel_tool_calls": true, "temperature": 1.0,
            "tool_choice": "auto", "tools": [], "top_p": 1.0,
        })
    }
}

fn status(finish: &str) -> &'static str {
    if finish == "stop" { "completed" } else { "incomplete" }
}

fn text_part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

fn merge(mut into: Value, from: Value) -> Value {
    if let (Value::Object(into), Value::Object(from)) = (&mut into, from) {
        into.extend(from);
    }
    into
}
