//! A server that several nodes reach: it is a device while it answers.

use std::sync::{
    Arc,
    atomic::{AtomicU16, Ordering},
};

use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
    task::JoinSet,
};

use super::fixture::SlotsFixture;

/// A server that answers each request with one status.
struct ApplianceServer {
    url: String,
    status: Arc<AtomicU16>,
    /// Ends with the server.
    _serving: JoinSet<()>,
}

impl ApplianceServer {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/health", listener.local_addr().unwrap());
        let status = Arc::new(AtomicU16::new(200));
        let (mut serving, answers) = (JoinSet::new(), Arc::clone(&status));
        serving.spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut head = [0; 4096];
                // A client that has gone needs no answer.
                let _received = stream.read(&mut head).await.unwrap_or_default();
                let answer = format!(
                    "HTTP/1.1 {} Answer\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
                    answers.load(Ordering::Relaxed)
                );
                stream.write_all(answer.as_bytes()).await.ok();
            }
        });
        Self { url, status, _serving: serving }
    }

    fn answer_with(&self, status: u16) {
        self.status.store(status, Ordering::Relaxed);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_stops_answering_gets_no_new_containers_on_any_node_until_it_answers_again() {
    let fixture = SlotsFixture::new("slots-http", &["a", "b"]).await;
    let [a, b] = fixture.nodes(["a", "b"]).await;
    let server = ApplianceServer::start().await;
    let endpoint = json!({"url": server.url, "properties": {"base": "http://appliance.example/v1"}});
    let http = json!({"endpoints": [endpoint], "intervalSeconds": 1, "timeoutSeconds": 1});
    let env = json!({"OPENAI_BASE_URL": "$(base)", "HEALTH": "$(url)"});
    fixture.configure("box", json!({"capacity": 2, "discovery": {"http": http}, "env": env})).await;
    let device = fixture.device("box", &server.url, None);
    a.until_health(&device, [true, true]).await;
    b.until_health(&device, [true, true]).await;
    let granted = a.kubelet.allocate("worker", &device.resource(), 1).await.unwrap();
    let env = granted.allocation.env;
    assert_eq!(env["OPENAI_BASE_URL"], "http://appliance.example/v1");
    assert_eq!(env["HEALTH"], server.url);
    b.until_health(&device, [false, true]).await;
    let claimed = device.object().await;

    server.answer_with(500);
    a.until_health(&device, [false, false]).await;
    b.until_health(&device, [false, false]).await;
    for node in [&a, &b] {
        let event = fixture.until_node_event(&node.name, "DeviceGone").await;
        assert_eq!(event.type_.as_deref(), Some("Warning"));
        assert!(event.message.unwrap_or_default().contains(&server.url));
    }
    let refused = a.kubelet.allocate_ids("late", &device.resource(), &device.slots([1])).await.unwrap_err();
    assert!(refused.contains("this node does not find the device"), "{refused}");
    assert_eq!(device.object().await, claimed, "a container keeps its slot, and nobody gets another one");

    server.answer_with(204);
    a.until_health(&device, [true, true]).await;
    b.until_health(&device, [false, true]).await;
}
