//! Transcripts in OpenAI's events.

use serde_json::{Value, json};

use super::FrameUsage;

pub(super) fn token(text: &str) -> String {
    data(&json!({"type": "transcript.text.delta", "delta": text, "logprobs": []}))
}

pub(super) fn closing(text: &str, usage: FrameUsage) -> Vec<String> {
    let done = json!({"type": "transcript.text.done", "text": text, "logprobs": [], "usage": tokens(usage)});
    vec![data(&done), "data: [DONE]\n\n".to_owned()]
}

pub(super) fn whole(text: &str, usage: FrameUsage) -> Value {
    json!({"text": text, "usage": tokens(usage)})
}

fn tokens(usage: FrameUsage) -> Value {
    let FrameUsage { prompt, completion } = usage;
    json!({
        "type": "tokens", "input_tokens": prompt, "output_tokens": completion, "total_tokens": prompt + completion,
        "input_token_details": {"audio_tokens": prompt, "text_tokens": 0},
    })
}

fn data(body: &Value) -> String {
    format!("data: {body}\n\n")
}
