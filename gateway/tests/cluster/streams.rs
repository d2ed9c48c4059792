//! Streams that a test holds open during an event.

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, TcpStream},
};

use futures_util::future::join_all;
use tokio::{sync::oneshot, task::JoinHandle};

use crate::{
    client::{TestResponse, chat_body, request},
    installation::ClusterGateway,
};

/// A running stream.
pub(crate) struct HeldClientStream {
    ended: JoinHandle<Option<TestResponse>>,
    socket: TcpStream,
}

impl HeldClientStream {
    /// Opens a stream, and returns once it has begun.
    pub(crate) async fn open(gateway: &ClusterGateway, model: &'static str, tokens: u32) -> Self {
        let mut socket = gateway.client().connect();
        let own = socket.try_clone().unwrap();
        let (tell, begun) = oneshot::channel();
        let mut tell = Some(tell);
        let ended = tokio::task::spawn_blocking(move || {
            let text = request("/v1/chat/completions", "", &chat_body(model, true, tokens));
            socket.write_all(text.as_bytes()).unwrap();
            let (mut bytes, mut room) = (Vec::new(), [0; 16 << 10]);
            while let Ok(n @ 1..) = socket.read(&mut room) {
                bytes.extend_from_slice(&room[..n]);
                if bytes.windows(6).any(|piece| piece == b"data: ")
                    && let Some(tell) = tell.take()
                {
                    tell.send(()).unwrap();
                }
            }
            TestResponse::parse(&bytes)
        });
        begun.await.unwrap();
        Self { ended, socket: own }
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
