//! One request and its response, on a connection of their own.
//!
//! A leader has such calls under way to thousands of engines at once, and each call keeps its memory until the engine
//! answers. So a call holds little more than the bytes it has received, which it reads with the relay's parser.

use bytes::{Bytes, BytesMut};
use http::{Method, Request, header};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::HttpClientError;
use crate::{
    backend_origin::Duplex,
    relay::{BodyDecoder, parse_response_head, write_request_line},
};

/// Most responses fit into one read of this size. The reads of larger ones double.
const FIRST_READ_BYTES: usize = 1 << 10;
const MAX_READ_BYTES: usize = 16 << 10;

/// A response whose head has arrived. Dropping it closes the connection.
#[derive(Debug)]
pub(super) struct OneShotResponse {
    pub(super) status: u16,
    /// A 503 with a stub's mark.
    pub(super) gated: bool,
    decoder: BodyDecoder,
    connection: Box<dyn Duplex>,
    /// Bytes after the head that are not decoded yet.
    received: BytesMut,
    read_bytes: usize,
}

impl OneShotResponse {
    /// Sends a request, and waits for the head of its response.
    ///
    /// # Errors
    /// [`HttpClientError::Broken`]: the connection ended before, this is not HTTP/1, or the request has no path.
    pub(super) async fn open(
        mut connection: Box<dyn Duplex>,
        request: Request<Bytes>,
    ) -> Result<Self, HttpClientError> {
        {
            let wire = to_wire(&request)?;
            let sent = async {
                connection.write_all(&wire).await?;
                connection.flush().await
            };
            // The server may have answered before it read the whole request.
            drop(sent.await);
        }
        let (mut received, mut read_bytes) = (BytesMut::new(), FIRST_READ_BYTES);
        loop {
            if read_more(&mut connection, &mut received, &mut read_bytes).await? == 0 {
                return Err(HttpClientError::Broken);
            }
            let mut bytes = received.freeze();
            let head =
                parse_response_head(&mut bytes, request.method()).map_err(|_| HttpClientError::Broken)?;
            if let Some(head) = head {
                let (status, gated, decoder) = (head.status.as_u16(), head.gated, head.decoder);
                return Ok(Self { status, gated, decoder, connection, received: bytes.into(), read_bytes });
            }
            received = bytes.into();
        }
    }

    /// Returns the next piece of the body; `None` at its end. Dropping the future before it completes loses nothing.
    ///
    /// # Errors
    /// [`HttpClientError::Broken`]: the connection ended before the body did.
    pub(super) async fn chunk(&mut self) -> Result<Option<Bytes>, HttpClientError> {
        loop {
            let mut bytes = self.received.split();
            let found = self.decoder.decode(&mut bytes).map_err(|_| HttpClientError::Broken)?;
            if !found.payload.is_empty() {
                return Ok(Some(bytes.freeze().slice(found.payload)));
            }
            if self.decoder.is_done() {
                return Ok(None);
            }
            match read_more(&mut self.connection, &mut self.received, &mut self.read_bytes).await? {
                0 if matches!(self.decoder, BodyDecoder::UntilClose) => return Ok(None),
                0 => return Err(HttpClientError::Broken),
                _ => {}
            }
        }
    }

    /// Returns the whole body.
    ///
    /// # Errors
    /// [`HttpClientError::Broken`]: the body is cut off, or longer than `longest` bytes.
    pub(super) async fn body(&mut self, longest: usize) -> Result<Bytes, HttpClientError> {
        let Some(first) = self.chunk().await? else { return Ok(Bytes::new()) };
        let mut body = BytesMut::from(first);
        while body.len() <= longest {
            let Some(piece) = self.chunk().await? else { return Ok(body.freeze()) };
            body.extend_from_slice(&piece);
        }
        Err(HttpClientError::Broken)
    }
}

/// Reads the bytes that are there, or waits for some; 0 is the end.
async fn read_more(
    connection: &mut Box<dyn Duplex>,
    received: &mut BytesMut,
    read_bytes: &mut usize,
) -> Result<usize, HttpClientError> {
    received.reserve(*read_bytes);
    let read = connection.read_buf(received).await.map_err(|_| HttpClientError::Broken)?;
    if read >= *read_bytes {
        *read_bytes = (*read_bytes * 2).min(MAX_READ_BYTES);
    }
    Ok(read)
}

fn to_wire(request: &Request<Bytes>) -> Result<Vec<u8>, HttpClientError> {
    let (method, body) = (request.method(), request.body());
    let path = request.uri().path_and_query().ok_or(HttpClientError::Broken)?;
    let mut wire = Vec::with_capacity(256 + body.len());
    write_request_line(&mut wire, method, "", path);
    for (name, value) in request.headers() {
        for piece in [name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"] {
            wire.extend_from_slice(piece);
        }
    }
    if !body.is_empty() || *method != Method::GET {
        wire.extend_from_slice(format!("{}: {}\r\n", header::CONTENT_LENGTH, body.len()).as_bytes());
    }
    wire.extend_from_slice(b"\r\n");
    wire.extend_from_slice(body);
    Ok(wire)
}

#[cfg(test)]
mod tests {
    use std::{io::Write as _, time::Duration};

    use rouse_testing::scripted_engine::scripted;
    use serde_json::json;
    use tokio::io::{DuplexStream, duplex};

    use super::super::HttpClient;
    use super::*;

    const LONG: Duration = Duration::from_secs(30);

    /// The outcome of a call to a server that sends these pieces and closes.
    async fn answered(pieces: Vec<Vec<u8>>) -> Result<(u16, Bytes), HttpClientError> {
        let address = scripted(move |mut stream, _| {
            for piece in &pieces {
                stream.write_all(piece).unwrap();
            }
        });
        let reply = HttpClient::new(address, None).get("/metrics", LONG).await?;
        Ok((reply.status, reply.body))
    }

    #[tokio::test]
    async fn a_body_arrives_whole_in_each_framing() {
        let large = vec![b'x'; 300_000];
        let sized = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", large.len()).into_bytes();
        assert_eq!(answered(vec![sized, large.clone()]).await, Ok((200, Bytes::from(large.clone()))));
        let until_close = b"HTTP/1.0 404 Not Found\r\n\r\n".to_vec();
        assert_eq!(answered(vec![until_close, large.clone()]).await, Ok((404, Bytes::from(large))));
        let chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n\
            3\r\none\r\n2\r\n, \r\n3\r\ntwo\r\n0\r\n\r\n";
        let bytewise = chunked.iter().map(|byte| vec![*byte]).collect();
        assert_eq!(answered(bytewise).await, Ok((200, Bytes::from_static(b"one, two"))));
        let empty = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n".to_vec();
        assert_eq!(answered(vec![empty]).await, Ok((204, Bytes::new())));
    }

    #[tokio::test]
    async fn a_response_that_is_cut_off_malformed_or_too_long_is_an_error() {
        let broken = Err(HttpClientError::Broken);
        assert_eq!(answered(vec![]).await, broken);
        assert_eq!(answered(vec![b"HTTP/1.1 200 OK\r\ncontent-".to_vec()]).await, broken);
        assert_eq!(answered(vec![b"SSH-2.0-OpenSSH_9.2\r\n".to_vec()]).await, broken);
        let short = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nab".to_vec();
        assert_eq!(answered(vec![short]).await, broken);
        let endless = vec![b"HTTP/1.1 200 OK\r\n\r\n".to_vec(), vec![b'x'; super::super::MAX_BODY_BYTES + 1]];
        assert_eq!(answered(endless).await, broken);
    }

    /// A response that begins with these bytes, and the half of its server, which can send more.
    async fn opened(sent: &str) -> (OneShotResponse, DuplexStream) {
        let (connection, mut server) = duplex(4096);
        server.write_all(sent.as_bytes()).await.unwrap();
        let request = Request::get("/metrics").body(Bytes::new()).unwrap();
        (OneShotResponse::open(Box::new(connection), request).await.unwrap(), server)
    }

    #[tokio::test]
    async fn a_body_of_known_length_ends_on_an_open_connection_before_the_bytes_after_it() {
        for framed in [
            "content-length: 8\r\n\r\none, two",
            "transfer-encoding: chunked\r\n\r\n5\r\none, \r\n3\r\ntwo\r\n0\r\n\r\n",
        ] {
            let (mut response, server) = opened(&format!("HTTP/1.1 200 OK\r\n{framed}HTTP/1.1 500")).await;
            assert_eq!(response.body(100).await, Ok(Bytes::from_static(b"one, two")), "{framed}");
            drop(server);
        }
    }

    #[tokio::test]
    async fn a_read_that_is_dropped_before_a_piece_arrives_loses_nothing() {
        let head = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
        let (mut response, mut server) = opened(&format!("{head}5\r\none, ")).await;
        assert_eq!(response.chunk().await, Ok(Some(Bytes::from_static(b"one, "))));
        server.write_all(b"\r\n3\r").await.unwrap();
        tokio::select! {
            biased;
            piece = response.chunk() => panic!("no piece has arrived: {piece:?}"),
            () = std::future::ready(()) => {}
        }
        server.write_all(b"\ntwo\r\n0\r\n\r\n").await.unwrap();
        assert_eq!(response.body(100).await, Ok(Bytes::from_static(b"two")));
    }

    #[tokio::test]
    async fn an_answer_counts_although_its_server_has_closed_without_reading_the_request() {
        let (connection, mut server) = duplex(4096);
        let answer = b"HTTP/1.1 413 Content Too Large\r\ncontent-length: 0\r\n\r\n";
        server.write_all(answer).await.unwrap();
        drop(server);
        let request = Request::post("/v1/gate").body(Bytes::from_static(b"{}")).unwrap();
        let response = OneShotResponse::open(Box::new(connection), request).await.unwrap();
        assert_eq!(response.status, 413);
    }

    #[tokio::test]
    async fn a_request_has_its_headers_and_the_length_of_its_body() {
        let (heard_tx, heard) = std::sync::mpsc::sync_channel(3);
        let address = scripted(move |mut stream, request| {
            heard_tx.send(request).unwrap();
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").unwrap();
        });
        let client = HttpClient::new(address, Some("secret".to_owned()));
        client.post("/v1/gate?x=y", Some(&json!({"a": 1})), LONG).await.unwrap();
        client.get("/health", LONG).await.unwrap();
        client.post("/v1/become-ready", None, LONG).await.unwrap();
        let host = format!("host: {address}\r\nconnection: close\r\nauthorization: Bearer secret\r\n");
        let heard: Vec<String> = (0..3).map(|_| String::from_utf8(heard.recv().unwrap()).unwrap()).collect();
        let typed = "content-type: application/json\r\n";
        let posted =
            format!("POST /v1/gate?x=y HTTP/1.1\r\n{host}{typed}content-length: 7\r\n\r\n{{\"a\":1}}");
        assert_eq!(heard[0], posted);
        assert_eq!(heard[1], format!("GET /health HTTP/1.1\r\n{host}\r\n"));
        assert_eq!(heard[2], format!("POST /v1/become-ready HTTP/1.1\r\n{host}content-length: 0\r\n\r\n"));
    }
}
