use tokio::{
    io::AsyncWriteExt,
    net::{TcpListener, TcpStream},
};

use super::*;
use crate::http::testing::InProcessGateway;

mod streams;

#[tokio::test]
async fn frames_that_are_none_and_floods_of_resets_break_http2_and_leaving_does_not() {
    let stream = |n: u8, reset: bool| {
        // `GET / HTTP/2`, ended with its head, and optionally reset at once.
        let mut frames = vec![0, 0, 6, 1, 5, 0, 0, 0, 2 * n + 1, 0x82, 0x84, 0x86, 0x41, 0x01, b'x'];
        if reset {
            frames.extend([0, 0, 4, 3, 0, 0, 0, 0, 2 * n + 1, 0, 0, 0, 8]);
        }
        frames
    };
    let flood: Vec<u8> = (0..127).flat_map(|n| stream(n, true)).collect();
    let data_on_no_stream = [0, 0, 1, 0, 0, 0, 0, 0, 0, b'x'].to_vec();
    let goaway_of_the_client = [0, 0, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1].to_vec();
    for (sent, breaks) in
        [(data_on_no_stream, true), (flood, true), (stream(0, false), false), (goaway_of_the_client, false)]
    {
        let (mut client, server) = tokio::io::duplex(1 << 16);
        client.write_all(HTTP2_PREFACE).await.unwrap();
        client.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await.unwrap();
        client.write_all(&sent).await.unwrap();
        client.shutdown().await.unwrap();
        let service = service_fn(async |_| Ok::<_, Infallible>(Response::new(String::new())));
        let served = http2::Builder::new(hyper_util::rt::TokioExecutor::new())
            .max_pending_accept_reset_streams(8)
            .serve_connection(TokioIo::new(server), service)
            .await;
        assert_eq!(served.as_ref().is_err_and(is_http2_violation), breaks, "{served:?} after {sent:?}");
    }
}

#[tokio::test]
async fn a_head_behind_an_answer_that_is_not_out_is_not_timed_out_but_its_client_cut() {
    let gateway = InProcessGateway::start(|_| {});
    let limits = ConnectionLimits::from(&gateway.config.load().limits);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let socket = ClientSocket::new(listener.accept().await.unwrap().0, ShutdownStage::Serving);
    client.write_all(b"GET /").await.unwrap();
    assert!(!poll_fn(|cx| socket.poll_starts_with(cx, HTTP2_PREFACE)).await.unwrap());
    let watch = ConnectionDeadlines::new(&limits, &socket);
    assert!(matches!(watch.idle_deadline().1, ConnectionEnd::SlowHead));
    poll_fn(|cx| {
        while socket.poll_write(cx, &[0; 1 << 16]).is_ready() {}
        Poll::Ready(())
    })
    .await;
    assert!(matches!(watch.idle_deadline().1, ConnectionEnd::Stalled));
}
