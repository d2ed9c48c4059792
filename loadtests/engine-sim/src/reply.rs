//! How an answer leaves: its framing, its coding, and the wire faults that a gateway has to survive.

use serde_json::{Value, json};

use crate::{
    api::Api,
    faults::{Fault, Faults},
    gzip::Gzip,
    http1::{Broken, Conn, Head},
};

const TRAILER: &str = "x-sim-trailer: yes\r\n";

/// One request's way of being answered.
pub(crate) struct Wire {
    old: bool,
    bodiless: bool,
    keep_alive: bool,
    gzip: bool,
    trailers: bool,
    close_delimited: bool,
    interim: String,
}

impl Wire {
    pub(crate) fn plain(head: &Head) -> Self {
        Self {
            old: head.old,
            bodiless: head.method == "HEAD",
            keep_alive: head.keeps_alive(),
            gzip: false,
            trailers: false,
            close_delimited: false,
            interim: String::new(),
        }
    }

    pub(crate) fn faulty(head: &Head, faults: &Faults) -> Self {
        let mut wire = Self::plain(head);
        // Probes and metrics stay readable: what these faults try is how answers are passed on.
        if !head.path.starts_with("/v1/") && Api::of(&head.path).is_none() {
            return wire;
        }
        wire.gzip = faults.on(Fault::GzipAlways) || faults.on(Fault::Gzip) && head.accepts_gzip();
        wire.trailers = faults.on(Fault::Trailers) && !head.old;
        wire.close_delimited = faults.on(Fault::CloseDelimited);
        wire.keep_alive &= !wire.close_delimited;
        if faults.on(Fault::EarlyHints) {
            wire.interim += "HTTP/1.1 103 Early Hints\r\nlink: </style.css>; rel=preload\r\n\r\n";
        }
        if faults.on(Fault::Interim) {
            wire.interim += "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n";
        }
        wire
    }

    pub(crate) fn keeps_alive(&self) -> bool {
        self.keep_alive
    }

    /// Has the connection close after the answer.
    pub(crate) fn close(&mut self) {
        self.keep_alive = false;
    }

    fn head(
        &self,
        status: u16,
        content_type: &str,
        length: Option<usize>,
        more: &[(&str, String)],
    ) -> String {
        use std::fmt::Write as _;

        let mut head = format!("{}HTTP/1.1 {status} {}\r\nserver: uvicorn\r\n", self.interim, reason(status));
        let mut line = |name: &str, value: &dyn std::fmt::Display| {
            // Writing to a String cannot fail.
            write!(head, "{name}: {value}\r\n").ok();
        };
        if !content_type.is_empty() {
            line("content-type", &content_type);
        }
        for (name, value) in more {
            line(name, value);
        }
        if self.gzip {
            line("content-encoding", &"gzip");
        }
        match length {
            Some(length) => line("content-length", &length),
            None if self.closes_at_end() => {}
            None => line("transfer-encoding", &"chunked"),
        }
        if self.trailers {
            line("trailer", &"x-sim-trailer");
        }
        match (self.keep_alive, self.old) {
            (false, _) => line("connection", &"close"),
            (true, true) => line("connection", &"keep-alive"),
            (true, false) => {}
        }
        head.push_str("\r\n");
        head
    }

    fn closes_at_end(&self) -> bool {
        self.close_delimited || self.old
    }
}

/// A refusal in the words of the API that was asked, as vLLM has them.
pub(crate) fn refusal(api: Api, status: u16, kind: &str, message: &str, param: Option<&str>) -> Reply {
    if !api.is_anthropics() {
        return Reply::error(status, kind, message, param);
    }
    Reply::json(status, &json!({"type": "error", "error": {"type": kind, "message": message}}))
}

/// An answer whose body is known when it begins.
pub(crate) struct Reply {
    status: u16,
    content_type: &'static str,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
}

impl Reply {
    pub(crate) fn json(status: u16, body: &Value) -> Self {
        Self {
            status,
            content_type: "application/json",
            headers: Vec::new(),
            body: body.to_string().into_bytes(),
        }
    }

    pub(crate) fn text(content_type: &'static str, body: String) -> Self {
        Self { status: 200, content_type, headers: Vec::new(), body: body.into_bytes() }
    }

    pub(crate) fn bytes(content_type: &'static str, body: Vec<u8>) -> Self {
        Self { status: 200, content_type, headers: Vec::new(), body }
    }

    pub(crate) fn empty(status: u16) -> Self {
        Self { status, content_type: "", headers: Vec::new(), body: Vec::new() }
    }

    /// vLLM's error envelope.
    pub(crate) fn error(status: u16, kind: &str, message: &str, param: Option<&str>) -> Self {
        let error = json!({"message": message, "type": kind, "param": param, "code": status});
        Self::json(status, &json!({ "error": error }))
    }

    /// What FastAPI itself says, outside the OpenAI routes.
    pub(crate) fn detail(status: u16, detail: &str) -> Self {
        Self::json(status, &json!({ "detail": detail }))
    }

    pub(crate) fn with(mut self, name: &'static str, value: &str) -> Self {
        self.headers.push((name, value.to_owned()));
        self
    }

    pub(crate) async fn send(self, conn: &mut Conn, wire: &Wire) -> Result<(), Broken> {
        let mut body = self.body;
        if wire.gzip {
            let mut gzip = Gzip::new();
            body = gzip.part(&body);
            body.extend(gzip.end());
        }
        let length = (!wire.trailers && !wire.close_delimited).then_some(body.len());
        let mut out = wire.head(self.status, self.content_type, length, &self.headers).into_bytes();
        if !wire.bodiless {
            if length.is_none() && !wire.closes_at_end() {
                out.extend(chunk(&body));
                out.extend(last_chunk(wire));
            } else {
                out.extend(body);
            }
        }
        conn.send(&out).await
    }
}

/// An answer that is made while it is sent, one write for each event.
pub(crate) struct EventStream<'a> {
    wire: &'a Wire,
    gzip: Option<Gzip>,
}

impl<'a> EventStream<'a> {
    pub(crate) async fn begin(conn: &mut Conn, wire: &'a Wire) -> Result<Self, Broken> {
        let head = wire.head(200, "text/event-stream; charset=utf-8", None, &[]);
        conn.send(head.as_bytes()).await?;
        Ok(Self { wire, gzip: wire.gzip.then(Gzip::new) })
    }

    pub(crate) async fn event(&mut self, conn: &mut Conn, event: &[u8]) -> Result<(), Broken> {
        match &mut self.gzip {
            Some(gzip) => {
                let part = gzip.part(event);
                self.write(conn, &part).await
            }
            None => self.write(conn, event).await,
        }
    }

    pub(crate) async fn end(mut self, conn: &mut Conn) -> Result<(), Broken> {
        if let Some(gzip) = self.gzip.take() {
            self.write(conn, &gzip.end()).await?;
        }
        if self.wire.closes_at_end() {
            return Ok(());
        }
        conn.send(&last_chunk(self.wire)).await
    }

    async fn write(&self, conn: &mut Conn, bytes: &[u8]) -> Result<(), Broken> {
        if self.wire.closes_at_end() { conn.send(bytes).await } else { conn.send(&chunk(bytes)).await }
    }
}

fn chunk(bytes: &[u8]) -> Vec<u8> {
    // An empty chunk would be the last one.
    if bytes.is_empty() {
        return Vec::new();
    }
    let mut out = format!("{:x}\r\n", bytes.len()).into_bytes();
    out.extend_from_slice(bytes);
    out.extend_from_slice(b"\r\n");
    out
}

fn last_chunk(wire: &Wire) -> Vec<u8> {
    format!("0\r\n{}\r\n", if wire.trailers { TRAILER } else { "" }).into_bytes()
}

fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        400 => "Bad Request",
        401 => "Unauthorized",
        404 => "Not Found",
        405 => "Method Not Allowed",
        429 => "Too Many Requests",
        500 => "Internal Server Error",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        _ => "Status",
    }
}
