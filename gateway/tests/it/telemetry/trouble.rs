//! Trouble that telemetry must survive: a log without a reader, an environment meant for other programs, an end at a
//! bad time.

use std::{
    io::{ErrorKind, PipeReader, PipeWriter, Read as _, Write as _, pipe},
    process::Stdio,
    time::Duration,
};

use nix::{
    fcntl::{FcntlArg, OFlag, fcntl},
    sys::signal::Signal,
};

use super::{ask, collector::Collector, dropped, text, traced};
use crate::support::{
    GatewayFixture, SimModel,
    tls::{CertificateAuthority, connect_tls},
};

/// A pipe whose buffer is full.
fn full() -> (PipeReader, PipeWriter) {
    let (reader, mut writer) = pipe().unwrap();
    fcntl(&writer, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).unwrap();
    let stuck = loop {
        if let Err(error) = writer.write(b".") {
            break error;
        }
    };
    assert_eq!(stuck.kind(), ErrorKind::WouldBlock);
    fcntl(&writer, FcntlArg::F_SETFL(OFlag::empty())).unwrap();
    (reader, writer)
}

fn one_that_parks() -> GatewayFixture {
    GatewayFixture::new(&["2Gi"]).model(&SimModel { flags: "--start-time 5m", ..SimModel::new("parks") })
}

#[test]
fn a_standard_error_that_nobody_reads_holds_up_neither_requests_nor_the_end() {
    let (reader, writer) = full();
    let gateway = one_that_parks().start_as(|command| {
        command.stderr(Stdio::from(writer));
    });
    // Each request logs a warning, on the core that has the connection.
    for number in 0..20 {
        assert_eq!(ask(&gateway, &format!("r{number}"), "x-request-timeout: 0.05\r\n", "parks", false), 503);
        assert_eq!(gateway.client().get("/healthz").status, 200);
    }
    // One log line for each mistake, and more lines than the queue holds.
    let mistakes: String = (0..20_000).map(|number| format!("no-such-key-{number}: 1\n")).collect();
    std::fs::write(gateway.dir.join("rouse.yaml"), mistakes).unwrap();
    gateway.signal(Signal::SIGHUP);
    // On a busy machine the gateway takes seconds to read so much, and the log does not cause them. The test therefore
    // ends the gateway only after the read.
    let is_read = "rouse_config_reloads_total{outcome=\"failed\"} 1\n";
    gateway.until("what does not fit is dropped and counted", Duration::from_secs(20), || {
        assert_eq!(gateway.client().get("/healthz").status, 200);
        gateway.admin().get("/metrics").text().contains(is_read) && dropped(&gateway, "log", "queue_full") > 0
    });
    let asked = tokio::time::Instant::now();
    assert_eq!(gateway.terminate(), Some(0));
    assert!(asked.elapsed() < Duration::from_secs(8), "{:?}", asked.elapsed());
    drop(reader);
}

#[test]
fn what_was_logged_last_is_written_before_the_gateway_ends() {
    let (mut reader, writer) = pipe().unwrap();
    let gateway = one_that_parks().start_as(|command| {
        command.stderr(Stdio::from(writer));
    });
    assert_eq!(gateway.terminate(), Some(0));
    let mut log = String::new();
    reader.read_to_string(&mut log).unwrap();
    assert!(log.contains("shutting down"), "{log}");
}

#[test]
fn a_collector_that_the_environment_names_badly_costs_only_the_traces() {
    for (value, said) in [
        ("collector:4317", "OTEL_EXPORTER_OTLP_ENDPOINT is not a URL"),
        ("http://user:s3cret@127.0.0.1:9", "OTEL_EXPORTER_OTLP_ENDPOINT contains credentials"),
    ] {
        let gateway = one_that_parks().start_as(|command| {
            command.env("OTEL_EXPORTER_OTLP_ENDPOINT", value);
        });
        gateway.until_logged(said);
        assert!(!gateway.log().contains("s3cret"), "{}", gateway.log());
    }
    let collector = Collector::start();
    let gateway = one_that_parks().start_as(|command| {
        command
            .env("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url())
            .env("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc");
    });
    gateway.until_logged("OTEL_EXPORTER_OTLP_PROTOCOL requests gRPC");
    ask(&gateway, "traced", "", "nobody", false);
    collector.tree(&gateway, "traced");
}

#[test]
fn the_scheme_of_a_span_is_that_of_its_connection() {
    let collector = Collector::start();
    let fixture = GatewayFixture::new(&["1Gi"]).model(&SimModel::new("m"));
    let authority = CertificateAuthority::new(fixture.dir());
    authority.issue("server");
    let telemetry = format!("telemetry: {{otlp: \"{}\"}}", collector.url());
    let gateway = fixture.settings(&authority.settings("")).settings(&telemetry).start();
    let mut stream = connect_tls(gateway.api, &authority.client(&["http/1.1"], None));
    let head = "GET /v1/models HTTP/1.1\r\nhost: localhost\r\nx-request-id: tls\r\nconnection: close\r\n\r\n";
    stream.write_all(head.as_bytes()).unwrap();
    stream.read_to_end(&mut Vec::new()).unwrap();
    assert_eq!(text(&collector.tree(&gateway, "tls").0, "url.scheme"), "https");
}

#[test]
fn the_end_cuts_a_pause_between_two_attempts_short() {
    let collector = Collector::start();
    collector.refuse(true);
    let gateway = traced(&collector, "");
    ask(&gateway, "late", "", "nobody", false);
    gateway.until("one attempt failed", Duration::from_secs(5), || {
        gateway.log().contains("cannot export traces")
    });
    // The second attempt fails, too; the third would follow three seconds later.
    crate::support::pause(Duration::from_millis(1500));
    collector.refuse(false);
    assert_eq!(gateway.terminate(), Some(0));
    assert!(collector.has("late"));
}
