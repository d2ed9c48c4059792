//! The probes port for the kubelet: `/ready` for the engine behind this stub, `/health` for the stub itself.
//!
//! A closed gate makes the Pod unready, whatever the engine's readiness: the stub could only refuse requests from
//! Kubernetes Services.

use std::sync::Arc;

use axum::{Router, extract::State, http::StatusCode, routing::get};

use super::readiness::Readiness;

/// Whether the gate is closed now.
pub(crate) type IsGatedFn = Arc<dyn Fn() -> bool + Send + Sync>;

#[derive(Clone)]
struct ProbesState {
    readiness: Arc<Readiness>,
    is_gated: IsGatedFn,
}

/// Serves `/ready` and `/health`.
pub(crate) fn routes(readiness: Arc<Readiness>, gated: IsGatedFn) -> Router {
    Router::new()
        .route("/ready", get(ready))
        .route("/health", get(async || "OK\n"))
        .with_state(ProbesState { readiness, is_gated: gated })
}

async fn ready(State(probes): State<ProbesState>) -> (StatusCode, &'static str) {
    if probes.readiness.ready() && !(probes.is_gated)() {
        (StatusCode::OK, "OK\n")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "Service Unavailable\n")
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use axum::{body::Body, http::Request};
    use http_body_util::BodyExt as _;
    use tower_service::Service as _;

    use super::*;

    async fn asked(router: &mut Router, path: &str) -> (u16, String) {
        let response = router.call(Request::get(path).body(Body::empty()).unwrap()).await.unwrap();
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    #[tokio::test]
    async fn ready_is_the_bit_and_an_open_gate() {
        let readiness = Arc::new(Readiness::default());
        let gated = Arc::new(AtomicBool::new(false));
        let mut router = {
            let gated = Arc::clone(&gated);
            routes(Arc::clone(&readiness), Arc::new(move || gated.load(Ordering::SeqCst)))
        };
        let no = (503, "Service Unavailable\n".to_owned());
        let yes = (200, "OK\n".to_owned());
        assert_eq!(asked(&mut router, "/ready").await, no);
        readiness.become_ready(true);
        assert_eq!(asked(&mut router, "/ready").await, yes);
        gated.store(true, Ordering::SeqCst);
        assert_eq!(asked(&mut router, "/ready").await, no);
        assert_eq!(asked(&mut router, "/health").await, yes);
        gated.store(false, Ordering::SeqCst);
        assert_eq!(asked(&mut router, "/ready").await, yes);
    }
}
