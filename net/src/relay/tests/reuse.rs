//! Kept-alive connections: which one is reused, and what happens when it was closed meanwhile.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use super::*;
use crate::{
    backend_origin::{BackendTls, Duplex, TlsHandshake},
    tcp::Tcp,
};

const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

fn closed(begun: bool) -> Fault {
    Fault::EngineClosedConnection { model: "m".into(), may_have_started: begun }
}

async fn served(core: &Core, observer: &RecordingObserver, peer: &mut Peer) {
    let (text, ()) = tokio::join!(whole(core, observer), answer(peer, OK));
    assert_eq!(text, "ok");
}

async fn whole(core: &Core, observer: &RecordingObserver) -> String {
    let mut body = core.send(false, observer).await.unwrap().into_body();
    let (text, end) = drain(&mut body).await;
    assert_eq!(end, Ok(()));
    text
}

async fn answer(peer: &mut Peer, text: &str) {
    peer.request().await;
    peer.write(text).await;
}

/// Opens two connections, and uses the second one last.
async fn two(core: &Core, engine: &ListeningEngine, observer: &RecordingObserver) -> (Peer, Peer) {
    let one_by_one = async {
        let (mut first, mut second) = (engine.accept().await, engine.accept().await);
        answer(&mut first, OK).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
        answer(&mut second, OK).await;
        (first, second)
    };
    let (_, _, peers) = tokio::join!(whole(core, observer), whole(core, observer), one_by_one);
    assert_eq!(core.pool.len(), 2);
    peers
}

#[tokio::test]
async fn the_connection_used_last_is_used_next() {
    let engine = ListeningEngine::start().await;
    let core = Core::new(engine.address());
    let observer = RecordingObserver::default();
    let (_first, mut second) = two(&core, &engine, &observer).await;
    for _ in 0..3 {
        served(&core, &observer, &mut second).await;
    }
    assert_eq!(core.pool.len(), 2);
}

#[tokio::test]
async fn a_connection_that_was_closed_while_idle_is_passed_over() {
    let engine = ListeningEngine::start().await;
    let core = Core::new(engine.address());
    let observer = RecordingObserver::default();
    let (mut first, second) = two(&core, &engine, &observer).await;
    drop(second);
    tokio::time::sleep(Duration::from_millis(20)).await;
    served(&core, &observer, &mut first).await;
    assert_eq!(observer.0.borrow().replays, 0);
}

#[tokio::test]
async fn a_reused_connection_that_gives_no_byte_is_replayed_once_on_a_new_one() {
    let engine = ListeningEngine::start().await;
    let core = Core::new(engine.address());
    let observer = RecordingObserver::default();
    let (first, mut second) = two(&core, &engine, &observer).await;
    // The engine closes in the instant the connection is picked: after the request was sent.
    let engine_side = async {
        second.request().await;
        drop(second);
        let mut fresh = engine.accept().await;
        answer(&mut fresh, OK).await;
    };
    let (text, ()) = tokio::join!(whole(&core, &observer), engine_side);
    assert_eq!(text, "ok");
    assert_eq!(observer.0.borrow().replays, 1);
    assert_eq!(
        observer.ends(),
        [ExchangeOutcome::Complete, ExchangeOutcome::Complete, ExchangeOutcome::Complete]
    );
    drop(first);
}

#[tokio::test]
async fn the_replay_is_spent_on_a_new_connection_only_and_only_once() {
    let engine = ListeningEngine::start().await;
    let core = Core::new(engine.address());
    let observer = RecordingObserver::default();
    let (first, mut second) = two(&core, &engine, &observer).await;
    let engine_side = async {
        second.request().await;
        drop(second);
        engine.accept().await.request().await;
    };
    let (failed, ()) = tokio::join!(core.send(false, &observer), engine_side);
    let failed = failed.unwrap_err();
    assert_eq!((failed.fault, failed.reroutable), (closed(false), false));
    assert_eq!(observer.0.borrow().replays, 1);
    assert!(core.is_unused());
    drop(first);
}

#[tokio::test]
async fn what_an_engine_has_had_for_seconds_is_sent_no_second_time() {
    let engine = ListeningEngine::start().await;
    let core = Core::new(engine.address());
    let observer = RecordingObserver::default();
    let (first, mut second) = two(&core, &engine, &observer).await;
    let engine_side = async {
        second.request().await;
        drop(second);
    };
    let mut order = core.exchange_args(false, &observer);
    order.now = Instant::now().checked_sub(Duration::from_secs(3)).expect("the machine is older than that");
    let (failed, ()) = tokio::join!(exchange(&core.pool, order), engine_side);
    let failed = failed.unwrap_err();
    assert_eq!((failed.fault, failed.begun), (closed(true), true));
    assert_eq!(observer.0.borrow().replays, 0);
    drop(first);
}

/// The engine read the request and died of it. Another engine would, too.
#[tokio::test]
async fn what_an_engine_has_read_may_not_go_elsewhere_though_it_cannot_be_reached_again() {
    let engine = ListeningEngine::start().await;
    let core = Core::new(engine.address());
    let observer = RecordingObserver::default();
    let (first, mut second) = two(&core, &engine, &observer).await;
    let engine_side = async {
        second.request().await;
        drop((engine, first, second));
    };
    let (failed, ()) = tokio::join!(core.send(true, &observer), engine_side);
    let failed = failed.unwrap_err();
    assert_eq!((failed.fault, failed.reroutable), (closed(false), false));
    assert_eq!(observer.0.borrow().replays, 1);
}

#[tokio::test]
async fn after_one_byte_nothing_is_replayed() {
    let engine = ListeningEngine::start().await;
    let core = Core::new(engine.address());
    let observer = RecordingObserver::default();
    let (first, mut second) = two(&core, &engine, &observer).await;
    let engine_side = async {
        answer(&mut second, "H").await;
        drop(second);
    };
    let (failed, ()) = tokio::join!(core.send(false, &observer), engine_side);
    assert_eq!(failed.unwrap_err().fault, closed(true));
    assert_eq!(observer.0.borrow().replays, 0);
    drop(first);
}

#[tokio::test]
async fn another_life_at_the_same_address_shares_no_connection() {
    let engine = ListeningEngine::start().await;
    let mut core = Core::new(engine.address());
    let observer = RecordingObserver::default();
    let mut peer = async {
        let (_, peer) = tokio::join!(whole(&core, &observer), async {
            let mut peer = engine.accept().await;
            answer(&mut peer, OK).await;
            peer
        });
        peer
    }
    .await;
    core.target.generation = Generation(2);
    let (_, ()) = tokio::join!(whole(&core, &observer), async {
        answer(&mut engine.accept().await, OK).await;
    });
    assert_eq!(core.pool.len(), 2);
    drop(core);
    peer.expect_close().await;
}

#[tokio::test]
async fn idle_connections_are_closed_by_this_side_and_before_the_engine_does() {
    assert!(pool::DEFAULT_IDLE_TIMEOUT < Millis::secs(5));
    let engine = ListeningEngine::start().await;
    let mut core = Core::new(engine.address());
    core.pool = ConnectionPool::new(Millis(60), 8);
    let observer = RecordingObserver::default();
    let expire = core.pool.clone();
    let watched = async {
        let (_, mut peer) = tokio::join!(whole(&core, &observer), async {
            let mut peer = engine.accept().await;
            answer(&mut peer, OK).await;
            peer
        });
        assert_eq!(core.pool.len(), 1);
        tokio::time::sleep(Duration::from_millis(60)).await;
        peer.expect_close().await;
        assert!(core.pool.is_empty());
    };
    tokio::select! {
        () = expire.expire() => panic!("it never returns"),
        () = watched => {}
    }
}

#[tokio::test]
async fn an_engine_keeps_no_more_than_its_share_of_connections() {
    let engine = ListeningEngine::start().await;
    let mut core = Core::new(engine.address());
    core.pool = ConnectionPool::new(pool::DEFAULT_IDLE_TIMEOUT, 1);
    let observer = RecordingObserver::default();
    let engine_side = async {
        let (mut first, mut second) = (engine.accept().await, engine.accept().await);
        answer(&mut first, OK).await;
        answer(&mut second, OK).await;
    };
    tokio::join!(whole(&core, &observer), whole(&core, &observer), engine_side);
    assert_eq!(core.pool.len(), 1);
}

/// Fake TLS that counts how often the relay secures a connection.
#[derive(Debug, Default)]
struct CountingTls(AtomicUsize);

impl BackendTls for CountingTls {
    fn handshake(&self, connection: Tcp) -> TlsHandshake {
        self.0.fetch_add(1, Relaxed);
        Box::pin(async move { Ok(Box::new(connection) as Box<dyn Duplex>) })
    }
}

#[tokio::test]
async fn a_backend_has_a_name_a_path_and_connections_of_its_own() {
    let engine = ListeningEngine::start().await;
    let (seen, tls) = (RecordingObserver::default(), Arc::new(CountingTls::default()));
    let of = |host: &str| {
        let mut core = Core::new(engine.address());
        let tls: Arc<dyn BackendTls> = tls.clone();
        core.target.origin = Some(Arc::new(BackendOrigin::new(host, "/team", Some(tls))));
        core
    };
    let (one, mut two) = (of("one.example"), of("two.example"));
    two.pool = one.pool.clone();
    let fresh = async || {
        let mut peer = engine.accept().await;
        let request = peer.request().await;
        peer.write(OK).await;
        (peer, request)
    };
    let (_, (mut peer, request)) = tokio::join!(whole(&one, &seen), fresh());
    assert!(request.starts_with("POST /team/v1/chat/completions?x=1 HTTP/1.1\r\n"), "{request}");
    assert!(request.contains("\r\nhost: one.example\r\n"), "{request}");
    served(&one, &seen, &mut peer).await;
    assert_eq!(tls.0.load(Relaxed), 1, "it is kept as any other");
    let (_, (_second, request)) = tokio::join!(whole(&two, &seen), fresh());
    assert!(
        request.contains("\r\nhost: two.example\r\n"),
        "the same address, and not the same server: {request}"
    );
    drop(peer);
    tokio::time::sleep(Duration::from_millis(20)).await;
    let (_, (_third, _)) = tokio::join!(whole(&one, &seen), fresh());
    assert_eq!((tls.0.load(Relaxed), seen.0.borrow().replays), (3, 0), "that it was closed is seen");
}
