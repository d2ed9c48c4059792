//! Tests from an order to its effect, without a network in between.

use std::{
    convert::Infallible,
    future::Future,
    pin::{Pin, pin},
    task::{Context, Poll, Waker},
};

use http::{Method, Request};
use http_body_util::BodyExt as _;
use tower_service::Service as _;

use super::*;

type Called<'a> = Pin<&'a mut dyn Future<Output = Result<Response, Infallible>>>;

/// Polls a call once, as the control thread does when the call arrives.
fn once(call: Called<'_>) -> Poll<Response> {
    call.poll(&mut Context::from_waker(Waker::noop())).map(|answered| {
        let Ok(answer) = answered;
        answer
    })
}

fn request(method: Method, path: &str, body: &'static str) -> Request<Body> {
    Request::builder().method(method).uri(path).body(Body::from(body)).unwrap()
}

const ORDER: &str = r#"{"epoch":1,"generation":1}"#;

/// The gate closes in the first poll of the order: between receipt and effect the thread can do no other work and wait
/// for nothing.
#[tokio::test]
async fn an_order_is_carried_out_when_it_is_looked_at_and_shown_from_then_on() {
    for path in ["/v1/gate", "/v1/gate?wait=true"] {
        let proxy = Proxy::from_flags(&[]);
        let mut router = router(&proxy, Router::new());
        let under_way = proxy.gate.route().current.take_lease().unwrap();
        assert!(proxy.gate.is_open());

        let mut close = pin!(router.call(request(Method::POST, path, ORDER)));
        let answer = once(close.as_mut());
        assert!(!proxy.gate.is_open(), "{path}");
        assert!(proxy.gate.route().current.take_lease().is_none(), "{path}: a lease behind a closed gate");
        match answer {
            Poll::Ready(answer) => assert_eq!((answer.status(), path), (StatusCode::ACCEPTED, "/v1/gate")),
            Poll::Pending => assert_eq!(path, "/v1/gate?wait=true", "it waits for the drain"),
        }

        let mut look = pin!(router.call(request(Method::GET, "/v1/gate", "")));
        let Poll::Ready(shown) = once(look.as_mut()) else { panic!("to look takes no time") };
        let shown = shown.into_body().collect().await.unwrap().to_bytes();
        let shown: stub_api::GateStatus = serde_json::from_slice(&shown).unwrap();
        assert_eq!((shown.gated, shown.leases), (true, 1));
        drop(under_way);
    }
}

/// Returns the status and the gate of a response.
async fn asked(proxy: &Arc<Proxy>, request: Request<Body>) -> (u16, stub_api::GateStatus) {
    let answer = router(proxy, Router::new()).call(request).await.unwrap();
    let status = answer.status().as_u16();
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    (status, serde_json::from_slice(&body).expect("as controllers read it"))
}

#[tokio::test]
async fn a_read_tells_nothing_of_who_leads_and_a_new_leader_says_so() {
    let proxy = Proxy::from_flags(&["--epoch-gate"]);
    for epoch in ["3", "18446744073709551615", "five"] {
        let mut get_gate_request = request(Method::GET, "/v1/gate", "");
        get_gate_request.headers_mut().insert(stub_api::EPOCH_HEADER, epoch.parse().unwrap());
        let (status, gate) = asked(&proxy, get_gate_request).await;
        assert_eq!((status, gate.epoch), (200, 0));
    }
    let lead = async |epoch| asked(&proxy, request(Method::POST, "/v1/epoch", epoch)).await;
    for (epoch, status, newest) in [
        (r#"{"epoch":3}"#, 200, 3),
        (r#"{"epoch":2}"#, 409, 3),
        (r#"{"epoch":4}"#, 200, 4),
        (r#"{"epoch":18446744073709551615}"#, 400, 4),
    ] {
        let (answered, gate) = lead(epoch).await;
        assert_eq!((answered, gate.epoch), (status, newest), "{epoch}");
    }
    let (refused, gate) = asked(&proxy, request(Method::DELETE, "/v1/gate", ORDER)).await;
    assert_eq!((refused, gate.epoch), (409, 4));
    let (opened, gate) =
        asked(&proxy, request(Method::DELETE, "/v1/gate", r#"{"epoch":4,"generation":1}"#)).await;
    assert_eq!((opened, gate.gated), (200, false), "the leader is obeyed as before");
}

#[tokio::test]
async fn no_web_page_is_answered() {
    let proxy = Proxy::from_flags(&[]);
    for (name, value) in [("origin", "https://page.example"), ("host", "page.example:8081")] {
        for (method, path) in [(Method::GET, "/v1/gate"), (Method::POST, "/v1/epoch")] {
            let mut page = request(method, path, r#"{"epoch":3}"#);
            page.headers_mut().insert(name, value.parse().unwrap());
            let answer = router(&proxy, Router::new()).call(page).await.unwrap();
            assert_eq!((answer.status(), name), (StatusCode::FORBIDDEN, name));
        }
    }
    assert_eq!(proxy.gate.view().epoch, 0);
}

#[tokio::test]
async fn an_order_to_open_is_carried_out_when_it_is_looked_at_too() {
    let proxy = Proxy::from_flags(&["--epoch-gate"]);
    let mut router = router(&proxy, Router::new());
    assert!(proxy.gate.route().current.take_lease().is_none());
    let mut open = pin!(router.call(request(Method::DELETE, "/v1/gate", ORDER)));
    let Poll::Ready(answer) = once(open.as_mut()) else { panic!("it takes no time") };
    assert_eq!(answer.status(), StatusCode::OK);
    assert!(proxy.gate.route().current.take_lease().is_some());
}

#[tokio::test]
async fn an_order_that_arrives_late_is_refused_by_the_number_in_its_query() {
    let proxy = Proxy::from_flags(&["--epoch-gate"]);
    for (method, path, status, gated) in [
        (Method::DELETE, "/v1/gate?sequence=4", 200, false),
        (Method::POST, "/v1/gate?sequence=6", 202, true),
        (Method::DELETE, "/v1/gate?sequence=5", 412, true),
        (Method::DELETE, "/v1/gate?sequence=8", 200, false),
        (Method::POST, "/v1/gate?wait=true&sequence=7", 412, false),
        (Method::POST, "/v1/gate", 202, true),
    ] {
        let (answered, gate) = asked(&proxy, request(method, path, ORDER)).await;
        assert_eq!((answered, gate.gated), (status, gated), "{path}");
    }
}
