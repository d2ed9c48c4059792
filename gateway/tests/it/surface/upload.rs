//! Uploads: the gateway reads a body once and sends it on as the pieces around the model's name.

use std::io::Write as _;

use crate::support::{GatewayFixture, SimModel, TestClient, TestResponse, read};

pub(crate) const MULTIPART: &str = "multipart/form-data; boundary=b";
const SIZE: usize = 50 << 20;

/// A multipart form as stock clients send it.
pub(crate) fn form(fields: &[(&str, &str)], file: &[u8]) -> Vec<u8> {
    let mut body = Vec::with_capacity(file.len() + 1024);
    for (name, value) in fields {
        write!(body, "--b\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n").unwrap();
    }
    let head = "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\nContent-Type: audio/wav\r\n\r\n";
    for part in [head.as_bytes(), file, b"\r\n--b--\r\n"] {
        body.extend_from_slice(part);
    }
    body
}

/// Posts these bytes with this content type.
pub(crate) fn post_form(client: TestClient, path: &str, kind: &str, body: &[u8]) -> TestResponse {
    let length = body.len();
    let kind = if kind.is_empty() { String::new() } else { format!("Content-Type: {kind}\r\n") };
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{kind}Content-Length: {length}\r\n\r\n"
    );
    let mut open = client.open(head);
    // A server may refuse and close before the client has written everything.
    open.try_write(body);
    open.rest()
}

/// One line of the gateway's `/proc` memory status, in bytes.
fn memory(pid: i32, line: &str) -> usize {
    let status = read(std::path::Path::new(&format!("/proc/{pid}/status")));
    let value = status.lines().find_map(|found| found.strip_prefix(line)).unwrap();
    value.trim_start_matches(':').split_whitespace().next().unwrap().parse::<usize>().unwrap() << 10
}

#[test]
fn an_upload_is_held_once_however_large_and_charged_for_once() {
    // Two of these bodies together would be refused, and so would one body that is charged twice.
    let settings = "limits: {body: 60Mi, bodyTotal: 60Mi}";
    let gateway = GatewayFixture::new(&["2Gi"])
        .settings(settings)
        .model(&SimModel {
            flags: "--model engines-own",
            engine: "servedName: engines-own",
            ..SimModel::new("small")
        })
        .start();
    gateway.wake("small");
    let file: Vec<u8> = (0..SIZE).map(|i| (i % 251) as u8).collect();
    let body = form(&[("model", "small")], &file);
    let client = gateway.client();
    // A first request keeps the gateway's one-time costs out of the measurement.
    post_form(client, "/v1/audio/transcriptions", MULTIPART, &form(&[("model", "small")], b"x"));
    let before = memory(gateway.pid(), "VmRSS");
    let answer = post_form(client, "/v1/audio/transcriptions", MULTIPART, &body);
    assert_eq!(answer.status, 200, "{}", answer.text());
    let heard = format!("{SIZE} bytes, FNV-1a {:016x}", engine_sim::content::hash(&file));
    assert_eq!(answer.json()["text"], heard);
    let held = memory(gateway.pid(), "VmHWM").saturating_sub(before);
    assert!(held * 10 <= body.len() * 16, "{held} bytes for a body of {}", body.len());
    gateway.until_unused("small#0");
}
