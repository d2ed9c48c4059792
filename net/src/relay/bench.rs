//! Exposes internals to `net/benches/wire.rs`.

use bytes::Bytes;
use http::{HeaderMap, Method, uri::PathAndQuery};

use super::{
    decode::BodyDecoder,
    head,
    headers::{self, HeaderOverrides},
};

/// Parses an engine's response head at the front of `buffer`; true if it was complete.
pub fn read_head(buffer: &mut Bytes) -> bool {
    matches!(head::parse(buffer, &Method::POST), Ok(Some(_)))
}

/// Writes a request head as an engine gets it, without the empty line.
pub fn write_head(
    out: &mut Vec<u8>,
    method: &Method,
    path: &PathAndQuery,
    headers: &HeaderMap,
    host: &str,
    length: usize,
) {
    head::write_request_line(out, method, "", path);
    let overrides = HeaderOverrides {
        host,
        authorization: None,
        request_id: None,
        length: Some(length as u64),
        identity_encoding: true,
        load_report: false,
    };
    headers::to_engine(out, headers, overrides);
}

/// Decodes a chunked body.
#[derive(Debug)]
pub struct BenchChunkedDecoder(BodyDecoder);

impl Default for BenchChunkedDecoder {
    fn default() -> Self {
        Self(BodyDecoder::chunked())
    }
}

impl BenchChunkedDecoder {
    /// Decodes `wire` in place and returns the length of its payload; `None` when it is not chunked.
    pub fn decode(&mut self, wire: &mut [u8]) -> Option<usize> {
        self.0.decode(wire).ok().map(|found| found.payload.len())
    }
}
