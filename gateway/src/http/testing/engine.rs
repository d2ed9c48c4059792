//! Scripted engines.

use std::{net::SocketAddr, sync::Arc};

use rouse_testing::{port::ReservedPort, scripted_engine::request_length};
use rustls::ServerConfig;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::TcpListener,
    sync::mpsc,
    time::Instant,
};
use tokio_rustls::TlsAcceptor;

/// An engine that sends the same bytes for every request. It then keeps the connection open, or closes it if the bytes
/// contain `connection: close`.
pub(crate) struct CannedEngine {
    pub(crate) address: SocketAddr,
    /// Each request, unparsed.
    pub(crate) requests: mpsc::UnboundedReceiver<String>,
    /// When the gateway closed a connection, or the engine itself did.
    pub(crate) closed_at: mpsc::UnboundedReceiver<Instant>,
    task: tokio::task::JoinHandle<()>,
}

impl CannedEngine {
    pub(crate) async fn start(answer: impl Into<Vec<u8>>) -> Self {
        Self::spawn(answer.into(), None).await
    }

    /// Like [`Self::start`], behind TLS.
    pub(crate) async fn start_tls(answer: impl Into<Vec<u8>>, server: &Arc<ServerConfig>) -> Self {
        Self::spawn(answer.into(), Some(TlsAcceptor::from(Arc::clone(server)))).await
    }

    async fn spawn(answer: Vec<u8>, tls: Option<TlsAcceptor>) -> Self {
        let answer = Arc::new(answer);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        #[expect(clippy::disallowed_methods, reason = "a test's channel")]
        let (requests_tx, requests) = mpsc::unbounded_channel();
        #[expect(clippy::disallowed_methods, reason = "a test's channel")]
        let (closes, closed) = mpsc::unbounded_channel();
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (answer, saw, closes) = (Arc::clone(&answer), requests_tx.clone(), closes.clone());
                let tls = tls.clone();
                tokio::spawn(async move {
                    match tls {
                        None => serve_connection(stream, answer, saw, closes).await,
                        Some(tls) => {
                            if let Ok(stream) = tls.accept(stream).await {
                                serve_connection(stream, answer, saw, closes).await;
                            }
                        }
                    }
                });
            }
        });
        Self { address, requests, closed_at: closed, task }
    }
}

impl Drop for CannedEngine {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve_connection(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    answer: Arc<Vec<u8>>,
    requests_tx: mpsc::UnboundedSender<String>,
    closed_tx: mpsc::UnboundedSender<Instant>,
) {
    let mut bytes = Vec::new();
    loop {
        if request_length(&bytes).is_some() {
            requests_tx.send(String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
            bytes.clear();
            let dies = String::from_utf8_lossy(&answer).contains("connection: close");
            if stream.write_all(&answer).await.is_err() || dies {
                break;
            }
        } else if !stream.read_buf(&mut bytes).await.is_ok_and(|n| n > 0) {
            break;
        }
    }
    closed_tx.send(Instant::now()).unwrap_or_default();
}

/// An address that refuses connections until this process ends.
pub(crate) fn refused_address() -> SocketAddr {
    let port = ReservedPort::bind();
    let address = port.address();
    std::mem::forget(port);
    address
}

pub(crate) fn json_response(body: &str) -> String {
    format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// The beginning of a stream of events that does not end.
pub(crate) fn sse_response(data: &str) -> String {
    let event = format!("data: {data}\n\n");
    format!(
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n{:x}\r\n{event}\r\n",
        event.len()
    )
}
