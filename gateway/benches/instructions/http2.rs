//! A minimal HTTP/2 client for scripts.
//!
//! It sends requests on one connection. As with any client, the server remembers their fields after the first request.

/// Acknowledgement of SETTINGS.
pub(crate) const SETTINGS_ACK: &[u8] = &[0, 0, 0, 4, 1, 0, 0, 0, 0];

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const WINDOW_UPDATE: u8 = 8;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
/// Index of the newest entry in the table that both sides keep.
const NEWEST: u8 = 62;

/// Returns the preface, with settings and a window update that let the server send without limits.
pub(crate) fn opening() -> Vec<u8> {
    const WINDOW: u32 = (1 << 31) - 1;
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    let [a, b, c, d] = WINDOW.to_be_bytes();
    frame(&mut bytes, SETTINGS, 0, 0, &[0, 4, a, b, c, d]);
    frame(&mut bytes, WINDOW_UPDATE, 0, 0, &(WINDOW - 65535).to_be_bytes());
    bytes
}

#[derive(Default)]
pub(crate) struct Session {
    requests: u32,
    bytes: Vec<u8>,
}

impl Session {
    pub(crate) fn request(&mut self, fields: &[(&str, String)], body: &[u8]) -> &[u8] {
        let stream = 2 * self.requests + 1;
        let mut block = Vec::new();
        for ((name, value), after) in fields.iter().zip((0..fields.len()).rev()) {
            // The content length differs when a stream is requested.
            if self.requests == 0 || *name == "content-length" {
                let remember = *name != "content-length";
                block.push(if remember { 0x40 } else { 0 });
                literal(&mut block, name);
                literal(&mut block, value);
            } else {
                // One less than the fields, as the last field is not remembered.
                block.push(0x80 | (NEWEST + after as u8 - 1));
            }
        }
        self.requests += 1;
        self.bytes.clear();
        frame(&mut self.bytes, HEADERS, END_HEADERS, stream, &block);
        frame(&mut self.bytes, DATA, END_STREAM, stream, body);
        &self.bytes
    }
}

fn literal(block: &mut Vec<u8>, text: &str) {
    block.push(text.len() as u8);
    block.extend_from_slice(text.as_bytes());
}

fn frame(bytes: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
    bytes.extend_from_slice(&(payload.len() as u32).to_be_bytes()[1..]);
    bytes.extend_from_slice(&[kind, flags]);
    bytes.extend_from_slice(&stream.to_be_bytes());
    bytes.extend_from_slice(payload);
}
