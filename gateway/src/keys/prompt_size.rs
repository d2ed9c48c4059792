//! Measures the text in a request, to estimate its prompt.

use bytes::Bytes;
use http::{HeaderMap, header};
use rouse_net::openai::routing_fields::MAX_ON_CORE_BYTES;

/// The prefix of an upload's content type.
const MULTIPART_PREFIX: &[u8] = b"multipart/";
/// The prefix of a JSON string with an image or a sound. The tokens of such data do not depend on its length.
const DATA_URL_PREFIX: &str = "\"data:";
/// The marker between the media type and the data.
const BASE64_MARKER: &str = ";base64,";
/// The longest accepted media type with its parameters, in bytes.
const MAX_MEDIA_TYPE_BYTES: usize = 128;
/// Smaller bodies count whole: an image in them is hardly longer than its tokens.
const MAX_UNSCANNED_BYTES: usize = 16 << 10;

/// The bytes of text in a body: 0 for an upload, and without embedded images and sounds for JSON.
pub(crate) async fn prompt_text_bytes(headers: &HeaderMap, body: &Bytes) -> usize {
    let json = headers
        .get(header::CONTENT_TYPE)
        .and_then(|kind| kind.as_bytes().get(..MULTIPART_PREFIX.len()))
        .is_none_or(|kind| !kind.eq_ignore_ascii_case(MULTIPART_PREFIX));
    if !json {
        return 0;
    }
    if body.len() <= MAX_ON_CORE_BYTES {
        return count_text_bytes(body);
    }
    let whole = body.clone();
    tokio::task::spawn_blocking(move || count_text_bytes(&whole)).await.unwrap_or(body.len())
}

/// Counts the text. Clients choose the words of a prompt, so a marker in the middle of a text turns nothing after it
/// into data: only a string that is a data URL from its first character is skipped, and only as far as it is base64.
fn count_text_bytes(body: &[u8]) -> usize {
    // Check the length first: validating UTF-8 is slow and matters only for a large body.
    let Some(body) =
        Some(body).filter(|body| body.len() > MAX_UNSCANNED_BYTES).and_then(|body| str::from_utf8(body).ok())
    else {
        return body.len();
    };
    let (mut text, mut from) = (0, 0);
    for (at, _) in body.match_indices(DATA_URL_PREFIX) {
        let (before, after) = body.as_bytes().split_at(at + DATA_URL_PREFIX.len());
        if let Some((start, length)) = data_url_payload(after).filter(|_| !is_escaped(before)) {
            let start = before.len() + start;
            text += start - from;
            from = start + length;
        }
    }
    text + body.len() - from
}

/// Whether the quote before the scheme is itself part of a string.
fn is_escaped(before: &[u8]) -> bool {
    let before = before.strip_suffix(DATA_URL_PREFIX.as_bytes()).unwrap_or(before);
    before.iter().rev().take_while(|byte| **byte == b'\\').count() % 2 == 1
}

/// The start and length of a data URL's data. `rest`: the text after its scheme.
fn data_url_payload(rest: &[u8]) -> Option<(usize, usize)> {
    let head = rest.get(..MAX_MEDIA_TYPE_BYTES + BASE64_MARKER.len()).unwrap_or(rest);
    let start = head.windows(BASE64_MARKER.len()).position(|window| window == BASE64_MARKER.as_bytes())?;
    let is_type = |byte: &u8| byte.is_ascii_alphanumeric() || b"/\\.+-;=_".contains(byte);
    if !head.get(..start)?.iter().all(is_type) {
        return None;
    }
    let start = start + BASE64_MARKER.len();
    let data = rest.get(start..)?;
    let is_data = |(at, byte): &(usize, &u8)| match byte {
        // Some encoders escape slashes.
        b'\\' => data.get(at + 1) == Some(&b'/'),
        byte => byte.is_ascii_alphanumeric() || b"+/=".contains(byte),
    };
    Some((start, data.iter().enumerate().take_while(is_data).count()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_in_a_body_are_no_text() {
        let image = "A+/=".repeat(12_500);
        let body =
            format!(r#"{{"a":"data:image/png;base64,{image}","b":"data:x;base64,{image}","c":"hello"}}"#);
        assert_eq!(count_text_bytes(body.as_bytes()), body.len() - 2 * image.len());
        let escaped = body.replace('/', "\\/");
        assert_eq!(count_text_bytes(escaped.as_bytes()), body.len() - 2 * image.len() + 1);
        assert_eq!(count_text_bytes(b"{\"a\":\";base64,A\"}"), 17);
        assert_eq!(count_text_bytes("x".repeat(60_000).as_bytes()), 60_000);
    }

    #[test]
    fn a_prompt_is_text_whatever_it_says_of_data() {
        let words = "many words of a prompt, ".repeat(2000);
        for prompt in [
            format!(";base64,{words}"),
            format!("look: data:image/png;base64,{words}"),
            format!("\\\"data:image/png;base64,{}", "A".repeat(50_000)),
            format!("data:{words};base64,AAAA"),
        ] {
            let body = format!(r#"{{"content":"{prompt}"}}"#);
            assert_eq!(count_text_bytes(body.as_bytes()), body.len(), "{prompt:.40}");
        }
        for (separator, skipped) in [(" ", 4), ("\\n", 4), ("\\/", 15)] {
            let words = ["many", "words", "it"].join(separator);
            let body = format!(
                r#"{{"content":"data:text/plain;base64,{words} {}"}}"#,
                " ".repeat(MAX_UNSCANNED_BYTES)
            );
            assert_eq!(count_text_bytes(body.as_bytes()), body.len() - skipped, "it ends where base64 does");
        }
    }

    #[tokio::test]
    async fn an_upload_is_no_text() {
        let mut headers = HeaderMap::new();
        let body = Bytes::from_static(b"12345678");
        assert_eq!(prompt_text_bytes(&headers, &body).await, 8);
        headers.insert(header::CONTENT_TYPE, "Multipart/form-data; boundary=x".parse().unwrap());
        assert_eq!(prompt_text_bytes(&headers, &body).await, 0);
    }
}
