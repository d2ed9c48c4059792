//! Each kind's calls, against a scripted engine on a real socket.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    sync::{Arc, Mutex},
};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Response, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use rouse_testing::port::ReservedPort;
use tokio::{net::TcpListener, time::Instant};

use super::*;
use rouse::{engine::SLEEP_DENIAL_TIMEOUT, model::SleepLevel};

const WITHIN: Duration = Duration::from_secs(5);

/// Answers each `METHOD /path` of its table with 200, and all other requests with 404. An answer `NNN` is a status. An
/// entry `METHOD /path after CALL` takes precedence once CALL was made. Records all requests with their bodies.
struct FakeEngine {
    address: SocketAddr,
    asked: Arc<Mutex<Vec<String>>>,
}

impl FakeEngine {
    async fn new(answers: &[(&'static str, &'static str)]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let asked = Arc::<Mutex<Vec<String>>>::default();
        let answers: Arc<BTreeMap<_, _>> = Arc::new(answers.iter().copied().collect());
        let recorded = Arc::clone(&asked);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (answers, recorded) = (Arc::clone(&answers), Arc::clone(&recorded));
                let answer = service_fn(move |request: hyper::Request<Incoming>| {
                    let (answers, recorded) = (Arc::clone(&answers), Arc::clone(&recorded));
                    async move {
                        let endpoint = format!("{} {}", request.method(), request.uri());
                        let body = request.into_body().collect().await.unwrap().to_bytes();
                        let body = String::from_utf8_lossy(&body);
                        let mut recorded = recorded.lock().unwrap();
                        recorded.push(format!("{endpoint} {body}").trim_end().to_owned());
                        let before = |path: &str| recorded.iter().any(|call| call.starts_with(path));
                        let later = answers.iter().find(|(key, _)| {
                            key.split_once(" after ")
                                .is_some_and(|(key, path)| key == endpoint && before(path))
                        });
                        let answer =
                            later.map(|(_, answer)| answer).or_else(|| answers.get(endpoint.as_str()));
                        let answer = answer.copied().unwrap_or("404");
                        let status = answer.parse().unwrap_or(200_u16);
                        let body = Full::new(Bytes::from_static(answer.as_bytes()));
                        Ok::<_, Infallible>(Response::builder().status(status).body(body).unwrap())
                    }
                });
                tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), answer));
            }
        });
        Self { address, asked }
    }

    fn adapter(&self, kind: EngineKind, sleep: SleepApi, task: ProbeTask) -> Adapter {
        let manner = EngineProfile { kind, sleep, served_name: "org/m".to_owned(), task, api_key: None };
        Adapter::new(manner, self.address)
    }

    fn vllm(&self) -> Adapter {
        self.adapter(EngineKind::Vllm, SleepApi::Vllm, ProbeTask::Generate)
    }

    fn asked(&self) -> Vec<String> {
        std::mem::take(&mut self.asked.lock().unwrap())
    }
}

#[tokio::test]
async fn vllm_sleeps_once_its_counters_are_still_and_wakes_from_level_2_in_four_steps() {
    let engine = FakeEngine::new(&[
        ("GET /metrics", "vllm:num_requests_running{a=\"b\"} 0.0\n"),
        ("POST /sleep?level=2&mode=wait", "ok"),
        ("GET /is_sleeping", r#"{"is_sleeping": true}"#),
        ("POST /wake_up?tags=weights", "ok"),
        ("POST /collective_rpc", "ok"),
        ("POST /wake_up?tags=kv_cache", "ok"),
        ("POST /reset_prefix_cache", "ok"),
    ])
    .await;
    assert_eq!(engine.vllm().sleep(SleepLevel::Two).await, Ok(()));
    assert_eq!(engine.asked(), ["GET /metrics", "POST /sleep?level=2&mode=wait", "GET /is_sleeping"]);
    assert_eq!(engine.vllm().wake(SleepLevel::Two).await, Ok(()));
    assert_eq!(
        engine.asked(),
        [
            "POST /wake_up?tags=weights",
            r#"POST /collective_rpc {"method":"reload_weights"}"#,
            "POST /wake_up?tags=kv_cache",
            "POST /reset_prefix_cache",
        ]
    );
}

#[tokio::test]
async fn an_engine_that_still_works_is_not_put_to_sleep() {
    let busy = [("GET /metrics", "vllm:num_requests_running 1.0\n"), ("POST /sleep?level=1&mode=wait", "ok")];
    let engine = FakeEngine::new(&busy).await;
    assert_eq!(engine.vllm().sleep(SleepLevel::One).await, Err(FailureCause::Refused));
    assert!(!engine.asked().iter().any(|call| call.contains("/sleep")));
}

/// vLLM's gauges stay up after its last requests were aborted, until its next step.
#[tokio::test]
async fn an_engine_whose_counters_are_stuck_is_asked_for_a_token_and_then_put_to_sleep() {
    let engine = FakeEngine::new(&[
        ("GET /metrics", "vllm:num_requests_running 3.0\n"),
        ("GET /metrics after POST /v1/chat", "vllm:num_requests_running 0.0\n"),
        ("POST /v1/chat/completions", "ok"),
        ("POST /sleep?level=1&mode=wait", "ok"),
    ])
    .await;
    assert_eq!(engine.vllm().sleep(SleepLevel::One).await, Ok(()));
}

const TAKES: (&str, &str) = ("POST /sleep?level=1&mode=wait", "ok");
const DENIES: (&str, &str) = ("GET /is_sleeping", r#"{"is_sleeping": false}"#);
const ASLEEP: &str = r#"{"is_sleeping": true}"#;

#[tokio::test]
async fn an_engine_that_says_for_long_enough_that_it_is_awake_does_not_fall_asleep() {
    let engine = FakeEngine::new(&[TAKES, DENIES]).await;
    let began = Instant::now();
    assert_eq!(engine.vllm().sleep(SleepLevel::One).await, Err(FailureCause::SleepDenied));
    assert!(began.elapsed() >= SLEEP_DENIAL_TIMEOUT.duration(), "{:?}", began.elapsed());
}

#[tokio::test]
async fn an_engine_that_took_the_order_and_cannot_tell_counts_as_asleep() {
    for answer in ["404", "500", "not json", "{}"] {
        let engine = FakeEngine::new(&[TAKES, ("GET /is_sleeping", answer)]).await;
        assert_eq!(engine.vllm().sleep(SleepLevel::One).await, Ok(()), "{answer}");
    }
}

/// An engine that gives no answer is neither asleep nor awake: only its own report that it sleeps ends the wait.
#[tokio::test]
async fn an_engine_that_denied_and_then_says_nothing_is_asleep_once_it_says_so() {
    let later =
        [("GET /is_sleeping after POST /falls", "503"), ("GET /is_sleeping after POST /asleep", ASLEEP)];
    let engine = FakeEngine::new(&[TAKES, DENIES, later[0], later[1]]).await;
    let adapter = engine.vllm();
    let sleeping = tokio::spawn(async move { adapter.sleep(SleepLevel::One).await });
    let asked = || engine.asked.lock().unwrap().iter().filter(|call| *call == DENIES.0).count();
    while asked() == 0 {
        tokio::task::yield_now().await;
    }
    let client = HttpClient::new(engine.address, None);
    client.post("/falls", None, WITHIN).await.unwrap();
    tokio::time::sleep(SLEEP_DENIAL_TIMEOUT.duration() + Duration::from_millis(300)).await;
    assert!(asked() > 2 && !sleeping.is_finished());
    client.post("/asleep", None, WITHIN).await.unwrap();
    assert_eq!(sleeping.await.unwrap(), Ok(()));
}

#[tokio::test]
async fn a_wake_that_fails_half_way_goes_no_further() {
    let engine =
        FakeEngine::new(&[("POST /wake_up?tags=weights", "ok"), ("POST /collective_rpc", "500")]).await;
    assert_eq!(engine.vllm().wake(SleepLevel::Two).await, Err(FailureCause::Refused));
    assert_eq!(engine.asked().len(), 2);
}

#[tokio::test]
async fn sglang_gives_its_memory_back_and_reads_its_weights_again() {
    let engine = FakeEngine::new(&[
        ("POST /flush_cache", "ok"),
        ("POST /release_memory_occupation", "ok"),
        ("POST /resume_memory_occupation", "ok"),
        ("GET /get_model_info", r#"{"model_path": "/models/m"}"#),
        ("POST /update_weights_from_disk", "ok"),
    ])
    .await;
    let adapter = engine.adapter(EngineKind::Sglang, SleepApi::Sglang, ProbeTask::Generate);
    assert_eq!(adapter.sleep(SleepLevel::Two).await, Ok(()));
    engine.asked();
    assert_eq!(adapter.wake(SleepLevel::Two).await, Ok(()));
    assert_eq!(
        engine.asked(),
        [
            r#"POST /resume_memory_occupation {"tags":["weights"]}"#,
            "GET /get_model_info",
            r#"POST /update_weights_from_disk {"model_path":"/models/m"}"#,
            r#"POST /resume_memory_occupation {"tags":["kv_cache"]}"#,
        ]
    );
}

#[tokio::test]
async fn an_engine_without_sleep_calls_is_not_asked_for_any() {
    let engine = FakeEngine::new(&[]).await;
    let adapter = engine.adapter(EngineKind::LlamaCpp, SleepApi::None, ProbeTask::Generate);
    assert_eq!(adapter.sleep(SleepLevel::One).await, Err(FailureCause::Refused));
    assert_eq!(adapter.wake(SleepLevel::One).await, Err(FailureCause::Refused));
    assert_eq!(engine.asked(), [""; 0]);
}

#[tokio::test]
async fn a_list_of_models_is_health_enough_where_there_is_no_health_route() {
    let engine = FakeEngine::new(&[("GET /v1/models", r#"{"data": [{"id": "x.gguf"}]}"#)]).await;
    let llama = engine.adapter(EngineKind::LlamaCpp, SleepApi::None, ProbeTask::Generate);
    assert_eq!(llama.health(WITHIN).await, EngineHealth::Healthy);
    assert_eq!(llama.check_served_name(WITHIN).await, Ok(()));
    assert_eq!(engine.vllm().health(WITHIN).await, EngineHealth::Unhealthy);
    let wrong = engine.vllm().check_served_name(WITHIN).await.unwrap_err();
    assert_eq!(wrong.to_string(), "wrong_model: the engine serves 'x.gguf', the configuration says 'org/m'");
}

#[tokio::test]
async fn the_probe_falls_back_to_plain_completions_and_asks_what_the_task_is() {
    let engine =
        FakeEngine::new(&[("POST /v1/chat/completions", "400"), ("POST /v1/completions", "ok")]).await;
    assert_eq!(engine.vllm().probe(WITHIN).await, CanaryVerdict::Passed);
    assert_eq!(engine.asked().len(), 2);
    for (task, path) in [(ProbeTask::Embed, "POST /v1/embeddings"), (ProbeTask::Score, "POST /score")] {
        let adapter = engine.adapter(EngineKind::Vllm, SleepApi::None, task);
        assert_eq!(adapter.probe(WITHIN).await, CanaryVerdict::Passed);
        assert!(engine.asked()[0].starts_with(path));
    }
}

#[tokio::test]
async fn a_probe_fails_by_a_5xx_a_silent_engine_or_none() {
    let engine = FakeEngine::new(&[("POST /v1/chat/completions", "503")]).await;
    assert_eq!(engine.vllm().probe(WITHIN).await, CanaryVerdict::Failed(FailureCause::Unhealthy));
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = silent.local_addr().unwrap();
    let at = |address| FakeEngine { address, asked: Arc::default() }.vllm();
    assert_eq!(
        at(address).probe(Duration::from_millis(50)).await,
        CanaryVerdict::Failed(FailureCause::Timeout)
    );
    drop(silent);
    assert_eq!(at(address).probe(WITHIN).await, CanaryVerdict::Failed(FailureCause::Unreachable));
}

#[tokio::test]
async fn an_engine_without_metrics_differs_from_one_whose_answer_fails() {
    let load = EngineLoad { waiting: Some(3.0), ..EngineLoad::default() };
    for (answer, expected) in [
        ("vllm:num_requests_waiting 3\n", LoadAnswer::Known(load)),
        ("process_cpu_seconds_total 7\n", LoadAnswer::NoMetrics),
        ("<html></html>", LoadAnswer::NoMetrics),
        ("404", LoadAnswer::NoMetrics),
        ("501", LoadAnswer::NoMetrics),
        ("vllm:num_requests_waiting NaN\n", LoadAnswer::Failed),
        ("429", LoadAnswer::Failed),
        ("503", LoadAnswer::Failed),
    ] {
        let engine = FakeEngine::new(&[("GET /metrics", answer)]).await;
        assert_eq!(engine.vllm().load_answer(WITHIN).await, expected, "{answer}");
        assert_eq!(engine.vllm().load(WITHIN).await, expected.load(), "{answer}");
    }
    let nobody = ReservedPort::bind();
    let refused = FakeEngine { address: nobody.address(), asked: Arc::default() };
    assert_eq!(refused.vllm().load_answer(WITHIN).await, LoadAnswer::Failed);
}
