//! `POST /admin/v1/chat`: a chat completion for an operator who tries a model.
//!
//! The request goes to a serving thread through a connection within this process ([`crate::serve::ApiWorkers`]), and
//! from there takes the path of any client's request: it waits for its model, counts in the metrics and is limited like
//! others. Its key is named `admin` and may use every model, so an operator needs no key of the inference API. The
//! answer passes through unchanged. When the operator leaves, the connection is closed, and that cancels the request.
//!
//! The client here is hyper's and not `rouse_net::http_client`. That one connects to addresses only, keeps no header of
//! a response, and its parser drops the headers `x-rouse-*`, which are an engine's there and the gateway's own here.
//! Three more abilities, which no other caller needs, would be more code than [`RelayedChat`].

use std::{
    error::Error as _,
    pin::Pin,
    task::{Context, Poll},
};

use axum::{
    BoxError,
    body::{Body, Bytes},
    extract::{Request, State},
    response::Response,
};
use http::{StatusCode, header};
use http_body::{Frame, SizeHint};
use http_body_util::{Full, LengthLimitError};
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use rouse::fault::Fault;
use rouse_net::relay::headers::remove_hop_by_hop;
use tokio::task::JoinSet;

use super::{AdminState, error, fault, invalid};
use crate::serve::ApiWorkers;

pub(super) const PATH: &str = "/admin/v1/chat";
/// The route of the inference API that answers.
const INFERENCE_PATH: &str = "/v1/chat/completions";

pub(super) async fn chat(State(shared): State<AdminState>, request: Request) -> Response {
    let limit = shared.sources.config.load().limits.body;
    let most = usize::try_from(limit.0).unwrap_or(usize::MAX);
    let body = match axum::body::to_bytes(request.into_body(), most).await {
        Ok(body) => body,
        Err(failed) if failed.source().is_some_and(|cause| cause.is::<LengthLimitError>()) => {
            return fault(&Fault::BodyTooLarge { setting: "limits.body".to_owned(), limit });
        }
        Err(_) => return invalid("the body ended early"),
    };
    match relay(&shared.sources.workers, body).await {
        Ok(response) => response,
        Err(failed) => {
            tracing::debug!(error = %failed, "a chat of an operator was not served");
            let message =
                "no thread took the chat: the gateway is starting, shutting down or out of descriptors";
            error(StatusCode::SERVICE_UNAVAILABLE, "not_serving", message)
        }
    }
}

/// Sends the request to a serving thread. Errors: none took it, or it ended before it answered.
async fn relay(workers: &ApiWorkers, body: Bytes) -> Result<Response, BoxError> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(workers.connect()?)).await?;
    let mut connection_task = JoinSet::new();
    connection_task.spawn(async move {
        if let Err(failed) = connection.await {
            tracing::debug!(error = %failed, "the connection of an operator's chat failed");
        }
    });
    let request = http::Request::post(INFERENCE_PATH)
        .header(header::HOST, "localhost")
        .header(header::CONTENT_TYPE, "application/json")
        .body(Full::new(body))?;
    let (mut head, answer) = sender.send_request(request).await?.into_parts();
    remove_hop_by_hop(&mut head.headers);
    let body = RelayedChat { answer, _sender: sender, _connection_task: connection_task };
    Ok(Response::from_parts(head, Body::new(body)))
}

/// The answer's body. Dropping it closes the connection.
struct RelayedChat {
    answer: Incoming,
    _sender: http1::SendRequest<Full<Bytes>>,
    _connection_task: JoinSet<()>,
}

impl http_body::Body for RelayedChat {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        Pin::new(&mut self.get_mut().answer).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.answer.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.answer.size_hint()
    }
}

#[cfg(test)]
mod tests;
