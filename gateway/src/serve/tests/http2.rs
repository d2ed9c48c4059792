use super::*;

#[tokio::test]
async fn an_idle_connection_of_http2_is_told_that_it_ends() {
    let gateway = InProcessGateway::start(|_| {});
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
    let mut all = Vec::new();
    tokio::time::timeout(Duration::from_secs(12), stream.read_to_end(&mut all)).await.unwrap().unwrap();
    // A GOAWAY frame of eight bytes on the connection.
    assert!(all.windows(9).any(|frame| frame == b"\0\0\x08\x07\0\0\0\0\0"), "{all:?}");
}

/// Reads one HTTP/2 frame: its type, its stream and its payload.
async fn frame(stream: &mut TcpStream) -> Option<(u8, u32, Vec<u8>)> {
    let mut head = [0; 9];
    tokio::time::timeout(PROMPT_TIMEOUT * 200, stream.read_exact(&mut head))
        .await
        .expect("nothing came")
        .ok()?;
    let mut body = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
    stream.read_exact(&mut body).await.ok()?;
    Some((head[3], u32::from_be_bytes([head[5], head[6], head[7], head[8]]), body))
}

#[tokio::test]
async fn a_request_that_crosses_the_goodbye_of_an_idle_connection_of_http2_is_answered() {
    const GOAWAY: u8 = 7;
    const PING: u8 = 6;
    const HEADERS: u8 = 1;
    let gateway = InProcessGateway::start(|_| {});
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
    let (mut last, mut answered) = (Vec::new(), false);
    while let Some((kind, on, body)) = frame(&mut stream).await {
        match kind {
            GOAWAY if last.is_empty() => {
                assert_eq!(body[..4], 0x7fff_ffff_u32.to_be_bytes());
                // `GET /healthz`, sent before the client has read the GOAWAY.
                let block = b"\x82\x86\x04\x08/healthz\x41\x01x";
                let mut request = vec![0, 0, block.len() as u8, HEADERS, 5, 0, 0, 0, 1];
                request.extend_from_slice(block);
                stream.write_all(&request).await.unwrap();
                last = body;
            }
            GOAWAY => last = body,
            PING => {
                let mut pong = vec![0, 0, 8, PING, 1, 0, 0, 0, 0];
                pong.extend_from_slice(&body);
                stream.write_all(&pong).await.unwrap();
            }
            HEADERS => answered = on == 1,
            _ => {}
        }
    }
    assert!(answered);
    assert_eq!(last[..4], 1_u32.to_be_bytes(), "what was heard");
}

#[tokio::test]
async fn http2_without_negotiation_is_served_and_a_reset_stream_leaves_its_place() {
    let mut gateway = InProcessGateway::start(|_| {});
    let engine = CannedEngine::start(json_response("{\"a\":1}")).await;
    let gate = gateway.open_gate();
    let io = TokioIo::new(TcpStream::connect(gateway.address).await.unwrap());
    let (sender, connection) =
        hyper::client::conn::http2::handshake::<_, _, Full<Bytes>>(TokioExecutor::new(), io).await.unwrap();
    let driven = tokio::spawn(connection);
    let request = || {
        http::Request::post(format!("http://{}/v1/chat/completions", gateway.address))
            .body(Full::from("{\"model\":\"org/m\"}"))
            .unwrap()
    };
    let mut leaving = sender.clone();
    let abandoned = tokio::spawn(leaving.send_request(request()));
    let mut parked = gateway.parked.recv().await.unwrap();
    abandoned.abort();
    tokio::time::timeout(PROMPT_TIMEOUT, parked.answer.closed()).await.expect("still parked");
    gateway.set_endpoints(&[(engine.address, &gate)]);
    let response = sender.clone().send_request(request()).await.unwrap();
    assert_eq!(response.status(), 200);
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "{\"a\":1}");
    driven.abort();
}

/// A request body that begins and does not continue.
struct UnfinishedBody(Option<Bytes>);

impl hyper::body::Body for UnfinishedBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<hyper::body::Frame<Bytes>, Self::Error>>> {
        let first = self.0.take();
        first.map_or(std::task::Poll::Pending, |data| {
            std::task::Poll::Ready(Some(Ok(hyper::body::Frame::data(data))))
        })
    }
}

#[tokio::test]
async fn a_stream_of_http2_that_is_reset_during_its_body_is_a_client_that_left() {
    let mut gateway = InProcessGateway::start(|_| {});
    let io = TokioIo::new(TcpStream::connect(gateway.address).await.unwrap());
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake::<_, _, UnfinishedBody>(TokioExecutor::new(), io)
            .await
            .unwrap();
    let driven = tokio::spawn(connection);
    let request = http::Request::post(format!("http://{}/v1/completions", gateway.address));
    let begun = UnfinishedBody(Some(Bytes::from_static(b"{")));
    let abandoned = tokio::spawn(sender.send_request(request.body(begun).unwrap()));
    // A request that is reset before the gateway accepts it does not count.
    while gateway.loads.exchanges() != [1] {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    abandoned.abort();
    let ended = gateway.next_ended().await;
    assert_eq!(
        (ended.status, ended.code, ended.left_in_phase),
        (499, None, Some(DisconnectPhase::Connecting))
    );
    driven.abort();
}
