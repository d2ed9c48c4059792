//! Encodes requests and parses response heads.

use std::{mem::MaybeUninit, net::SocketAddr, time::Duration};

use anyhow::{Context as _, bail, ensure};
use bytes::{Buf as _, BytesMut};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

/// Text that pads a body.
const FILLING: &str = "lorem ipsum ";

/// A chat request, ready to be sent.
pub(super) struct LoadRequest<'a> {
    pub(super) proxy: SocketAddr,
    pub(super) model: &'a str,
    pub(super) key: &'a str,
    /// Size to which the body is padded, in bytes.
    pub(super) body: usize,
    /// Events, for a stream.
    pub(super) events: Option<u32>,
    pub(super) interval: Duration,
    pub(super) engine_time: Duration,
}

impl LoadRequest<'_> {
    pub(super) fn bytes(&self) -> Vec<u8> {
        let body = self.json();
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: {}\r\nauthorization: Bearer {}\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n",
            self.proxy,
            self.key,
            body.len()
        );
        (head + &body).into_bytes()
    }

    /// The body alone.
    pub(super) fn json(&self) -> String {
        let model = serde_json::Value::from(self.model);
        let before = format!(r#"{{"model":{model},"messages":[{{"role":"user","content":""#);
        let (interval, engine) = (self.interval.as_micros(), self.engine_time.as_micros());
        let stream = self.events.is_some();
        let tokens = self.events.unwrap_or(64);
        // The engine's settings travel in a field that every proxy passes on, even one that knows the schema.
        let after = format!(
            r#""}}],"max_tokens":{tokens},"stream":{stream},"user":"interval={interval}us,engine={engine}us"}}"#
        );
        let filling_bytes = self.body.saturating_sub(before.len() + after.len());
        let mut filling = FILLING.repeat(filling_bytes / FILLING.len() + 1);
        filling.truncate(filling_bytes);
        before + &filling + &after
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LoadResponseFraming {
    Length(usize),
    Chunked,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LoadResponseHead {
    bytes: usize,
    pub(super) status: u16,
    pub(super) framing: LoadResponseFraming,
    pub(super) keeps_alive: bool,
}

pub(super) struct LoadConnection {
    pub(super) io: TcpStream,
    /// Bytes read but not consumed.
    pub(super) read: BytesMut,
}

impl LoadConnection {
    pub(super) async fn open(proxy: SocketAddr) -> anyhow::Result<Self> {
        let io = TcpStream::connect(proxy).await.context("connect")?;
        io.set_nodelay(true)?;
        Ok(Self { io, read: BytesMut::new() })
    }

    pub(super) async fn send(&mut self, bytes: &[u8]) -> anyhow::Result<()> {
        self.io.write_all(bytes).await.context("send")
    }

    pub(super) async fn read_more(&mut self) -> anyhow::Result<()> {
        self.read.reserve(2048);
        let count = self.io.read_buf(&mut self.read).await.context("read")?;
        ensure!(count > 0, "the connection ended in the middle of a response");
        Ok(())
    }

    /// Reads the next response's head and skips informational responses. The head's bytes are consumed.
    pub(super) async fn head(&mut self) -> anyhow::Result<LoadResponseHead> {
        loop {
            match parse(&self.read)? {
                Some(head) if head.status < 200 => self.read.advance(head.bytes),
                Some(head) => {
                    self.read.advance(head.bytes);
                    return Ok(head);
                }
                None => self.read_more().await?,
            }
        }
    }
}

fn parse(bytes: &[u8]) -> anyhow::Result<Option<LoadResponseHead>> {
    let mut headers = [const { MaybeUninit::uninit() }; 64];
    let mut response = httparse::Response::new(&mut []);
    let parser = httparse::ParserConfig::default();
    let parsed = parser.parse_response_with_uninit_headers(&mut response, bytes, &mut headers);
    let httparse::Status::Complete(size) = parsed.context("head")? else { return Ok(None) };
    let mut framing = None;
    let mut keeps_alive = response.version == Some(1);
    for header in response.headers.iter() {
        let (name, value) = (header.name, header.value);
        match name.len() {
            14 if name.eq_ignore_ascii_case("content-length") => {
                framing = Some(LoadResponseFraming::Length(
                    str::from_utf8(value)?.parse().context("content-length")?,
                ));
            }
            17 if name.eq_ignore_ascii_case("transfer-encoding") => {
                framing = Some(LoadResponseFraming::Chunked)
            }
            10 if name.eq_ignore_ascii_case("connection") => {
                keeps_alive = !value.eq_ignore_ascii_case(b"close")
            }
            _ => {}
        }
    }
    let status = response.code.unwrap_or_default();
    let Some(framing) = framing.or_else(|| (status < 200).then_some(LoadResponseFraming::Length(0))) else {
        bail!("a response has neither a length nor chunks");
    };
    Ok(Some(LoadResponseHead { bytes: size, status, framing, keeps_alive }))
}
