//! Asks a place again and again. Each question has a connection of its own, which is what a new client of the engine
//! would meet; of the answer only the status is read.

use std::{fmt, sync::Arc, time::Duration};

use axum::{
    body::Body,
    http::{Request, StatusCode, header},
};
use hyper_util::rt::TokioIo;
use tokio::{
    net::TcpStream,
    time::{self, Instant},
};

use super::{Readiness, endpoint::PolledEndpoint};

/// As Kubernetes has it. An engine that takes longer to say that it is ready is not.
const POLL_TIMEOUT: Duration = Duration::from_secs(1);
/// An answer's head is at most this long: the least that hyper's buffer takes.
const MAX_HEAD_BYTES: usize = 8192;

/// What a place said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PollResponse {
    Status(StatusCode),
    /// No connection.
    ConnectFailed,
    /// No answer in time.
    TimedOut,
    /// A connection, and then no HTTP.
    ProtocolError,
}

impl PollResponse {
    /// A redirection is not followed, and so is no good answer.
    pub(super) fn is_success(self) -> bool {
        matches!(self, Self::Status(status) if status.is_success())
    }
}

impl fmt::Display for PollResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status(status) => write!(f, "status {}", status.as_u16()),
            Self::ConnectFailed => f.write_str("no connection"),
            Self::TimedOut => f.write_str("no answer in time"),
            Self::ProtocolError => f.write_str("the connection broke"),
        }
    }
}

/// Polls until an order replaces the one that began it.
pub(super) async fn run(readiness: Arc<Readiness>, life: u64, place: PolledEndpoint) {
    loop {
        let asked = Instant::now();
        let answer = time::timeout(POLL_TIMEOUT, poll_once(&place)).await.unwrap_or(PollResponse::TimedOut);
        let Some(again) = readiness.record_response(life, &answer, asked, Instant::now()) else {
            return;
        };
        time::sleep_until(again).await;
    }
}

async fn poll_once(place: &PolledEndpoint) -> PollResponse {
    let Ok(stream) = TcpStream::connect(place.address).await else {
        return PollResponse::ConnectFailed;
    };
    let mut client = hyper::client::conn::http1::Builder::new();
    let Ok((mut sender, connection)) =
        client.max_buf_size(MAX_HEAD_BYTES).handshake(TokioIo::new(stream)).await
    else {
        return PollResponse::ProtocolError;
    };
    let request = Request::get(place.path.as_str())
        .header(header::HOST, place.address.to_string())
        .header(header::USER_AGENT, concat!("rouse-stub/", env!("CARGO_PKG_VERSION")))
        .header(header::CONNECTION, "close")
        .body(Body::empty());
    let Ok(request) = request else {
        return PollResponse::ProtocolError;
    };
    let answer = async move {
        let answer = sender.send_request(request).await;
        answer.map_or(PollResponse::ProtocolError, |response| PollResponse::Status(response.status()))
    };
    // Driven here, so that the end of the poller is the end of its connection.
    tokio::pin!(answer, connection);
    tokio::select! {
        biased;
        answer = &mut answer => answer,
        _ = &mut connection => answer.await,
    }
}
