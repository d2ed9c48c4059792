//! Streams that a test holds open during an event.

use std::net::{Shutdown, TcpStream};

use futures_util::future::join_all;
use tokio::{sync::oneshot, task::JoinHandle};

use crate::{client::TestResponse, installation::ClusterGateway};

/// A running stream.
pub(crate) struct HeldClientStream {
    ended: JoinHandle<Option<TestResponse>>,
    socket: TcpStream,
}

impl HeldClientStream {
    /// Opens a stream, and returns once it has begun.
    pub(crate) async fn open(gateway: &ClusterGateway, model: &'static str, tokens: u32) -> Self {
        Self::open_until(gateway, model, tokens, "data: ").await
    }

    /// Opens a stream that an engine holds back after the head.
    pub(crate) async fn open_stalled(gateway: &ClusterGateway, model: &'static str, tokens: u32) -> Self {
        Self::open_until(gateway, model, tokens, "\r\n\r\n").await
    }

    async fn open_until(
        gateway: &ClusterGateway,
        model: &'static str,
        tokens: u32,
        received: &'static str,
    ) -> Self {
        let mut open = gateway.client().open_chat(model, true, tokens);
        let socket = open.socket().try_clone().unwrap();
        let (tell, begun) = oneshot::channel();
        let ended = tokio::task::spawn_blocking(move || {
            open.until(received);
            tell.send(()).unwrap();
            // The gateway may reset the connection, and the test may close it.
            while open.try_more().unwrap_or(false) {}
            TestResponse::parse(&open.received)
        });
        begun.await.unwrap();
        Self { ended, socket }
    }

    /// Opens `each` streams through each gateway.
    pub(crate) async fn open_each(
        gateways: &[ClusterGateway],
        model: &'static str,
        tokens: u32,
        each: usize,
    ) -> Vec<Self> {
        let all = gateways.iter().flat_map(|gateway| std::iter::repeat_n(gateway, each));
        join_all(all.map(|gateway| Self::open(gateway, model, tokens))).await
    }

    /// Waits for the end of the stream, and returns the answer.
    pub(crate) async fn finish(self) -> TestResponse {
        self.ended.await.unwrap().unwrap()
    }

    pub(crate) async fn finish_whole(self) {
        let answer = self.finish().await;
        assert!(answer.is_whole_stream(), "{answer:?}");
    }

    /// Disconnects, as a client that has read enough.
    pub(crate) async fn leave(self) {
        self.socket.shutdown(Shutdown::Both).unwrap();
        self.ended.await.unwrap();
    }
}
