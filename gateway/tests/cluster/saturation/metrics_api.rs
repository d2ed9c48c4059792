//! An adapter that serves one of Kubernetes's metrics APIs, as metrics-server or an adapter for Prometheus does.

use std::{
    io::Write as _,
    net::{SocketAddr, TcpStream},
    sync::Arc,
    thread,
};

use k8s_openapi::{
    api::core::v1::Service,
    kube_aggregator::pkg::apis::apiregistration::v1::{APIService, APIServiceCondition},
};
use kube::{Api, Client, api::PostParams};
use rouse_cluster::{Namespace, wait};
use rouse_testing::{
    scripted_engine::{read_head, serve},
    tls,
};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::{Value, json};

/// The version of every metrics API.
pub(super) const VERSION: &str = "v1beta1";

/// Returns the response to a GET by what follows the version in its target; `None` for an unknown path.
type MetricsResponder = Box<dyn Fn(&str) -> Option<Value> + Send + Sync>;

struct MetricsApi {
    group: &'static str,
    respond: MetricsResponder,
}

/// Serves this group in the whole cluster, and returns once the API server passes requests on to it. The cluster must
/// be the test's own. `respond`: see [`MetricsResponder`].
pub(super) async fn install(
    client: &Client,
    namespace: &Namespace,
    group: &'static str,
    respond: impl Fn(&str) -> Option<Value> + Send + Sync + 'static,
) {
    let adapter = start(MetricsApi { group, respond: Box::new(respond) });
    // Endpoints cannot have a loopback address. The API server resolves this Service itself.
    let service = json!({
        "metadata": {"name": "metrics-adapter"},
        "spec": {"type": "ExternalName", "externalName": adapter.ip().to_string()},
    });
    let services: Api<Service> = namespace.api();
    services.create(&PostParams::default(), &serde_json::from_value(service).unwrap()).await.unwrap();
    let name = format!("{VERSION}.{group}");
    let registration = json!({
        "metadata": {"name": name},
        "spec": {
            "group": group, "version": VERSION, "groupPriorityMinimum": 100, "versionPriority": 100,
            "service": {"namespace": namespace.name(), "name": "metrics-adapter", "port": adapter.port()},
            "insecureSkipTLSVerify": true,
        },
    });
    let registrations: Api<APIService> = Api::all(client.clone());
    let registration = serde_json::from_value(registration).unwrap();
    registrations.create(&PostParams::default(), &registration).await.unwrap();
    let is_true =
        |condition: &APIServiceCondition| condition.type_ == "Available" && condition.status == "True";
    let is_available = |registration: &Option<APIService>| {
        let status = registration.as_ref().and_then(|registration| registration.status.as_ref());
        status.and_then(|status| status.conditions.as_ref()).is_some_and(|all| all.iter().any(is_true))
    };
    wait::until(&registrations, &name, "available", is_available).await.unwrap();
}

/// Starts the adapter. It listens until the process ends.
fn start(api: MetricsApi) -> SocketAddr {
    let (config, _) = tls::server(&["localhost"]);
    let api = Arc::new(api);
    serve(move |stream| {
        let (config, api) = (Arc::clone(&config), Arc::clone(&api));
        thread::spawn(move || api.answer(stream, config));
    })
}

impl MetricsApi {
    /// Answers one request, and closes the connection.
    fn answer(&self, stream: TcpStream, config: Arc<ServerConfig>) {
        let mut stream = StreamOwned::new(ServerConnection::new(config).unwrap(), stream);
        // A client may connect and send nothing.
        let Some(head) = read_head(&mut stream) else { return };
        let head = String::from_utf8_lossy(&head).into_owned();
        let target = head.split(' ').nth(1).unwrap_or_default();
        let (status, body) = match self.response(target) {
            Some(body) => ("200 OK", body.to_string()),
            None => ("404 Not Found", String::new()),
        };
        let length = body.len();
        let head = format!("HTTP/1.1 {status}\r\nContent-Type: application/json\r\nConnection: close");
        // A client that has disconnected gets no answer.
        drop(write!(stream, "{head}\r\nContent-Length: {length}\r\n\r\n{body}"));
        stream.conn.send_close_notify();
        drop(stream.flush());
    }

    fn response(&self, target: &str) -> Option<Value> {
        let group = format!("{}/{VERSION}", self.group);
        let below = target.strip_prefix("/apis/")?.strip_prefix(group.as_str())?;
        if below.is_empty() {
            return Some(json!({
                "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group, "resources": [],
            }));
        }
        (self.respond)(below)
    }
}
