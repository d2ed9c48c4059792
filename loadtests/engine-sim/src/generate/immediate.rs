//! Responses without generation, computed at once from the request alone.

use serde_json::{Value, json};

use crate::{api::SimApi, content, frames::AnswerIdentity, request::SimRequest};

const SPEECH_BYTES: usize = 24 << 10;
const IMAGE_BYTES: usize = 1 << 10;

/// A response that is ready before its time to first token has passed.
pub(super) enum ImmediateAnswer {
    /// No immediate response: tokens are generated.
    Generated,
    Json(Value),
    Audio(Vec<u8>),
}

/// Computes the response. `None` if the request lacks the texts to compare.
pub(super) fn answer(
    api: SimApi,
    ask: &SimRequest<'_>,
    model: &str,
    prompts: &[String],
    tokens: u64,
    name: &AnswerIdentity,
) -> Option<ImmediateAnswer> {
    Some(ImmediateAnswer::Json(match api {
        SimApi::CountTokens => json!({"input_tokens": tokens}),
        SimApi::Embeddings => embeddings(ask, model, prompts, tokens),
        SimApi::Rerank => rerank(ask, model, prompts, tokens, name)?,
        SimApi::Score => scores(ask, model, prompts, tokens, name)?,
        SimApi::Moderations => moderations(model, prompts, name),
        SimApi::Images => images(ask, model, prompts, name),
        SimApi::Speech => {
            return Some(ImmediateAnswer::Audio(content::binary(model, &prompts.concat(), SPEECH_BYTES)));
        }
        _ => return Some(ImmediateAnswer::Generated),
    }))
}

fn embeddings(ask: &SimRequest<'_>, model: &str, inputs: &[String], tokens: u64) -> Value {
    let is_coded = ask.encoding_format.as_deref() == Some("base64");
    let data = |(index, input): (usize, &String)| {
        let vector = content::embedding(model, input, ask.dimensions.unwrap_or(8));
        let embedding = if is_coded {
            let bytes: Vec<u8> = vector.iter().flat_map(|value| value.to_le_bytes()).collect();
            Value::from(base64(&bytes))
        } else {
            Value::from(vector)
        };
        json!({"object": "embedding", "index": index, "embedding": embedding})
    };
    let data: Vec<Value> = inputs.iter().enumerate().map(data).collect();
    let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0});
    json!({"object": "list", "model": model, "data": data, "usage": usage})
}

fn rerank(
    ask: &SimRequest<'_>,
    model: &str,
    documents: &[String],
    tokens: u64,
    name: &AnswerIdentity,
) -> Option<Value> {
    let query = ask.queries()?.concat();
    let mut ranked: Vec<(f64, usize)> =
        documents.iter().enumerate().map(|(i, text)| (content::score(model, &query, text), i)).collect();
    ranked.sort_by(|a, b| b.0.total_cmp(&a.0));
    ranked.truncate(ask.top_n.filter(|n| *n > 0).unwrap_or(usize::MAX));
    let result = |(score, index): &(f64, usize)| json!({"index": index, "document": {"text": documents.get(*index)}, "relevance_score": score});
    let results: Vec<Value> = ranked.iter().map(result).collect();
    Some(json!({"id": name.id, "model": model, "usage": {"total_tokens": tokens}, "results": results}))
}

fn scores(
    ask: &SimRequest<'_>,
    model: &str,
    texts: &[String],
    tokens: u64,
    name: &AnswerIdentity,
) -> Option<Value> {
    let queries = ask.queries()?;
    // A single query is compared with each of the texts.
    let query = |index: usize| queries.get(index).filter(|_| queries.len() > 1).or_else(|| queries.first());
    let score = |(index, text): (usize, &String)| {
        let score = content::score(model, query(index).map_or("", String::as_str), text);
        json!({"index": index, "object": "score", "score": score})
    };
    let data: Vec<Value> = texts.iter().enumerate().map(score).collect();
    let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0});
    Some(json!({
        "id": name.id, "object": "list", "created": name.created, "model": model, "data": data, "usage": usage,
    }))
}

fn moderations(model: &str, inputs: &[String], name: &AnswerIdentity) -> Value {
    let result = |input: &String| {
        let scores = ["harassment", "violence"].map(|category| content::score(model, input, category));
        let [harassment, violence] = scores.map(|score| score > 0.5);
        json!({
            "flagged": harassment || violence,
            "categories": {"harassment": harassment, "violence": violence},
            "category_scores": {"harassment": scores[0], "violence": scores[1]},
        })
    };
    let results: Vec<Value> = inputs.iter().map(result).collect();
    json!({"id": name.id, "model": model, "results": results})
}

fn images(ask: &SimRequest<'_>, model: &str, prompts: &[String], name: &AnswerIdentity) -> Value {
    let image = |n: u64| {
        let prompt = format!("{}{n}", prompts.concat());
        json!({"b64_json": base64(&content::binary(model, &prompt, IMAGE_BYTES))})
    };
    let data: Vec<Value> = (0..ask.n.unwrap_or(1).clamp(1, 10)).map(image).collect();
    json!({"created": name.created, "data": data})
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
