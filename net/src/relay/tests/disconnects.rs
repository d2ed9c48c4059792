//! Clients that disconnect in every phase: the engine sees it at once, and nothing leaks.

use super::*;

const DROPS: usize = 100;

#[tokio::test]
async fn a_client_that_leaves_while_connecting_leaves_nothing() {
    let engine = ListeningEngine::start().await;
    let core = Core::new(engine.address());
    for _ in 0..DROPS {
        let observer = RecordingObserver::default();
        {
            let mut going = Box::pin(exchange(&core.pool, core.exchange_args(true, &observer)));
            assert!(poll_once(going.as_mut()).is_pending());
        }
        assert_eq!(observer.ends(), [ExchangeOutcome::ClientLeft(DisconnectPhase::Connecting)]);
        assert!(core.is_unused());
    }
    // The connections that the kernel had established are closed as well.
    while let Ok(Ok((socket, _))) = timeout(AT_ONCE, engine.0.accept()).await {
        Peer(socket).expect_close().await;
    }
}

#[tokio::test]
async fn a_client_that_leaves_while_the_engine_thinks_is_seen_leaving() {
    let engine = ListeningEngine::start().await;
    let core = Core::new(engine.address());
    for round in 0..DROPS {
        let observer = RecordingObserver::default();
        let mut peer = {
            let going = exchange(&core.pool, core.exchange_args(round % 2 == 0, &observer));
            let engine_side = async {
                let mut peer = engine.accept().await;
                peer.request().await;
                // Half of the clients disconnect inside the head.
                if round % 4 < 2 {
                    peer.write("HTTP/1.1 200 OK\r\ncontent-").await;
                }
                peer
            };
            tokio::select! {
                biased;
                _ = going => panic!("there was no answer"),
                peer = engine_side => peer,
            }
        };
        peer.expect_close().await;
        assert_eq!(observer.ends(), [ExchangeOutcome::ClientLeft(DisconnectPhase::Headers)]);
        assert!(core.is_unused());
    }
    assert!(core.pool.is_empty());
}

#[tokio::test]
async fn a_client_that_leaves_mid_stream_is_seen_leaving_though_no_token_flows() {
    let engine = ListeningEngine::start().await;
    let core = Core::new(engine.address());
    for round in 0..DROPS {
        let observer = RecordingObserver::default();
        let engine_side = async {
            let mut peer = engine.accept().await;
            peer.request().await;
            peer.write(EVENTS).await;
            peer.chunk("data: 1\n\n").await;
            peer
        };
        let (answer, mut peer) = tokio::join!(core.send(true, &observer), engine_side);
        let mut body = answer.unwrap().into_body();
        if round % 2 == 0 {
            frame(&mut body).await.unwrap().unwrap();
        }
        assert_eq!(core.gate.leases(), 1);
        drop(body);
        assert_eq!(observer.ends(), [ExchangeOutcome::ClientLeft(DisconnectPhase::Streaming)]);
        assert!(core.is_unused());
        peer.expect_close().await;
    }
    assert!(core.pool.is_empty());
}

#[tokio::test]
async fn a_client_that_leaves_while_its_body_is_being_sent_is_seen_leaving() {
    let engine = ListeningEngine::start().await;
    let core = Core::new(engine.address());
    for _ in 0..10 {
        let observer = RecordingObserver::default();
        let mut order = core.exchange_args(false, &observer);
        order.request.body = Bytes::from(vec![b'x'; 16 << 20]).into();
        let mut peer = tokio::select! {
            biased;
            _ = exchange(&core.pool, order) => panic!("there was no answer"),
            peer = async {
                let mut peer = engine.accept().await;
                assert_ne!(peer.0.read(&mut [0; 64]).await.unwrap(), 0);
                peer
            } => peer,
        };
        peer.expect_close().await;
        assert_eq!(observer.ends(), [ExchangeOutcome::ClientLeft(DisconnectPhase::Headers)]);
        assert!(core.is_unused());
    }
}
