//! Cost of parsing and writing on the data path, parser by parser.

use std::hint::black_box;

use bytes::Bytes;
use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use http::{HeaderMap, HeaderValue, Method, uri::PathAndQuery};
use rouse_net::{
    engine_load,
    openai::{routing_fields::peek, sse::ResponseScanner},
    relay::bench::{BenchChunkedDecoder, read_head, write_head},
};

const ANSWER: &[u8] =
    b"HTTP/1.1 200 OK\r\ndate: Fri, 20 Nov 2026 12:00:00 GMT\r\nserver: uvicorn\r\ncontent-length: 600\r\n\
    content-type: application/json\r\nx-request-id: 0a1b2c3d-0000-4000-8000-0123456789ab\r\n\r\n";

fn heads(c: &mut Criterion) {
    let answer = Bytes::from_static(ANSWER);
    c.bench_function("wire/head of an answer read", |b| {
        b.iter_batched(|| answer.clone(), |mut held| read_head(&mut held), BatchSize::SmallInput);
    });
    let mut headers = HeaderMap::new();
    for (name, value) in [
        ("host", "gateway.example:8080"),
        ("user-agent", "OpenAI/Python 2.1.0"),
        ("accept", "application/json"),
        ("accept-encoding", "gzip, deflate"),
        ("connection", "keep-alive"),
        ("content-type", "application/json"),
        ("content-length", "1024"),
        ("authorization", "Bearer sk-0123456789abcdef0123456789abcdef"),
        ("x-stainless-lang", "python"),
    ] {
        headers.append(name, HeaderValue::from_static(value));
    }
    let path = PathAndQuery::from_static("/v1/chat/completions");
    let mut out = Vec::new();
    c.bench_function("wire/head of a request written", |b| {
        b.iter(|| {
            out.clear();
            write_head(&mut out, &Method::POST, &path, black_box(&headers), "127.0.0.1:8000", 1024);
            out.len()
        });
    });
}

fn model(c: &mut Criterion) {
    let mut group = c.benchmark_group("wire/model found in a body");
    for (name, size) in [("1 KiB", 1 << 10), ("32 KiB", 32 << 10), ("1 MiB", 1 << 20)] {
        let text = "all work and no play makes \\\"Jack\\\" a dull boy. ".repeat(size / 48);
        let body = format!(
            r#"{{"messages":[{{"role":"system","content":"be brief"}},{{"role":"user","content":"{text}"}}],"model":"m","stream":true}}"#
        );
        group.throughput(Throughput::Bytes(body.len() as u64));
        group.bench_function(name, |b| b.iter(|| peek(black_box(body.as_bytes())).is_ok()));
    }
    group.finish();
}

fn event() -> String {
    let id = "chatcmpl-0123456789abcdef";
    format!(
        "data: {{\"id\":\"{id}\",\"object\":\"chat.completion.chunk\",\"created\":1790000000,\"model\":\"m\",\"choices\":[{{\
         \"index\":0,\"delta\":{{\"content\":\" token\"}},\"logprobs\":null,\"finish_reason\":null}}]}}\n\n"
    )
}

fn events(c: &mut Criterion) {
    let one = event();
    let many = one.repeat((64 << 10) / one.len());
    for (name, bytes) in [("one event", &one), ("64 KiB of events", &many)] {
        let mut group = c.benchmark_group("wire/stream");
        group.throughput(Throughput::Bytes(bytes.len() as u64));
        group.bench_function(format!("{name} scanned"), |b| {
            let mut scanner = ResponseScanner::new();
            b.iter(|| scanner.feed(black_box(bytes.as_bytes())));
        });
        let chunks: String =
            bytes.split_inclusive("\n\n").map(|event| format!("{:x}\r\n{event}\r\n", event.len())).collect();
        group.bench_function(format!("{name} out of chunks"), |b| {
            let mut chunked = BenchChunkedDecoder::default();
            let decode = |mut wire: Vec<u8>| chunked.decode(&mut wire);
            b.iter_batched(|| chunks.clone().into_bytes(), decode, BatchSize::SmallInput);
        });
        group.finish();
    }
}

/// A page of metrics of the size that an engine writes.
fn metrics(c: &mut Criterion) {
    let labels = "engine=\"0\",model_name=\"org/model-7b-instruct\"";
    let mut page = format!(
        "vllm:num_requests_running{{{labels}}} 12.0\nvllm:num_requests_waiting{{{labels}}} 3.0\n\
         vllm:kv_cache_usage_perc{{{labels}}} 0.82\n"
    );
    for bucket in 0..500 {
        page += &format!("vllm:request_prompt_tokens_bucket{{{labels},le=\"{bucket}.0\"}} 17.0\n");
    }
    let mut group = c.benchmark_group("wire/load");
    group.throughput(Throughput::Bytes(page.len() as u64));
    group.bench_function("read from a page of metrics", |b| {
        b.iter(|| engine_load::parse(black_box(page.as_bytes())));
    });
    group.finish();
}

criterion_group!(benches, heads, model, events, metrics);
criterion_main!(benches);
