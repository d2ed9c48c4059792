//! Sends responses: framing, coding, and the wire faults that a gateway must survive.

use serde_json::{Value, json};

use crate::{
    api::SimApi,
    faults::{ActiveFaults, SimFault},
    gzip::Gzip,
    http1::{SimConnection, SimConnectionError, SimRequestHead},
};

const TRAILER: &str = "x-sim-trailer: yes\r\n";

/// How one request's response is encoded.
pub(crate) struct ResponseEncoding {
    http10: bool,
    bodiless: bool,
    keep_alive: bool,
    gzip: bool,
    trailers: bool,
    close_delimited: bool,
    interim: String,
}

impl ResponseEncoding {
    pub(crate) fn without_faults(head: &SimRequestHead) -> Self {
        Self {
            http10: head.http10,
            bodiless: head.method == "HEAD",
            keep_alive: head.keeps_alive(),
            gzip: false,
            trailers: false,
            close_delimited: false,
            interim: String::new(),
        }
    }

    pub(crate) fn with_faults(head: &SimRequestHead, faults: &ActiveFaults) -> Self {
        let mut wire = Self::without_faults(head);
        // Probes and metrics stay readable, because these faults test how a proxy relays responses.
        if !head.path.starts_with("/v1/") && SimApi::from_path(&head.path).is_none() {
            return wire;
        }
        wire.gzip = faults.is_on(SimFault::GzipAlways) || faults.is_on(SimFault::Gzip) && head.accepts_gzip();
        wire.trailers = faults.is_on(SimFault::Trailers) && !head.http10;
        wire.close_delimited = faults.is_on(SimFault::CloseDelimited);
        wire.keep_alive &= !wire.close_delimited;
        if faults.is_on(SimFault::EarlyHints) {
            wire.interim += "HTTP/1.1 103 Early Hints\r\nlink: </style.css>; rel=preload\r\n\r\n";
        }
        if faults.is_on(SimFault::Interim) {
            wire.interim += "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n";
        }
        wire
    }

    pub(crate) fn keeps_alive(&self) -> bool {
        self.keep_alive
    }

    /// Closes the connection after the response.
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
        match (self.keep_alive, self.http10) {
            (false, _) => line("connection", &"close"),
            (true, true) => line("connection", &"keep-alive"),
            (true, false) => {}
        }
        head.push_str("\r\n");
        head
    }

    fn closes_at_end(&self) -> bool {
        self.close_delimited || self.http10
    }
}

/// An error in the form of the requested API, as in vLLM.
pub(crate) fn api_error(
    api: SimApi,
    status: u16,
    kind: &str,
    message: &str,
    param: Option<&str>,
) -> SimReply {
    if !api.is_anthropic() {
        return SimReply::error(status, kind, message, param);
    }
    SimReply::json(status, &json!({"type": "error", "error": {"type": kind, "message": message}}))
}

/// A response whose body is known at its beginning.
pub(crate) struct SimReply {
    status: u16,
    content_type: &'static str,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
}

impl SimReply {
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

    /// FastAPI's own error, outside the OpenAI routes.
    pub(crate) fn detail(status: u16, detail: &str) -> Self {
        Self::json(status, &json!({ "detail": detail }))
    }

    pub(crate) fn with(mut self, name: &'static str, value: &str) -> Self {
        self.headers.push((name, value.to_owned()));
        self
    }

    pub(crate) async fn send(
        self,
        conn: &mut SimConnection,
        wire: &ResponseEncoding,
    ) -> Result<(), SimConnectionError> {
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

/// A response generated while it is sent, with one write for each event.
pub(crate) struct EventStream<'a> {
    wire: &'a ResponseEncoding,
    gzip: Option<Gzip>,
}

impl<'a> EventStream<'a> {
    pub(crate) async fn begin(
        conn: &mut SimConnection,
        wire: &'a ResponseEncoding,
    ) -> Result<Self, SimConnectionError> {
        let head = wire.head(200, "text/event-stream; charset=utf-8", None, &[]);
        conn.send(head.as_bytes()).await?;
        Ok(Self { wire, gzip: wire.gzip.then(Gzip::new) })
    }

    pub(crate) async fn event(
        &mut self,
        conn: &mut SimConnection,
        event: &[u8],
    ) -> Result<(), SimConnectionError> {
        match &mut self.gzip {
            Some(gzip) => {
                let part = gzip.part(event);
                self.write(conn, &part).await
            }
            None => self.write(conn, event).await,
        }
    }

    pub(crate) async fn end(mut self, conn: &mut SimConnection) -> Result<(), SimConnectionError> {
        if let Some(gzip) = self.gzip.take() {
            self.write(conn, &gzip.end()).await?;
        }
        if self.wire.closes_at_end() {
            return Ok(());
        }
        conn.send(&last_chunk(self.wire)).await
    }

    async fn write(&self, conn: &mut SimConnection, bytes: &[u8]) -> Result<(), SimConnectionError> {
        if self.wire.closes_at_end() { conn.send(bytes).await } else { conn.send(&chunk(bytes)).await }
    }
}

fn chunk(bytes: &[u8]) -> Vec<u8> {
    // An empty chunk would end the body.
    if bytes.is_empty() {
        return Vec::new();
    }
    let mut out = format!("{:x}\r\n", bytes.len()).into_bytes();
    out.extend_from_slice(bytes);
    out.extend_from_slice(b"\r\n");
    out
}

fn last_chunk(wire: &ResponseEncoding) -> Vec<u8> {
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
