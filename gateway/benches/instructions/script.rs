//! The byte streams of clients and the engine, and their order.

use std::time::Duration;

use anyhow::Context as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};

use crate::{
    http2,
    world::{BenchGateway, KEY, MODEL},
};

/// Requests before the measurement, which prove the engine and fill pools and tables.
const WARM: usize = 16;
/// More yields to the runtime than a request needs from its client to the queue.
const TURNS: usize = 64;
/// Sizes of a request's body, of a response's body and of an event, in bytes.
const BODY: usize = 1024;
const ANSWER: usize = 600;
const EVENT: usize = 226;
/// Timeout for a stuck run, far longer than any run takes.
const STUCK: Duration = Duration::from_secs(300);

/// The cases, by the names of their recorded counts.
pub(crate) const CASES: [Case; 5] = [
    Case { name: "request", unit: "request", units: 500, http2: false, what: ScriptItem::Request },
    Case { name: "event", unit: "event", units: 2000, http2: false, what: ScriptItem::Event },
    Case { name: "request-http2", unit: "request", units: 500, http2: true, what: ScriptItem::Request },
    Case { name: "event-http2", unit: "event", units: 2000, http2: true, what: ScriptItem::Event },
    Case {
        name: "parked",
        unit: "two requests, one of them parked",
        units: 300,
        http2: false,
        what: ScriptItem::Parked,
    },
];

pub(crate) struct Case {
    pub(crate) name: &'static str,
    /// Name of the unit.
    pub(crate) unit: &'static str,
    /// Units of a short run.
    pub(crate) units: usize,
    http2: bool,
    what: ScriptItem,
}

#[derive(Clone, Copy)]
enum ScriptItem {
    /// Kept-alive connections, a body of 1 KB, a response of 600 B.
    Request,
    /// One stream. Each event is written when the client has received the previous one.
    Event,
    /// A model with one place: each unit has a request that waits for the one before it.
    Parked,
}

impl Case {
    pub(crate) async fn run(&self, units: usize) -> anyhow::Result<()> {
        tokio::time::timeout(STUCK, self.play(units)).await.context("the script is stuck")?
    }

    async fn play(&self, units: usize) -> anyhow::Result<()> {
        let model = if matches!(self.what, ScriptItem::Parked) { "maxConcurrency: 1" } else { "" };
        let mut world = BenchGateway::start(model)?;
        let mut client = Client::new(&world, self.http2).await?;
        client.send(false).await?;
        let mut engine = PipeEnd::new(world.accept().await?);
        engine.answer().await?;
        client.answered().await?;
        for _ in 1..WARM {
            client.ask(&mut engine).await?;
        }
        match self.what {
            ScriptItem::Request => {
                for _ in 0..units {
                    client.ask(&mut engine).await?;
                }
            }
            ScriptItem::Event => {
                client.send(true).await?;
                engine.request().await?;
                engine.write(STREAM_HEAD.as_bytes()).await?;
                let event = chunk(&event());
                for _ in 0..units {
                    engine.write(&event).await?;
                    client.event().await?;
                }
            }
            ScriptItem::Parked => {
                let mut second = Client::new(&world, self.http2).await?;
                for _ in 0..units {
                    client.send(false).await?;
                    engine.request().await?;
                    second.send(false).await?;
                    for _ in 0..TURNS {
                        tokio::task::yield_now().await;
                    }
                    engine.reply().await?;
                    client.answered().await?;
                    engine.answer().await?;
                    second.answered().await?;
                }
            }
        }
        Ok(())
    }
}

/// One end of a pipe. It only compares the end of what it reads, since the scripts must cost next to nothing.
struct PipeEnd {
    pipe: DuplexStream,
    read: Vec<u8>,
    answer: Vec<u8>,
}

impl PipeEnd {
    fn new(pipe: DuplexStream) -> Self {
        let body = answer();
        let head = format!(
            "HTTP/1.1 200 OK\r\ndate: Fri, 20 Nov 2026 12:00:00 GMT\r\nserver: uvicorn\r\ncontent-length: {}\r\n\
             content-type: application/json\r\n\r\n",
            body.len()
        );
        Self { pipe, read: vec![0; 64 << 10], answer: [head.as_bytes(), &body].concat() }
    }

    async fn write(&mut self, bytes: &[u8]) -> anyhow::Result<()> {
        Ok(self.pipe.write_all(bytes).await?)
    }

    async fn until(&mut self, end: &[u8]) -> anyhow::Result<()> {
        let mut filled = 0;
        loop {
            let read = self.pipe.read(&mut self.read[filled..]).await?;
            anyhow::ensure!(read > 0, "closed after {:?}", String::from_utf8_lossy(&self.read[..filled]));
            filled += read;
            if self.read[..filled].ends_with(end) {
                return Ok(());
            }
        }
    }

    /// Reads a whole request, at an engine.
    async fn request(&mut self) -> anyhow::Result<()> {
        self.until(END_OF_REQUEST).await
    }

    async fn reply(&mut self) -> anyhow::Result<()> {
        self.pipe.write_all(&self.answer).await?;
        Ok(())
    }

    async fn answer(&mut self) -> anyhow::Result<()> {
        self.request().await?;
        self.reply().await
    }
}

struct Client {
    wire: PipeEnd,
    http2: Option<http2::Session>,
    /// The plain request and the streaming one.
    requests: [Request; 2],
}

/// A request: fields and body. Over HTTP/1.1, `bytes` contains both.
struct Request {
    fields: Fields,
    bytes: Vec<u8>,
}

impl Client {
    async fn new(world: &BenchGateway, http2: bool) -> anyhow::Result<Self> {
        let mut wire = PipeEnd::new(world.connect()?);
        let mut session = None;
        if http2 {
            wire.write(&http2::opening()).await?;
            // Reads the server's settings, which need an acknowledgement; what follows does not matter.
            wire.until(b"").await?;
            wire.write(http2::SETTINGS_ACK).await?;
            session = Some(http2::Session::default());
        }
        let requests = [false, true].map(|stream| {
            let body = body(stream);
            let fields = fields(&body);
            let bytes = if http2 { body } else { [head(&fields).as_bytes(), &body].concat() };
            Request { fields, bytes }
        });
        Ok(Self { wire, http2: session, requests })
    }

    async fn send(&mut self, stream: bool) -> anyhow::Result<()> {
        let Request { fields, bytes } = &self.requests[usize::from(stream)];
        match &mut self.http2 {
            Some(session) => self.wire.pipe.write_all(session.request(fields, bytes)).await?,
            None => self.wire.pipe.write_all(bytes).await?,
        }
        Ok(())
    }

    async fn answered(&mut self) -> anyhow::Result<()> {
        self.wire.until(END_OF_ANSWER).await
    }

    async fn event(&mut self) -> anyhow::Result<()> {
        self.wire.until(if self.http2.is_some() { b"\n\n" } else { b"\n\n\r\n" }).await
    }

    async fn ask(&mut self, engine: &mut PipeEnd) -> anyhow::Result<()> {
        self.send(false).await?;
        engine.answer().await?;
        self.answered().await
    }
}

const STREAM_HEAD: &str = "HTTP/1.1 200 OK\r\ndate: Fri, 20 Nov 2026 12:00:00 GMT\r\nserver: uvicorn\r\n\
    content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
const END_OF_REQUEST: &[u8] = b"\"temperature\":0.7}";
const END_OF_ANSWER: &[u8] = b"\"total_tokens\":280}}";

type Fields = [(&'static str, String); 9];

/// Returns the fields of a request in HTTP/2's spelling.
fn fields(body: &[u8]) -> Fields {
    [
        (":method", "POST".into()),
        (":scheme", "http".into()),
        (":authority", "gateway:8080".into()),
        (":path", "/v1/chat/completions".into()),
        ("user-agent", "OpenAI/Python 2.8.0".into()),
        ("accept", "application/json".into()),
        ("authorization", format!("Bearer {KEY}")),
        ("content-type", "application/json".into()),
        ("content-length", body.len().to_string()),
    ]
}

fn head(fields: &Fields) -> String {
    let mut head = "POST /v1/chat/completions HTTP/1.1\r\nhost: gateway:8080\r\n".to_owned();
    for (name, value) in fields.iter().filter(|(name, _)| !name.starts_with(':')) {
        head.extend([name, ": ", value, "\r\n"]);
    }
    head + "\r\n"
}

fn body(stream: bool) -> Vec<u8> {
    let options = if stream { r#","stream":true"# } else { "" };
    let begin = format!(r#"{{"model":"{MODEL}","messages":[{{"role":"user","content":""#);
    let end = format!(r#""}}],"max_tokens":64{options},"temperature":0.7}}"#);
    padded(&begin, &end, BODY)
}

fn answer() -> Vec<u8> {
    let begin = r#"{"id":"chatcmpl-1","object":"chat.completion","created":1800000000,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":""#;
    let end = r#""},"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":216,"completion_tokens":64,"total_tokens":280}}"#;
    padded(begin, end, ANSWER)
}

fn event() -> Vec<u8> {
    let begin = r#"data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1800000000,"model":"m","choices":[{"index":0,"delta":{"content":""#;
    padded(begin, "\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n", EVENT)
}

fn chunk(bytes: &[u8]) -> Vec<u8> {
    [format!("{:x}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat()
}

fn padded(begin: &str, end: &str, length: usize) -> Vec<u8> {
    let words = "the quick brown fox jumps over the lazy dog and ".bytes().cycle();
    let room = length.saturating_sub(begin.len() + end.len());
    begin.bytes().chain(words.take(room)).chain(end.bytes()).collect()
}
