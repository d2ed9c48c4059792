use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};

use axum::http::Method;
use http_body_util::BodyExt as _;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpSocket},
    task::JoinHandle,
    time,
};
use tower_service::Service as _;

use super::*;

/// An engine that answers every connection with the configured status.
struct ProbedEngine {
    url: String,
    status: Arc<AtomicU16>,
    probe_count: Arc<AtomicUsize>,
    probe_check: Arc<Mutex<ProbeCheck>>,
    task: JoinHandle<()>,
}

/// A check that the engine makes at each probe, and its results.
type ProbeCheck = Option<(Box<dyn Fn() -> bool + Send>, Vec<bool>)>;

impl ProbedEngine {
    async fn start(status: u16) -> Self {
        Self::on(TcpListener::bind("127.0.0.1:0").await.unwrap(), status, "")
    }

    fn on(listener: TcpListener, status: u16, more: &'static str) -> Self {
        let url = format!("http://{}/health", listener.local_addr().unwrap());
        let status = Arc::new(AtomicU16::new(status));
        let probe_count = Arc::new(AtomicUsize::new(0));
        let at_asked = Arc::new(Mutex::new(ProbeCheck::None));
        let looks = Arc::clone(&at_asked);
        let (answers, count) = (Arc::clone(&status), Arc::clone(&probe_count));
        let task = tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let status = answers.load(Ordering::SeqCst);
                count.fetch_add(1, Ordering::SeqCst);
                if let Some((look, seen)) = &mut *looks.lock().unwrap() {
                    seen.push(look());
                }
                tokio::spawn(async move {
                    let mut head = [0; 1024];
                    let read = stream.read(&mut head).await.unwrap_or(0);
                    assert!(head[..read].starts_with(b"GET /health HTTP/1.1\r\n"));
                    let answer = format!("HTTP/1.1 {status} X\r\n{more}content-length: 2\r\n\r\nhi");
                    // The poller may have disconnected.
                    _ = stream.write_all(answer.as_bytes()).await;
                });
            }
        });
        Self { url, status, probe_count, probe_check: at_asked, task }
    }

    fn set(&self, status: u16) {
        self.status.store(status, Ordering::SeqCst);
    }
}

impl Drop for ProbedEngine {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn call(readiness: &Arc<Readiness>, method: Method, path: &str, body: &str) -> (u16, String) {
    let mut router = routes(Arc::clone(readiness), Arc::new(|_| Ok(())));
    let request = axum::http::Request::builder().method(method).uri(path);
    let response = router.call(request.body(axum::body::Body::from(body.to_owned())).unwrap()).await.unwrap();
    let status = response.status().as_u16();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8(body.to_vec()).unwrap())
}

async fn order(readiness: &Arc<Readiness>, url: &str, more: &str) {
    let body = format!("{{\"url\": \"{url}\"{more}}}");
    assert_eq!(call(readiness, Method::POST, READINESS_URL_PATH, &body).await, (200, "OK\n".to_owned()));
}

/// Waits until the readiness is `ready`, and returns how long that took.
async fn until(readiness: &Readiness, ready: bool) -> Duration {
    let began = Instant::now();
    while readiness.ready() != ready {
        assert!(began.elapsed() < Duration::from_secs(10), "not {ready}: {:?}", readiness.dump());
        time::sleep(Duration::from_millis(1)).await;
    }
    began.elapsed()
}

#[tokio::test]
async fn the_words_are_idempotent_and_a_thousand_flips_are_seen_in_order() {
    let readiness = Arc::new(Readiness::default());
    let ok = (200, "OK\n".to_owned());
    for flip in 1..=1000 {
        let ready = flip % 2 == 1;
        let path = if ready { BECOME_READY_PATH } else { BECOME_UNREADY_PATH };
        assert_eq!(call(&readiness, Method::POST, path, "").await, ok);
        assert_eq!(call(&readiness, Method::POST, path, "").await, ok);
        assert_eq!(readiness.ready(), ready);
        assert_eq!(readiness.dump().changes, flip);
    }
}

#[tokio::test]
async fn other_methods_are_told_which_are_allowed() {
    let readiness = Arc::new(Readiness::default());
    for (path, allowed) in
        [(BECOME_READY_PATH, "POST"), (BECOME_UNREADY_PATH, "POST"), (READINESS_URL_PATH, "POST,DELETE")]
    {
        let request = axum::http::Request::put(path).body(axum::body::Body::empty()).unwrap();
        let response = routes(Arc::clone(&readiness), Arc::new(|_| Ok(()))).call(request).await.unwrap();
        assert_eq!(
            (response.status().as_u16(), response.headers()["allow"].as_bytes()),
            (405, allowed.as_bytes())
        );
    }
}

#[tokio::test]
async fn an_order_that_makes_no_sense_is_refused_and_changes_nothing() {
    let readiness = Arc::new(Readiness::default());
    readiness.become_ready(true);
    for (body, why) in [
        ("", "the body is not"),
        ("{}", "missing field `url`"),
        ("{\"url\": \"http://10.0.0.1/\", \"every\": 1}", "unknown field `every`"),
        ("{\"url\": \"http://engine/\"}", "the url must have an IP address"),
        ("{\"url\": \"http://10.0.0.1/\", \"period\": 0}", "period must be from 1 ms to 1 h"),
        ("{\"url\": \"http://10.0.0.1/\", \"period\": \"2h\"}", "period must be from 1 ms to 1 h"),
        ("{\"url\": \"http://10.0.0.1/\", \"period\": -1}", "the body is not"),
        ("{\"url\": \"http://10.0.0.1/\", \"failureThreshold\": 0}", "failureThreshold must be 1 or more"),
    ] {
        let (status, text) = call(&readiness, Method::POST, READINESS_URL_PATH, body).await;
        assert_eq!(status, 400, "{body}");
        assert!(text.contains(why), "{body}: {text}");
    }
    assert_eq!(readiness.dump(), ReadinessDump { ready: true, changes: 1, poller: None });
}

#[tokio::test]
async fn an_engine_that_begins_to_listen_is_ready_within_20_ms() {
    let readiness = Arc::new(Readiness::default());
    // Bound but not listening: connections are refused, and no other process can take the port.
    let engine = TcpSocket::new_v4().unwrap();
    engine.bind(([127, 0, 0, 1], 0).into()).unwrap();
    let address = engine.local_addr().unwrap();
    order(&readiness, &format!("http://{address}/health"), "").await;
    while readiness.dump().poller.unwrap().failures < 5 {
        time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(readiness.dump().poller.unwrap().last.as_deref(), Some("no connection"));
    let engine = ProbedEngine::on(engine.listen(64).unwrap(), 200, "");
    let took = until(&readiness, true).await;
    assert!(took < Duration::from_millis(20), "{took:?}");
    assert_eq!(engine.probe_count.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn unready_comes_after_the_threshold_and_not_before() {
    let readiness = Arc::new(Readiness::default());
    let engine = ProbedEngine::start(503).await;
    order(&readiness, &engine.url, ", \"period\": 40, \"failureThreshold\": 3").await;
    while engine.probe_count.load(Ordering::SeqCst) < 3 {
        time::sleep(Duration::from_millis(1)).await;
    }
    assert!(!readiness.ready());
    engine.set(204);
    until(&readiness, true).await;

    // The engine records the readiness at each probe after its answers turned bad; the test itself might look a probe
    // too late.
    let shared_readiness = Arc::clone(&readiness);
    engine.set(500);
    *engine.probe_check.lock().unwrap() = Some((Box::new(move || shared_readiness.ready()), Vec::new()));
    let at_asked = || engine.probe_check.lock().unwrap().as_ref().unwrap().1.clone();
    while at_asked().len() < 4 {
        time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(at_asked()[..4], [true, true, true, false]);
    assert!(!readiness.ready());
    assert_eq!(readiness.dump().changes, 2);
}

#[tokio::test]
async fn a_thousand_flaps_of_the_engine_are_all_seen() {
    let readiness = Arc::new(Readiness::default());
    let engine = ProbedEngine::start(503).await;
    order(&readiness, &engine.url, ", \"period\": 1, \"failureThreshold\": 2").await;
    for flap in 1..=1000 {
        let ready = flap % 2 == 1;
        engine.set(if ready { 200 } else { 503 });
        until(&readiness, ready).await;
        assert_eq!(readiness.dump().changes, flap);
    }
}

#[tokio::test]
async fn a_redirection_is_no_good_answer_and_is_not_followed() {
    let readiness = Arc::new(Readiness::default());
    let good = ProbedEngine::start(200).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let location: &'static str = format!("location: {}\r\n", good.url).leak();
    let engine = ProbedEngine::on(listener, 307, location);
    order(&readiness, &engine.url, "").await;
    while engine.probe_count.load(Ordering::SeqCst) < 5 {
        time::sleep(Duration::from_millis(1)).await;
    }
    assert!(!readiness.ready());
    assert_eq!(good.probe_count.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn an_engine_that_accepts_and_says_nothing_or_nonsense_is_not_ready() {
    let readiness = Arc::new(Readiness::default());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    order(&readiness, &format!("http://{}/health", listener.local_addr().unwrap()), "").await;
    let (held, _) = listener.accept().await.unwrap();
    let last = || readiness.dump().poller.unwrap().last;
    while last().is_none() {
        time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(last().as_deref(), Some("timed out"));
    drop(held);
    let (mut stream, _) = listener.accept().await.unwrap();
    stream.write_all(b"SSH-2.0-OpenSSH\r\n\r\n").await.unwrap();
    while last().as_deref() != Some("the connection broke") {
        time::sleep(Duration::from_millis(5)).await;
    }
    // A head without an end is cut off.
    let (mut stream, _) = listener.accept().await.unwrap();
    stream.write_all(b"HTTP/1.1 200 OK\r\nx: ").await.unwrap();
    let mut sent = 0;
    while stream.write_all(&[b'a'; 4096]).await.is_ok() {
        sent += 4096;
        assert!(sent < 64 << 20, "it reads on and on");
    }
    assert!(!readiness.ready());
}

#[tokio::test]
async fn the_newest_order_holds() {
    let readiness = Arc::new(Readiness::default());
    let (first, second) = (ProbedEngine::start(200).await, ProbedEngine::start(503).await);
    order(&readiness, &first.url, ", \"period\": 5").await;
    until(&readiness, true).await;

    // The same endpoint again: still ready.
    order(&readiness, &first.url, ", \"period\": 5").await;
    assert!(readiness.ready());
    until(&readiness, true).await;
    assert_eq!(readiness.dump().changes, 1);

    // Another endpoint: unready at once, and the first is polled no more.
    order(&readiness, &second.url, ", \"period\": 5").await;
    assert!(!readiness.ready());
    while second.probe_count.load(Ordering::SeqCst) < 3 {
        time::sleep(Duration::from_millis(1)).await;
    }
    let probes_before = first.probe_count.load(Ordering::SeqCst);
    while second.probe_count.load(Ordering::SeqCst) < 10 {
        time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(first.probe_count.load(Ordering::SeqCst), probes_before);
    assert!(!readiness.ready());

    // An explicit order ends the poller.
    assert_eq!(call(&readiness, Method::POST, BECOME_READY_PATH, "").await.0, 200);
    assert!(readiness.ready());
    assert_eq!(readiness.dump().poller, None);

    second.set(200);
    order(&readiness, &second.url, ", \"period\": 5").await;
    until(&readiness, true).await;
    assert_eq!(call(&readiness, Method::DELETE, READINESS_URL_PATH, "").await, (200, "OK\n".to_owned()));
    assert!(!readiness.ready());
    assert_eq!(call(&readiness, Method::DELETE, READINESS_URL_PATH, "").await.0, 200);
    assert_eq!(readiness.dump().poller, None);
}

#[tokio::test]
async fn an_answer_to_an_order_that_was_replaced_is_not_noted() {
    let readiness = Arc::new(Readiness::default());
    let engine = ProbedEngine::start(200).await;
    order(&readiness, &engine.url, "").await;
    let order_seq = readiness.state().order_seq;
    readiness.become_ready(false);
    let now = Instant::now();
    assert_eq!(
        readiness.record_response(order_seq, &poll::PollResponse::Status(StatusCode::OK), now, now),
        None
    );
    assert!(!readiness.ready());
}
