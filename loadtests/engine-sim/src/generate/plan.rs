//! A request as the engine carries it out.

use bytes::Bytes;
use serde_json::{Value, json};

use crate::{
    ask::{Api, Ask},
    content,
    engine::Engine,
    frames::Voice,
    reply::Reply,
};

/// What a request wants, in the engine's terms.
pub(super) struct Plan {
    pub(super) api: Api,
    pub(super) model: String,
    pub(super) voices: Vec<Voice>,
    pub(super) inputs: Vec<String>,
    pub(super) stream: bool,
    pub(super) usage: bool,
    pub(super) tokens: u64,
    pub(super) finish: &'static str,
    pub(super) prompt_tokens: u64,
    dimensions: usize,
    base64: bool,
}

impl Plan {
    pub(super) fn read(engine: &Engine, api: Api, body: &Bytes) -> Result<Self, Reply> {
        let bad = |message: &str, param| Reply::error(400, "BadRequestError", message, param);
        let ask: Ask<'_> = serde_json::from_slice(body).map_err(|error| bad(&error.to_string(), None))?;
        let names = engine.names();
        let model = names.first().cloned().unwrap_or_default();
        let asked = ask.model.as_deref().unwrap_or(&model);
        if !names.iter().any(|name| name == asked) {
            let message = format!("The model `{asked}` does not exist.");
            return Err(Reply::error(404, "NotFoundError", &message, Some("model")));
        }
        let prompts = ask.prompts(api).ok_or_else(|| bad("the request has no prompt", None))?;
        let (n, seed, corrupt) = (ask.n.unwrap_or(1).clamp(1, 128), ask.seed(), engine.view().corrupt);
        let voice =
            |prompt: &str, i: u64| Voice { key: content::key(&model, prompt, seed.wrapping_add(i)), corrupt };
        let voices = prompts.iter().flat_map(|prompt| (0..n).map(move |i| (prompt, i)));
        let voices = voices.map(|(prompt, i)| voice(prompt, i)).collect();
        if ask.tokens() == Some(0) {
            return Err(bad("max_tokens must be at least 1, got 0.", Some("max_tokens")));
        }
        Ok(Self {
            api,
            voices,
            stream: ask.stream.unwrap_or(false) && api != Api::Embeddings,
            usage: ask.include_usage(),
            tokens: ask.tokens().unwrap_or(engine.args.tokens),
            finish: if ask.tokens().is_some() { "length" } else { "stop" },
            prompt_tokens: ask.prompt_tokens(&prompts),
            dimensions: ask.dimensions.unwrap_or(8),
            base64: ask.encoding_format.as_deref() == Some("base64"),
            inputs: prompts,
            model,
        })
    }

    pub(super) fn embeddings(&self) -> Value {
        let data = |(index, input): (usize, &String)| {
            let vector = content::embedding(&self.model, input, self.dimensions);
            let embedding = if self.base64 {
                let bytes: Vec<u8> = vector.iter().flat_map(|value| value.to_le_bytes()).collect();
                Value::from(base64(&bytes))
            } else {
                Value::from(vector)
            };
            json!({"object": "embedding", "index": index, "embedding": embedding})
        };
        let data: Vec<Value> = self.inputs.iter().enumerate().map(data).collect();
        let usage = json!({
            "prompt_tokens": self.prompt_tokens, "total_tokens": self.prompt_tokens, "completion_tokens": 0,
        });
        json!({"object": "list", "model": self.model, "data": data, "usage": usage})
    }
}

fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let bits =
            group.iter().fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - group.len()));
        for n in 0..4 {
            let letter = char::from(LETTERS[(bits >> (18 - 6 * n)) as usize & 63]);
            out.push(if n > group.len() { '=' } else { letter });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::base64;

    #[test]
    fn base64_pads() {
        assert_eq!(base64(b"Man"), "TWFu");
        assert_eq!(base64(b"Ma"), "TWE=");
        assert_eq!(base64(b"M"), "TQ==");
    }
}
