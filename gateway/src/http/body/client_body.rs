//! A request's body as the client's connection delivers it.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use rouse_net::server::{Http1RequestBody, RequestBodyError};

use crate::serve::socket::ClientSocket;

/// The body of a client's request, over either version of HTTP. One type for both, so that the code that serves a
/// request is built once.
pub(crate) enum ClientBody {
    Http1(Http1RequestBody<ClientSocket>),
    Http2(Incoming),
}

/// The body ended before its end.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("{0}")]
    Http1(#[source] RequestBodyError),
    #[error("{0}")]
    Http2(#[source] hyper::Error),
}

impl Body for ClientBody {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        match self.get_mut() {
            Self::Http1(body) => Pin::new(body).poll_frame(cx).map_err(Error::Http1),
            Self::Http2(body) => Pin::new(body).poll_frame(cx).map_err(Error::Http2),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Http1(body) => body.is_end_stream(),
            Self::Http2(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Http1(body) => body.size_hint(),
            Self::Http2(body) => body.size_hint(),
        }
    }
}
