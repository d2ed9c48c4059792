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

use super::{Readiness, place::Place};

/// As Kubernetes has it. An engine that takes longer to say that it is ready is not.
const WITHIN: Duration = Duration::from_secs(1);
/// An answer's head is at most this long: the least that hyper's buffer takes.
const MOST: usize = 8192;

/// What a place said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Status(StatusCode),
    /// No connection.
    Refused,
    /// No answer in time.
    Silent,
    /// A connection, and then no HTTP.
    Broken,
}

impl Answer {
    /// A redirection is not followed, and so is no good answer.
    pub(super) fn is_good(self) -> bool {
        matches!(self, Self::Status(status) if status.is_success())
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status(status) => write!(f, "status {}", status.as_u16()),
            Self::Refused => f.write_str("no connection"),
            Self::Silent => f.write_str("no answer in time"),
            Self::Broken => f.write_str("the connection broke"),
        }
    }
}

/// Polls until an order replaces the one that began it.
pub(super) async fn run(readiness: Arc<Readiness>, life: u64, place: Place) {
    loop {
        let asked = Instant::now();
        let answer = time::timeout(WITHIN, ask(&place)).await.unwrap_or(Answer::Silent);
        let Some(again) = readiness.note(life, &answer, asked, Instant::now()) else {
            return;
        };
        time::sleep_until(again).await;
    }
}

async fn ask(place: &Place) -> Answer {
    let Ok(stream) = TcpStream::connect(place.address).await else {
        return Answer::Refused;
    };
    let mut client = hyper::client::conn::http1::Builder::new();
    let Ok((mut sender, connection)) = client.max_buf_size(MOST).handshake(TokioIo::new(stream)).await else {
        return Answer::Broken;
    };
    let request = Request::get(place.path.as_str())
        .header(header::HOST, place.address.to_string())
        .header(header::USER_AGENT, concat!("rouse-stub/", env!("CARGO_PKG_VERSION")))
        .header(header::CONNECTION, "close")
        .body(Body::empty());
    let Ok(request) = request else {
        return Answer::Broken;
    };
    let answer = async move {
        let answer = sender.send_request(request).await;
        answer.map_or(Answer::Broken, |response| Answer::Status(response.status()))
    };
    // Driven here, so that the end of the poller is the end of its connection.
    tokio::pin!(answer, connection);
    tokio::select! {
        biased;
        answer = &mut answer => answer,
        _ = &mut connection => answer.await,
    }
}
