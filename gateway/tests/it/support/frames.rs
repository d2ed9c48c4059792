//! HTTP/2 frames by hand, including frames that no library would send.

use std::io::{self, Read, Write};

pub(crate) const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
pub(crate) const RST_STREAM: u8 = 3;
pub(crate) const SETTINGS: u8 = 4;
pub(crate) const PING: u8 = 6;
pub(crate) const GOAWAY: u8 = 7;
pub(crate) const WINDOW_UPDATE: u8 = 8;
pub(crate) const CONTINUATION: u8 = 9;

pub(crate) const END_STREAM: u8 = 1;
pub(crate) const END_HEADERS: u8 = 4;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

pub(crate) struct Http2Frame {
    pub(crate) kind: u8,
    pub(crate) flags: u8,
    pub(crate) stream: u32,
    pub(crate) payload: Vec<u8>,
}

pub(crate) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let mut bytes = length[1..].to_vec();
    bytes.extend_from_slice(&[kind, flags]);
    bytes.extend_from_slice(&stream.to_be_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

/// The client preface and a SETTINGS frame with these `(id, value)` pairs.
pub(crate) fn preface_and_settings(settings: &[(u16, u32)]) -> Vec<u8> {
    let mut payload = Vec::new();
    for (id, value) in settings {
        payload.extend_from_slice(&id.to_be_bytes());
        payload.extend_from_slice(&value.to_be_bytes());
    }
    [PREFACE, &frame(SETTINGS, 0, 0, &payload)].concat()
}

/// A header block of literals without indexing.
pub(crate) fn header_block(headers: &[(&str, &str)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (name, value) in headers {
        bytes.push(0);
        for text in [name, value] {
            length(&mut bytes, text.len());
            bytes.extend_from_slice(text.as_bytes());
        }
    }
    bytes
}

/// Encodes an HPACK integer with a prefix of seven bits.
fn length(bytes: &mut Vec<u8>, mut n: usize) {
    if n < 127 {
        bytes.push(n as u8);
        return;
    }
    bytes.push(127);
    n -= 127;
    while n >= 128 {
        bytes.push((n % 128) as u8 | 128);
        n /= 128;
    }
    bytes.push(n as u8);
}

pub(crate) const POST: [(&str, &str); 4] = [
    (":method", "POST"),
    (":scheme", "http"),
    (":authority", "localhost"),
    (":path", "/v1/chat/completions"),
];

/// The frames of a complete chat completion request.
pub(crate) fn chat(stream: u32, body: &str) -> Vec<u8> {
    let mut bytes = frame(HEADERS, END_HEADERS, stream, &header_block(&POST));
    bytes.extend(frame(DATA, END_STREAM, stream, body.as_bytes()));
    bytes
}

/// Reads the next frame; `None` at the end of the connection, clean or not.
pub(crate) fn read_frame(from: &mut impl Read) -> Option<Http2Frame> {
    let mut head = [0; 9];
    from.read_exact(&mut head).ok()?;
    let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
    let mut payload = vec![0; length as usize];
    from.read_exact(&mut payload).ok()?;
    let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]) & 0x7fff_ffff;
    Some(Http2Frame { kind: head[3], flags: head[4], stream, payload })
}

/// The error code of a RST_STREAM or GOAWAY frame.
pub(crate) fn error_code(frame: &Http2Frame) -> u32 {
    let at = if frame.kind == GOAWAY { 4 } else { 0 };
    u32::from_be_bytes(frame.payload[at..at + 4].try_into().unwrap())
}

/// Writes and flushes these bytes. Fails when the other side accepts no more.
pub(crate) fn write(to: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    to.write_all(bytes)?;
    to.flush()
}
