//! The last response on a connection, which no request or no further request follows.
//!
//! A server refuses a head that it cannot read, or that does not arrive. It writes that response itself, past the
//! connection loop, and then lets the client read it.

use std::{
    future::poll_fn,
    io,
    mem::MaybeUninit,
    task::{Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::Response;
use tokio::{io::ReadBuf, time::timeout};

use super::{ServerIo, response_head::write_status_and_headers};

/// How long a refused client may continue to send its request.
const LINGER_TIMEOUT: Duration = Duration::from_secs(30);
/// How long it may pause, and how long it may take to accept the response.
const LINGER_IO_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes per read, on the stack.
const READ_CHUNK_BYTES: usize = 2048;

/// Serializes a response after which the server closes the connection. Its framing is the server's own.
#[must_use]
pub fn last_response_bytes(response: &Response<Bytes>) -> Vec<u8> {
    let (mut bytes, body) = (Vec::new(), response.body());
    write_status_and_headers(&mut bytes, "HTTP/1.1 ", response.status(), response.headers());
    let rest = format!("connection: close\r\ncontent-length: {}\r\n\r\n", body.len());
    bytes.extend_from_slice(rest.as_bytes());
    bytes.extend_from_slice(body);
    bytes
}

/// Writes these bytes past the connection loop, which must be over.
///
/// # Errors
/// The connection broke, or the client does not accept the bytes within 5 s.
pub async fn send_last_response<P: ServerIo>(peer: &P, mut bytes: &[u8]) -> io::Result<()> {
    let sent = async {
        while !bytes.is_empty() {
            let written = poll_fn(|cx| peer.poll_write(cx, bytes)).await?;
            if written == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            bytes = bytes.get(written..).unwrap_or_default();
        }
        poll_fn(|cx| peer.poll_flush(cx)).await
    };
    timeout(LINGER_IO_TIMEOUT, sent).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// Shuts the connection down for writing, then reads and discards everything that the client still sends. Closing the
/// socket with unread bytes would reset the connection, and the client would lose the response with the reason.
///
/// Ends with the client's side of the connection, when the client pauses for 5 s, and after 30 s.
pub async fn linger<P: ServerIo>(peer: &P) {
    let all = async {
        if poll_fn(|cx| peer.poll_shutdown(cx)).await.is_ok() {
            while let Ok(Ok(true)) = timeout(LINGER_IO_TIMEOUT, discard(peer)).await {}
        }
    };
    if timeout(LINGER_TIMEOUT, all).await.is_err() {
        tracing::debug!("refused client did not stop sending, closing the connection");
    }
}

/// Reads and discards some bytes. Returns false at the end.
async fn discard<P: ServerIo>(peer: &P) -> io::Result<bool> {
    poll_fn(|cx| {
        let mut scratch = [const { MaybeUninit::uninit() }; READ_CHUNK_BYTES];
        let mut buf = ReadBuf::uninit(&mut scratch);
        ready!(peer.poll_read(cx, &mut buf))?;
        Poll::Ready(Ok(!buf.filled().is_empty()))
    })
    .await
}

#[cfg(test)]
mod tests {
    use http::{HeaderValue, StatusCode, header};

    use super::*;

    #[test]
    fn a_last_response_closes_the_connection_and_has_a_length() {
        let mut response = Response::new(Bytes::from_static(b"why"));
        *response.status_mut() = StatusCode::REQUEST_TIMEOUT;
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain"));
        // The server frames the response, whatever its maker wrote.
        response.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from_static("9"));
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        let text = String::from_utf8(last_response_bytes(&response)).unwrap();
        let wire = "HTTP/1.1 408 Request Timeout\r\ncontent-type: text/plain\r\nconnection: close\r\n\
                    content-length: 3\r\n\r\nwhy";
        assert_eq!(text, wire);
    }
}
