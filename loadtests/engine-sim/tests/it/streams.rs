use std::io::Write;

use engine_sim::content;
use serde_json::{Value, json};

use crate::support::*;

#[test]
fn a_chat_stream_is_what_content_says() {
    let engine = start("--itl 1ms");
    let body = r#"{"model":"m","messages":[{"role":"system","content":"be brief"},{"role":"user","content":[{"type":"text","text":"hello"}]}],
        "max_completion_tokens":5,"stream":true,"seed":7,"stream_options":{"include_usage":true},"tools":[{"x":1}]}"#;
    let answer = engine.post(CHAT, body);
    assert_eq!(answer.find_header("content-type"), Some("text/event-stream; charset=utf-8"));
    assert!(answer.complete);
    assert_eq!(chat_text(&answer), content::text("m", "hello", 7, 5));
    let events = answer.events();
    let event = |i: usize| serde_json::from_str::<Value>(&events[i]).unwrap();
    assert_eq!(events.len(), 1 + 5 + 1 + 1);
    assert_eq!(event(0)["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    assert_eq!(event(4)["choices"][0]["finish_reason"], Value::Null);
    assert_eq!(event(5)["choices"][0]["finish_reason"], "length");
    assert_eq!(event(6)["choices"], json!([]));
    assert_eq!(event(6)["usage"], json!({"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9}));
    assert_eq!(events[7], "[DONE]");
    let counters = engine.counters();
    assert_eq!((&counters["finished"], &counters["generation_tokens"]), (&json!(1), &json!(5)));
    assert_eq!((&counters["running"], &counters["cached_tokens"]), (&json!(0), &json!(0)));
}

#[test]
fn whole_answers_and_streams_say_the_same() {
    let engine = start("--itl 0 --tokens 4");
    let expected = content::text("m", "hi", 0, 4);
    let chat = engine.post(CHAT, r#"{"model":"m","messages":[{"role":"user","content":"hi"}]}"#).json();
    assert_eq!(chat["choices"][0]["message"]["content"], *expected);
    assert_eq!(chat["choices"][0]["finish_reason"], "stop");
    let text = engine.post("/v1/completions", r#"{"model":"m","prompt":["hi","ho"],"n":2}"#).json();
    let texts: Vec<&Value> =
        text["choices"].as_array().unwrap().iter().map(|choice| &choice["text"]).collect();
    assert_eq!(texts.len(), 4);
    assert_eq!(*texts[0], *expected);
    assert_eq!(*texts[1], *content::text("m", "hi", 1, 4));
    assert_eq!(*texts[2], *content::text("m", "ho", 0, 4));
    let response =
        engine.post("/v1/responses", r#"{"model":"m","input":[{"role":"user","content":"hi"}]}"#).json();
    assert_eq!(response["output"][0]["content"][0]["text"], *expected);
    assert_eq!(response["status"], "completed");
}

#[test]
fn a_responses_stream_begins_with_created_and_counts_its_events() {
    let engine = start("--itl 0 --tokens 3");
    let answer = engine.post("/v1/responses", r#"{"model":"m","input":"hi","stream":true}"#);
    let events: Vec<Value> =
        answer.events().iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    let types: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(types[..2], ["response.created", "response.in_progress"]);
    assert_eq!(types.last(), Some(&"response.completed"));
    assert!(events.iter().enumerate().all(|(i, event)| event["sequence_number"] == i));
    let deltas: String = events.iter().filter_map(|event| event["delta"].as_str()).collect();
    assert_eq!(deltas, content::text("m", "hi", 0, 3));
    assert!(answer.text().starts_with("event: response.created\ndata: {"));
}

#[test]
fn embeddings_come_as_floats_and_as_base64() {
    let engine = start("");
    let floats = engine.post("/v1/embeddings", r#"{"model":"m","input":["a","b"],"dimensions":3}"#).json();
    let values = floats["data"][1]["embedding"].as_array().unwrap();
    let values: Vec<f32> = values.iter().map(|value| value.as_f64().unwrap() as f32).collect();
    assert_eq!(values, content::embedding("m", "b", 3));
    let coded =
        engine.post("/v1/embeddings", r#"{"model":"m","input":"b","encoding_format":"base64"}"#).json();
    assert_eq!(coded["data"][0]["embedding"].as_str().unwrap().len(), (8 * 4_usize).div_ceil(3) * 4);
    let huge = engine.post("/v1/embeddings", r#"{"model":"m","input":"a","dimensions":4611686018427387904}"#);
    assert_eq!((huge.status, &huge.json()["error"]["param"]), (400, &"dimensions".into()), "{}", huge.text());
    assert_eq!(engine.post("/v1/embeddings", "\u{feff}{\"model\":\"m\",\"input\":\"a\"}").status, 200);
}

#[test]
fn a_client_that_leaves_aborts_within_50_ms_in_every_phase() {
    let engine = start("--max-running 1 --ttft 0 --itl 60s");
    let abort = |client: std::net::TcpStream, before: u64| {
        let left = engine.counter("now_unix_us");
        drop(client);
        engine.wait_for_counter("aborts", before + 1);
        let took = engine.counter("last_abort_unix_us") - left;
        assert!(took < 50_000, "the abort took {took} us");
    };
    let streaming = open_stream(engine.addr, "a", 10);
    engine.wait_for_counter("generation_tokens", 1);
    let mut queued = connect(engine.addr);
    queued.write_all(request("POST", CHAT, &chat("b", 10, true), "").as_bytes()).unwrap();
    engine.wait_for_counter("waiting", 1);
    abort(queued, 0);
    abort(streaming, 1);
    engine.set(r#"{"long-prefill": "60s"}"#);
    let mut prefill = connect(engine.addr);
    prefill.write_all(request("POST", CHAT, &chat("c", 10, false), "").as_bytes()).unwrap();
    engine.wait_for_counter("running", 1);
    abort(prefill, 2);
    engine.wait_for_counter("running", 0);
    assert_eq!(engine.counter("cached_tokens"), 0);
}

#[test]
fn a_stream_without_pauses_does_not_hold_up_others() {
    let engine = start("--ttft 0 --itl 0");
    let endless = open_stream(engine.addr, "a", u64::MAX);
    let drain = std::thread::spawn({
        let mut endless = endless.try_clone().unwrap();
        move || std::io::copy(&mut endless, &mut std::io::sink())
    });
    for _ in 0..20 {
        assert_eq!(engine.get("/health").status, 200);
    }
    endless.shutdown(std::net::Shutdown::Both).unwrap();
    drain.join().unwrap().ok();
    engine.wait_for_counter("aborts", 1);
}

#[test]
fn more_requests_than_may_run_wait_and_are_gauged() {
    let engine = start("--max-running 1 --itl 20ms");
    let _first = open_stream(engine.addr, "a", 10);
    let mut second = connect(engine.addr);
    second.write_all(request("POST", CHAT, &chat("b", 2, true), "connection: close\r\n").as_bytes()).unwrap();
    engine.wait_for_counter("waiting", 1);
    let metrics = engine.get("/metrics").text();
    assert!(metrics.contains("vllm:num_requests_running{engine=\"0\",model_name=\"m\"} 1.0"), "{metrics}");
    assert!(metrics.contains("vllm:num_requests_waiting{engine=\"0\",model_name=\"m\"} 1.0"), "{metrics}");
    assert_eq!(chat_text(&read(&mut second)), content::text("m", "b", 0, 2));
}

#[test]
fn requests_are_refused_as_by_vllm() {
    let engine = start("--api-key secret");
    assert_eq!(engine.post(CHAT, &chat("a", 1, false)).status, 401);
    let engine = start("");
    let unknown = engine.post(CHAT, r#"{"model":"x","messages":[{"content":"a"}]}"#);
    assert_eq!(unknown.status, 404);
    assert_eq!(unknown.json()["error"]["message"], "The model `x` does not exist.");
    assert_eq!(unknown.json()["error"]["type"], "NotFoundError");
    for bad in ["{", "[]", r#"{"model":"m"}"#, r#"{"model":"m","messages":[]}"#] {
        let answer = engine.post(CHAT, bad);
        assert_eq!((answer.status, &answer.json()["error"]["code"]), (400, &json!(400)), "{bad}");
    }
    assert_eq!(engine.get(CHAT).status, 405);
    assert_eq!(engine.get("/nothing").json(), json!({"detail": "Not Found"}));
    assert_eq!(engine.counter("running"), 0);
}

#[test]
fn tokens_go_there_and_back() {
    let engine = start("");
    let tokens = engine.post("/tokenize", r#"{"model":"m","prompt":"hello there"}"#).json();
    assert_eq!(tokens["count"], 3);
    let text = engine.post("/detokenize", &json!({"model": "m", "tokens": tokens["tokens"]}).to_string());
    assert_eq!(text.json()["prompt"], "hello there");
}

#[test]
fn the_first_name_is_shown_whatever_was_asked() {
    let engine = start("--model other");
    let models = engine.get("/v1/models").json();
    assert_eq!((&models["data"][0]["id"], &models["data"][1]["id"]), (&json!("m"), &json!("other")));
    let body = r#"{"model":"other","prompt":"a","max_tokens":2}"#;
    let answer = engine.post("/v1/completions", body).json();
    assert_eq!(answer["model"], "m");
    assert_eq!(answer["choices"][0]["text"], *content::text("m", "a", 0, 2));
}

#[test]
fn metrics_go_by_vllms_names() {
    let engine = start("--ttft 20ms --itl 10ms");
    engine.post(CHAT, &chat("a", 3, true));
    let metrics = engine.get("/metrics").text();
    let value = |name: &str| -> f64 {
        let line = metrics
            .lines()
            .find(|l| l.starts_with(&format!("vllm:{name}{{")))
            .unwrap_or_else(|| panic!("{name}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    assert_eq!((value("generation_tokens_total"), value("prompt_tokens_total")), (3.0, 1.0));
    assert_eq!((value("request_success_total"), value("kv_cache_usage_perc")), (1.0, 0.0));
    assert_eq!(value("inter_token_latency_seconds_count"), 2.0);
    assert!(value("time_to_first_token_seconds_sum") >= 0.02);
    // Tokens are paced from the start, so a late first token shortens the first gap.
    assert!(value("inter_token_latency_seconds_sum") >= 0.01);
    assert!(metrics.contains(
        "vllm:cache_config_info{engine=\"0\",model_name=\"m\",block_size=\"16\",num_gpu_blocks=\""
    ));
}
