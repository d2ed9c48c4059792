//! What `net/benches/wire.rs` measures of what is nobody else's business.

use bytes::Bytes;
use http::{HeaderMap, Method, uri::PathAndQuery};

use super::{
    decode::BodyDecoder,
    head,
    headers::{self, HeaderOverrides},
};

/// The head of an engine's answer is at the front of `held` and was read.
pub fn read_head(held: &mut Bytes) -> bool {
    matches!(head::parse(held, &Method::POST), Ok(Some(_)))
}

/// The head of a request as an engine gets it, the empty line apart.
pub fn write_head(
    out: &mut Vec<u8>,
    method: &Method,
    path: &PathAndQuery,
    headers: &HeaderMap,
    host: &str,
    length: usize,
) {
    head::write_request_line(out, method, "", path);
    let ours = HeaderOverrides {
        host,
        authorization: None,
        request_id: None,
        length: Some(length as u64),
        identity_encoding: true,
    };
    headers::to_engine(out, headers, ours);
}

/// A chunked body.
#[derive(Debug)]
pub struct BenchChunkedDecoder(BodyDecoder);

impl Default for BenchChunkedDecoder {
    fn default() -> Self {
        Self(BodyDecoder::chunked())
    }
}

impl BenchChunkedDecoder {
    /// How long the payload in `wire` is, which it is moved together in; `None` when it is not chunked.
    pub fn decode(&mut self, wire: &mut [u8]) -> Option<usize> {
        self.0.decode(wire).ok().map(|found| found.payload.len())
    }
}
