//! Parses request heads without an allocation.

use std::mem::MaybeUninit;

/// The route of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FastRoute {
    Chat,
    Models,
    ModelInfo,
    Version,
    Sleeping,
    Health,
    Unknown,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FastRequestFraming {
    Length(u64),
    Chunked,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FastRequestHead {
    /// Length of the head.
    pub(super) bytes: usize,
    pub(super) route: FastRoute,
    pub(super) framing: FastRequestFraming,
    pub(super) keeps_alive: bool,
    /// The client waits for a 100 before it sends the body.
    pub(super) expects_continue: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct MalformedHead;

/// Parses a head; `None` if it is incomplete.
pub(super) fn parse(bytes: &[u8]) -> Result<Option<FastRequestHead>, MalformedHead> {
    // Initializing 64 headers would cost more than parsing the few that arrive.
    let mut headers = [const { MaybeUninit::uninit() }; 64];
    let mut request = httparse::Request::new(&mut []);
    let parsed = request.parse_with_uninit_headers(bytes, &mut headers);
    let httparse::Status::Complete(size) = parsed.map_err(|_| MalformedHead)? else {
        return Ok(None);
    };
    let route = route(request.method.unwrap_or_default(), request.path.unwrap_or_default());
    let mut head = FastRequestHead {
        bytes: size,
        route,
        framing: FastRequestFraming::Length(0),
        keeps_alive: request.version == Some(1),
        expects_continue: false,
    };
    for header in request.headers.iter() {
        let (name, value) = (header.name, header.value);
        // Compare the length first: most fields are none of these.
        match name.len() {
            14 if name.eq_ignore_ascii_case("content-length") => {
                let length = str::from_utf8(value).ok().and_then(|digits| digits.parse().ok());
                head.framing = FastRequestFraming::Length(length.ok_or(MalformedHead)?);
            }
            17 if name.eq_ignore_ascii_case("transfer-encoding") => {
                head.framing = FastRequestFraming::Chunked
            }
            10 if name.eq_ignore_ascii_case("connection") => {
                head.keeps_alive = match value {
                    v if v.eq_ignore_ascii_case(b"close") => false,
                    v if v.eq_ignore_ascii_case(b"keep-alive") => true,
                    _ => head.keeps_alive,
                };
            }
            6 if name.eq_ignore_ascii_case("expect") => head.expects_continue = true,
            _ => {}
        }
    }
    Ok(Some(head))
}

fn route(method: &str, path: &str) -> FastRoute {
    match (method, path) {
        ("POST", "/v1/chat/completions") => FastRoute::Chat,
        ("GET", "/health" | "/ping") => FastRoute::Health,
        ("GET", "/v1/models") => FastRoute::Models,
        ("GET", "/version") => FastRoute::Version,
        ("GET", "/is_sleeping") => FastRoute::Sleeping,
        ("GET", "/model_info" | "/get_model_info" | "/server_info" | "/get_server_info") => {
            FastRoute::ModelInfo
        }
        _ => FastRoute::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_is_read_when_it_is_complete() {
        let text = b"POST /v1/chat/completions HTTP/1.1\r\nHost: e\r\nCONTENT-LENGTH: 12\r\nConnection: close\r\n\r\n";
        let head = FastRequestHead {
            bytes: text.len(),
            route: FastRoute::Chat,
            framing: FastRequestFraming::Length(12),
            keeps_alive: false,
            expects_continue: false,
        };
        assert_eq!(parse(text), Ok(Some(head)));
        assert_eq!(parse(&text[..text.len() - 1]), Ok(None));
        assert_eq!(parse(b"GET / HTTP/1.1\r\ncontent-length: x\r\n\r\n"), Err(MalformedHead));
    }
}
