//! Answers in every form that HTTP allows, and an engine that sends them, cut at points where no engine would cut.
//!
//! The engine is this test binary itself, started with a filter that runs nothing but [`engine`]. The headers
//! [`FORM_HEADER`] and [`CUT_HEADER`] select its answer.

use std::{
    io::Write as _,
    net::{TcpListener, TcpStream},
    thread,
    time::Duration,
};

use rouse_testing::scripted_engine::read_request;

use super::{GatewayFixture, pause, row};

/// The header with the index into [`all_forms`].
pub(crate) const FORM_HEADER: &str = "x-form";
/// The header with the number of bytes per write.
pub(crate) const CUT_HEADER: &str = "x-cut";

/// Pause after each write, so that the gateway reads it before the next one.
const WRITE_PAUSE: Duration = Duration::from_micros(200);

pub(crate) struct ResponseForm {
    pub(crate) kind: &'static str,
    pub(crate) body: Vec<u8>,
    pub(crate) framing: FormFraming,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FormFraming {
    Length,
    /// Chunks of these sizes in turn, with all extras that chunks may have.
    Chunks(&'static [usize]),
    /// The end of the connection ends the body.
    Close,
}

const EVENTS: &str = "text/event-stream; charset=utf-8";
const JSON: &str = "application/json";
const BYTES: &str = "audio/x-raw";

/// Everything that an event stream may contain, without its end: characters of one to four bytes, and invalid ones.
fn events(line_end: &str) -> Vec<u8> {
    let text = [
        "\u{feff}: a comment\n\n",
        "retry: 10\nid: 7\ndata: {\"choices\":[{\"delta\":{\"content\":\"Grüße, 世界 \u{1f980}\"}}]}\n\n",
        "data:{\"no\":\"space\"}\n\n\n\n",
        ":\n\nevent: odd\ndata: two\ndata: lines \u{2028} here\n\n",
        "data: {\"text\":\"data: [DONE] \\n\\n \\\"error\\\": 1\"}\n\n",
    ]
    .concat();
    let mut bytes = text.replace('\n', line_end).into_bytes();
    bytes.extend_from_slice(b"data: \xff\xfe\x00\xe2\x82");
    bytes.extend_from_slice(line_end.repeat(2).as_bytes());
    bytes
}

fn with_end(mut events: Vec<u8>, end: &str) -> Vec<u8> {
    events.extend_from_slice(end.as_bytes());
    events
}

/// All byte values in an order that does not soon repeat.
fn noise(length: usize) -> Vec<u8> {
    let mut state = 0x2026_u32;
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    (0..length).map(next).collect()
}

pub(crate) fn all_forms() -> Vec<ResponseForm> {
    use FormFraming::{Chunks, Close, Length};
    let done = "data: [DONE]\n\n";
    let error = "data: {\"error\":{\"message\":\"the engine's own\",\"code\":500}}\n\n";
    let large = format!("data: {{\"arguments\":\"{}\"}}\n\n", "é".repeat(150_000)).into_bytes();
    let document =
        "{\"id\":\"x\",\"text\":\"Grüße \u{1f980}\",\"usage\":{\"total_tokens\":1}}\n".as_bytes().to_vec();
    let odd: FormFraming = Chunks(&[1, 2, 3, 5, 8, 13, 64, 1]);
    let forms = [
        (EVENTS, with_end(events("\n"), done), odd),
        (EVENTS, with_end(events("\n"), done), Chunks(&[1])),
        (EVENTS, with_end(events("\n"), done), Chunks(&[4096])),
        (EVENTS, with_end(events("\n"), done), Length),
        (EVENTS, with_end(events("\n"), done), Close),
        (EVENTS, with_end(events("\r\n"), "data: [DONE]\r\n\r\n"), odd),
        (EVENTS, with_end(events("\r\n"), "data: [DONE]\r\n\r\n"), Close),
        (EVENTS, with_end(events("\r"), "data: [DONE]\r\r"), odd),
        (EVENTS, with_end(events("\r"), "data: [DONE]\r\r"), Close),
        (EVENTS, with_end(events("\n"), error), odd),
        (EVENTS, with_end(events("\n"), error), Close),
        (EVENTS, with_end(events("\n"), "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"), Close),
        // Without an end event: the framing ends the stream.
        (EVENTS, events("\n"), odd),
        (EVENTS, events("\n"), Length),
        (EVENTS, with_end(large.clone(), done), Chunks(&[100_000, 1])),
        (EVENTS, with_end(large, done), Close),
        (EVENTS, noise(3000), odd),
        // Closed without an event, this would be a broken stream.
        (EVENTS, Vec::new(), Chunks(&[1])),
        (JSON, document.clone(), odd),
        (JSON, document.clone(), Length),
        (JSON, document, Close),
        (BYTES, noise(3000), odd),
        (BYTES, noise(3000), Length),
        (BYTES, noise(3000), Close),
        (BYTES, noise(400_000), Chunks(&[70_000, 3])),
        (BYTES, noise(400_000), Length),
        (BYTES, noise(400_000), Close),
        (BYTES, Vec::new(), Length),
        (BYTES, Vec::new(), Close),
    ];
    forms.into_iter().map(|(kind, body, framing)| ResponseForm { kind, body, framing }).collect()
}

impl ResponseForm {
    fn wire(&self) -> Vec<u8> {
        let framing = match self.framing {
            FormFraming::Length => format!("content-length: {}\r\n", self.body.len()),
            FormFraming::Chunks(_) => "transfer-encoding: chunked\r\n".to_owned(),
            FormFraming::Close => "connection: close\r\n".to_owned(),
        };
        let mut wire =
            format!("HTTP/1.1 200 OK\r\ncontent-type: {}\r\n{framing}\r\n", self.kind).into_bytes();
        let FormFraming::Chunks(sizes) = self.framing else {
            wire.extend_from_slice(&self.body);
            return wire;
        };
        let (mut rest, mut sizes) = (&self.body[..], sizes.iter().cycle());
        while let (false, Some(size)) = (rest.is_empty(), sizes.next()) {
            let (chunk, after) = rest.split_at((*size).min(rest.len()));
            let extension = if size.is_multiple_of(2) { ";of=\"engine\"" } else { "" };
            wire.extend_from_slice(format!("{:04x}{extension}\r\n", chunk.len()).as_bytes());
            wire.extend_from_slice(chunk);
            wire.extend_from_slice(b"\r\n");
            rest = after;
        }
        wire.extend_from_slice(b"0\r\nx-trailer: 1\r\n\r\n");
        wire
    }
}

impl GatewayFixture {
    /// Adds a model whose engine answers in the requested form, behind a stub with this admin port.
    pub(crate) fn forms_model(self, name: &str, admin: u16) -> Self {
        let exe = std::env::current_exe().unwrap();
        let words = [
            "env",
            "FORMS_AT=${HOST}:${PORT}",
            exe.to_str().unwrap(),
            "support::forms::engine",
            "--exact",
            "--nocapture",
        ];
        let (command, env, behind) = row::stub_command(&words, row::StubInRow { admin, folder: None });
        self.model_yaml(&format!(
            r#"  - name: {name}
    engine:
      kind: custom
      task: none
      command: {command}
      env: {env}
{behind}    memory: {{awake: 64Mi}}
"#
        ))
    }
}

/// Runs the engine when another test starts this binary as one. Among the tests it does nothing.
#[test]
fn engine() {
    let Ok(address) = std::env::var("FORMS_AT") else { return };
    let listener = TcpListener::bind(address).unwrap();
    for stream in listener.incoming() {
        let mut stream = stream.unwrap();
        stream.set_nodelay(true).unwrap();
        thread::spawn(move || while answer(&mut stream) {});
    }
}

/// Answers one request. Returns false when the connection ends with it.
fn answer(stream: &mut TcpStream) -> bool {
    let Some(request) = read_request(stream) else { return false };
    let text = String::from_utf8_lossy(&request).into_owned();
    let asked = |name: &str| -> Option<usize> {
        text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": ")?.parse().ok())
    };
    let Some((form, cut)) = asked(FORM_HEADER).zip(asked(CUT_HEADER)) else {
        return stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").is_ok();
    };
    let form = all_forms().swap_remove(form);
    for piece in form.wire().chunks(cut) {
        if stream.write_all(piece).is_err() {
            return false;
        }
        pause(WRITE_PAUSE);
    }
    form.framing != FormFraming::Close
}
