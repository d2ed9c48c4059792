//! Every API except chat, and chat's outputs other than text.

use std::io::Write;

use engine_sim::content;
use serde_json::{Value, json};

use crate::support::*;

const MESSAGES: &str = "/v1/messages";
const RESPONSES: &str = "/v1/responses";

fn parsed(answer: &TestResponse) -> Vec<Value> {
    let events = answer.events();
    events
        .iter()
        .filter(|event| *event != "[DONE]")
        .map(|event| serde_json::from_str(event).unwrap())
        .collect()
}

fn types(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["type"].as_str().unwrap()).collect()
}

fn joined(events: &[Value], pointer: &str) -> String {
    events.iter().filter_map(|event| event.pointer(pointer)?.as_str()).collect()
}

/// `body` extended with `more`.
fn with(body: &Value, more: Value) -> String {
    let mut body = body.clone();
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body.to_string()
}

fn schema() -> Value {
    json!({"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city", "days"]})
}

fn fits(document: &str) {
    let document: Value = serde_json::from_str(document).unwrap();
    assert!(document["city"].is_string() && document["days"].is_i64(), "{document}");
}

#[test]
fn messages_are_blocks_whole_and_in_events() {
    let engine = start("--itl 0");
    let ask = json!({
        "model": "m", "max_tokens": 3, "system": "be brief",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    });
    let said = content::text("m", "hi", 0, 3);
    let whole = engine.post(MESSAGES, &ask.to_string()).json();
    assert_eq!(whole["content"], json!([{"type": "text", "text": said}]));
    assert_eq!(whole["usage"], json!({"input_tokens": 3, "output_tokens": 3}));
    assert_eq!((&whole["stop_reason"], &whole["role"]), (&json!("max_tokens"), &json!("assistant")));
    let answer = engine.post(MESSAGES, &with(&ask, json!({"stream": true})));
    assert!(answer.text().starts_with("event: message_start\ndata: {"));
    let events = parsed(&answer);
    let deltas = ["content_block_delta"; 3];
    let ends = ["content_block_stop", "message_delta", "message_stop"];
    assert_eq!(types(&events), [&["message_start", "content_block_start"], &deltas[..], &ends].concat());
    assert_eq!(joined(&events, "/delta/text"), said);
    assert_eq!(events[0]["message"]["usage"], json!({"input_tokens": 3, "output_tokens": 0}));
    assert_eq!(events[6]["usage"]["output_tokens"], 3);
    let count = engine.post("/v1/messages/count_tokens", &ask.to_string()).json();
    assert_eq!(count, json!({"input_tokens": 3}));
}

#[test]
fn messages_are_refused_in_their_own_form() {
    let engine = start("--fault fail-next=1");
    let ask = json!({"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]});
    let refused = |body: &str, status| {
        let answer = engine.post(MESSAGES, body);
        assert_eq!((answer.status, &answer.json()["type"]), (status, &json!("error")), "{body}");
        assert!(answer.json()["error"]["message"].is_string());
    };
    refused(&ask.to_string(), 503);
    refused(&with(&ask, json!({"model": "x"})), 404);
    refused(r#"{"model":"m","messages":[{"role":"user","content":"hi"}]}"#, 400);
    assert_eq!(engine.post(MESSAGES, &ask.to_string()).status, 200);
    assert_eq!(engine.counters()["paths"], json!({MESSAGES: 4}));
}

#[test]
fn tools_are_called_in_every_apis_form_with_arguments_cut_in_pieces() {
    let engine = start("--itl 0");
    let function = |name| json!({"name": name, "parameters": schema()});
    let ask = json!({
        "model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": true,
        "tools": [{"type": "function", "function": function("a")}, {"type": "function", "function": function("b")}],
    });
    let events = parsed(&engine.post(CHAT, &ask.to_string()));
    let call = |event: &Value| event.pointer("/choices/0/delta/tool_calls/0").cloned();
    for (index, name) in [(0, "a"), (1, "b")] {
        let calls: Vec<Value> =
            events.iter().filter_map(call).filter(|call| call["index"] == index).collect();
        assert_eq!(calls[0]["function"], json!({"name": name, "arguments": ""}));
        assert!(calls[0]["id"].is_string() && calls.len() > 3, "{calls:?}");
        fits(&joined(&calls, "/function/arguments"));
    }
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
    let whole = engine.post(CHAT, &with(&ask, json!({"stream": false}))).json();
    assert_eq!(whole["choices"][0]["message"]["tool_calls"].as_array().unwrap().len(), 2);
    let result =
        json!({"messages": [{"role": "tool", "tool_call_id": "1", "content": "sunny"}], "stream": false});
    let after = engine.post(CHAT, &with(&ask, result)).json();
    assert_eq!(after["choices"][0]["message"]["content"], content::text("m", "sunny", 0, 16));

    let ask = json!({"model": "m", "input": "hi", "stream": true, "tools": [
        {"type": "function", "name": "a", "parameters": schema()}]});
    let events = parsed(&engine.post(RESPONSES, &ask.to_string()));
    let deltas: Vec<Value> =
        events.iter().filter(|e| e["type"] == "response.function_call_arguments.delta").cloned().collect();
    fits(&joined(&deltas, "/delta"));
    let last = events.last().unwrap();
    assert_eq!(
        (&last["type"], &last["response"]["output"][0]["name"]),
        (&json!("response.completed"), &json!("a"))
    );
    assert!(events.iter().enumerate().all(|(i, event)| event["sequence_number"] == i));

    let ask = json!({"model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": "hi"}], "stream": true,
        "tools": [{"name": "a", "input_schema": schema()}]});
    let events = parsed(&engine.post(MESSAGES, &ask.to_string()));
    assert_eq!(events[1]["content_block"]["name"], "a");
    fits(&joined(&events, "/delta/partial_json"));
    let whole = engine.post(MESSAGES, &with(&ask, json!({"stream": false}))).json();
    assert_eq!((&whole["stop_reason"], whole["content"][0]["input"].is_object()), (&json!("tool_use"), true));
}

#[test]
fn a_document_that_fits_the_schema_is_the_answer_where_one_is_asked_for() {
    let engine = start("--itl 0");
    let format = json!({"type": "json_schema", "json_schema": {"name": "trip", "schema": schema()}});
    let ask =
        json!({"model": "m", "messages": [{"role": "user", "content": "hi"}], "response_format": format});
    let whole = engine.post(CHAT, &ask.to_string()).json();
    let said = whole["choices"][0]["message"]["content"].as_str().unwrap();
    fits(said);
    assert_eq!(whole["choices"][0]["finish_reason"], "stop");
    assert_eq!(chat_text(&engine.post(CHAT, &with(&ask, json!({"stream": true})))), said);
    let format = json!({"format": {"type": "json_schema", "name": "trip", "schema": schema()}});
    let ask = json!({"model": "m", "input": "hi", "text": format, "previous_response_id": "resp-1"});
    let whole = engine.post(RESPONSES, &ask.to_string()).json();
    fits(whole["output"][0]["content"][0]["text"].as_str().unwrap());
    assert_eq!(whole["previous_response_id"], "resp-1");
    let cut = engine.post(RESPONSES, &with(&ask, json!({"max_output_tokens": 1}))).json();
    assert_eq!(cut["status"], "incomplete");
}

#[test]
fn what_is_compared_is_scored_and_ranked() {
    let engine = start("");
    let ask = json!({"model": "m", "query": "q", "documents": ["a", {"text": "b"}, "c"], "top_n": 2});
    assert_eq!(engine.post("/rerank", &ask.to_string()).status, 400, "mixed documents are none");
    let ask = with(&ask, json!({"documents": ["a", "b", "c"]}));
    for path in ["/v1/rerank", "/v2/rerank", "/rerank"] {
        let ranked = engine.post(path, &ask).json();
        let scores: Vec<f64> = ranked["results"]
            .as_array()
            .unwrap()
            .iter()
            .map(|r| r["relevance_score"].as_f64().unwrap())
            .collect();
        assert!(scores.len() == 2 && scores[0] >= scores[1], "{ranked}");
    }
    let ask = json!({"model": "m", "text_1": "q", "text_2": ["a", "b"]}).to_string();
    for path in ["/v1/score", "/score"] {
        let scored = engine.post(path, &ask).json();
        assert_eq!(scored["data"][1]["score"], content::score("m", "q", "b"), "{path}");
    }
    assert_eq!(engine.post("/v1/score", r#"{"model":"m","text_2":"a"}"#).status, 400);
    let moderated = engine.post("/v1/moderations", r#"{"model":"m","input":["a","b"]}"#).json();
    assert_eq!(moderated["results"].as_array().unwrap().len(), 2);
    assert!(moderated["results"][0]["flagged"].is_boolean());
}

#[test]
fn speech_is_sound_and_images_are_text() {
    let engine = start("");
    let speech = engine.post("/v1/audio/speech", r#"{"model":"m","input":"hi","voice":"any"}"#);
    assert_eq!((speech.find_header("content-type"), speech.body.len()), (Some("audio/mpeg"), 24 << 10));
    assert_eq!(speech.body, content::binary("m", "hi", 24 << 10));
    let images = engine.post("/v1/images/generations", r#"{"model":"m","prompt":"hi","n":2}"#).json();
    let images: Vec<usize> =
        images["data"].as_array().unwrap().iter().map(|i| i["b64_json"].as_str().unwrap().len()).collect();
    assert_eq!(images, [1368, 1368]);
}

/// A form as stock clients send it.
fn form(fields: &[(&str, &str)], file: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    for (name, value) in fields {
        write!(body, "--b\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n").unwrap();
    }
    let head = "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\nContent-Type: audio/wav\r\n\r\n";
    [&body, head.as_bytes(), file, b"\r\n--b--\r\n"].concat()
}

fn upload(engine: &EngineSimProcess, path: &str, body: &[u8]) -> TestResponse {
    let mut io = connect(engine.addr);
    let length = body.len();
    write!(
        io,
        "POST {path} HTTP/1.1\r\nhost: e\r\nconnection: close\r\ncontent-type: multipart/form-data; boundary=b\r\ncontent-length: {length}\r\n\r\n"
    )
    .unwrap();
    io.write_all(body).unwrap();
    read(&mut io)
}

#[test]
fn a_transcription_names_the_file_that_it_heard() {
    let engine = start("--itl 0");
    let file: Vec<u8> = (0..100_000_u32).map(|i| (i % 251) as u8).collect();
    let heard = format!("100000 bytes, FNV-1a {:016x}", content::hash(&file));
    for path in ["/v1/audio/transcriptions", "/v1/audio/translations"] {
        let whole = upload(&engine, path, &form(&[("model", "m")], &file)).json();
        assert_eq!(whole["text"], heard);
        let stream = upload(&engine, path, &form(&[("model", "m"), ("stream", "true")], &file));
        let events = parsed(&stream);
        assert_eq!(joined(&events, "/delta"), heard);
        assert_eq!(events.last().unwrap()["text"], heard);
        assert_eq!(events.last().unwrap()["type"], "transcript.text.done");
        assert!(stream.text().ends_with("data: [DONE]\n\n"));
        let text = upload(&engine, path, &form(&[("model", "m"), ("response_format", "text")], &file));
        assert_eq!(text.text(), heard);
        assert_eq!(upload(&engine, path, &form(&[("model", "x")], &file)).status, 404);
        assert_eq!(upload(&engine, path, b"--b--\r\n").status, 400);
    }
    assert!(engine.counters()["arrivals"][0]["body_bytes"].as_u64() > Some(100_000));
}

#[test]
fn with_fixed_ids_the_same_request_gets_the_same_bytes() {
    let [one, other] = [start("--fixed-ids"), start("--fixed-ids --itl 1ms")];
    for (path, body) in [
        (CHAT, chat("a", 3, true)),
        (CHAT, chat("a", 3, false)),
        (RESPONSES, r#"{"model":"m","input":"a","stream":true}"#.to_owned()),
        (MESSAGES, r#"{"model":"m","max_tokens":3,"messages":[{"content":"a"}],"stream":true}"#.to_owned()),
    ] {
        let first = one.post(path, &body);
        assert_eq!((first.status, &first.body), (200, &one.post(path, &body).body), "{path}");
        assert_eq!(first.body, other.post(path, &body).body, "{path}");
    }
    let id = |prompt| one.post(CHAT, &chat(prompt, 1, false)).json()["id"].clone();
    assert_ne!(id("a"), id("b"));
}
