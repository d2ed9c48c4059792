//! Measures how long small calls take, and how they end.

use std::time::Duration;

use http::Method;
use prometheus::HistogramVec;
use rouse_net::http_client::CallObserver;

const INSTANCES_PATH: &str = "/v2/vllm/instances";

/// Observes calls for one requester, or one launcher.
#[derive(Clone, Debug)]
pub struct CallLatencyObserver {
    histogram: HistogramVec,
    namespace: String,
    config: String,
}

impl CallLatencyObserver {
    pub(super) fn new(histogram: HistogramVec, namespace: &str, config: &str) -> Self {
        Self { histogram, namespace: namespace.to_owned(), config: config.to_owned() }
    }
}

impl CallObserver for CallLatencyObserver {
    fn call_ended(&self, method: &Method, path: &str, status: Option<u16>, took: Duration) {
        let Some(purpose) = purpose(method, path) else { return };
        let status = status.unwrap_or_default().to_string();
        let labels = [purpose, method.as_str(), &self.namespace, &self.config, &status];
        self.histogram.with_label_values(&labels).observe(took.as_secs_f64());
    }
}

/// Returns the public project's name of the call's purpose; `None` if it has none.
fn purpose(method: &Method, path: &str) -> Option<&'static str> {
    let (path, query) = path.split_once('?').unwrap_or((path, ""));
    let instance = path.strip_prefix(INSTANCES_PATH).and_then(|rest| rest.strip_prefix('/'));
    Some(match (method.as_str(), path) {
        ("GET", "/v1/dual-pods/accelerators") => "get_gpu_uuids",
        ("GET", "/v1/dual-pods/accelerator-memory-usage") => "get_accel_memory_usage",
        ("POST", "/v1/become-ready") => "relay_ready",
        ("POST", "/v1/become-unready") => "relay_unready",
        // The stub responds once its engine has.
        ("POST", "/v1/engine/wake" | "/wake_up") => "wake",
        ("POST", "/v1/engine/sleep" | "/sleep") => "sleep",
        ("GET", "/is_sleeping") => "query_sleeping",
        ("GET", "/health") => "get_health",
        ("GET", INSTANCES_PATH) if query == "detail=false" => "list_instance_ids",
        ("GET", INSTANCES_PATH) => "list_instances",
        ("GET", _) if instance.is_some() => "get_instance_state",
        ("PUT", _) if instance.is_some() => "create_instance",
        ("DELETE", _) if instance.is_some() => "delete_instance",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_call_is_for_is_known_from_what_is_called() {
        let of = |method: Method, path| purpose(&method, path);
        assert_eq!(of(Method::GET, "/v2/vllm/instances"), Some("list_instances"));
        assert_eq!(of(Method::GET, "/v2/vllm/instances?detail=false"), Some("list_instance_ids"));
        assert_eq!(of(Method::DELETE, "/v2/vllm/instances/a?generation=3"), Some("delete_instance"));
        assert_eq!(of(Method::PUT, "/v2/vllm/instances/a"), Some("create_instance"));
        assert_eq!(of(Method::GET, "/v2/vllm/instances/a"), Some("get_instance_state"));
        assert_eq!(of(Method::POST, "/sleep?level=1"), Some("sleep"));
        assert_eq!(of(Method::POST, "/v1/engine/wake"), Some("wake"));
        assert_eq!(of(Method::POST, "/v1/gate?wait=true"), None);
        assert_eq!(of(Method::DELETE, "/v2/vllm/instances"), None);
    }
}
