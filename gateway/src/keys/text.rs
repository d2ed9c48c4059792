//! How much of a request is text, for the estimate of its prompt.

use bytes::Bytes;
use http::{HeaderMap, header};
use rouse::openai::head::OFF_CORE;

/// How data inside JSON begins: its tokens have nothing to do with its length.
const DATA: &str = ";base64,";
/// Smaller bodies are taken as they are: an image in them is hardly longer than its tokens.
const SMALL: usize = 16 << 10;

/// Bytes of text in a body: none in an upload, and in JSON without the images and sounds that are written into it.
pub(crate) async fn text(headers: &HeaderMap, body: &Bytes) -> usize {
    let json = headers
        .get(header::CONTENT_TYPE)
        .is_none_or(|kind| !kind.as_bytes().to_ascii_lowercase().starts_with(b"multipart/"));
    if !json {
        return 0;
    }
    if body.len() <= OFF_CORE {
        return count(body);
    }
    let whole = body.clone();
    tokio::task::spawn_blocking(move || count(&whole)).await.unwrap_or(body.len())
}

fn count(body: &[u8]) -> usize {
    let Some(mut rest) = std::str::from_utf8(body).ok().filter(|body| body.len() > SMALL) else {
        return body.len();
    };
    let mut text = 0;
    while let Some((before, after)) = rest.split_once(DATA) {
        text += before.len();
        rest = after.split_once('"').map_or("", |(_, rest)| rest);
    }
    text + rest.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_in_a_body_are_no_text() {
        let image = "A".repeat(50_000);
        let body =
            format!(r#"{{"a":"data:image/png;base64,{image}","b":"data:x;base64,{image}","c":"hello"}}"#);
        assert_eq!(count(body.as_bytes()), body.len() - 2 * (image.len() + DATA.len() + 1));
        assert_eq!(count(b"{\"a\":\";base64,A\"}"), 17);
        assert_eq!(count("x".repeat(60_000).as_bytes()), 60_000);
    }

    #[tokio::test]
    async fn an_upload_is_no_text() {
        let mut headers = HeaderMap::new();
        let body = Bytes::from_static(b"12345678");
        assert_eq!(text(&headers, &body).await, 8);
        headers.insert(header::CONTENT_TYPE, "Multipart/form-data; boundary=x".parse().unwrap());
        assert_eq!(text(&headers, &body).await, 0);
    }
}
