//! The engine's output. Token `i` is a function of (model, prompt, seed, i) alone. So a client can check every byte of
//! every stream without a copy, and two engines never produce the same text by accident.

/// Each token of a model that was woken incorrectly.
pub const CORRUPT: &str = " !!!!!!";

/// Bytes of every token, corrupt ones too.
pub const TOKEN_BYTES: usize = 7;

/// Maximum length of an embedding. No model has more dimensions, and the result must fit into memory.
pub const MAX_DIMENSIONS: usize = 65_536;

/// The stream's key. `prompt` is the text of the last message (chat, messages), the prompt (completions) or the input
/// (responses, embeddings); text parts are concatenated, token ids joined by a space. `seed` is the request's, else 0;
/// choice `n` of a request adds `n` to it.
#[must_use]
pub fn key(model: &str, prompt: &str, seed: u64) -> u64 {
    // FNV-1a: small, stable across releases, and easy to reimplement in a load generator's language.
    let fold = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    let hash = model.as_bytes().iter().fold(0xcbf2_9ce4_8422_2325, fold);
    let hash = prompt.as_bytes().iter().fold(fold(hash, &0), fold);
    seed.to_le_bytes().iter().fold(fold(hash, &0), fold)
}

/// Token `i` of the stream: a space and six characters that need no escape in JSON.
#[must_use]
pub fn token(key: u64, i: u64) -> String {
    const LETTERS: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
    let bits = mix(key.wrapping_add(i));
    let mut text = String::with_capacity(TOKEN_BYTES);
    text.push(' ');
    for n in 0..6 {
        text.push(char::from(LETTERS[(bits >> (5 * n)) as usize & 31]));
    }
    text
}

/// The complete output of `tokens` tokens.
#[must_use]
pub fn text(model: &str, prompt: &str, seed: u64, tokens: u64) -> String {
    let key = key(model, prompt, seed);
    (0..tokens).map(|i| token(key, i)).collect()
}

/// The embedding of `input`: `dimensions` values in -1..1.
#[must_use]
pub fn embedding(model: &str, input: &str, dimensions: usize) -> Vec<f32> {
    let key = key(model, input, 0);
    (0..dimensions as u64)
        .map(|i| (mix(key.wrapping_add(i)) >> 40) as f32 / (1_u32 << 23) as f32 - 1.0)
        .collect()
}

/// FNV-1a of `bytes`; a transcription identifies its file by this hash.
#[must_use]
pub fn hash(bytes: &[u8]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in bytes {
        hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    }
    hash
}

/// Opaque output: `length` bytes of speech for `input`, or of an image for a prompt. Clients can only compare it.
#[must_use]
pub fn binary(model: &str, input: &str, length: usize) -> Vec<u8> {
    let key = key(model, input, 0);
    (0..length as u64).map(|i| (mix(key.wrapping_add(i)) >> 56) as u8).collect()
}

/// How well `document` answers `query`, in 0..1.
#[must_use]
pub fn score(model: &str, query: &str, document: &str) -> f64 {
    let key = key(model, query, hash(document.as_bytes()));
    (mix(key) >> 40) as f64 / f64::from(1_u32 << 24)
}

/// Number of tokens in `text`: one for each four bytes.
#[must_use]
pub fn count(text: &str) -> u64 {
    (text.len() as u64).div_ceil(4)
}

/// Token ids of `text`, each with up to four of its bytes.
#[must_use]
pub fn encode(text: &str) -> Vec<u32> {
    let pack = |chunk: &[u8]| chunk.iter().rev().fold(0, |id, byte| id << 8 | u32::from(*byte));
    text.as_bytes().chunks(4).map(pack).collect()
}

/// The text of `ids`; the inverse of [`encode`] for text without NUL.
#[must_use]
pub fn decode(ids: &[u32]) -> String {
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).filter(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// splitmix64's finaliser: neighbouring tokens share no visible pattern.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_depends_on_model_prompt_and_seed_only() {
        assert_eq!(text("m", "hello", 0, 8), text("m", "hello", 0, 8));
        assert_ne!(text("m", "hello", 0, 8), text("n", "hello", 0, 8));
        assert_ne!(text("m", "hello", 0, 8), text("m", "hullo", 0, 8));
        assert_ne!(text("m", "hello", 0, 8), text("m", "hello", 1, 8));
        assert_eq!(text("m", "hello", 0, 8).len(), 8 * TOKEN_BYTES);
        assert_eq!(CORRUPT.len(), TOKEN_BYTES);
    }

    #[test]
    fn tokens_decode_to_their_text() {
        let text = "Grüße, world";
        assert_eq!(decode(&encode(text)), text);
        assert_eq!(encode(text).len() as u64, count(text));
    }
}
