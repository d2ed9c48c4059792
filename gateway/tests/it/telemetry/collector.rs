//! A trace collector: it takes OTLP over HTTP and keeps the received spans.

use std::{
    collections::BTreeMap,
    io::Write as _,
    net::{SocketAddr, TcpStream},
    sync::{Arc, Mutex},
    time::Duration,
};

use opentelemetry_proto::tonic::{
    collector::trace::v1::ExportTraceServiceRequest,
    common::v1::{KeyValue, any_value::Value},
    trace::v1::Span,
};
use prost::Message as _;
use rouse_testing::scripted_engine::{head_length, read_request, serve};

use crate::support::{GatewayProcess, pause};

#[derive(Clone)]
pub(super) struct Collector {
    address: SocketAddr,
    collected: Arc<Mutex<CollectedSpans>>,
}

#[derive(Default)]
struct CollectedSpans {
    spans: Vec<Span>,
    resource: BTreeMap<String, String>,
    heads: Vec<String>,
    /// Whether the collector answers 503 instead of 200.
    refuse: bool,
}

impl Collector {
    pub(super) fn start() -> Self {
        let collected: Arc<Mutex<CollectedSpans>> = Arc::default();
        let own = Arc::clone(&collected);
        let address = serve(move |mut stream| {
            if let Some(request) = read_request(&mut stream) {
                own.lock().unwrap().take(&request, stream);
            }
        });
        Self { address, collected }
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(super) fn refuse(&self, refuse: bool) {
        self.collected.lock().unwrap().refuse = refuse;
    }

    pub(super) fn resource(&self) -> BTreeMap<String, String> {
        self.collected.lock().unwrap().resource.clone()
    }

    /// The head of the last export.
    pub(super) fn head(&self) -> String {
        self.collected.lock().unwrap().heads.last().cloned().unwrap_or_default()
    }

    /// The spans of the request with this id: its own span, and its child spans in the order of their starts.
    pub(super) fn tree(&self, gateway: &GatewayProcess, id: &str) -> (Span, Vec<Span>) {
        let find = || {
            let got = self.collected.lock().unwrap();
            let own = got.spans.iter().find(|span| text(span, "rouse.request_id") == id)?.clone();
            let mut below: Vec<Span> =
                got.spans.iter().filter(|span| span.parent_span_id == own.span_id).cloned().collect();
            below.sort_by_key(|span| span.start_time_unix_nano);
            Some((own, below))
        };
        gateway.until(&format!("{id} is exported"), Duration::from_secs(15), || find().is_some());
        find().unwrap()
    }

    pub(super) fn has(&self, id: &str) -> bool {
        pause(Duration::from_millis(10));
        self.collected.lock().unwrap().spans.iter().any(|span| text(span, "rouse.request_id") == id)
    }

    pub(super) fn asked(&self, path: &str) -> bool {
        self.collected.lock().unwrap().spans.iter().any(|span| text(span, "url.path") == path)
    }
}

impl CollectedSpans {
    /// Takes an export, and answers it.
    fn take(&mut self, request: &[u8], mut stream: TcpStream) {
        let (head, body) = request.split_at(head_length(request).unwrap());
        self.heads.push(String::from_utf8_lossy(head).to_lowercase());
        if self.refuse {
            stream.write_all(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n").unwrap();
            return;
        }
        let request = ExportTraceServiceRequest::decode(body).unwrap();
        for resource in request.resource_spans {
            let attributes = resource.resource.unwrap().attributes;
            self.resource = attributes.iter().map(|pair| (pair.key.clone(), shown(pair))).collect();
            self.spans.extend(resource.scope_spans.into_iter().flat_map(|scope| scope.spans));
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").unwrap();
    }
}

/// An attribute as text; empty when the span lacks it.
pub(super) fn text(span: &Span, name: &str) -> String {
    span.attributes.iter().find(|pair| pair.key == name).map(shown).unwrap_or_default()
}

pub(super) fn names(spans: &[Span]) -> Vec<&str> {
    spans.iter().map(|span| span.name.as_str()).collect()
}

pub(super) fn hex(id: &[u8]) -> String {
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn shown(pair: &KeyValue) -> String {
    match pair.value.as_ref().and_then(|value| value.value.clone()) {
        Some(Value::StringValue(text)) => text,
        Some(Value::IntValue(number)) => number.to_string(),
        other => format!("{other:?}"),
    }
}
